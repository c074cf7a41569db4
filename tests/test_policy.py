"""The learning-rate schedule by hand, and gradients that checkpointing does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_grpo_consumer import TINY, distance, update

from rayless.comm.experience import Experience
from rayless.comm.topology import Topology
from rayless.trainers.model_config import OptimizerConfig


def factors(**settings: Any) -> list[float]:
    """Learning rate over its peak at each of eight steps."""
    from rayless.trainers.policy import lr_factor

    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
    config = OptimizerConfig(**plain | settings)
    return [lr_factor(step, config) for step in range(config.total_steps)]


def test_the_rise_ends_at_the_peak_and_starts_above_zero() -> None:
    assert factors(warmup_steps=4, total_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_towards_zero() -> None:
    assert factors(schedule="linear", total_steps=4) == [1.0, 0.75, 0.5, 0.25]
    assert factors(schedule="cosine", total_steps=4) == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
    assert factors(schedule="linear", warmup_steps=2, total_steps=4) == [0.5, 1.0, 1.0, 0.5]


@pytest.mark.job
@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_gradient_checkpointing_changes_no_update(layout: str) -> None:
    changes: dict[str, Any] = {"grpo_config": {"lr": 1e-3, "layout": layout}}
    ((losses, means, moved),) = update(1, **changes)
    model = {"path": TINY, "dtype": "float32", "gradient_checkpointing": True}
    ((again, means_again, moved_again),) = update(1, model_config=model, **changes)
    assert again == losses
    assert means_again["train/grad_norm"] == pytest.approx(means["train/grad_norm"], rel=1e-6)
    assert distance(moved, moved_again) < 1e-5


def _far_log_probs(topology: Topology) -> Any:
    """Log-probs of a line of 900 tokens: bf16 ZeRO, and the same model loaded as bf16 (trainer only)."""
    if topology.seat.role == "rollout":
        return None
    from rayless.trainers.model_config import ModelConfig, PluginConfig
    from rayless.trainers.packing import micro_batches
    from rayless.trainers.policy import Policy, ReferencePolicy

    length, model = 900, ModelConfig(path=TINY, dtype="bfloat16")
    ids = torch.randint(100, 40000, (1, length), generator=torch.Generator().manual_seed(0))
    experience = Experience(
        input_ids=ids,
        lengths=torch.tensor([length]),
        mask=torch.arange(length)[None] >= 5,
        log_probs=torch.zeros(1, length),
        versions=torch.zeros(1, length, dtype=torch.int32),
        rewards=torch.zeros(1),
        groups=torch.zeros(1, dtype=torch.int64),
    )
    (batch,) = micro_batches(experience, [torch.tensor([0])], layout="padded", max_tokens=length)
    plugin = PluginConfig(plugin="zero", precision="bf16")
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0, schedule="constant", warmup_steps=0, total_steps=1)
    policy = Policy(model, plugin, optimizer, device=topology.device)
    with torch.no_grad():
        trained = policy.log_probs(batch, 1.0)[0]
    return trained, ReferencePolicy(model, plugin, device=topology.device).log_probs(batch, 1.0)


@pytest.mark.job
def test_zero_in_bf16_keeps_far_tokens_where_they_are() -> None:
    """Rotary frequencies rounded to bf16 would turn them."""
    trained, loaded = run_ranks(_far_log_probs, 2)[0]
    assert (trained - loaded).abs().max() < 1e-3


@pytest.mark.job
def test_the_kl_term_starts_at_zero_and_pulls_back() -> None:
    """At the first step policy and reference are one model: the KL is 0; at the second it is not."""
    settings = {"lr": 1e-3, "beta": 0.1}
    ((_, first, _),) = update(1, grpo_config=settings)
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    ((_, second, _),) = update(1, steps=2, grpo_config=settings)
    assert second["policy/kl"] > 1e-4
