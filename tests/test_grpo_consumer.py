"""The consumer: what its constructor promises, and that no split of the work changes an update."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from rayless.comm.experience import Experience
from rayless.comm.topology import Topology, TopologyConfig
from rayless.comm.weights import WeightsConfig

TINY = str(Path(__file__).parents[1] / "models" / "tiny")
PROMPT, LENGTHS = 5, (1, 1, 1, 1, 6, 6, 6, 6, 3, 2, 4, 5, 2, 2, 2, 2)
GROUP = 4


def arguments(**changes: Any) -> dict[str, Any]:
    """The consumer's arguments, all plain values."""
    settings = {
        "num_producers": 1,
        "num_episodes": 1,
        "rank": 0,
        "world_size": 1,
        "master_addr": "127.0.0.1",
        "master_port": 0,
        "num_update_per_episode": 3,
        "num_recv_per_update": 4,
        "batch_size": 4,
        "model_config": {"path": TINY, "dtype": "float32"},
        "plugin_config": {"precision": "fp32"},
        "num_generations": GROUP,
        "grpo_config": {"lr": 1e-3},
    }
    return settings | changes


def experience(rewards: list[float]) -> Experience:
    """Four groups of four completions with made-up tokens and log-probs of about what the random model gives."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([PROMPT + length for length in LENGTHS])
    rows, longest = len(lengths), int(lengths.max())
    places = torch.arange(longest)[None]
    ids = torch.randint(100, 40000, (rows, longest), generator=generator)
    ids[:, :PROMPT] = ids[::GROUP, :PROMPT].repeat_interleave(GROUP, dim=0)
    mask = (places >= PROMPT) & (places < lengths[:, None])
    return Experience(
        input_ids=ids,
        lengths=lengths,
        mask=mask,
        log_probs=torch.where(mask, torch.full((rows, longest), -10.8), torch.zeros(rows, longest)),
        versions=torch.zeros(rows, longest, dtype=torch.int32),
        rewards=torch.tensor(rewards),
        groups=torch.arange(rows) // GROUP,
    )


MIXED = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


def _update(topology: Topology, changes: dict[str, Any], rewards: list[float], steps: int) -> Any:
    """Loss, gradient norm and weights (trainers only) after `steps` optimizer steps on the same experience."""
    if topology.seat.role == "rollout":
        return None
    from rayless.trainers.base_consumer import Surroundings
    from rayless.trainers.grpo_consumer import GRPOConsumer

    seat = {"rank": topology.seat.index, "world_size": topology.num_trainers}
    consumer = GRPOConsumer(**arguments(**changes, **seat))
    consumer.setup(topology, Surroundings(tokenizer=None, recorder=None, weights=WeightsConfig()))
    before = {name: tensor.detach().clone() for name, tensor in consumer.policy.named_weights()}
    losses = []
    for number in range(steps):
        loss = consumer.step(number, None, experience=experience(rewards))
        while loss is None:
            loss = consumer.step(number, None)
        losses.append(loss)
    moved = {name: (tensor.detach() - before[name]).float() for name, tensor in consumer.policy.named_weights()}
    return losses, consumer.counts.means(), moved


def update(num_trainers: int, rewards: list[float] | None = None, steps: int = 1, **changes: Any) -> list[Any]:
    """`_update` on so many trainers, beside one rollout rank that does nothing."""
    config = TopologyConfig(rollout_ranks=1)
    results = run_ranks(_update, num_trainers + 1, config=config, arguments=(changes, rewards or MIXED, steps))
    return results[:num_trainers]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Of two updates, relative to their size."""
    gap = sum(float((left[name] - right[name]).square().sum()) for name in left) ** 0.5
    return gap / sum(float(tensor.square().sum()) for tensor in left.values()) ** 0.5


def test_the_signature_is_the_one_that_users_know() -> None:
    from rayless.trainers.base_consumer import BaseConsumer
    from rayless.trainers.grpo_consumer import GRPOConsumer

    parameters = inspect.signature(GRPOConsumer).parameters
    assert list(parameters) == [
        *("num_producers", "num_episodes", "rank", "world_size", "master_addr", "master_port"),
        *("num_update_per_episode", "num_recv_per_update", "batch_size", "model_config", "plugin_config"),
        *("minibatch_size", "num_generations", "grpo_config", "save_interval", "save_dir"),
    ]
    defaults = {name: item.default for name, item in parameters.items() if item.default is not inspect.Parameter.empty}
    assert defaults == {
        "minibatch_size": 1,
        "num_generations": 8,
        "grpo_config": {},
        "save_interval": 100,
        "save_dir": "./model",
    }
    assert issubclass(GRPOConsumer, BaseConsumer)
    assert list(inspect.signature(GRPOConsumer.step).parameters) == ["self", "step_idx", "pbar", "kwargs"]


