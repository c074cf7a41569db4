from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_experience import assert_same, some_experience

from rayless.comm.experience import concat
from rayless.comm.topology import Topology, TopologyConfig
from rayless.comm.transfer import Message, agree_statistics, receive_message, send_message

NAMES = ["reward", "größe", "tokens"]
# Row lengths of each group, by its number: none at all, rows without completion, one that is long.
GROUPS = [[3, 5], [4], [], [2, 2, 7], [2], [9, 3], [4000]]


def message_of(number: int) -> Message:
    """What some engine makes of group `number`; every sum and text tells which."""
    statistics = [[number + place / 3, number * 10 + place] for place in range(len(NAMES))]
    return Message(
        number=number,
        experience=some_experience(GROUPS[number], group=number),
        statistics=torch.tensor(statistics, dtype=torch.float64),
        text="" if number % 3 == 0 else f'["größe {number} 🙂"]',
    )


def exchange(topology: Topology, shares: list[list[int]]) -> list[Message]:
    """Each engine sends the groups of its share; trainers take the last engine's first."""
    if topology.seat.role == "trainer":
        names = agree_statistics(topology, None)
        assert names == NAMES, f"agreed on {names}"
        return [
            receive_message(topology, engine=engine, num_statistics=len(names))
            for engine in reversed(range(len(shares)))
            for _ in shares[engine]
        ]
    if topology.is_engine_leader:
        agree_statistics(topology, NAMES)
        for number in shares[topology.seat.engine]:
            for work, _ in send_message(topology, message_of(number)):
                work.wait()
    return []


def assert_everything_arrived(messages: list[Message], numbers: list[int]) -> None:
    """These groups, in this order, with all that belongs to them."""
    assert [message.number for message in messages] == numbers
    for got, expected in zip(messages, map(message_of, numbers), strict=True):
        assert_same(got.experience, expected.experience)
        torch.testing.assert_close(got.statistics, expected.statistics, rtol=0, atol=0)
        assert got.text == expected.text


@pytest.mark.parametrize("num_trainers", [1, 2, 3])
@pytest.mark.parametrize(
    "shares",
    [
        [[0, 1, 2, 3, 4, 5, 6]],
        [[6, 0, 1], [2, 5]],
        [[3], [], [0, 5, 2, 4]],  # the second engine gives nothing
    ],
    ids=["1 engine", "2 engines", "3 engines"],
)
def test_every_trainer_gets_every_group_as_its_engine_sent_it(num_trainers: int, shares: list[list[int]]) -> None:
    config = TopologyConfig(rollout_ranks=len(shares))
    received = run_ranks(exchange, num_trainers + len(shares), config=config, arguments=(shares,))
    numbers = [number for share in reversed(shares) for number in share]
    for messages in received[:num_trainers]:
        assert_everything_arrived(messages, numbers)
    first = concat([message.experience for message in received[0]])
    for messages in received[1:num_trainers]:
        assert_same(concat([message.experience for message in messages]), first)


def test_an_engine_of_two_ranks_speaks_through_its_first() -> None:
    config = TopologyConfig(rollout_ranks=4, rollout_tp_size=2)
    received = run_ranks(exchange, 6, config=config, arguments=([[5, 2], [3]],))
    assert [len(messages) for messages in received] == [3, 3, 0, 0, 0, 0]
    for messages in received[:2]:
        assert_everything_arrived(messages, [3, 5, 2])


def exchange_without_statistics(topology: Topology) -> list[Any]:
    agreed = agree_statistics(topology, [] if topology.is_engine_leader else None)
    if topology.seat.role == "rollout":
        nothing = torch.empty(0, 2, dtype=torch.float64)
        message = Message(number=1, experience=some_experience([3]), statistics=nothing)
        for work, _ in send_message(topology, message):
            work.wait()
        return agreed
    message = receive_message(topology, engine=0, num_statistics=0)
    return [*agreed, tuple(message.statistics.shape), message.text, message.experience.input_ids.tolist()]


def test_a_message_may_carry_no_statistics_and_no_text() -> None:
    assert run_ranks(exchange_without_statistics, 2) == [[(0, 2), "", [[1000, 1001, 1002]]], []]


def agree_on(topology: Topology, lists: list[list[str]]) -> str:
    """Engine e counts `lists[e]`; returns a trainer's complaint."""
    if topology.seat.role == "rollout":
        return ", ".join(agree_statistics(topology, lists[topology.seat.engine]))
    with pytest.raises(AssertionError) as error:
        agree_statistics(topology, None)
    return str(error.value)


@pytest.mark.parametrize("others", [["reward"], ["tokens", "reward"], []])
def test_engines_that_count_different_things_are_noticed(others: list[str]) -> None:
    names = ["reward", "tokens"]
    heard = run_ranks(agree_on, 4, arguments=([names, others],))
    assert heard[:2] == [f"engine 1 counts {others}, others count {names}"] * 2


def ask_for_the_second_channel(topology: Topology) -> str:
    """The first engine alone does; nobody sends."""
    if topology.seat.name != "rollout[0]":
        return ""
    with pytest.raises(AssertionError) as error:
        receive_message(topology, engine=1, num_statistics=0)
    return str(error.value)


def test_an_engine_has_no_part_in_the_channel_of_another() -> None:
    heard = run_ranks(ask_for_the_second_channel, 3, config=TopologyConfig(rollout_ranks=2))
    assert heard == ["", "rollout[0] has no part in the channel of engine 1", ""]
