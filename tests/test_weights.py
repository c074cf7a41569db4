import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from rayless.comm import weights
from rayless.comm.topology import Topology, TopologyConfig, meet
from rayless.comm.weights import (
    Manifest,
    TensorSpec,
    WeightReceiver,
    WeightsConfig,
    WeightSender,
    agree_manifest,
    describe,
)

Named = list[tuple[str, Tensor]]
Shapes = dict[str, tuple[int, ...]]

SMALL_BUCKETS = WeightsConfig(bucket_mib=1)
TP_2 = TopologyConfig(rollout_ranks=2, rollout_tp_size=2)
SHAPES: Shapes = {
    "one": (1,),
    "three": (3,),
    "seven": (7,),
    "scalar": (),
    "nothing": (0,),
    "no columns": (4, 0),
    "größe": (33, 17),
    "larger than a bucket": (700, 900),  # 630,000 elements: 1.2 MiB in bfloat16
    "last": (5, 1, 3),
}
MIXED = tuple(
    TensorSpec(name=name, shape=shape, dtype=dtype)
    for (name, shape), dtype in zip(
        SHAPES.items(),
        [torch.bfloat16, torch.float16, torch.bfloat16, torch.float64, torch.float32] * 2,
        strict=False,
    )
)


def weights_of(version: int, shapes: Shapes = SHAPES) -> Named:
    """Float32 values of one version, with everything among them that a cast may get wrong."""
    generator = torch.Generator().manual_seed(version)
    named = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    # Ties between two bfloat16 values, the largest float32, subnormal and signed zero.
    awkward = torch.tensor([torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4028235e38, 1e-40, -0.0])
    return [(name, awkward * version if name == "seven" else tensor) for name, tensor in named]


def bits(named: Named) -> list[tuple[str, tuple[int, ...], torch.dtype, bytes]]:
    """All that must be equal, to the last bit."""
    return [
        (name, tuple(tensor.shape), tensor.dtype, bytes(tensor.flatten().view(torch.uint8).numpy()))
        for name, tensor in named
    ]


def cast(named: Named, manifest: Manifest) -> Named:
    return [(name, tensor.to(spec.dtype)) for (name, tensor), spec in zip(named, manifest, strict=True)]


def copies(named: Named) -> Named:
    """What the next version does not overwrite."""
    return [(name, tensor.clone()) for name, tensor in named]


def publish(
    topology: Topology, manifests: list[Manifest], versions: list[int], config: WeightsConfig
) -> tuple[list[Manifest], list[Named]]:
    """Every version under every manifest; returns the manifests as agreed and what arrived."""
    agreed, arrived = [], []
    for manifest in manifests:
        is_leader = topology.control.rank() == 0
        agreed.append(agree_manifest(topology, manifest if is_leader else None))
        if is_leader:
            sender = WeightSender(topology, agreed[-1], config)
            for version in versions:
                sender.send(weights_of(version), version=version)
        elif topology.seat.role == "rollout":
            receiver = WeightReceiver(topology, agreed[-1], config)
            arrived += [copies(list(receiver.receive(version=version))) for version in versions]
    return agreed, arrived


@pytest.mark.parametrize(
    ("num_ranks", "topology"),
    [(2, TopologyConfig()), (3, TP_2), (4, TopologyConfig()), (6, TopologyConfig(rollout_ranks=4, rollout_tp_size=2))],
)
def test_every_rollout_rank_gets_every_version_as_a_plain_cast_would_give(
    num_ranks: int, topology: TopologyConfig
) -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    manifests = [*(describe(weights_of(1), dtype) for dtype in dtypes), MIXED]
    versions = [1, 2, 5]
    found = run_ranks(publish, num_ranks, config=topology, arguments=(manifests, versions, SMALL_BUCKETS))
    num_rollout = topology.rollout_ranks or num_ranks // 2
    expected = [bits(cast(weights_of(version), manifest)) for manifest in manifests for version in versions]
    for agreed, arrived in found[:-num_rollout]:
        assert (agreed, arrived) == (manifests, [])
    for agreed, arrived in found[-num_rollout:]:
        assert agreed == manifests
        assert list(map(bits, arrived)) == expected


def test_one_large_bucket_gives_the_same_as_many_small_ones() -> None:
    manifest = describe(weights_of(3), torch.bfloat16)
    found = run_ranks(publish, 2, arguments=([manifest], [3], WeightsConfig(bucket_mib=64)))
    assert bits(found[1][1][0]) == bits(cast(weights_of(3), manifest))


# In bfloat16 0.6 MiB each, so one bucket each: more than are in flight at a time.
FIVE_BUCKETS: Shapes = dict.fromkeys("abcde", (600, 512))


