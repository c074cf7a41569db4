"""Carry weights from the trainer leader to every rollout rank over the bridge.

Names, shapes and dtypes are agreed once. Then weights travel in flat buckets of bytes; behind its tensors each bucket
carries the version, its own number and one checksum per tensor; the receiver compares before it gives a tensor away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rayless.comm.orders import share_json
from rayless.comm.topology import Topology

# Tensors start at multiples of this many bytes: any dtype can be viewed there, and checksums sum whole 8-byte words.
ALIGNMENT = 16
NUM_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """Section `weights`: how they travel."""

    bucket_mib: int = 16
    """Size of one broadcast in MiB; a larger tensor travels alone. Two buckets are in flight."""

    def __post_init__(self) -> None:
        if self.bucket_mib < 1:
            raise ValueError(f"weights.bucket_mib must be at least 1, got {self.bucket_mib}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What travels under one name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Manifest = tuple[TensorSpec, ...]


def describe(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Manifest:
    """What will travel when `weights` are cast to the engines' `dtype`."""
    return tuple(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype) for name, tensor in weights)


def agree_manifest(topology: Topology, manifest: Manifest | None) -> Manifest:
    """The trainer leader's manifest, on every rank of the job; only the leader's is read."""
    rows = [(spec.name, spec.shape, str(spec.dtype).removeprefix("torch.")) for spec in manifest or ()]
    is_source = topology.seat.role == "trainer" and topology.is_leader
    heard = share_json(rows, group=topology.control, source=0, is_source=is_source)
    return tuple(TensorSpec(name=name, shape=tuple(shape), dtype=getattr(torch, dtype)) for name, shape, dtype in heard)


