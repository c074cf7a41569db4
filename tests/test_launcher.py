import json
from pathlib import Path
from typing import Any

import pytest

from rayless.comm.launcher import FIRST_PORT, NUM_PORTS, Launch, expand_hosts, read_launcher
from rayless.comm.topology import TopologyConfig, assign_roles

CASES = Path(__file__).parent / "cases"
ENVIRONMENTS = {case["id"]: case for case in map(json.loads, (CASES / "launch_env_cases.jsonl").open())}
NODE_LISTS = [json.loads(line) for line in (CASES / "nodelist_cases.jsonl").open()]
# What the one line must hold, for each environment that is refused. v8 is refused only when roles are assigned.
REFUSALS = {
    "v4": ["batch script itself", "SLURM_STEP_ID", "srun"],
    "v5": ["LOCAL_RANK"],
    "v6": ["RANK", "torchrun", "srun"],
    "v7": ["RANK=2", "WORLD_SIZE=2"],
}
TORCHRUN = ENVIRONMENTS["v1"]["env"]
SRUN = ENVIRONMENTS["v3"]["env"]


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        read_launcher(environ)
    return str(error.value)


def on_task(environ: dict[str, str], task: int, **more: str) -> Launch:
    """What task number `task` of SRUN (2 nodes with 2 tasks each) understands."""
    return read_launcher({**environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % 2), **more})


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_is_understood_or_refused_in_one_line(name: str) -> None:
    environ, expected = ENVIRONMENTS[name]["env"], ENVIRONMENTS[name]["expect"]
    if name in REFUSALS:
        message = refusal(environ)
        assert [part for part in REFUSALS[name] if part not in message] == []
    elif name != "v8":
        launch = read_launcher(environ)
        assert expected == {key: getattr(launch, key) for key in expected}


def test_a_world_of_one_has_no_roles_to_give() -> None:
    nodes = read_launcher(ENVIRONMENTS["v8"]["env"]).nodes
    with pytest.raises(ValueError, match=r"\A.*one rollout rank and one trainer rank, got 0 rollout .* of 1 ranks\Z"):
        assign_roles(nodes, TopologyConfig())


def test_torchrun_says_where_to_meet() -> None:
    launch = read_launcher(TORCHRUN)
    assert (launch.master_addr, launch.master_port, launch.nodes) == ("127.0.0.1", 29555, (0, 0))


