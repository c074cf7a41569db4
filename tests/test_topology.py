import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from rayless.comm.collectives import role_barrier, role_max, role_sum
from rayless.comm.topology import Seat, Topology, TopologyConfig, assign_roles

TWO_NODES = (0, 0, 0, 1, 1, 1)
TWO_ENGINES = TopologyConfig(rollout_ranks=2)


def short(seats: list[Seat]) -> str:
    """`t` for a trainer, the engine's number for a rollout rank; indices and engine ranks must count up."""
    for role in ("trainer", "rollout"):
        indices = [seat.index for seat in seats if seat.role == role]
        assert indices == list(range(len(indices)))
    for engine in {seat.engine for seat in seats} - {-1}:
        places = [seat.engine_rank for seat in seats if seat.engine == engine]
        assert places == list(range(len(places)))
    return "".join("t" if seat.role == "trainer" else str(seat.engine) for seat in seats)


@pytest.mark.parametrize(
    ("nodes", "config", "roles"),
    [
        ((0, 0), TopologyConfig(), "t0"),
        ((0, 0, 0), TopologyConfig(), "tt0"),
        ((0, 0, 0, 0), TopologyConfig(), "tt01"),
        ((0, 0, 0, 0), TopologyConfig(rollout_ranks=1), "ttt0"),
        ((0, 0, 0, 0), TopologyConfig(rollout_ranks=3), "t012"),
        ((0,) * 6, TopologyConfig(rollout_tp_size=2), "tttt00"),  # half of 6 holds one whole engine of 2
        ((0,) * 8, TopologyConfig(rollout_tp_size=2), "tttt0011"),
        ((0,) * 8, TopologyConfig(rollout_tp_size=4), "tttt0000"),
        ((0,) * 3, TopologyConfig(rollout_ranks=2, rollout_tp_size=2), "t00"),
        (TWO_NODES, TopologyConfig(), "ttt012"),
        (TWO_NODES, TopologyConfig(rollout_ranks=2, placement="per_node"), "tt0tt1"),
        (TWO_NODES, TopologyConfig(rollout_ranks=4, placement="per_node"), "t01t23"),
        (TWO_NODES, TopologyConfig(rollout_ranks=4, rollout_tp_size=2, placement="per_node"), "t00t11"),
        ((0, 0, 1, 1), TopologyConfig(placement="per_node"), "t0t1"),
        ((0, 0, 0, 1, 1), TopologyConfig(rollout_ranks=2, placement="per_node"), "tt0t1"),
    ],
)
def test_roles_by_hand(nodes: tuple[int, ...], config: TopologyConfig, roles: str) -> None:
    seats = assign_roles(nodes, config)
    assert short(seats) == roles
    assert [seat.node for seat in seats] == list(nodes)


def test_a_seat_has_a_name_for_logs() -> None:
    seats = assign_roles((0, 0, 0), TopologyConfig(rollout_ranks=2))
    assert [seat.name for seat in seats] == ["trainer[0]", "rollout[0]", "rollout[1]"]


@pytest.mark.parametrize(
    ("nodes", "config", "message"),
    [
        ((0,), TopologyConfig(), "got 0 rollout ranks .*rollout_ranks=None, rollout_tp_size=1. of 1 ranks"),
        ((0, 0), TopologyConfig(rollout_ranks=2), "got 2 rollout ranks .*rollout_ranks=2.* of 2 ranks"),
        ((0,) * 4, TopologyConfig(rollout_tp_size=4), "got 0 rollout ranks .*rollout_tp_size=4. of 4 ranks"),
        ((0,) * 4, TopologyConfig(rollout_ranks=3, rollout_tp_size=2), "multiple of .*rollout_tp_size, got 3 and 2"),
        (TWO_NODES, TopologyConfig(rollout_ranks=3, placement="per_node"), "divide over 2 nodes, got 3"),
        (
            (0, 0, 0, 1),
            TopologyConfig(rollout_ranks=2, placement="per_node"),
            "no trainer on node 1: 1 rollout ranks of its 1 ranks",
        ),
        (
            TWO_NODES,
            TopologyConfig(rollout_ranks=4, rollout_tp_size=2),
            r"engine 0 would lie on nodes \[0, 1\]: its 2 ranks must share one node",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_one_line(
    nodes: tuple[int, ...], config: TopologyConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        assign_roles(nodes, config)


def test_settings_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"topology\.rollout_ranks must be at least 1, got 0"):
        TopologyConfig(rollout_ranks=0)
    with pytest.raises(ValueError, match=r"topology\.rollout_tp_size must be at least 1, got -2"):
        TopologyConfig(rollout_tp_size=-2)


def look_around(topology: Topology) -> dict[str, Any]:
    """What one rank sees of the job; every number that says who belongs to a group counts over the whole job."""
    job_rank = topology.control.rank()  # dist.get_rank(group) counts from the role's world
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "inner"))
    met = torch.tensor([2**job_rank])
    dist.all_reduce(met, group=mesh.get_group("inner"))
    role_barrier()
    return {
        "seat": topology.seat,
        "members": role_sum(torch.tensor([2**job_rank])).item(),
        "highest": role_max(torch.tensor([job_rank])).item(),
        "members_by_mesh": met.item(),
        "world": (dist.get_rank(), dist.get_world_size()),
        "environment": (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])),
        "control": dist.get_process_group_ranks(topology.control),
        "bridge": topology.bridge and dist.get_process_group_ranks(topology.bridge),
        "channels": [channel and dist.get_process_group_ranks(channel) for channel in topology.channels],
        "channel_sources": topology.channel_sources,
        "counts": (topology.num_trainers, topology.num_engines, topology.neighbours),
        "leads": (topology.is_leader, topology.is_engine_leader),
    }