@dataclass(frozen=True, slots=True)
class _Bucket:
    number: int
    specs: Manifest
    starts: tuple[int, ...]
    num_bytes: int
    """Bytes on the wire, the tail included."""

    def tail(self, buffer: Tensor) -> Tensor:
        """[2 + tensors] int64: version, bucket number, checksum of each tensor."""
        return buffer[self.num_bytes - 8 * (2 + len(self.specs)) : self.num_bytes].view(torch.int64)

    def words(self, buffer: Tensor) -> Iterator[Tensor]:
        """The bytes of each tensor with the padding behind it (it travels too), as int64."""
        for spec, start in zip(self.specs, self.starts, strict=True):
            yield buffer[start : start + _aligned(spec.num_bytes)].view(torch.int64)

    def tensors(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        for spec, start in zip(self.specs, self.starts, strict=True):
            yield spec.name, buffer[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)

    def checksums(self, buffer: Tensor) -> Tensor:
        # Sums of whole numbers wrap around and come out the same in any order: any device gives the same.
        return torch.stack([words.sum() for words in self.words(buffer)])


def _buckets(manifest: Manifest, bucket_bytes: int) -> list[_Bucket]:
    """Cut the manifest, in its order, into runs of at most `bucket_bytes`."""
    runs: list[list[TensorSpec]] = []
    room = 0
    for spec in manifest:
        if not runs or _aligned(spec.num_bytes) > room:
            runs.append([])
            room = bucket_bytes
        runs[-1].append(spec)
        room -= _aligned(spec.num_bytes)
    buckets = []
    for number, specs in enumerate(runs):
        starts, end = [], 0
        for spec in specs:
            starts.append(end)
            end += _aligned(spec.num_bytes)
        buckets.append(_Bucket(number, tuple(specs), tuple(starts), end + 8 * (2 + len(specs))))
    return buckets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Memory:
    """Byte buffers by slot. On a CPU they are kept from version to version: new pages cost as much as filling them.

    CUDA's allocator gives memory out again at no cost, and in between others may have it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: dict[int, Tensor] = {}

    def buffer(self, slot: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, not set to anything."""
        if self.device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if slot not in self.kept or len(self.kept[slot]) < num_bytes:
            self.kept[slot] = torch.empty(num_bytes, dtype=torch.uint8)
        return self.kept[slot][:num_bytes]


class WeightSender:
    """The trainer leader's end of the bridge."""

    def __init__(self, topology: Topology, manifest: Manifest, config: WeightsConfig) -> None:
        self.bridge = _bridge(topology)
        self.buckets = _buckets(manifest, config.bucket_mib * 2**20)
        self.memory = _Memory(topology.device)

    @torch.no_grad()
    def send(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Broadcast `weights`, each cast to its manifest dtype; returns when all is sent.

        Raises AssertionError that names the tensor when one is missing, on top, out of order or of another shape.
        """
        source = iter(weights)
        works: list[dist.Work] = []
        for bucket in self.buckets:
            if bucket.number >= NUM_IN_FLIGHT:
                works[bucket.number - NUM_IN_FLIGHT].wait()  # its buffer is free again
            buffer = self.memory.buffer(bucket.number % NUM_IN_FLIGHT, bucket.num_bytes)
            _fill(bucket, buffer, source, version)
            works.append(_broadcast(buffer, self.bridge))
        for work in works[-NUM_IN_FLIGHT:]:
            work.wait()
        extra = next(source, None)
        assert extra is None, f"version {version}: the manifest ends here, the trainer gave {extra[0]!r} on top"


def _fill(bucket: _Bucket, buffer: Tensor, source: Iterator[tuple[str, Tensor]], version: int) -> None:
    for expected, target in bucket.tensors(buffer):
        name, tensor = next(source, ("", target))
        assert name == expected, f"version {version}: the manifest names {expected!r} here, the trainer gave {name!r}"
        given, wanted = tuple(tensor.shape), tuple(target.shape)  # copy_ would spread a small tensor over a larger one
        assert given == wanted, f"version {version}: the manifest gives {name!r} shape {wanted}, the trainer {given}"
        target.copy_(tensor)
    tail = bucket.tail(buffer)
    tail[0], tail[1] = version, bucket.number
    tail[2:] = bucket.checksums(buffer)


class WeightReceiver:
    """A rollout rank's end of the bridge."""

    def __init__(self, topology: Topology, manifest: Manifest, config: WeightsConfig) -> None:
        self.num_bytes = sum(spec.num_bytes for spec in manifest)
        self.bridge = _bridge(topology)
        self.buckets = _buckets(manifest, config.bucket_mib * 2**20)
        self.memory = _Memory(topology.device)

    @torch.no_grad()
    def receive(self, *, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of one version in manifest order; every rollout rank must take all of them.

        Each bucket has memory of its own, so a consumer may keep what it was given until the next version is asked for.
        Raises RuntimeError that names the tensor when what arrived is not what was sent.
        """
        pending: list[tuple[_Bucket, Tensor, dist.Work]] = []
        for bucket in self.buckets:
            buffer = self.memory.buffer(bucket.number, bucket.num_bytes)
            pending.append((bucket, buffer, _broadcast(buffer, self.bridge)))
            if len(pending) == NUM_IN_FLIGHT:
                yield from _take(*pending.pop(0), version)
        for arrived in pending:
            yield from _take(*arrived, version)


def _take(bucket: _Bucket, buffer: Tensor, work: dist.Work, version: int) -> Iterator[tuple[str, Tensor]]:
    work.wait()
    sent = bucket.tail(buffer).tolist()
    if sent[:2] != [version, bucket.number]:
        raise RuntimeError(
            f"expected bucket {bucket.number} of weights version {version}, got bucket {sent[1]} of version {sent[0]}"
        )
    for spec, wanted, found in zip(bucket.specs, sent[2:], bucket.checksums(buffer).tolist(), strict=True):
        if wanted != found:
            raise RuntimeError(
                f"weights version {version}: {spec.name} arrived with checksum {found}, sent was {wanted}"
            )
    yield from bucket.tensors(buffer)


def _broadcast(buffer: Tensor, bridge: dist.ProcessGroup) -> dist.Work:
    work = dist.broadcast(buffer, group=bridge, group_src=0, async_op=True)
    assert work is not None, "an asynchronous broadcast gives a handle"
    return work


def _bridge(topology: Topology) -> dist.ProcessGroup:
    assert topology.bridge is not None, f"{topology.seat.name} has no part in the weight bridge"
    return topology.bridge
