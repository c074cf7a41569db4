from typing import Any

import pytest
import torch
from ranks import run_ranks

from rayless.comm.orders import Kind, Order, announce, await_order, decode_text, encode_text, share_json
from rayless.comm.topology import Topology, TopologyConfig

ORDERS = [
    Order(kind=Kind.PUBLISH, version=0),
    Order(kind=Kind.GENERATE, version=0, first=0, count=8),
    Order(kind=Kind.PUBLISH, version=2**40),
    Order(kind=Kind.GENERATE, version=2**40, first=2**40 + 1, count=3),
    Order(kind=Kind.STOP),
]
TEXTS = ["", "größe", "日本語 🙂", 'line\nbreak\u2028\x00"quote"', "half an emoji: \ud83d", "x" * 100_000]
VALUES: list[Any] = [None, [], {}, "", 0, 1.5, [1, [2, [None]]], {"größe 🙂": [True, "日本語"]}, *TEXTS]


def follow(topology: Topology, orders: list[Order]) -> list[Order]:
    if topology.seat.role == "rollout":
        return [await_order(topology) for _ in orders]
    for order in orders:
        announce(topology, order)
    return orders


def announce_for_oneself(topology: Topology, odd_trainer: int) -> str:
    """Every trainer announces version 7, the odd one version 8; returns the complaint."""
    if topology.seat.role == "rollout":
        return str(await_order(topology).version)
    is_odd = topology.seat.index == odd_trainer
    order = Order(kind=Kind.PUBLISH, version=8 if is_odd else 7)
    if not is_odd:
        announce(topology, order)
        return ""
    with pytest.raises(AssertionError) as error:
        announce(topology, order)
    return str(error.value)


def share_all(topology: Topology, values: list[Any]) -> list[Any]:
    """From the first rank and, the other way, from the last one."""
    rank, last = topology.control.rank(), topology.control.size() - 1
    shared = []
    for value in values:
        for source in (0, last):
            mine = value if rank == source else "not read"
            shared.append(share_json(mine, group=topology.control, source=source, is_source=rank == source))
    return shared


def test_every_rank_hears_the_orders_of_the_leader_in_their_order() -> None:
    heard = run_ranks(follow, 4, arguments=(ORDERS,))
    assert heard == [ORDERS] * 4


def test_a_trainer_that_disagrees_is_named() -> None:
    complaints = run_ranks(announce_for_oneself, 4, config=TopologyConfig(rollout_ranks=1), arguments=(1,))
    assert [complaints[0], *complaints[2:]] == ["", "", "7"]
    assert complaints[1].startswith("trainer[1] was about to run")
    assert complaints[1].index("version=8") < complaints[1].index("leader announced") < complaints[1].index("version=7")


def test_json_arrives_unchanged_on_every_rank() -> None:
    twice = [value for value in VALUES for _ in range(2)]
    assert run_ranks(share_all, 3, arguments=(VALUES,)) == [twice] * 3


@pytest.mark.parametrize("text", ["", "größe", "日本語 🙂", "line\nbreak\u2028\x00"])
def test_text_crosses_as_its_utf8_bytes(text: str) -> None:
    wire = encode_text(text)
    assert wire.dtype == torch.uint8
    assert wire.tolist() == list(text.encode())
    assert decode_text(wire) == text
