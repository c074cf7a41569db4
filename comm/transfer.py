"""Carry experience from engine leaders to every training rank, one message per group, on the engines' channels.

A message is a header of fixed length and one flat byte buffer: statistics, sample text, then the experience.
S statistics, each a sum and a count whose names both sides agree on once at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rayless.comm.experience import Experience, num_bytes, pack, unpack
from rayless.comm.orders import decode_text, encode_text, share_json
from rayless.comm.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What an engine leader sends for one group."""

    number: int
    """The group's number, counted over the whole run."""
    experience: Experience
    statistics: Tensor
    """[S, 2] float64: sum and count of each agreed name."""
    text: str = ""
    """Sample completions as JSON, or nothing."""


def agree_statistics(topology: Topology, names: list[str] | None) -> list[str]:
    """The names of the statistics, in wire order; every engine leader gives the same, trainers give None."""
    agreed = names
    for engine, channel in enumerate(topology.channels):
        if channel is None:
            continue
        is_source = topology.is_engine_leader
        heard = share_json(names, group=channel, source=topology.channel_sources[engine], is_source=is_source)
        assert agreed in (None, heard), f"engine {engine} counts {heard}, others count {agreed}"
        agreed = heard
    assert agreed is not None, "a job without engines has no statistics to agree on"
    return agreed


def engine_of(number: int, num_engines: int) -> int:
    """The engine that generates group `number`: what both sides go by."""
    return number % num_engines


def send_message(topology: Topology, message: Message) -> list[tuple[dist.Work, Tensor]]:
    """To every trainer; called by engine leaders. Wait for the works, and keep the tensors until then.

    It does not block, so that an engine goes on while trainers still take the groups of others.
    """
    channel, source = _channel(topology, topology.seat.engine)
    text = encode_text(message.text)
    tokens = int(message.experience.lengths.sum())
    # Statistics are wide, so the sections of the experience behind them stay aligned to their element size.
    body = torch.cat([message.statistics.flatten().view(torch.uint8), pack(message.experience), text])
    header = torch.tensor([message.number, len(message.experience), tokens, len(text)])
    works = [dist.broadcast(part, group=channel, group_src=source, async_op=True) for part in (header, body)]
    return [(work, part) for work, part in zip(works, (header, body), strict=True) if work is not None]


def receive_message(topology: Topology, *, engine: int, num_statistics: int) -> Message:
    """The next message of `engine`; called by every trainer."""
    channel, source = _channel(topology, engine)
    header = torch.empty(4, dtype=torch.int64)
    dist.broadcast(header, group=channel, group_src=source)
    number, num_rows, num_tokens, text_bytes = header.tolist()
    head = num_statistics * 2 * torch.float64.itemsize
    tail = head + num_bytes(num_rows, num_tokens)
    body = torch.empty(tail + text_bytes, dtype=torch.uint8)
    dist.broadcast(body, group=channel, group_src=source)
    return Message(
        number=number,
        experience=unpack(body[head:tail], num_rows=num_rows, num_tokens=num_tokens),
        statistics=body[:head].view(torch.float64).view(num_statistics, 2).clone(),
        text=decode_text(body[tail:]),
    )


def _channel(topology: Topology, engine: int) -> tuple[dist.ProcessGroup, int]:
    channel = topology.channels[engine]
    assert channel is not None, f"{topology.seat.name} has no part in the channel of engine {engine}"
    return channel, topology.channel_sources[engine]
