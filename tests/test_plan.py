"""The batch arithmetic and the rank map, with numbers checked by hand.

U = groups (prompts) per weight update; the tiny recipe has 4 prompts per optimizer step and at most 3 steps.
"""

from __future__ import annotations

import pytest

from rayless.comm.launcher import Launch
from rayless.launch.config import RECIPES, JobConfig, read_config
from rayless.launch.plan import Plan, arithmetic, make_plan, rank_map

TINY = ["--config", str(RECIPES / "tiny.yaml")]


def launch(*nodes: int) -> Launch:
    """Rank 0 of a job with one rank per number; the numbers are the ranks' nodes."""
    return Launch(rank=0, local_rank=0, nodes=nodes, master_addr="localhost", master_port=29500)


def config(*arguments: str) -> JobConfig:
    return read_config([*TINY, "--run.steps", "null", *arguments])


def plan(*arguments: str, nodes: tuple[int, ...] = (0, 0), num_prompts: int = 64, num_too_long: int = 0) -> Plan:
    return make_plan(config(*arguments), launch(*nodes), num_prompts=num_prompts, num_too_long=num_too_long)


def test_without_num_recv_per_update_each_step_has_its_own_weights() -> None:
    one = plan()
    # 64 prompts / 4 per step = 16 updates of one step
    assert (one.groups_per_update, one.updates_per_episode, one.steps_per_update, one.total_steps) == (4, 16, 1, 16)
    assert (one.num_trainers, one.num_engines, one.groups_per_episode) == (1, 1, 64)


def test_groups_per_update_come_from_all_engines() -> None:
    # 2 engines x 6 groups = 12 = 3 steps of 4; 64 // 12 = 5 updates; 5 x 12 = 60 of 64 prompts; 5 x 3 = 15 steps
    two = plan("--rollout.num_recv_per_update", "6", nodes=(0, 0, 0, 0))
    assert (two.num_trainers, two.num_engines) == (2, 2)
    assert (two.groups_per_update, two.updates_per_episode, two.steps_per_update, two.total_steps) == (12, 5, 3, 15)
    assert two.groups_per_episode == 60


def test_tensor_parallel_ranks_are_one_engine() -> None:
    # 2 ranks = 1 engine x 6 groups, no multiple of 4
    tensor_parallel = ("--topology.rollout_tp_size", "2")
    with pytest.raises(ValueError, match=r"got 1 x 6 = 6$"):
        plan("--rollout.num_recv_per_update", "6", *tensor_parallel, nodes=(0, 0, 0, 0))
    assert plan("--rollout.num_recv_per_update", "8", *tensor_parallel, nodes=(0, 0, 0, 0)).groups_per_update == 8


def test_episodes_multiply_and_updates_per_episode_cap() -> None:
    three = plan("--run.num_episodes", "3", "--grpo_config.num_update_per_episode", "5")
    assert (three.updates_per_episode, three.total_steps, three.groups_per_episode) == (5, 15, 20)


def test_run_steps_cap_but_do_not_extend() -> None:
    assert plan("--run.steps", "7").total_steps == 7
    assert plan("--run.steps", "17").total_steps == 16
    assert plan("--run.steps", "17", "--run.num_episodes", "2").total_steps == 17


@pytest.mark.parametrize(("num_prompts", "updates"), [(4, 1), (7, 1), (8, 2)])
def test_prompts_that_fill_no_update_sit_the_episode_out(num_prompts: int, updates: int) -> None:
    assert plan(num_prompts=num_prompts).updates_per_episode == updates


@pytest.mark.parametrize(
    ("arguments", "num_ranks", "message"),
    [
        (
            ["--grpo_config.batch_size", "3"],
            4,
            "grpo_config.batch_size must be a multiple of training ranks x grpo_config.minibatch_size = 2 x 1, got 3",
        ),
        (
            ["--grpo_config.minibatch_size", "3"],
            2,
            "grpo_config.batch_size must be a multiple of training ranks x grpo_config.minibatch_size = 1 x 3, got 4",
        ),
        (
            ["--rollout.num_recv_per_update", "3"],
            4,
            "engines x rollout.num_recv_per_update must be a multiple of grpo_config.batch_size = 4, got 2 x 3 = 6",
        ),
        (
            ["--grpo_config.batch_size", "10"],
            2,
            "one weight update takes 10 prompts (grpo_config.batch_size, rollout.num_recv_per_update), "
            "the data has 9 left after 5 were too long",
        ),
        (
            ["--grpo_config.num_update_per_episode", "3"],
            2,
            "grpo_config.num_update_per_episode must be at most 2: 9 prompts, 4 per update; got 3",
        ),
        (
            ["--rollout.num_recv_per_update", "8", "--run.steps", "3"],
            2,
            "run.steps must be a multiple of the 2 optimizer steps per weight update, got 3",
        ),
        (
            ["--topology.rollout_ranks", "2"],
            2,
            "the job needs at least one rollout rank and one trainer rank, got 2 rollout ranks "
            "(topology.rollout_ranks=2, rollout_tp_size=1) of 2 ranks",
        ),
        (
            ["--topology.rollout_ranks", "5"],
            2,
            "the job needs at least one rollout rank and one trainer rank, got 5 rollout ranks "
            "(topology.rollout_ranks=5, rollout_tp_size=1) of 2 ranks",
        ),
        (
            ["--topology.rollout_ranks", "3", "--topology.rollout_tp_size", "2"],
            4,
            "topology.rollout_ranks must be a multiple of topology.rollout_tp_size, got 3 and 2",
        ),
        (
            ["--topology.rollout_tp_size", "2", "--rollout.engine", "hf"],
            4,
            "topology.rollout_tp_size must be 1 with rollout.engine hf, got 2",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: list[str], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=r"got|left") as caught:
        plan(*arguments, nodes=(0,) * num_ranks, num_prompts=9, num_too_long=5)
    assert str(caught.value) == message


def test_a_job_of_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the job needs at least one rollout rank and one trainer rank, got 0"):
        plan(nodes=(0,))


def test_the_rank_map_names_role_engine_node_and_log() -> None:
    seats = plan("--topology.rollout_ranks", "2", "--topology.rollout_tp_size", "2", nodes=(0, 0, 1, 1)).seats
    assert rank_map(seats) == [
        "rank 0    trainer[0]                   node 0   logs/trainer-0.log",
        "rank 1    trainer[1]                   node 0   logs/trainer-1.log",
        "rank 2    rollout[0]     engine 0.0    node 1   logs/rollout-0.log",
        "rank 3    rollout[1]     engine 0.1    node 1   logs/rollout-1.log",
    ]


def test_per_node_placement_shows_in_the_rank_map() -> None:
    seats = plan("--topology.placement", "per_node", nodes=(0, 0, 1, 1)).seats
    assert [line.split()[2] for line in rank_map(seats)] == ["trainer[0]", "rollout[0]", "trainer[1]", "rollout[1]"]


def test_the_arithmetic_is_told_in_words() -> None:
    arguments = ["--rollout.num_recv_per_update", "6", "--run.num_episodes", "2"]
    two = plan(*arguments, nodes=(0, 0, 0, 0), num_prompts=30, num_too_long=5)
    assert arithmetic(two, config(*arguments)) == [
        "prompts          30 (5 left out, longer than 64 tokens), 24 used per episode",
        "optimizer step   4 prompts x 4 completions; 2 prompts per trainer in 2 calls of step()",
        "weight update    12 groups from 2 engines, 3 optimizer steps",
        "run              2 episodes x 2 updates, 12 optimizer steps in all",
    ]