def expected_view(rank: int, nodes: tuple[int, ...], trainers: list[int], engines: list[list[int]]) -> dict[str, Any]:
    """What `look_around` must return on a rank."""
    rollout = [member for members in engines for member in members]
    leaders = [members[0] for members in engines]
    world = next(members for members in [trainers, *engines] if rank in members)
    peers = trainers if rank in trainers else rollout
    channels = [sorted([leader, *trainers]) for leader in leaders]
    place = (world.index(rank), len(world))
    return {
        "members": sum(2**member for member in world),
        "highest": world[-1],
        "members_by_mesh": sum(2**member for member in world),
        "world": place,
        "environment": (*place, nodes[:rank].count(nodes[rank])),
        "control": list(range(len(nodes))),
        "bridge": [0, *rollout] if rank in [0, *rollout] else None,
        "channels": [channel if rank in channel else None for channel in channels],
        "channel_sources": tuple(channel.index(leader) for channel, leader in zip(channels, leaders, strict=True)),
        "counts": (len(trainers), len(engines), sum(nodes[peer] == nodes[rank] for peer in peers)),
        "leads": (rank == peers[0], rank in leaders),
    }


@pytest.mark.parametrize(
    ("nodes", "config", "trainers", "engines"),
    [
        ((0,) * 2, TopologyConfig(), [0], [[1]]),
        ((0,) * 3, TopologyConfig(rollout_ranks=2, rollout_tp_size=2), [0], [[1, 2]]),
        ((0,) * 4, TopologyConfig(), [0, 1], [[2], [3]]),
        (TWO_NODES, TopologyConfig(rollout_ranks=2, placement="per_node"), [0, 1, 3, 4], [[2], [5]]),
        (TWO_NODES, TopologyConfig(rollout_ranks=4, placement="per_node"), [0, 3], [[1], [2], [4], [5]]),
        (
            TWO_NODES,
            TopologyConfig(rollout_ranks=4, rollout_tp_size=2, placement="per_node"),
            [0, 3],
            [[1, 2], [4, 5]],
        ),
    ],
)
def test_each_rank_finds_its_world_and_its_groups(
    nodes: tuple[int, ...], config: TopologyConfig, trainers: list[int], engines: list[list[int]]
) -> None:
    found = run_ranks(look_around, len(nodes), config=config, nodes=nodes)
    assert [view.pop("seat") for view in found] == assign_roles(nodes, config)
    assert found == [expected_view(rank, nodes, trainers, engines) for rank in range(len(nodes))]


def fail_on_rollout_1(topology: Topology) -> None:
    if topology.seat.name == "rollout[1]":
        raise ZeroDivisionError("as the test wants it")
    dist.barrier(group=topology.control)  # with ranks that never come


def sleep_on_rollout_1(topology: Topology, seconds: float) -> None:
    if topology.seat.name == "rollout[1]":
        time.sleep(seconds)


def die_on_rollout_1(topology: Topology, code: int) -> None:
    if topology.seat.name == "rollout[1]":
        os._exit(code)


def test_a_rank_that_fails_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(pytest.fail.Exception) as error:
        run_ranks(fail_on_rollout_1, 3, config=TWO_ENGINES)
    assert "rank 2, rollout[1]:\nTraceback" in str(error.value)
    assert "in fail_on_rollout_1" in str(error.value)
    assert "ZeroDivisionError: as the test wants it" in str(error.value)
    assert multiprocessing.active_children() == []


def test_a_rank_that_hangs_is_ended() -> None:
    with pytest.raises(pytest.fail.Exception, match="were not done after 2 seconds"):
        run_ranks(sleep_on_rollout_1, 3, config=TWO_ENGINES, arguments=(600.0,), timeout=2.0)
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_without_a_word_is_reported_with_its_exit_code() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 2 died with exit code 7"):
        run_ranks(die_on_rollout_1, 3, config=TWO_ENGINES, arguments=(7,))
    assert multiprocessing.active_children() == []


def test_numbers_that_do_not_fit_reach_every_rank_before_they_connect() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank .:\nTraceback[^$]*got 2 rollout ranks"):
        run_ranks(look_around, 2, config=TWO_ENGINES)
