"""Weights from a trainer into a tensor-parallel vLLM engine: as if it had been started from that checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from rayless.comm.topology import Topology, TopologyConfig
from rayless.comm.weights import WeightReceiver, WeightsConfig, WeightSender, agree_manifest, describe

TINY = str(Path(__file__).parents[1] / "models" / "tiny")
PROMPTS = [[1, 100 + number, 200 + 7 * number, 300] for number in range(8)]


def _sync(topology: Topology, folder: str) -> Any:
    """The trainer changes the tiny model, saves it and publishes it; the engine answers from what it received."""
    from transformers import AutoModelForCausalLM

    config = WeightsConfig(bucket_mib=1)
    if topology.seat.role == "rollout":
        return _answers(topology, TINY, config)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    manifest = agree_manifest(topology, describe(model.named_parameters(), torch.float32))
    WeightSender(topology, manifest, config).send(model.named_parameters(), version=3)
    return None


def _start_afresh(topology: Topology, folder: str) -> Any:
    return _answers(topology, folder, None) if topology.seat.role == "rollout" else None


def _answers(topology: Topology, path: str, config: WeightsConfig | None) -> Any:
    """Tokens and log-probs of the fixed prompts, on each rank of the engine; after a sync where `config` is given."""
    from transformers import AutoTokenizer

    from rayless.rollout.engine import RolloutConfig
    from rayless.rollout.vllm_engine import VLLMEngine

    rollout = RolloutConfig(num_generations=2, max_prompt_length=16, max_new_tokens=6, kv_cache_gib=0.25)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    engine = VLLMEngine(path, tokenizer, rollout, dtype=torch.float32, device=topology.device, seed=0)
    if config:
        manifest = agree_manifest(topology, None)
        receiver = WeightReceiver(topology, manifest, config)
        engine.load_weights(receiver.receive(version=3), version=3)
        for buffer in receiver.memory.kept.values():
            buffer.fill_(255)  # not a number anywhere: the next version may arrive while this one generates
    for number, prompt in enumerate(PROMPTS):
        engine.add(number, prompt, seed=1000 * number)
    finished: dict[int, Any] = {}
    while engine.busy:
        finished |= dict(engine.step())
    groups = [finished[number] for number in range(len(PROMPTS))]
    return [[(answer.token_ids, answer.log_probs) for answer in group] for group in groups]


@pytest.mark.job
def test_a_synced_tensor_parallel_engine_equals_one_started_from_the_checkpoint(tmp_path: Path) -> None:
    config = TopologyConfig(rollout_ranks=2, rollout_tp_size=2)
    synced = run_ranks(_sync, 3, config=config, arguments=(str(tmp_path),), timeout=180)
    fresh = run_ranks(_start_afresh, 3, config=config, arguments=(str(tmp_path),), timeout=180)
    assert synced[1] == synced[2], "the ranks of one engine disagree"
    for group, expected in zip(synced[1], fresh[1], strict=True):
        for (tokens, log_probs), (own_tokens, own_log_probs) in zip(group, expected, strict=True):
            assert tokens == own_tokens
            assert log_probs == pytest.approx(own_log_probs, abs=1e-5)
