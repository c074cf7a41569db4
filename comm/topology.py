"""Split one job's ranks into trainers and rollout engines, and connect them.

Each rank ends up with its role's own default world (ColossalAI and vLLM both take the default group for theirs), plus
the groups that cross roles: control (all ranks, gloo), bridge (trainer leader and all rollout ranks, for weights) and
one channel per engine (its leader and all trainers, gloo, for experience). Seat = what one rank of the job is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rayless.comm.launcher import Launch

Role = Literal["trainer", "rollout"]
# Groups on which a rank may wait for a whole generation or a checkpoint. A dead peer is noticed at once all the same:
# its sockets close, and torchrun ends the job.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyConfig:
    """Section `topology`: who does what."""

    rollout_ranks: int | None = None
    """Ranks that run engines; null takes half of all ranks (rounded down to whole engines)."""
    rollout_tp_size: int = 1
    """Ranks of one engine (tensor parallel), all on one node."""
    placement: Literal["split", "per_node"] = "split"
    """`split`: the last ranks of the job roll out. `per_node`: the last ranks of each node do, equally many on each."""

    def __post_init__(self) -> None:
        if self.rollout_ranks is not None and self.rollout_ranks < 1:
            raise ValueError(f"topology.rollout_ranks must be at least 1, got {self.rollout_ranks}")
        if self.rollout_tp_size < 1:
            raise ValueError(f"topology.rollout_tp_size must be at least 1, got {self.rollout_tp_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one rank of the job is."""

    role: Role
    index: int
    """Number inside the role: rollout[1] has index 1."""
    node: int
    engine: int = -1
    """Number of the rollout rank's engine; -1 for trainers."""
    engine_rank: int = -1
    """Number inside the engine (tensor parallel rank); -1 for trainers."""

    @property
    def name(self) -> str:
        """How logs and errors call this rank, such as rollout[1]."""
        return f"{self.role}[{self.index}]"


