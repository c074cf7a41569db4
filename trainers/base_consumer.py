"""What every consumer of experience shares: the loop, the exchange with the rollout ranks, checkpoints and metrics.

U groups per weight update; an update is one or more optimizer steps of batch_size groups each.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rayless.comm.experience import Experience, concat
from rayless.comm.launcher import Launch
from rayless.comm.orders import Kind, Order, announce
from rayless.comm.topology import Topology, connect_trainers
from rayless.comm.transfer import agree_statistics, engine_of, receive_message
from rayless.comm.weights import WeightsConfig, WeightSender, agree_manifest, describe
from rayless.trainers.checkpoint import Progress, load_training_state, read_progress, save_checkpoint
from rayless.trainers.grpo_config import check_batch, groups_per_update
from rayless.trainers.metrics import Recorder, StepCounts
from rayless.trainers.model_config import ModelConfig
from rayless.trainers.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run gives its consumer beside the arguments that users know."""

    tokenizer: Any
    recorder: Recorder | None
    """Only the trainer leader has one."""
    weights: WeightsConfig
    max_steps: int | None = None
    """Optimizer steps after which the run ends, whatever the episodes say."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint is saved with, and a resumed run has to share."""
    keep_last: int = 2
    """Checkpoints that are kept; 0 keeps all."""
    resume_from: Path | None = None
    """A checkpoint's folder."""


