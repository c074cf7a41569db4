"""Every key of `grpo_config` is read: a change of it alone changes what an update gives."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_grpo_consumer import MIXED, arguments, experience

from rayless.comm.topology import Topology
from rayless.comm.weights import WeightsConfig
from rayless.trainers.grpo_config import GRPOConfig

Settings = dict[str, Any]

KL: Settings = {"beta": 0.5, "kl_estimator": "k3"}
CORRECTED: Settings = {"old_logprobs": "recompute", "correction": "truncate", "correction_high": 1.05}
REJECTED: Settings = {"rejection": "seq_mean_k3", "rejection_high": 1.0}

# Of every key: what the others are, and the value whose effect is to be seen.
CHANGES: dict[str, tuple[Settings, Any]] = {
    "preset": ({}, "grpo"),
    "loss": ({}, "reinforce"),
    "ratio_level": ({}, "sequence"),
    "aggregation": ({}, "sequence_sum"),
    "loss_length": ({"aggregation": "fixed_length", "loss_length": 8}, 16),
    "clip_low": ({}, 0.01),
    "clip_high": ({}, 0.01),
    "delta": ({}, 1.01),
    "dual_clip": ({}, 1.01),
    "log_ratio_clamp": ({}, 0.01),
    "sapo_tau_pos": ({"loss": "sapo"}, 2.0),
    "sapo_tau_neg": ({"loss": "sapo"}, 2.0),
    "vespo_k_pos": ({"loss": "vespo"}, 1.0),
    "vespo_k_neg": ({"loss": "vespo"}, 1.0),
    "vespo_lambda_pos": ({"loss": "vespo"}, 1.0),
    "vespo_lambda_neg": ({"loss": "vespo"}, 1.0),
    "cov_fraction": ({"loss": "kl_cov", "cov_fraction": 0.1}, 0.5),
    "clip_cov_low": ({"loss": "clip_cov", "cov_fraction": 1.0, "clip_cov_low": -9.0}, 0.0),
    "clip_cov_high": ({"loss": "clip_cov", "cov_fraction": 1.0, "clip_cov_low": -9.0}, 0.0),
    "kl_cov_coef": ({"loss": "kl_cov", "cov_fraction": 0.5}, 2.0),
    "dro_beta": ({"loss": "dro"}, 2.0),
    "off_policy_threshold": ({}, -1.0),
    "top_entropy": ({}, 0.5),
    "entropy_coef": ({}, 0.1),
    "beta": ({}, 0.5),
    "kl_estimator": (KL, "abs"),
    "kl_in": (KL, "reward"),
    "kl_k2_gradient": (KL, True),
    "kl_importance_weight": (KL, True),
    "kl_clamp": (KL, 1e-4),
    "kl_target": (KL, 1e-3),
    "kl_horizon": ({**KL, "kl_target": 1e-3}, 16),
    "advantage": ({}, "rloo"),
    "scale_rewards": ({}, "none"),
    "advantage_eps": ({}, 1.0),
    "correction": (CORRECTED, "mask"),
    "correction_level": (CORRECTED, "sequence"),
    "correction_low": (CORRECTED, 1.0),
    "correction_high": (CORRECTED, 1.01),
    "correction_normalize": (CORRECTED, True),
    "rejection": (REJECTED, "token_k3"),
    "rejection_low": (REJECTED, 0.9),
    "rejection_high": (REJECTED, 1e-2),
    "old_logprobs": ({}, "recompute"),
    "batch_size": ({}, 2),
    "minibatch_size": ({}, 2),
    "num_update_per_episode": ({}, 5),
    "num_generations": ({}, 2),
    "temperature": ({}, 0.5),
    "lr": ({}, 1e-2),
    "warmup_steps": ({}, 4),
    "schedule": ({}, "linear"),
    "weight_decay": ({}, 0.5),
    "max_tokens_per_microbatch": ({}, 16),
    "layout": ({"layout": "shared_prefix"}, "padded"),
}
# They are arguments of the constructor as well, and have to agree.
ARGUMENTS = ("batch_size", "minibatch_size", "num_update_per_episode", "num_generations")


def _result(topology: Topology, settings: Settings) -> list[float]:
    """All that two steps give: losses, metrics, weights, how the work was cut, how long the run would be."""
    from rayless.trainers.base_consumer import Surroundings
    from rayless.trainers.grpo_consumer import GRPOConsumer

    given = {name: settings[name] for name in ARGUMENTS if name in settings}
    consumer = GRPOConsumer(**arguments(grpo_config={"lr": 1e-3, **settings}, **given))
    consumer.setup(topology, Surroundings(tokenizer=None, recorder=None, weights=WeightsConfig()))
    found: list[float] = [consumer.total_steps]
    for number in range(2):
        loss = consumer.step(number, None, experience=experience(MIXED))
        calls = consumer.batch.calls if consumer.batch else []
        found += [float(batch.input_ids.numel()) for call in calls for batch in call]
        while loss is None:
            found.append(-1.0)
            loss = consumer.step(number, None)
        found += [loss, *(value for _, value in sorted(consumer.counts.means().items()))]
    found += [float(tensor.double().sum()) for _, tensor in consumer.policy.named_weights()]
    return found


def _results(topology: Topology) -> dict[str, tuple[list[float], list[float]]] | None:
    """Of every key: without its change and with it (trainer only)."""
    if topology.seat.role == "rollout":
        return None
    torch.set_num_threads(2)
    plain: dict[str, list[float]] = {}
    pairs = {"nothing": (_result(topology, {}), _result(topology, {}))}
    for name, (others, value) in CHANGES.items():
        if repr(others) not in plain:
            plain[repr(others)] = _result(topology, others)
        pairs[name] = (plain[repr(others)], _result(topology, {**others, name: value}))
    return pairs


@pytest.mark.job
def test_every_key_changes_some_result() -> None:
    assert set(CHANGES) == {field.name for field in fields(GRPOConfig)}
    pairs = run_ranks(_results, 2, timeout=300)[0]
    assert [name for name, (without, with_it) in pairs.items() if without == with_it] == ["nothing"]