def test_it_is_built_from_dicts_and_a_step_without_experience_does_nothing() -> None:
    from rayless.trainers.grpo_consumer import GRPOConsumer

    assert GRPOConsumer(**arguments()).step(0, None) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"grpo_config": {"learning_rat": 1}}, "grpo_config has no key 'learning_rat'"),
        ({"grpo_config": {"num_generations": 3}}, "grpo_config.num_generations is 3, but num_generations is 4"),
        ({"batch_size": 3}, "must be a multiple of grpo_config.batch_size = 3, got 1 x 4"),
        ({"minibatch_size": 3}, "grpo_config.batch_size must be a multiple of training ranks"),
        ({"grpo_config": {"preset": "dr_grpo"}}, "grpo_config.loss_length must be given"),
        ({"plugin_config": {"plugin": "gemini"}}, "plugin_config.plugin 'gemini' is not there yet"),
    ],
)
def test_contradictions_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    from rayless.trainers.grpo_consumer import GRPOConsumer

    with pytest.raises(ValueError, match=line):
        GRPOConsumer(**arguments(**changes))


def test_a_steered_kl_weight_counts_only_while_it_is_steered() -> None:
    from rayless.trainers.checkpoint import Progress
    from rayless.trainers.grpo_consumer import GRPOConsumer

    consumers = [GRPOConsumer(**arguments(grpo_config={"beta": 0.1, "kl_target": target})) for target in (None, 0.5)]
    for consumer in consumers:
        consumer.progress = Progress(beta=0.4)
    assert [consumer.beta for consumer in consumers] == [0.1, 0.4]


@pytest.mark.job
def test_numbers_that_are_none_end_the_run() -> None:
    """Before weights that are no numbers are published or saved."""
    with pytest.raises(BaseException, match="the gradient's norm is nan"):
        update(1, rewards=[float("inf")] * 3 + [0.0] * 13)


def test_a_batch_given_by_hand_trains_without_any_job(tmp_path: Path) -> None:
    """In a process of its own, since it connects that process."""
    import subprocess
    import sys

    script = (
        "from test_grpo_consumer import MIXED, arguments, experience\n"
        "from rayless.trainers.grpo_consumer import GRPOConsumer\n"
        "consumer = GRPOConsumer(**arguments(batch_size=4, minibatch_size=4, master_port=0))\n"
        "print(type(consumer.step(0, None, experience=experience(MIXED))).__name__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=120
    )
    assert run.stdout.endswith("float\n"), run.stderr


def test_equal_rewards_move_nothing() -> None:
    ((losses, means, moved),) = update(1, [0.35] * 16)
    assert losses == [0.0]
    assert means["train/grad_norm"] == 0.0
    assert means["reward/zero_std_fraction"] == 1.0
    assert all(not tensor.any() for tensor in moved.values())


@pytest.mark.job
def test_no_split_of_the_work_changes_an_update() -> None:
    """AdamW hides a wrong scale of the gradient, so its norm is compared too."""
    (reference,) = update(1, steps=2, minibatch_size=4)
    for num_trainers, changes in (
        (1, {"grpo_config": {"lr": 1e-3, "max_tokens_per_microbatch": 1}}),
        (1, {"grpo_config": {"lr": 1e-3, "layout": "padded"}}),
        (1, {"grpo_config": {"lr": 1e-3, "layout": "packed", "max_tokens_per_microbatch": 40}}),
        (1, {"grpo_config": {"lr": 1e-3, "layout": "shared_prefix", "max_tokens_per_microbatch": 70}}),
        (1, {"plugin_config": {"precision": "fp32", "plugin": "zero", "zero_stage": 1}}),
        (2, {}),
        (2, {"minibatch_size": 2, "plugin_config": {"precision": "fp32", "plugin": "zero", "zero_stage": 1}}),
        (2, {"plugin_config": {"precision": "fp32", "plugin": "zero", "zero_stage": 2}}),
        (4, {"plugin_config": {"precision": "fp32", "plugin": "zero", "zero_stage": 2}}),
    ):
        for losses, means, moved in update(num_trainers, steps=2, **changes):
            assert losses == pytest.approx(reference[0], rel=1e-5), (num_trainers, changes)
            assert means["train/grad_norm"] == pytest.approx(reference[1]["train/grad_norm"], rel=1e-4)
            assert distance(reference[2], moved) < 1e-3, (num_trainers, changes)
