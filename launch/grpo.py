"""GRPO as one job: `torchrun --nproc_per_node 8 launch/grpo.py [--config FILE] [--section.key VALUE ...]`.

Every rank reads the same configuration and data, takes its seat, and runs its role's loop to the end.
"""

from __future__ import annotations

import rayless.launch.cpu_defaults  # isort: skip  # noqa: F401 - before torch

import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rayless.comm.launcher import Launch, read_launcher
from rayless.comm.orders import share_json
from rayless.comm.topology import Topology, connect, disconnect, meet
from rayless.launch.config import JobConfig, read_config
from rayless.launch.plan import Plan, arithmetic, fixed_numbers, log_name, make_plan, rank_map
from rayless.launch.summary import summarize
from rayless.launch.terminal import ProgressDisplay, blaming_lost_peers, redirect_output, refuse, report_errors
from rayless.rollout.engine import Engine
from rayless.rollout.prompts import Prompts, PromptStream, load_prompts
from rayless.rollout.rewards import Rewarder, load_rewards
from rayless.trainers.checkpoint import check_resumable, check_unclaimed, find_checkpoint, read_progress
from rayless.trainers.metrics import Recorder
from rayless.trainers.model_config import check_network


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank knows before the job connects."""

    launch: Launch
    config: JobConfig
    plan: Plan
    tokenizer: Any
    prompts: Prompts
    rewarder: Rewarder
    checkpoint: Path | None
    """What the run goes on from."""


@record
def main() -> None:
    """Run this rank."""
    arguments = sys.argv[1:]
    speaks = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    if not speaks and {"--help", "-h", "--print_config"} & set(arguments):
        return
    try:
        job = prepare(arguments)
    except ValueError as error:
        refuse(error, speaks=speaks)
    if job.config.dry_run:
        if job.launch.rank == 0:
            print("\n".join([*rank_map(job.plan.seats), *arithmetic(job.plan, job.config)]))
        return
    run(job)


def prepare(arguments: list[str]) -> Job:
    """Everything that can be checked before a model loads. Raises ValueError for the user's mistakes."""
    config = read_config(arguments)  # first: --help needs no launcher
    launch = read_launcher(os.environ)
    transformers_logging.disable_progress_bar()
    rewarder = load_rewards(config.rewards)
    model = config.model_config
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        network = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model_config.path: {model.path!r} cannot be opened: {reason}") from None
    if len(tokenizer) < 2:  # transformers makes up an empty one
        raise ValueError(f"model_config.path: {model.path!r} holds no tokenizer")
    limit = config.rollout.max_prompt_length
    check_network(
        network.to_dict(),
        longest=limit + config.rollout.max_new_tokens,
        masks=config.grpo_config.layout != "padded" and model.attn_implementation == "sdpa",
        checkpointing=model.gradient_checkpointing,
    )
    prompts = load_prompts(config.data, tokenizer, max_prompt_length=limit, seed=config.run.seed)
    for prompt in prompts.kept:
        rewarder.check(prompt.row, {**prompt.columns, "answer": prompt.answer})
    plan = make_plan(config, launch, num_prompts=len(prompts.kept), num_too_long=prompts.num_too_long)
    checkpoint = resume_point(config)
    check_unclaimed(save_dir(config, config.run.name or ""), checkpoint)
    if checkpoint:
        check_resumable(checkpoint, fixed_numbers(plan, config))
    return Job(
        launch=launch,
        config=config,
        plan=plan,
        tokenizer=tokenizer,
        prompts=prompts,
        rewarder=rewarder,
        checkpoint=checkpoint,
    )


def resume_point(config: JobConfig) -> Path | None:
    """The checkpoint that this run goes on from; a run without a name is new and has none of its own."""
    if config.run.name is None and config.checkpoint.resume == "auto":
        return None
    return find_checkpoint(save_dir(config, config.run.name or ""), config.checkpoint.resume)


def save_dir(config: JobConfig, name: str) -> Path:
    """Where checkpoints go."""
    return Path(config.run.dir, name, config.checkpoint.save_dir)