def from_one_scratch(named: Named) -> Iterator[tuple[str, Tensor]]:
    """The tensors one after the other in the same memory, which is overwritten as soon as the next one is asked for."""
    scratch = torch.empty(max(tensor.numel() for _, tensor in named))
    for name, tensor in named:
        lent = scratch[: tensor.numel()].view(tensor.shape)
        lent.copy_(tensor)
        yield name, lent
        scratch.fill_(torch.nan)


def publish_and_overwrite(topology: Topology, manifest: Manifest, versions: list[int]) -> tuple[int, list[Named]]:
    """The sender spoils its weights and buckets after each version; receivers look when a whole version is through.

    Returns how many buckets were sent, and what arrived.
    """
    kept: list[Named] = []
    sent: list[Tensor] = []
    broadcast = weights._broadcast

    def remember(buffer: Tensor, bridge: dist.ProcessGroup) -> dist.Work:
        sent.append(buffer)
        return broadcast(buffer, bridge)

    with pytest.MonkeyPatch.context() as patch:
        if topology.seat.role == "trainer":
            patch.setattr(weights, "_broadcast", remember)
        if topology.seat.role == "rollout":
            receiver = WeightReceiver(topology, manifest, SMALL_BUCKETS)
            for version in versions:
                time.sleep(0.1)  # the sender has all its buckets in flight before anyone takes one
                kept.append(copies(list(receiver.receive(version=version))))
        else:
            sender = WeightSender(topology, manifest, SMALL_BUCKETS)
            for version in versions:
                sender.send(from_one_scratch(weights_of(version, FIVE_BUCKETS)), version=version)
                for buffer in sent:
                    buffer.fill_(255)
    meet(topology)
    return len(sent), kept


def test_tensors_kept_to_the_end_of_a_version_hold_what_was_sent_whatever_the_sender_overwrites() -> None:
    versions = [1, 2, 3]
    manifest = describe(weights_of(1, FIVE_BUCKETS), torch.bfloat16)
    found = run_ranks(publish_and_overwrite, 3, config=TP_2, arguments=(manifest, versions))
    assert found[0] == (len(versions) * len(FIVE_BUCKETS), [])
    expected = [bits(cast(weights_of(version, FIVE_BUCKETS), manifest)) for version in versions]
    for _, kept in found[1:]:
        assert list(map(bits, kept)) == expected


class Damaged:
    """A broadcast that turns one bit of what it carried."""

    def __init__(self, work: dist.Work, buffer: Tensor, place: int) -> None:
        self.work, self.buffer, self.place = work, buffer, place

    def wait(self) -> None:
        self.work.wait()
        self.buffer[self.place] ^= 1


def broadcast_and_damage(
    broadcast: Callable[[Tensor, dist.ProcessGroup], dist.Work], place: int, buffer: Tensor, bridge: dist.ProcessGroup
) -> Damaged:
    return Damaged(broadcast(buffer, bridge), buffer, place)


def receive_damaged(
    topology: Topology, manifest: Manifest, places: list[int], damaged_rank: int
) -> list[tuple[list[str], str]]:
    """One version per place, with that byte of its only bucket damaged on one rank; what came out before the error."""
    results = []
    broadcast = weights._broadcast
    if topology.seat.role == "trainer":
        sender = WeightSender(topology, manifest, SMALL_BUCKETS)
        for version in range(len(places)):
            sender.send(weights_of(version, {spec.name: spec.shape for spec in manifest}), version=version)
        return []
    receiver = WeightReceiver(topology, manifest, SMALL_BUCKETS)
    for version, place in enumerate(places):
        given: list[str] = []
        stream = receiver.receive(version=version)
        if topology.seat.index != damaged_rank:
            results.append(([name for name, _ in stream], ""))
            continue
        with pytest.MonkeyPatch.context() as patch:
            damage = partial(broadcast_and_damage, broadcast, place)
            patch.setattr(weights, "_broadcast", damage)
            with pytest.raises(RuntimeError) as error:
                given.extend(name for name, _ in stream)
        results.append((given, str(error.value)))
    return results


