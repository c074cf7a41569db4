"""Settings of the GRPO update and the batch arithmetic that goes with them. No heavy library is imported here."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rayless.trainers.loss_config import LossConfig

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(LossConfig):
    """Section `grpo_config`: the update."""

    batch_size: int = 8
    """Prompts per optimizer step, over the whole job."""
    minibatch_size: int = 1
    """Prompts per call of `step` and training rank."""
    num_update_per_episode: int | None = None
    """Weight updates per pass over the prompts; null uses as many prompts as fill whole updates."""
    num_generations: int | None = None
    """Completions per prompt; null takes rollout.num_generations, anything else must equal it."""
    temperature: float | None = None
    """Of the sampler; null takes rollout.temperature, anything else must equal it."""
    lr: float = 1e-6
    """Peak learning rate."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak, to reach 0 after the last optimizer step; constant does not."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_tokens_per_microbatch: int = 16384
    """Tokens of one forward and backward pass, padding included; a single longer row passes alone."""
    layout: Literal["auto", "shared_prefix", "packed", "padded"] = "auto"
    """`shared_prefix` computes a group's prompt once, `packed` rows without padding between (both with sdpa attention
    only); `padded` is one line per row. `auto` takes for each step what costs least (`padded` without sdpa)."""

    def __post_init__(self) -> None:
        LossConfig.__post_init__(self)  # super() does not work in a class with slots
        for name in ("batch_size", "minibatch_size", "max_tokens_per_microbatch", "num_update_per_episode"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"grpo_config.{name} must be at least 1, got {value}")
        for name in ("lr", "warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"grpo_config.{name} must be finite and at least 0, got {getattr(self, name)}")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"grpo_config.temperature must be finite and above 0, got {self.temperature}")


def groups_per_update(num_producers: int, num_recv_per_update: int | None, batch_size: int) -> int:
    """Groups per weight update over all engines (U). Raises ValueError when U is no multiple of `batch_size`."""
    if num_recv_per_update is None:
        return batch_size
    groups = num_producers * num_recv_per_update
    if groups % batch_size:
        raise ValueError(
            f"engines x rollout.num_recv_per_update must be a multiple of grpo_config.batch_size = {batch_size}, "
            f"got {num_producers} x {num_recv_per_update} = {groups}"
        )
    return groups


def check_batch(batch_size: int, minibatch_size: int, num_trainers: int) -> None:
    """Raises ValueError when an optimizer step's prompts do not divide into equal calls of `step` on every trainer."""
    if batch_size % (num_trainers * minibatch_size):
        raise ValueError(
            f"grpo_config.batch_size must be a multiple of training ranks x grpo_config.minibatch_size "
            f"= {num_trainers} x {minibatch_size}, got {batch_size}"
        )


def as_config(kind: type[Config], given: dict[str, Any] | Config, section: str) -> Config:
    """A dictionary as the section's dataclass; raises ValueError for a key that it does not have."""
    if isinstance(given, kind):
        return given
    assert isinstance(given, dict), f"{section} must be a dict or a {kind.__name__}, got {type(given).__name__}"
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{section} has no key {key!r}; the nearest is {near!r}")
    for key, hint in get_type_hints(kind).items():
        choices = _choices(hint)
        if key in given and choices and given[key] not in choices:
            raise ValueError(f"{section}.{key} must be one of {', '.join(map(str, choices))}, got {given[key]!r}")
    return kind(**given)


def _choices(hint: Any) -> list[Any]:
    """What a key of this type may be, where it is one of a few values: those of a Literal, and None if that may be."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    found = [_choices(one) for one in get_args(hint)]
    return [*(choice for choices in found for choice in choices), None] if any(found) else []


def with_arguments(given: dict[str, Any] | GRPOConfig, **arguments: Any) -> GRPOConfig:
    """The section with the constructor's own arguments in it; what a dict states in both places must be equal."""
    config = as_config(GRPOConfig, given, "grpo_config")
    for name, value in arguments.items():
        # A dataclass does not tell whether its batch_size was stated or is the default; null always is the default.
        stated = given.get(name) if isinstance(given, dict) else getattr(config, name)
        is_stated = isinstance(given, dict) or GRPOConfig.__dataclass_fields__[name].default is None
        if is_stated and stated not in (None, value):
            raise ValueError(f"grpo_config.{name} is {stated}, but {name} is {value}: they must agree")
    return replace(config, **arguments)
