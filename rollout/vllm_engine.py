"""vLLM in process: its engine loop is ours to step, its weights come through its own weight-transfer registry.

The only file that imports vLLM. G completions per prompt. All ranks of a tensor-parallel engine run the same calls.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rayless.rollout.engine import Completion, RolloutConfig, end_token_ids

SHARED_MEMORY = Path("/dev/shm")
NAME = "rayless"


@dataclass
class _Init(WeightTransferInitInfo):
    """Nothing: the bridge is connected before the engine starts."""


@dataclass
class _Update(WeightTransferUpdateInfo):
    tensors: Iterator[tuple[str, Tensor]]
    version: int


class _TensorStream(WeightTransferEngine[_Init, _Update]):
    """Feeds one stream of (name, tensor) to vLLM's layer-wise reload, and holds both to the model's names."""

    init_info_cls = _Init
    update_info_cls = _Update

    def init_transfer_engine(self, init_info: _Init) -> None:
        pass

    def start_weight_update(self) -> None:
        # Before the layers are taken apart: later a tied head would count as a parameter of its own.
        self.wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _Update) -> None:
        received: set[str] = set()
        loaded = self.model.load_weights(_noting_names(update_info.tensors, received))
        # Not every model fuses tensors. vLLM takes a fused one for loaded as soon as one of its parts has come.
        packed = getattr(self.model, "packed_modules_mapping", {})
        missing = {
            part
            for name in self.wanted
            for part in _parts(name, packed)
            if part not in received and (name not in loaded or part != name)
        }
        if missing:
            raise RuntimeError(
                f"weights version {update_info.version}: the engine never received {', '.join(sorted(missing))}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                # On CPU a head multiplies by a packed copy of its weight, and nothing came to renew a tied head's.
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(NAME, _TensorStream)


def _noting_names(tensors: Iterator[tuple[str, Tensor]], received: set[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        received.add(name)
        yield name, tensor


def _parts(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Hugging Face names of what vLLM keeps as `name`: model.layers.0.mlp.gate_up_proj.weight holds two tensors."""
    *parents, module, tensor = name.split(".")
    return [".".join([*parents, part, tensor]) for part in packed.get(module, [module])]


class _Executor(ExecutorWithExternalLauncher):
    """vLLM's executor for ranks that somebody else started, with a shared-memory name of the engine's own.

    On CPU, vLLM names its files after the init method, which it does not use otherwise: the world is there already.
    """

    shared_name = ""

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"env://:{self.shared_name}", rank, local_rank


class VLLMEngine:
    """See rayless.rollout.engine.Engine."""

    def __init__(
        self,
        model_path: str,
        tokenizer: Any,
        config: RolloutConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        trust_remote_code: bool = False,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's loop runs in this process
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default every engine takes all cores for itself
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_worth_a_warning)
        on_cpu = device.type == "cpu"
        cache_gib = config.kv_cache_gib or (1.0 if on_cpu else None)
        _Executor.shared_name = _shared_name()
        self.llm = LLM(
            model_path,
            tensor_parallel_size=torch.distributed.get_world_size(),
            distributed_executor_backend=_Executor,
            weight_transfer_config=WeightTransferConfig(backend=NAME),
            dtype=str(dtype).removeprefix("torch."),
            trust_remote_code=trust_remote_code,
            seed=seed,
            max_model_len=config.max_prompt_length + config.max_new_tokens,
            kv_cache_memory_bytes=None if cache_gib is None else int(cache_gib * 2**30),
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=on_cpu,
            generation_config="vllm",  # no sampling defaults of the model's own
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
        )
        self.config = config
        self.end_ids = end_token_ids(model_path, tokenizer)
        self.version = 0

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def add(self, number: int, prompt_ids: Sequence[int], *, seed: int) -> None:
        sampling = SamplingParams(
            n=self.config.num_generations,
            temperature=self.config.temperature,
            max_tokens=self.config.max_new_tokens,
            stop=self.config.stop or None,
            stop_token_ids=self.end_ids,
            seed=seed,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": list(prompt_ids)}, sampling)

    def step(self) -> list[tuple[int, list[Completion]]]:
        outputs = self.llm.llm_engine.step()
        return [
            (int(output.request_id), [self._completion(answer) for answer in output.outputs])
            for output in outputs
            if output.finished
        ]

    def _completion(self, answer: Any) -> Completion:
        token_ids = list(answer.token_ids)
        return Completion(
            token_ids=token_ids,
            log_probs=[row[token].logprob for row, token in zip(answer.logprobs, token_ids, strict=True)],
            versions=[self.version] * len(token_ids),
            text=answer.text,
            truncated=answer.finish_reason == "length",
        )

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        assert not self.busy, "weights change between groups"
        self.llm.collective_rpc("start_weight_update")
        self.llm.collective_rpc("update_weights", args=({"tensors": tensors, "version": version},))
        self.llm.collective_rpc("finish_weight_update")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(f"weights version {version}: vLLM could not drop its prefix cache")
        self.version = version

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _is_worth_a_warning(record: logging.LogRecord) -> bool:
    # Rotary tables are computed and a tied head follows its embedding: nothing is loaded there, and nothing is wrong.
    layer, _, complaint = record.getMessage().partition(": ")
    return not (complaint == "Failed to load weights" and layer.endswith(_NOT_LOADED))


_NOT_LOADED = ("RotaryEmbedding", "ParallelLMHead")


def _shared_name() -> str:
    """One name for all ranks of this engine that no other engine on this machine has: its leader's process number."""
    pid = torch.tensor([os.getpid()])
    torch.distributed.broadcast(pid, src=0)
    _remove_stale_files()
    return f"{NAME}.{int(pid)}."


def _remove_stale_files() -> None:
    """Delete shared-memory files of engines whose leader has ended without cleaning up (it was killed)."""
    for path in SHARED_MEMORY.glob(f"{NAME}.*"):
        pid = path.name.split(".")[1]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)
