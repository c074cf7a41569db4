"""Settings of the trained model: what it is, how ranks share it, how it is optimized. Imports no heavy library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

NOT_YET = ("hybrid", "fsdp", "gemini")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Section `model_config`: the model that is trained and served."""

    path: str
    """A Hugging Face model folder, or a model's name on the hub."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the engines compute with, and what weights are cast to on their way there."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """The trainers' attention; flash_attention_2 (CUDA) goes with grpo_config.layout=padded."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch knows it."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Section `plugin_config`: how the training ranks share the work."""

    plugin: str = "ddp"
    """`ddp`: every rank holds all. `zero`: optimizer states are spread (stage 1), gradients too (stage 2)."""
    zero_stage: int = 1
    """1 or 2; read by `zero`."""
    tp_size: int = 1
    """Tensor-parallel ranks; only 1 is there yet."""
    pp_size: int = 1
    """Pipeline stages; only 1 is there yet."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """What the forward pass computes with; master weights are fp32 either way."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm; .inf never scales."""

    def __post_init__(self) -> None:
        if self.plugin in NOT_YET:
            raise ValueError(f"plugin_config.plugin {self.plugin!r} is not there yet; there are ddp and zero")
        if self.plugin not in ("ddp", "zero"):
            raise ValueError(f"plugin_config.plugin must be ddp or zero, got {self.plugin!r}")
        if self.zero_stage not in (1, 2):
            raise ValueError(f"plugin_config.zero_stage must be 1 or 2, got {self.zero_stage}")
        if self.zero_stage == 2 and self.plugin != "zero":
            raise ValueError(f"plugin_config.zero_stage 2 needs plugin zero, got {self.plugin}")
        for name in ("tp_size", "pp_size"):
            if getattr(self, name) != 1:
                raise ValueError(f"plugin_config.{name} must be 1 (more is not there yet), got {getattr(self, name)}")
        if not self.max_norm > 0:
            raise ValueError(f"plugin_config.max_norm must be above 0 (.inf for no clipping), got {self.max_norm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer and its schedule need; counted in optimizer steps."""

    lr: float
    weight_decay: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    total_steps: int


# Settings by which some architectures change logits behind the head, where log-probs computed here would not see it.
SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def check_network(network: dict[str, Any], *, longest: int, masks: bool = False, checkpointing: bool = False) -> None:
    """Raises ValueError for a model (its config.json) whose log-probs would come out wrong, or that is too short.

    `longest`: tokens of prompt and completion together. `masks`: masks say who may look where.
    """
    network = {**network, **(network.get("text_config") or {})}
    if masks:
        _check_sees_all(network, longest)
    if checkpointing:  # which transformers does in training mode alone
        for name, value in network.items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"model_config.gradient_checkpointing needs a model without dropout, got {name}={value}"
                )
    for name in SCALED_LOGITS:
        if network.get(name) not in (None, 1, 1.0):
            raise ValueError(f"model_config.path: models with {name}={network[name]} are not there yet")
    limit = network.get("max_position_embeddings")
    if limit is not None and longest > limit:
        raise ValueError(
            f"rollout.max_prompt_length + rollout.max_new_tokens must be at most {limit} (the model's positions), "
            f"got {longest}"
        )


def _check_sees_all(network: dict[str, Any], longest: int) -> None:
    """Raises ValueError unless a mask of who may look where is all that a layer goes by."""
    kinds = set(
        network.get("layer_types") or ["sliding_attention" if network.get("sliding_window") else "full_attention"]
    )
    window = network.get("sliding_window") or 0
    if network.get("use_sliding_window") is False or window >= longest:
        kinds -= {"sliding_attention"}
    if odd := kinds - {"full_attention"}:
        raise ValueError(
            f"grpo_config.layout must be padded for a model with {', '.join(sorted(odd))} layers, which go by more "
            "than a mask"
        )