class BaseConsumer(ABC):
    """A training rank's role: `setup`, then `loop`. Subclasses build the policy and define `step`."""

    model_config: ModelConfig

    def __init__(
        self,
        num_producers: int,
        num_episodes: int,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        num_update_per_episode: int,
        num_recv_per_update: int | None,
        batch_size: int,
        *,
        minibatch_size: int,
        num_generations: int,
        save_interval: int,
        save_dir: str,
    ) -> None:
        self.num_producers, self.num_episodes = num_producers, num_episodes
        self.rank, self.world_size = rank, world_size
        self.master_addr, self.master_port = master_addr, master_port
        self.num_update_per_episode = num_update_per_episode
        self.batch_size, self.minibatch_size, self.num_generations = batch_size, minibatch_size, num_generations
        self.save_interval, self.save_dir = save_interval, Path(save_dir)
        self.groups_per_update = groups_per_update(num_producers, num_recv_per_update, batch_size)
        check_batch(batch_size, minibatch_size, world_size)
        self.open_books()
        self.topology: Topology
        self.policy: Policy
        self.is_set_up = False

    @abstractmethod
    def build(self, topology: Topology, *, total_steps: int, path: str | None) -> Policy:
        """The policy, its weights from `path` where that is given."""

    @abstractmethod
    def take(self, experience: Experience) -> None:
        """Accept one optimizer step's experience."""

    @abstractmethod
    def step(self, step_idx: int, pbar: Any, **kwargs: Any) -> float | None:
        """Train on a part of the accepted experience; the loss when an optimizer step is complete, else None."""

    def setup(self, topology: Topology, surroundings: Surroundings) -> None:
        """Build the policy on this rank's seat and restore what is to be resumed."""
        assert self.num_producers == topology.num_engines, (
            f"num_producers is {self.num_producers}, the job has {topology.num_engines} engines"
        )
        assert (self.rank, self.world_size) == (topology.seat.index, topology.num_trainers), (
            f"rank {self.rank} of {self.world_size} trainers does not sit at {topology.seat.name}"
        )
        self.topology, self.surroundings = topology, surroundings
        source = surroundings.resume_from
        self.policy = self.build(topology, total_steps=self.total_steps, path=str(source) if source else None)
        self.progress = Progress()
        if source:
            self.progress = read_progress(source)
            load_training_state(topology, source, self.policy)
            self.policy.resume_schedule(self.progress.steps)
        self.is_set_up = True

    def ensure_setup(self) -> None:
        """For a consumer that is fed by hand: the trainers alone form the job, at master_addr and master_port."""
        if self.is_set_up:
            return
        assert self.num_producers == 0 or not torch.distributed.is_initialized(), (
            "call setup with the job's topology first"
        )
        self.num_producers = 0
        launch = Launch(
            rank=self.rank,
            local_rank=self.rank,
            nodes=(0,) * self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
        )
        topology = connect_trainers(launch, device="cuda" if torch.cuda.is_available() else "cpu")
        self.setup(topology, Surroundings(tokenizer=None, recorder=None, weights=WeightsConfig()))

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps between two weight updates."""
        return self.groups_per_update // self.batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run: what the learning-rate schedule spans."""
        steps = self.num_episodes * self.num_update_per_episode * self.steps_per_update
        return steps if self.surroundings.max_steps is None else min(steps, self.surroundings.max_steps)

    @property
    def policy_version(self) -> int:
        """Optimizer steps that the policy has seen."""
        return self.progress.steps

    def loop(self, pbar: Any = None) -> None:
        """Run to the end: request, receive, step, publish, until the last episode or the cap on steps."""
        self._start()
        self._publish()
        while self.progress.steps < self.total_steps:
            self._request()
            for number in range(self.steps_per_update):
                self.take(self._receive(number))
                self._make_step(pbar)
                if number == self.steps_per_update - 1:
                    self._publish()
                self._record()
            self.progress = replace(self.progress, groups=self.progress.groups + self.groups_per_update)
            self._save_if_due()
        announce(self.topology, Order(kind=Kind.STOP))

    def _start(self) -> None:
        """Agree with the rollout ranks on what travels."""
        assert self.total_steps % self.steps_per_update == 0, "a run ends with a whole weight update"
        dtype = self.model_config.torch_dtype
        manifest = agree_manifest(self.topology, describe(self.policy.named_weights(), dtype))
        has_bridge = self.topology.bridge is not None
        self.sender = WeightSender(self.topology, manifest, self.surroundings.weights) if has_bridge else None
        self.statistics = agree_statistics(self.topology, None)
        self.saved_steps = self.progress.steps
        self.received_tokens, self.waited_seconds = 0, 0.0
        self.step_started = time.perf_counter()

    def _publish(self) -> None:
        """Every rollout rank gets the policy's weights."""
        with self._timed("time/publish"):
            announce(self.topology, Order(kind=Kind.PUBLISH, version=self.policy_version))
            if self.sender:
                self.sender.send(self.policy.named_weights(), version=self.policy_version)
        self.published = self.policy_version

    def _request(self) -> None:
        order = Order(
            kind=Kind.GENERATE, version=self.published, first=self.progress.groups, count=self.groups_per_update
        )
        announce(self.topology, order)

    def _receive(self, number: int) -> Experience:
        """The groups of this update's optimizer step `number`, in the order of their numbers."""
        first = self.progress.groups + number * self.batch_size
        messages = []
        with self._timed("time/wait_experience"):
            for group in range(first, first + self.batch_size):
                engine = engine_of(group, self.num_producers)
                message = receive_message(self.topology, engine=engine, num_statistics=len(self.statistics))
                assert message.number == group, f"expected group {group}, got group {message.number}"
                messages.append(message)
        for message in messages:
            for name, (total, count) in zip(self.statistics, message.statistics.tolist(), strict=True):
                self.counts.add(name, total, count)
            self.samples += json.loads(message.text) if message.text else []
        experience = concat([message.experience for message in messages])
        # Of the whole update: what its later steps train on may have arrived while the first one waited.
        self.received_tokens = int(experience.mask.sum()) + (self.received_tokens if number else 0)
        self.waited_seconds = self.seconds["time/wait_experience"] + (self.waited_seconds if number else 0.0)
        return experience

    def _make_step(self, pbar: Any) -> None:
        """Call `step` until the optimizer has stepped."""
        with self._timed("time/update"):
            while self.step(self.progress.steps, pbar) is None:
                pass
        self.progress = replace(self.progress, steps=self.progress.steps + 1)

    def _record(self) -> None:
        """Close the books of one optimizer step."""
        now = time.perf_counter()
        elapsed, self.step_started = now - self.step_started, now
        metrics = {**self.counts.means(), **self.seconds, "time/step": elapsed}
        metrics |= {
            "bubble/trainer": metrics["time/wait_experience"] / elapsed,
            "perf/generated_tokens_per_second": self.received_tokens / max(self.waited_seconds, 1e-9),
            "perf/trained_tokens_per_second": metrics["train/tokens"] / metrics["time/update"],
            "rollout/groups_sampled": self.batch_size,
            "weights/version": self.published,
        }
        if self.surroundings.recorder:
            self.surroundings.recorder.log(self.progress.steps, dict(sorted(metrics.items())))
            self.surroundings.recorder.show(self.progress.steps, self.samples)
        self.open_books()

    def open_books(self) -> None:
        """Begin to count for the next optimizer step."""
        self.counts = StepCounts()
        self.seconds: dict[str, float] = {}
        self.samples: list[dict[str, Any]] = []

    def _save_if_due(self) -> None:
        """A checkpoint whenever a multiple of save_interval has been passed, and at the end."""
        steps = self.progress.steps
        if steps // self.save_interval == self.saved_steps // self.save_interval and steps < self.total_steps:
            return
        save_checkpoint(
            self.topology,
            self.save_dir,
            self.policy,
            self.surroundings.tokenizer,
            self.progress,
            self.surroundings.fixed,
            keep_last=self.surroundings.keep_last,
        )
        self.saved_steps = steps

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