def run(job: Job) -> None:
    """Connect, play this rank's role, leave."""
    config = job.config
    topology = connect(job.launch, config.topology, device=config.device)
    is_first = job.launch.rank == 0
    proposal = config.run.name or f"{config.title}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = share_json(proposal, group=topology.control, source=0, is_source=is_first)
    folder = Path(config.run.dir, name)
    terminal = redirect_output(folder / "logs" / log_name(topology.seat))
    report_errors(topology.seat.name, terminal)
    if is_first:
        (folder / "config.yaml").write_text(config.text)
        print(f"run {folder}", *rank_map(job.plan.seats), *arithmetic(job.plan, config), sep="\n", file=terminal)
    share_cores(topology)
    with blaming_lost_peers():
        if topology.seat.role == "trainer":
            train(job, topology, folder, terminal)
        else:
            roll_out(job, topology)
    disconnect()


def share_cores(topology: Topology) -> None:
    """On CPU: the roles take turns, so each gets all cores that it may use; ranks of one role on a node share them."""
    if topology.device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // topology.neighbours))


def train(job: Job, topology: Topology, folder: Path, terminal: Any) -> None:
    """The training role."""
    # ColossalAI must not be imported before this rank has its role's world, nor where it is not needed.
    from rayless.trainers.base_consumer import Surroundings
    from rayless.trainers.grpo_consumer import GRPOConsumer

    config, plan = job.config, job.plan
    first_step = read_progress(job.checkpoint).steps + 1 if job.checkpoint else 1
    consumer = GRPOConsumer(
        num_producers=plan.num_engines,
        num_episodes=config.run.num_episodes,
        rank=topology.seat.index,
        world_size=topology.num_trainers,
        master_addr=job.launch.master_addr,
        master_port=job.launch.master_port,
        num_update_per_episode=plan.updates_per_episode,
        num_recv_per_update=config.rollout.num_recv_per_update,
        batch_size=config.grpo_config.batch_size,
        model_config=config.model_config,
        plugin_config=config.plugin_config,
        minibatch_size=config.grpo_config.minibatch_size,
        num_generations=config.rollout.num_generations,
        grpo_config=config.grpo_config,
        save_interval=config.checkpoint.save_interval,
        save_dir=str(save_dir(config, folder.name)),
    )
    recorder = Recorder(folder, config.logging, first_step=first_step) if topology.is_leader else None
    surroundings = Surroundings(
        tokenizer=job.tokenizer,
        recorder=recorder,
        weights=config.weights,
        max_steps=config.run.steps,
        keep_last=config.checkpoint.keep_last,
        resume_from=job.checkpoint,
        fixed=fixed_numbers(plan, config),
    )
    consumer.setup(topology, surroundings)
    if recorder is None:
        consumer.loop()
        meet(topology)
        return
    display = ProgressDisplay(terminal, total=plan.total_steps, done=first_step - 1)
    with closing(display), closing(recorder):
        consumer.loop(display)
    meet(topology)
    if consumer.policy_version >= first_step:
        display.console.print(summarize(folder, find_checkpoint(save_dir(config, folder.name), "auto")))


def roll_out(job: Job, topology: Topology) -> None:
    """The rollout role."""
    from rayless.rollout.worker import RolloutWorker

    config = job.config
    stream = PromptStream(job.prompts.kept, groups_per_episode=job.plan.groups_per_episode, seed=config.run.seed)
    engine = open_engine(job, topology)
    worker = RolloutWorker(
        topology,
        engine,
        stream,
        job.rewarder,
        config.weights,
        seed=config.run.seed,
        num_samples=config.logging.samples,
    )
    worker.loop()
    meet(topology)
    engine.close()


def open_engine(job: Job, topology: Topology) -> Engine:
    """The engine that the configuration names, on this rank."""
    config, model = job.config, job.config.model_config
    options: dict[str, Any] = {
        "dtype": model.torch_dtype,
        "device": topology.device,
        "trust_remote_code": model.trust_remote_code,
    }
    if config.rollout.engine == "hf":
        from rayless.rollout.hf_engine import HFEngine

        return HFEngine(model.path, job.tokenizer, config.rollout, **options)
    # vLLM must not be imported before this rank has its engine's world.
    from rayless.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(model.path, job.tokenizer, config.rollout, seed=config.run.seed, **options)


if __name__ == "__main__":
    main()
