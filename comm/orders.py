"""The one order of a job: the trainer leader announces each cross-role operation, everybody executes it in that order.

Announcements travel on the control group (gloo), so that nobody ever waits inside NCCL for something that takes long.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayless.comm.topology import Topology


class Kind(IntEnum):
    """What the trainer leader can ask of the job."""

    PUBLISH = 1
    GENERATE = 2
    STOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One announced operation."""

    kind: Kind
    version: int = 0
    """Weights that the operation publishes or generates with: the number of optimizer steps they have seen."""
    first: int = 0
    """GENERATE: number of the first group, counted over the whole run."""
    count: int = 0
    """GENERATE: how many groups."""


def announce(topology: Topology, order: Order) -> None:
    """Called by every trainer with the same order; the leader's goes out, the others check that theirs agrees."""
    heard = _broadcast_order(topology, order)
    assert heard == order, f"{topology.seat.name} was about to run {order}, the trainer leader announced {heard}"


def await_order(topology: Topology) -> Order:
    """The next operation, as rollout ranks hear it."""
    return _broadcast_order(topology, Order(kind=Kind.STOP))


def _broadcast_order(topology: Topology, order: Order) -> Order:
    wire = torch.tensor(astuple(order), dtype=torch.int64)
    dist.broadcast(wire, group=topology.control, group_src=0)
    kind, version, first, count = wire.tolist()
    return Order(kind=Kind(kind), version=version, first=first, count=count)


def share_json(value: Any, *, group: dist.ProcessGroup, source: int, is_source: bool) -> Any:
    """`value` of the group's rank `source`, on all of its ranks; it travels as JSON text over a gloo group."""
    wire = encode_text(json.dumps(value)) if is_source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(wire)])
    dist.broadcast(length, group=group, group_src=source)
    if not is_source:
        wire = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(wire, group=group, group_src=source)
    return json.loads(decode_text(wire))


def encode_text(text: str) -> Tensor:
    """UTF-8 bytes of `text` as [bytes] uint8."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def decode_text(wire: Tensor) -> str:
    """The text that `encode_text` flattened."""
    return bytes(wire.numpy()).decode()
