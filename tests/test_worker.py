"""The rollout loop: what it makes of finished completions, and in which order it sends them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayless.comm.orders import Kind, Order
from rayless.comm.topology import Seat, Topology
from rayless.comm.transfer import Message
from rayless.comm.weights import WeightsConfig
from rayless.rollout import worker
from rayless.rollout.engine import Completion
from rayless.rollout.prompts import Prompt, PromptStream, sampling_seed
from rayless.rollout.rewards import RewardConfig, load_rewards
from rayless.rollout.worker import RolloutWorker, Statistics, make_experience

PROMPT = Prompt(row=41, text="2 + 3 =", token_ids=[11, 12, 13], answer="5", columns={"id": "m1"})
COMPLETIONS = [
    Completion(token_ids=[21, 2], log_probs=[-0.5, -0.25], versions=[7, 7], text="5", truncated=False),
    Completion(token_ids=[], log_probs=[], versions=[], text="", truncated=False),
    Completion(token_ids=[22], log_probs=[-2.0], versions=[7], text="6", truncated=True),
]


class BackwardsEngine:
    """Finishes one group at a time, the last that was added first; each gets COMPLETIONS."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.added: list[tuple[int, list[int], int]] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, number: int, prompt_ids: Sequence[int], *, seed: int) -> None:
        self.waiting.append(number)
        self.added.append((number, list(prompt_ids), seed))

    def step(self) -> list[tuple[int, list[Completion]]]:
        return [(self.waiting.pop(), COMPLETIONS)]

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        raise AssertionError("no weights come in these tests")

    def close(self) -> None:
        pass


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Messages that the worker gave away, in order."""
    messages: list[Message] = []

    def send(topology: Topology, message: Message) -> list[Any]:
        messages.append(message)
        return []

    monkeypatch.setattr(worker, "send_message", send)
    return messages


def rollout_worker(
    group: dist.ProcessGroup, engine: BackwardsEngine, *, engine_rank: int = 0, num_samples: int = 0
) -> RolloutWorker:
    """On engine 1 of two, over 8 prompts of one token each in an order drawn with seed 3."""
    seat = Seat(role="rollout", index=1, node=0, engine=1, engine_rank=engine_rank)
    topology = Topology(
        seat=seat,
        seats=(seat,),
        device=torch.device("cpu"),
        control=group,
        bridge=None,
        channels=(None, group),
        channel_sources=(0, 0),
    )
    prompts = [Prompt(row=row, text=f"{row} =", token_ids=[row], answer="5", columns={}) for row in range(8)]
    stream = PromptStream(prompts, groups_per_episode=8, seed=3)
    rewarder = load_rewards([RewardConfig(name="exact_match"), RewardConfig(name="number_match", weight=0.5)])
    return RolloutWorker(topology, engine, stream, rewarder, WeightsConfig(), seed=3, num_samples=num_samples)


def test_a_group_becomes_rows_of_prompt_and_completion() -> None:
    experience = make_experience(PROMPT, COMPLETIONS, [1.0, 0.0, 0.25])
    assert experience.input_ids.tolist() == [[11, 12, 13, 21, 2], [11, 12, 13, 0, 0], [11, 12, 13, 22, 0]]
    assert experience.lengths.tolist() == [5, 3, 4]
    assert experience.mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert experience.log_probs.tolist() == [[0, 0, 0, -0.5, -0.25], [0, 0, 0, 0, 0], [0, 0, 0, -2.0, 0]]
    assert experience.versions.tolist() == [[0, 0, 0, 7, 7], [0, 0, 0, 0, 0], [0, 0, 0, 7, 0]]
    assert experience.rewards.tolist() == [1.0, 0.0, 0.25]
    assert experience.groups.tolist() == [41, 41, 41]
    assert experience.input_ids.dtype == experience.lengths.dtype == experience.groups.dtype == torch.int64
    assert experience.log_probs.dtype == experience.rewards.dtype == torch.float32
    assert (experience.mask.dtype, experience.versions.dtype) == (torch.bool, torch.int32)


def test_a_group_of_empty_completions_is_its_prompt() -> None:
    experience = make_experience(PROMPT, [COMPLETIONS[1]] * 2, [0.0, 0.0])
    assert experience.input_ids.tolist() == [[11, 12, 13]] * 2
    assert not experience.mask.any()


def test_statistics_add_up_until_they_are_taken() -> None:
    statistics = Statistics(["math"])
    assert statistics.names[:2] == ["reward/math", "completion/truncated_fraction"]
    statistics.add("reward/math", 3.0, 4)
    statistics.add("reward/math", 1.5, 4)
    statistics.add("completion/truncated_fraction", 1, 4)
    taken = statistics.take()
    assert taken.dtype == torch.float64
    assert taken[:2].tolist() == [[4.5, 8.0], [1.0, 4.0]]
    assert not taken[2:].any()
    assert not statistics.take().any()
    assert taken[:2].tolist() == [[4.5, 8.0], [1.0, 4.0]]  # what was taken stays as it was


def test_groups_leave_in_order_although_they_finish_backwards(group: dist.ProcessGroup, sent: list[Message]) -> None:
    engine = BackwardsEngine()
    rollout = rollout_worker(group, engine)
    rollout._generate(Order(kind=Kind.GENERATE, first=2, count=6))
    # Engine 1 of two has the odd numbers.
    assert [message.number for message in sent] == [3, 5, 7]
    rows = [rollout.stream.prompt(number).row for number in (3, 5, 7)]
    assert [message.experience.groups.tolist() for message in sent] == [[row] * 3 for row in rows]
    assert engine.added == [
        (number, [row], sampling_seed(3, number)) for number, row in zip((3, 5, 7), rows, strict=True)
    ]


def test_a_message_carries_rewards_and_their_statistics(group: dist.ProcessGroup, sent: list[Message]) -> None:
    rollout = rollout_worker(group, BackwardsEngine())
    rollout._generate(Order(kind=Kind.GENERATE, first=0, count=2))
    (message,) = sent
    assert message.experience.rewards.tolist() == [1.5, 0.0, 0.0]
    figures = dict(zip(rollout.statistics.names, message.statistics.tolist(), strict=True))
    assert figures["reward/exact_match"] == [1.0, 3.0]
    assert figures["reward/number_match"] == [1.0, 3.0]
    assert figures["completion/truncated_fraction"] == [1.0, 3.0]
    assert not rollout.statistics.take().any()


def test_the_first_groups_of_an_order_travel_as_text(group: dist.ProcessGroup, sent: list[Message]) -> None:
    rollout = rollout_worker(group, BackwardsEngine(), num_samples=4)
    rollout._generate(Order(kind=Kind.GENERATE, first=0, count=6))
    assert [message.text != "" for message in sent] == [True, True, False]  # numbers 1, 3 and 5 of 0 to 5
    question = {"prompt": rollout.stream.prompt(1).text, "answer": "5"}
    assert json.loads(sent[0].text) == [
        {**question, "completion": "5", "reward": 1.5, "tokens": 2, "truncated": False},
        {**question, "completion": "", "reward": 0.0, "tokens": 0, "truncated": False},
        {**question, "completion": "6", "reward": 0.0, "tokens": 1, "truncated": True},
    ]


def test_only_the_leader_of_an_engine_sends(group: dist.ProcessGroup, sent: list[Message]) -> None:
    engine = BackwardsEngine()
    rollout_worker(group, engine, engine_rank=1)._generate(Order(kind=Kind.GENERATE, first=0, count=6))
    assert [number for number, _, _ in engine.added] == [1, 3, 5]
    assert not engine.busy
    assert sent == []
