"""What an inference engine is to Rayless: groups in, finished groups out, weights in between.

G completions of one prompt are a group; its number is counted over the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor
from transformers import GenerationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Section `rollout`: how completions are sampled."""

    engine: Literal["vllm", "hf"] = "vllm"
    """`vllm`: in process, on CPU and CUDA. `hf`: transformers' generate, one group at a time, for reference."""
    num_generations: int = 8
    """Completions per prompt (G)."""
    num_recv_per_update: int | None = None
    """Groups per engine and weight update; null makes one update of each grpo_config.batch_size groups."""
    temperature: float = 1.0
    """Both the sampler and the trainer divide logits by it."""
    max_prompt_length: int = 512
    """Prompts with more tokens are left out when they are loaded, and counted."""
    max_new_tokens: int = 512
    """Completions are cut off after this many tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, besides the model's own end tokens."""
    max_staleness: int = 0
    """Weight updates by which the weights that sample a group may lag behind; only 0 is there yet."""
    kv_cache_gib: float | None = None
    """vLLM's key/value cache in GiB; null means 1 on CPU and what gpu_memory_utilization leaves on CUDA."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory that vLLM may fill (CUDA)."""

    def __post_init__(self) -> None:
        for name in ("num_generations", "max_prompt_length", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_recv_per_update is not None and self.num_recv_per_update < 1:
            raise ValueError(f"rollout.num_recv_per_update must be at least 1, got {self.num_recv_per_update}")
        if not 0.01 <= self.temperature < math.inf:  # vLLM takes 0.01 for anything below
            raise ValueError(f"rollout.temperature must be finite and at least 0.01, got {self.temperature}")
        if self.max_staleness != 0:
            raise ValueError(f"rollout.max_staleness must be 0 (more is not there yet), got {self.max_staleness}")
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < math.inf:
            raise ValueError(f"rollout.kv_cache_gib must be finite and above 0, got {self.kv_cache_gib}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"rollout.gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")
        if not all(self.stop):
            raise ValueError("rollout.stop must hold no empty text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer of n tokens, its end token included."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each token under the distribution it was sampled from (temperature applied)."""
    versions: list[int]
    """Weights that sampled each token."""
    text: str
    """Without special tokens."""
    truncated: bool
    """Whether the length limit cut it off."""


class Engine(Protocol):
    """What the rollout loop needs. All ranks of an engine make the same calls in the same order."""

    @property
    def busy(self) -> bool:
        """Whether some group is not finished."""
        ...

    def add(self, number: int, prompt_ids: Sequence[int], *, seed: int) -> None:
        """Start a group: G completions of the prompt, reproducible by `seed` where the engine is."""
        ...

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Work for a moment; groups that are finished now, with their numbers."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        """Take all tensors (Hugging Face names), drop what was cached under earlier weights; no group may be running.

        An error names the tensors that the model does not have, or did not get; the engine is of no use afterwards.
        """
        ...

    def close(self) -> None:
        """Give back memory, files and processes."""
        ...


def end_token_ids(model_path: str, tokenizer: Any) -> list[int]:
    """All ids that end an answer: those of the model's generation settings and the tokenizer's own."""
    try:
        settings = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # a model folder need not have generation settings
        settings = None
    ids = [settings] if isinstance(settings, int) else list(settings or [])
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


def kept_tokens(token_ids: Sequence[int], end_ids: Sequence[int], max_new_tokens: int) -> tuple[int, bool]:
    """How many of the generated ids belong to the answer (its first end token included), and whether it was cut off.

    What stands behind the first end token is padding, whatever its id; a padding id before it was sampled and stays.
    """
    for place, token in enumerate(token_ids):
        if token in end_ids:
            return place + 1, False
    return len(token_ids), len(token_ids) >= max_new_tokens


def text_before_stop(text: str, stop: Sequence[str]) -> str | None:
    """What stands before the first of the stop texts; None while there is none of them."""
    places = [text.index(one) for one in stop if one in text]
    return text[: min(places)] if places else None
