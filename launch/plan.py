"""What a job would do, known before anything starts: which rank is what, and how prompts become optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayless.comm.launcher import Launch
from rayless.comm.topology import Seat, assign_roles
from rayless.launch.config import JobConfig
from rayless.trainers.grpo_config import check_batch, groups_per_update


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of one job."""

    seats: tuple[Seat, ...]
    num_prompts: int
    num_too_long: int
    groups_per_update: int
    updates_per_episode: int
    steps_per_update: int
    total_steps: int

    @property
    def num_trainers(self) -> int:
        """Training ranks."""
        return sum(seat.role == "trainer" for seat in self.seats)

    @property
    def num_engines(self) -> int:
        """Engines."""
        return max(seat.engine for seat in self.seats) + 1

    @property
    def groups_per_episode(self) -> int:
        """Prompts that one pass uses: as many as fill whole updates."""
        return self.groups_per_update * self.updates_per_episode


def make_plan(config: JobConfig, launch: Launch, *, num_prompts: int, num_too_long: int) -> Plan:
    """Raises ValueError when numbers do not divide or do not suffice."""
    seats = tuple(assign_roles(launch.nodes, config.topology))
    grpo, run = config.grpo_config, config.run
    num_engines = max(seat.engine for seat in seats) + 1
    check_batch(grpo.batch_size, grpo.minibatch_size, sum(seat.role == "trainer" for seat in seats))
    per_update = groups_per_update(num_engines, config.rollout.num_recv_per_update, grpo.batch_size)
    if grpo.old_logprobs == "recompute" and per_update > grpo.batch_size:
        raise ValueError(
            f"grpo_config.old_logprobs=recompute needs one optimizer step per weight update, got "
            f"{per_update // grpo.batch_size} (rollout.num_recv_per_update)"
        )
    possible = num_prompts // per_update
    if possible < 1:
        raise ValueError(
            f"one weight update takes {per_update} prompts (grpo_config.batch_size, rollout.num_recv_per_update), "
            f"the data has {num_prompts} left after {num_too_long} were too long"
        )
    updates = grpo.num_update_per_episode or possible
    if updates > possible:
        raise ValueError(
            f"grpo_config.num_update_per_episode must be at most {possible}: {num_prompts} prompts, "
            f"{per_update} per update; got {updates}"
        )
    steps_per_update = per_update // grpo.batch_size
    total_steps = run.num_episodes * updates * steps_per_update
    if run.steps is not None and run.steps % steps_per_update:
        raise ValueError(
            f"run.steps must be a multiple of the {steps_per_update} optimizer steps per weight update, got {run.steps}"
        )
    tp_size = config.topology.rollout_tp_size
    if config.rollout.engine == "hf" and tp_size > 1:
        raise ValueError(f"topology.rollout_tp_size must be 1 with rollout.engine hf, got {tp_size}")
    return Plan(
        seats=seats,
        num_prompts=num_prompts,
        num_too_long=num_too_long,
        groups_per_update=per_update,
        updates_per_episode=updates,
        steps_per_update=steps_per_update,
        total_steps=total_steps if run.steps is None else min(run.steps, total_steps),
    )


def rank_map(seats: tuple[Seat, ...]) -> list[str]:
    """One line per rank: its role, engine, node and log file."""
    lines = []
    for rank, seat in enumerate(seats):
        engine = f"engine {seat.engine}.{seat.engine_rank}" if seat.role == "rollout" else ""
        lines.append(f"rank {rank:<4} {seat.name:<14} {engine:<13} node {seat.node}   logs/{log_name(seat)}")
    return lines


def log_name(seat: Seat) -> str:
    """The rank's log file inside the run's folder `logs`."""
    return f"{seat.role}-{seat.index}.log"


def arithmetic(plan: Plan, config: JobConfig) -> list[str]:
    """How prompts become steps, in lines."""
    grpo, rollout = config.grpo_config, config.rollout
    per_rank = grpo.batch_size // plan.num_trainers
    return [
        f"prompts          {plan.num_prompts} ({plan.num_too_long} left out, longer than "
        f"{rollout.max_prompt_length} tokens), {plan.groups_per_episode} used per episode",
        f"optimizer step   {grpo.batch_size} prompts x {rollout.num_generations} completions; "
        f"{per_rank} prompts per trainer in {per_rank // grpo.minibatch_size} calls of step()",
        f"weight update    {plan.groups_per_update} groups from {plan.num_engines} engines, "
        f"{plan.steps_per_update} optimizer steps",
        f"run              {config.run.num_episodes} episodes x {plan.updates_per_episode} updates, "
        f"{plan.total_steps} optimizer steps in all",
    ]


def fixed_numbers(plan: Plan, config: JobConfig) -> dict[str, Any]:
    """What a resumed run must share with the run that wrote its checkpoint: else prompts repeat or are skipped, or the
    optimizer's state does not fit."""
    plugin = config.plugin_config
    fixed: dict[str, Any] = {
        "run.seed": config.run.seed,
        "number of prompts": plan.num_prompts,
        "grpo_config.batch_size": config.grpo_config.batch_size,
        "groups per weight update": plan.groups_per_update,
        "weight updates per episode": plan.updates_per_episode,
        "plugin_config.plugin": plugin.plugin,
        "plugin_config.precision": plugin.precision,
    }
    if plugin.plugin == "zero":  # each rank keeps its own share of the optimizer's state
        fixed |= {"plugin_config.zero_stage": plugin.zero_stage, "number of training ranks": plan.num_trainers}
    return fixed
