"""Measure a part of the system and print one JSON line: `torchrun --nproc_per_node 2 -m rayless.launch.bench weights`.

What a line compares is measured in turns within one run, so that a slow moment of the machine hits all alike.
"""

from __future__ import annotations

import rayless.launch.cpu_defaults  # isort: skip  # noqa: F401 - before torch

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from rayless.comm.launcher import read_launcher
from rayless.comm.topology import Topology, TopologyConfig, connect, disconnect, meet
from rayless.comm.weights import WeightReceiver, WeightsConfig, WeightSender, agree_manifest, describe
from rayless.launch.bench_update import bench_update
from rayless.launch.config import find_path
from rayless.launch.grpo import share_cores
from rayless.rollout.engine import RolloutConfig
from rayless.trainers.model_config import ModelConfig

ROUNDS = 11


def bench_weights() -> None:
    """Weights from one trainer into vLLM on every other rank, against the least that this could cost.

    `plain_seconds`: one broadcast of as many bytes between the same ranks. `local_reload_seconds`: the engines load
    the same weights from their own memory. `sync_seconds`: cast, broadcast, checksum, load. Medians of 11.
    """
    launch = read_launcher(os.environ)
    config = TopologyConfig(rollout_ranks=launch.world_size - 1)
    topology = connect(launch, config, device="cuda" if torch.cuda.is_available() else "cpu")
    share_cores(topology)
    transformers_logging.disable_progress_bar()
    model = ModelConfig(path=find_path("models/smollm2", "model"))
    if topology.seat.role == "trainer":
        print(json.dumps(_trainer_side(topology, model)), flush=True)
    else:
        _rollout_side(topology, model)


def _trainer_side(topology: Topology, model: ModelConfig) -> dict[str, Any]:
    from rayless.trainers.policy import load_model

    network = load_model(model, topology.device, torch.float32)
    manifest = agree_manifest(topology, describe(network.named_parameters(), model.torch_dtype))
    num_bytes = sum(spec.num_bytes for spec in manifest)
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device=topology.device)
    times: dict[str, list[float]] = {"plain_seconds": [], "local_reload_seconds": [], "sync_seconds": []}
    plain = partial(dist.broadcast, flat, group=topology.bridge, group_src=0)
    sender = WeightSender(topology, manifest, WeightsConfig())
    for version in range(ROUNDS + 1):
        weights = network.named_parameters()
        send = partial(sender.send, weights, version=version)
        phases: list[Callable[[], Any]] = [plain, nothing, send]
        for name, work in zip(times, phases, strict=True):
            times[name].append(_timed(topology, work))
    meet(topology)
    disconnect()
    # The first round warms up.
    medians = {name: median(values[1:]) for name, values in times.items()}
    ratio = (medians["plain_seconds"] + medians["local_reload_seconds"]) / medians["sync_seconds"]
    return {"bench": "weights", "ranks": len(topology.seats), "bytes": num_bytes, **medians, "ratio": ratio}


def _rollout_side(topology: Topology, model: ModelConfig) -> None:
    from rayless.rollout.vllm_engine import VLLMEngine

    tokenizer = AutoTokenizer.from_pretrained(model.path)
    config = RolloutConfig(max_prompt_length=64, max_new_tokens=64)
    engine = VLLMEngine(
        model.path, tokenizer, config, dtype=model.torch_dtype, device=topology.device, seed=topology.seat.index
    )
    manifest = agree_manifest(topology, None)
    flat = torch.zeros(sum(spec.num_bytes for spec in manifest), dtype=torch.uint8, device=topology.device)
    own = [(spec.name, torch.zeros(spec.shape, dtype=spec.dtype, device=topology.device)) for spec in manifest]
    plain = partial(dist.broadcast, flat, group=topology.bridge, group_src=0)
    receiver = WeightReceiver(topology, manifest, WeightsConfig())
    for version in range(ROUNDS + 1):
        reload = partial(engine.load_weights, iter(own), version=version)
        sync = partial(engine.load_weights, receiver.receive(version=version), version=version)
        for work in (plain, reload, sync):
            _timed(topology, work)
    meet(topology)
    engine.close()
    disconnect()


def nothing() -> None:
    """What the trainer does while the engines reload."""


def _timed(topology: Topology, work: Callable[[], Any]) -> float:
    """Seconds from when all ranks are ready to when all are done."""
    meet(topology)
    start = time.perf_counter()
    work()
    if topology.device.type == "cuda":
        torch.cuda.synchronize()
    meet(topology)
    return time.perf_counter() - start


def update() -> None:
    """The bench `update`, in this process alone."""
    print(json.dumps(bench_update()), flush=True)


BENCHES = {"weights": bench_weights, "update": update}


def main() -> None:
    """Run the bench that the command line names."""
    if sys.argv[1:2] == [] or sys.argv[1] not in BENCHES:
        sys.exit("usage: torchrun --nproc_per_node N -m rayless.launch.bench weights, or without torchrun: update")
    BENCHES[sys.argv[1]]()


if __name__ == "__main__":
    main()