def test_a_damaged_byte_is_noticed_by_the_rank_that_has_it_before_any_tensor_is_given_away() -> None:
    # In bfloat16 `three` has bytes 0-5 and `seven` bytes 16-29, each with zeros up to the next multiple of 16. Behind
    # them 8 bytes each: version, bucket number, checksum of `three`, checksum of `seven`.
    shapes: Shapes = {"three": (3,), "seven": (7,)}
    manifest = describe(weights_of(0, shapes), torch.bfloat16)
    named = {0: "three", 5: "three", 16: "seven", 29: "seven", 31: "seven", 48: "three", 56: "seven"}
    places = [*named, 32, 40]
    found = run_ranks(receive_damaged, 3, config=TP_2, arguments=(manifest, places, 1))
    assert found[1] == [(["three", "seven"], "")] * len(places)
    assert [given for given, _ in found[2]] == [[]] * len(places)
    complaints = [message for _, message in found[2]]
    for version, name in enumerate(named.values()):
        assert complaints[version].startswith(f"weights version {version}: {name} arrived with checksum ")
    assert complaints[7] == "expected bucket 0 of weights version 7, got bucket 0 of version 6"
    assert complaints[8] == "expected bucket 0 of weights version 8, got bucket 1 of version 8"


def expect_another_version(topology: Topology, manifest: Manifest) -> str:
    if topology.seat.role == "trainer":
        shapes = {spec.name: spec.shape for spec in manifest}
        WeightSender(topology, manifest, SMALL_BUCKETS).send(weights_of(3, shapes), version=3)
        return ""
    with pytest.raises(RuntimeError) as error:
        next(WeightReceiver(topology, manifest, SMALL_BUCKETS).receive(version=4))
    return str(error.value)


def test_weights_of_another_version_are_refused() -> None:
    manifest = describe([("one", torch.ones(1))], torch.bfloat16)
    complaint = "expected bucket 0 of weights version 4, got bucket 0 of version 3"
    assert run_ranks(expect_another_version, 3, config=TP_2, arguments=(manifest,)) == ["", complaint, complaint]


ABC = tuple(TensorSpec(name=name, shape=(2,), dtype=torch.bfloat16) for name in "abc")


def send_what_the_manifest_does_not_say(topology: Topology, sets: list[Named]) -> list[str]:
    """None of these reaches the wire, so the rollout rank has nothing to do."""
    complaints = []
    for named in sets if topology.seat.role == "trainer" else []:
        with pytest.raises(AssertionError) as error:
            WeightSender(topology, ABC, SMALL_BUCKETS).send(iter(named), version=6)
        complaints.append(str(error.value))
    return complaints


def send_one_on_top(topology: Topology) -> str:
    named = [(name, torch.ones(2)) for name in "abcx"]
    if topology.seat.role == "rollout":
        return " ".join(name for name, _ in WeightReceiver(topology, ABC, SMALL_BUCKETS).receive(version=6))
    with pytest.raises(AssertionError) as error:
        WeightSender(topology, ABC, SMALL_BUCKETS).send(named, version=6)
    return str(error.value)


def test_a_sender_that_leaves_the_manifest_is_stopped_at_the_tensor() -> None:
    two = torch.ones(2)
    orders = {"ac": ("b", "c"), "ab": ("c", ""), "bac": ("a", "b"), "axbc": ("b", "x"), "": ("a", "")}
    sets = [[(name, two) for name in names] for names in orders]
    sets.append([("a", two), ("b", torch.ones(1)), ("c", two)])
    complaints = run_ranks(send_what_the_manifest_does_not_say, 2, arguments=(sets,))[0]
    assert complaints[:-1] == [
        f"version 6: the manifest names {expected!r} here, the trainer gave {given!r}"
        for expected, given in orders.values()
    ]
    assert complaints[-1] == "version 6: the manifest gives 'b' shape (2,), the trainer (1,)"


def test_a_tensor_on_top_of_the_manifest_is_named() -> None:
    complaint = "version 6: the manifest ends here, the trainer gave 'x' on top"
    assert run_ranks(send_one_on_top, 2) == [complaint, "a b c"]


def use_the_bridge_from_the_second_trainer(topology: Topology) -> str:
    if topology.seat.name != "trainer[1]":
        return ""
    with pytest.raises(AssertionError) as error:
        WeightSender(topology, ABC, SMALL_BUCKETS)
    return str(error.value)


def test_only_the_trainer_leader_sends() -> None:
    heard = run_ranks(use_the_bridge_from_the_second_trainer, 3)
    assert heard == ["", "trainer[1] has no part in the weight bridge", ""]


def test_a_bucket_below_one_mib_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights\.bucket_mib must be at least 1, got 0"):
        WeightsConfig(bucket_mib=0)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [((7,), torch.bfloat16, 14), ((), torch.float32, 4), ((3, 0), torch.float32, 0), ((3, 5), torch.float64, 120)],
)
def test_a_tensor_takes_its_elements_times_their_size(
    shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int
) -> None:
    assert TensorSpec(name="w", shape=shape, dtype=dtype).num_bytes == num_bytes