def test_torchrun_ranks_stand_on_nodes_of_equal_size() -> None:
    launch = read_launcher({**TORCHRUN, "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"})
    assert launch.nodes == (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank", "local_world_size"),
    [
        ("1", "4", "0", "3"),  # 1 rank on the first node, 3 on the second
        ("0", "3", "0", "2"),  # 2 ranks on the first node, 1 on the second
    ],
)
def test_nodes_of_unequal_size_are_refused(rank: str, world_size: str, local_rank: str, local_world_size: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    assert "same number of ranks" in refusal({**TORCHRUN, **place})


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_torchrun_variable_is_named(name: str) -> None:
    assert f"did not set {name}:" in refusal({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"])
def test_a_missing_srun_variable_is_named(name: str) -> None:
    assert f"did not set {name}:" in refusal({key: value for key, value in SRUN.items() if key != name})


def test_srun_without_a_host_list_is_refused() -> None:
    environ = {key: value for key, value in SRUN.items() if "NODELIST" not in key}
    assert "did not set SLURM_JOB_NODELIST:" in refusal(environ)
    assert "did not set SLURM_STEP_NODELIST:" in refusal({**environ, "SLURM_STEP_NODELIST": ""})


def test_the_hosts_of_the_step_win_over_those_of_the_allocation() -> None:
    assert on_task(SRUN, 0, SLURM_JOB_NODELIST="node[00-07]").master_addr == "node01"


def test_a_variable_that_is_no_number_is_named() -> None:
    assert refusal({**TORCHRUN, "RANK": "-1"}) == "RANK must be a whole number, got '-1'"
    assert refusal({**SRUN, "SLURM_JOB_ID": "one"}) == "SLURM_JOB_ID must be a whole number, got 'one'"


def test_srun_ranks_agree_on_everything_but_their_place() -> None:
    launches = [on_task(SRUN, task) for task in range(4)]
    assert [(launch.rank, launch.local_rank) for launch in launches] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {launch.nodes for launch in launches} == {(0, 0, 1, 1)}
    assert {launch.master_addr for launch in launches} == {"node01"}
    assert {launch.master_port for launch in launches} == {15000 + (4711 * 31) % 17000}


def test_other_jobs_and_other_steps_meet_at_other_ports() -> None:
    ports = [
        read_launcher({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(4711, 4721)
        for step in range(3)
    ]
    assert len(set(ports)) == 30
    # 32768 is where Linux begins to hand out ports by itself.
    assert all(FIRST_PORT <= port < FIRST_PORT + NUM_PORTS <= 32768 for port in ports)


def test_a_meeting_point_set_by_hand_is_taken() -> None:
    launch = read_launcher({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.7", 4000)


@pytest.mark.parametrize(
    ("hosts", "tasks", "nodes"),
    [
        ("n1", "4", (0, 0, 0, 0)),
        ("n[1-2]", "2(x2)", (0, 0, 1, 1)),
        ("n[1-2]", "3,1", (0, 0, 0, 1)),
        ("n[1-4]", "2(x3),1", (0, 0, 1, 1, 2, 2, 3)),
        ("n[1-4]", "1,2(x2),1(x1)", (0, 1, 1, 2, 2, 3)),
    ],
)
def test_every_form_of_tasks_per_node_gives_the_nodes(hosts: str, tasks: str, nodes: tuple[int, ...]) -> None:
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
        for rank, node in enumerate(nodes):
            place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank - nodes.index(node))}
            counts = {"SLURM_NTASKS": str(len(nodes)), "SLURM_STEP_NODELIST": hosts, name: tasks}
            assert read_launcher({**SRUN, **place, **counts}).nodes == nodes


def test_the_tasks_of_the_step_win_over_those_of_the_allocation() -> None:
    assert on_task(SRUN, 3, SLURM_TASKS_PER_NODE="8(x2)", SLURM_STEP_TASKS_PER_NODE="2(x2)").nodes == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"SLURM_TASKS_PER_NODE": "2x2"}, ["SLURM_TASKS_PER_NODE must look like", "'2x2'"]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),"}, ["SLURM_TASKS_PER_NODE must look like", "'2(x2),'"]),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, ["SLURM_TASKS_PER_NODE=2(x3)", "6 tasks", "SLURM_NTASKS says 4"]),
        ({"SLURM_STEP_NODELIST": "node[01-03]"}, ["SLURM_TASKS_PER_NODE is not set", "4 tasks", "3 nodes"]),
        ({"SLURM_PROCID": "4"}, ["SLURM_PROCID", "SLURM_NTASKS", "got 4 and 4"]),
        # Cyclic: task 1 is the first of the second node.
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, ["--distribution=block", "SLURM_PROCID=1", "SLURM_LOCALID=0"]),
    ],
)
def test_srun_contradictions_are_refused_with_their_numbers(changes: dict[str, str], parts: list[str]) -> None:
    message = refusal({**SRUN, **changes})
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("case", NODE_LISTS, ids=[case["nodelist"] or "empty" for case in NODE_LISTS])
def test_node_lists_match_the_case_file(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ValueError, match=r"\A[^\n]+ in the node list [^\n]+\Z") as error:
            expand_hosts(case["nodelist"])
        assert repr(case["nodelist"]) in str(error.value)
    else:
        assert expand_hosts(case["nodelist"]) == case["hosts"]


@pytest.mark.parametrize("nodelist", ["n[2-1]", "n[a-b]", "n[]", "n[1,]", "n]1[", "n[[1]]", "n1,,n2", "n1,", "n[1-2]]"])
def test_malformed_node_lists_are_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match="in the node list") as error:
        expand_hosts(nodelist)
    assert repr(nodelist) in str(error.value)