def assign_roles(nodes: Sequence[int], config: TopologyConfig) -> list[Seat]:
    """The seat of each rank; `nodes` gives each rank's node. Raises ValueError when the numbers do not fit."""
    world_size, tp_size = len(nodes), config.rollout_tp_size
    num_rollout = world_size // 2 // tp_size * tp_size if config.rollout_ranks is None else config.rollout_ranks
    if not 1 <= num_rollout < world_size:
        raise ValueError(
            f"the job needs at least one rollout rank and one trainer rank, got {num_rollout} rollout ranks "
            f"(topology.rollout_ranks={config.rollout_ranks}, rollout_tp_size={tp_size}) of {world_size} ranks"
        )
    if num_rollout % tp_size:
        raise ValueError(
            f"topology.rollout_ranks must be a multiple of topology.rollout_tp_size, got {num_rollout} and {tp_size}"
        )
    rollout = _rollout_ranks(nodes, num_rollout, config.placement)
    seats: list[Seat] = []
    for rank, node in enumerate(nodes):
        if rank in rollout:
            index = rollout.index(rank)
            engine, engine_rank = divmod(index, tp_size)
            seats.append(Seat(role="rollout", index=index, node=node, engine=engine, engine_rank=engine_rank))
        else:
            seats.append(Seat(role="trainer", index=rank - sum(other < rank for other in rollout), node=node))
    for engine in range(num_rollout // tp_size):
        homes = {seat.node for seat in seats if seat.engine == engine}
        if len(homes) > 1:
            raise ValueError(
                f"engine {engine} would lie on nodes {sorted(homes)}: its {tp_size} ranks must share one node; "
                "change topology.rollout_ranks, rollout_tp_size, or take topology.placement=per_node"
            )
    return seats


def _rollout_ranks(nodes: Sequence[int], num_rollout: int, placement: str) -> list[int]:
    if placement == "split":
        return list(range(len(nodes) - num_rollout, len(nodes)))
    num_nodes = len(set(nodes))
    if num_rollout % num_nodes:
        raise ValueError(
            f"topology.placement=per_node needs rollout_ranks to divide over {num_nodes} nodes, got {num_rollout}"
        )
    per_node = num_rollout // num_nodes
    ranks: list[int] = []
    for node in sorted(set(nodes)):
        members = [rank for rank, home in enumerate(nodes) if home == node]
        if len(members) <= per_node:
            raise ValueError(
                f"topology.placement=per_node leaves no trainer on node {node}: "
                f"{per_node} rollout ranks of its {len(members)} ranks"
            )
        ranks += members[-per_node:]
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """This rank's place among all seats, and the groups it shares with others."""

    seat: Seat
    seats: tuple[Seat, ...]
    device: torch.device
    control: dist.ProcessGroup
    """All ranks, gloo. Rank 0 is the trainer leader."""
    bridge: dist.ProcessGroup | None
    """Trainer leader (rank 0) and all rollout ranks; None on the other trainers."""
    channels: tuple[dist.ProcessGroup | None, ...]
    """Per engine: its leader and all trainers, gloo; None where this rank is neither."""
    channel_sources: tuple[int, ...]
    """Per engine: the leader's rank inside its channel."""

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its role."""
        return self.seat.index == 0

    @property
    def is_engine_leader(self) -> bool:
        """Whether this rank speaks for its engine."""
        return self.seat.engine_rank == 0

    @property
    def num_trainers(self) -> int:
        """Training ranks in the job."""
        return sum(seat.role == "trainer" for seat in self.seats)

    @property
    def num_engines(self) -> int:
        """Engines in the job."""
        return len(self.channels)

    @property
    def neighbours(self) -> int:
        """Ranks of this rank's role on its node, itself included."""
        return sum(seat.role == self.seat.role and seat.node == self.seat.node for seat in self.seats)


def connect(launch: Launch, config: TopologyConfig, *, device: Literal["cpu", "cuda"]) -> Topology:
    """Join the job and take this rank's seat; afterwards the default process group is the role's own (the engine's for
    rollout ranks) and RANK and WORLD_SIZE count inside it. Call it before vLLM or ColossalAI are imported."""
    seats = assign_roles(launch.nodes, config)
    return _join(launch, seats, device)


def connect_trainers(launch: Launch, *, device: Literal["cpu", "cuda"]) -> Topology:
    """A job of trainers alone, for a training loop that is fed by hand."""
    seats = [Seat(role="trainer", index=rank, node=node) for rank, node in enumerate(launch.nodes)]
    return _join(launch, seats, device)


def _join(launch: Launch, seats: list[Seat], device_type: str) -> Topology:
    device = torch.device("cuda", launch.local_rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launch.master_addr, str(launch.master_port)
    os.environ["LOCAL_RANK"] = str(launch.local_rank)
    dist.init_process_group(
        backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=PATIENCE,
    )
    topology, own = _make_groups(launch.rank, seats, device)
    # Both libraries take the default group for theirs; c10d has no public call that changes it.
    distributed_c10d._update_default_pg(own)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    return topology


def _make_groups(rank: int, seats: list[Seat], device: torch.device) -> tuple[Topology, dist.ProcessGroup]:
    """All groups, made by every rank in the same order; also this rank's own role group."""
    trainers = [number for number, seat in enumerate(seats) if seat.role == "trainer"]
    rollout = [number for number, seat in enumerate(seats) if seat.role == "rollout"]
    assert trainers[0] == 0, "the trainer leader is the job's first rank"
    num_engines = max(seat.engine for seat in seats) + 1
    engines = [[number for number in rollout if seats[number].engine == engine] for engine in range(num_engines)]
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"

    control = dist.new_group(timeout=PATIENCE, backend="gloo")
    bridge = dist.new_group([0, *rollout], backend="gloo" if device.type == "cpu" else "nccl")
    role_groups = [dist.new_group(members, backend=backend, timeout=PATIENCE) for members in [trainers, *engines]]
    channels, sources = [], []
    for members in engines:
        ranks = sorted([members[0], *trainers])
        channels.append(dist.new_group(ranks, backend="gloo", timeout=PATIENCE))
        sources.append(ranks.index(members[0]))

    seat = seats[rank]
    absent = dist.GroupMember.NON_GROUP_MEMBER
    topology = Topology(
        seat=seat,
        seats=tuple(seats),
        device=device,
        control=control,
        bridge=None if bridge is absent else bridge,
        channels=tuple(None if channel is absent else channel for channel in channels),
        channel_sources=tuple(sources),
    )
    return topology, role_groups[0 if seat.role == "trainer" else 1 + seat.engine]


def meet(topology: Topology) -> None:
    """Wait for every rank of the job: nobody closes a connection that another rank still reads from."""
    dist.barrier(group=topology.control)


def disconnect() -> None:
    """Close this rank's groups, after `meet`; vLLM's shutdown may have closed them all already."""
    if dist.is_initialized():
        dist.destroy_process_group()
