"""The rollout role's loop: hear what the trainer leader announces, and do it.

PUBLISH: take weights. GENERATE: run this engine's share of the groups and send each to the trainers, in the order of
their numbers. STOP: leave. All ranks of a tensor-parallel engine do the same; its leader alone scores and sends.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from rayless.comm.experience import Experience
from rayless.comm.orders import Kind, Order, await_order
from rayless.comm.topology import Topology
from rayless.comm.transfer import Message, agree_statistics, engine_of, send_message
from rayless.comm.weights import WeightReceiver, WeightsConfig, agree_manifest
from rayless.rollout.engine import Completion, Engine
from rayless.rollout.prompts import Prompt, PromptStream, sampling_seed
from rayless.rollout.rewards import Rewarder, Scores


class RolloutWorker:
    """One rank of one engine."""

    def __init__(
        self,
        topology: Topology,
        engine: Engine,
        stream: PromptStream,
        rewarder: Rewarder,
        weights: WeightsConfig,
        *,
        seed: int,
        num_samples: int,
    ) -> None:
        """`num_samples`: groups per update whose completions travel as text."""
        self.topology, self.engine, self.stream, self.rewarder = topology, engine, stream, rewarder
        self.weights, self.seed, self.num_samples = weights, seed, num_samples
        self.statistics = Statistics(rewarder.names)
        self.version = 0
        self.idle_seconds, self.window_start = 0.0, time.perf_counter()

    def loop(self) -> None:
        """Execute orders until the job ends."""
        receiver = WeightReceiver(self.topology, agree_manifest(self.topology, None), self.weights)
        agree_statistics(self.topology, self.statistics.names)
        self.window_start = time.perf_counter()
        while (order := self._await_order()).kind != Kind.STOP:
            if order.kind == Kind.PUBLISH:
                self._take_weights(receiver, order.version)
            else:
                self._close_window()
                self._generate(order)

    def _await_order(self) -> Order:
        start = time.perf_counter()
        order = await_order(self.topology)
        self.idle_seconds += time.perf_counter() - start
        return order

    def _close_window(self) -> None:
        """Count the idle share of the time from one request to the next."""
        now = time.perf_counter()
        self.statistics.add("bubble/rollout", self.idle_seconds, now - self.window_start)
        self.idle_seconds, self.window_start = 0.0, now

    def _take_weights(self, receiver: WeightReceiver, version: int) -> None:
        start = time.perf_counter()
        self.engine.load_weights(receiver.receive(version=version), version=version)
        self.version = version
        seconds = time.perf_counter() - start
        self.statistics.add("weights/sync_seconds", seconds, 1)
        self.statistics.add("weights/gigabytes_per_second", receiver.num_bytes / 1e9, seconds)

    def _generate(self, order: Order) -> None:
        """Run this engine's share of the order; a group leaves as soon as it and all before it are finished."""
        assert order.version == self.version, f"asked for version {order.version}, this engine has {self.version}"
        every = range(order.first, order.first + order.count)
        own = self.topology.seat.engine
        numbers = [number for number in every if engine_of(number, self.topology.num_engines) == own]
        for number in numbers:
            self.engine.add(number, self.stream.prompt(number).token_ids, seed=sampling_seed(self.seed, number))
        finished: dict[int, list[Completion]] = {}
        unsent = list(numbers)
        sending: list[tuple[Work, Tensor]] = []
        while unsent:
            assert self.engine.busy or unsent[0] in finished, f"the engine is idle, and group {unsent[0]} never came"
            finished.update(self.engine.step())
            while unsent and unsent[0] in finished:
                number = unsent.pop(0)
                completions = finished.pop(number)
                if self.topology.is_engine_leader:
                    message = self._message(number, completions, with_text=number - order.first < self.num_samples)
                    sending += send_message(self.topology, message)
        start = time.perf_counter()
        for work, _ in sending:
            work.wait()
        self.idle_seconds += time.perf_counter() - start

    def _message(self, number: int, completions: list[Completion], *, with_text: bool) -> Message:
        prompt = self.stream.prompt(number)
        texts = [completion.text for completion in completions]
        scores = self.rewarder.score(prompt.text, texts, {**prompt.columns, "answer": prompt.answer})
        for name, values in scores.by_function.items():
            self.statistics.add(f"reward/{name}", sum(values), len(values))
        truncated = sum(completion.truncated for completion in completions)
        self.statistics.add("completion/truncated_fraction", truncated, len(completions))
        return Message(
            number=number,
            experience=make_experience(prompt, completions, scores.total),
            statistics=self.statistics.take(),
            text=json.dumps(_samples(prompt, completions, scores)) if with_text else "",
        )


class Statistics:
    """Sums and counts under fixed names, collected between two messages."""

    def __init__(self, reward_names: list[str]) -> None:
        self.names = [
            *(f"reward/{name}" for name in reward_names),
            "completion/truncated_fraction",
            "bubble/rollout",
            "weights/sync_seconds",
            "weights/gigabytes_per_second",
        ]
        self.values = self._zeros()

    def add(self, name: str, total: float, count: float) -> None:
        """`total` summed over `count` things."""
        self.values[self.names.index(name)] += torch.tensor([total, count], dtype=torch.float64)

    def take(self) -> Tensor:
        """[S, 2] float64: all sums and counts since the last call."""
        taken, self.values = self.values, self._zeros()
        return taken

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.names), 2, dtype=torch.float64)


def make_experience(prompt: Prompt, completions: list[Completion], rewards: list[float]) -> Experience:
    """One group: each row is the prompt and one of its completions."""
    start = len(prompt.token_ids)
    lengths = torch.tensor([start + len(completion.token_ids) for completion in completions])
    rows, longest = len(completions), int(lengths.max())
    experience = Experience(
        input_ids=torch.zeros(rows, longest, dtype=torch.int64),
        lengths=lengths,
        mask=torch.zeros(rows, longest, dtype=torch.bool),
        log_probs=torch.zeros(rows, longest, dtype=torch.float32),
        versions=torch.zeros(rows, longest, dtype=torch.int32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        groups=torch.full((rows,), prompt.row),
    )
    experience.input_ids[:, :start] = torch.tensor(prompt.token_ids)
    for row, completion in enumerate(completions):
        sampled = slice(start, start + len(completion.token_ids))
        experience.input_ids[row, sampled] = torch.tensor(completion.token_ids, dtype=torch.int64)
        experience.mask[row, sampled] = True
        experience.log_probs[row, sampled] = torch.tensor(completion.log_probs)
        experience.versions[row, sampled] = torch.tensor(completion.versions, dtype=torch.int32)
    return experience


def _samples(prompt: Prompt, completions: list[Completion], scores: Scores) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt.text,
            "completion": completion.text,
            "answer": prompt.answer,
            "reward": round(reward, 4),
            "tokens": len(completion.token_ids),
            "truncated": completion.truncated,
        }
        for completion, reward in zip(completions, scores.total, strict=True)
    ]
