"""Experience: the one batch type that flows from rollout ranks to training ranks, and its flat wire form.

B finished completions (rows), T tokens of the longest row, N real tokens of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# Wire order: wide elements first, so that every section of the byte buffer starts at a multiple of its element size.
_ROW_SECTIONS = (("lengths", torch.int64), ("groups", torch.int64), ("rewards", torch.float32))
_TOKEN_SECTIONS = (
    ("input_ids", torch.int32),
    ("log_probs", torch.float32),
    ("versions", torch.int32),
    ("mask", torch.bool),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """B finished completions with all that an update needs of them; whole groups only, a group's rows together."""

    input_ids: Tensor  # [B, T] int64    prompt + completion, right padded
    lengths: Tensor  # [B]    int64    real length of each row
    mask: Tensor  # [B, T] bool     True on tokens the policy sampled (the end token too)
    log_probs: Tensor  # [B, T] float32  the sampler's log-prob of each sampled token, 0 elsewhere
    versions: Tensor  # [B, T] int32    weights each token was sampled with
    rewards: Tensor  # [B]    float32
    groups: Tensor  # [B]    int64    id of the prompt row; rows of one group stand together

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device | str) -> Experience:
        """The same batch with every tensor on `device`."""
        return Experience(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def rows(self, index: Tensor) -> Experience:
        """The rows that `index` ([R] int64 or bool over B) picks, in its order, trimmed to the longest of them."""
        longest = max(self.lengths[index].tolist(), default=0)
        picked = {field.name: getattr(self, field.name)[index] for field in fields(self)}
        return Experience(**{name: value[:, :longest] if value.dim() == 2 else value for name, value in picked.items()})

    def split(self, sizes: Sequence[int]) -> list[Experience]:
        """Consecutive runs of rows of the given sizes; they must add up to B."""
        assert sum(sizes) == len(self), f"sizes add up to {sum(sizes)}, the batch holds {len(self)} rows"
        return [self.rows(index) for index in torch.arange(len(self)).split(list(sizes))]


def concat(batches: Sequence[Experience]) -> Experience:
    """All rows of several batches in order, padded to the longest; batches without rows are welcome."""
    longest = max((batch.input_ids.shape[1] for batch in batches), default=0)

    def join(name: str) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        if parts[0].dim() == 2:
            parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts]
        return torch.cat(parts)

    return Experience(**{field.name: join(field.name) for field in fields(Experience)})


def empty() -> Experience:
    """A batch of no rows: the contribution of a rank that has nothing to give."""
    return unpack(torch.empty(0, dtype=torch.uint8), num_rows=0, num_tokens=0)


def num_bytes(num_rows: int, num_tokens: int) -> int:
    """Length in bytes of the wire form of `num_rows` rows with `num_tokens` real tokens together."""
    return num_rows * _width(_ROW_SECTIONS) + num_tokens * _width(_TOKEN_SECTIONS)


def pack(experience: Experience) -> Tensor:
    """The wire form: [num_bytes] uint8 on the CPU, token ids as int32, no padding."""
    real = _real_tokens(experience.lengths, experience.input_ids.shape[1])
    sections = [getattr(experience, name).to(dtype) for name, dtype in _ROW_SECTIONS]
    sections += [getattr(experience, name)[real].to(dtype) for name, dtype in _TOKEN_SECTIONS]
    return torch.cat([section.contiguous().view(torch.uint8) for section in sections])


def unpack(wire: Tensor, *, num_rows: int, num_tokens: int) -> Experience:
    """The batch that `pack` flattened; `num_rows` and `num_tokens` come from the message's header."""
    assert len(wire) == num_bytes(num_rows, num_tokens), "the message's header and its length disagree"
    flat: dict[str, Tensor] = {}
    start = 0
    for sections, count in ((_ROW_SECTIONS, num_rows), (_TOKEN_SECTIONS, num_tokens)):
        for name, dtype in sections:
            stop = start + count * dtype.itemsize
            flat[name] = wire[start:stop].view(dtype)
            start = stop
    lengths = flat["lengths"]
    longest = max(lengths.tolist(), default=0)
    real = _real_tokens(lengths, longest)

    def padded(name: str, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(num_rows, longest, dtype=dtype)
        out[real] = flat[name].to(dtype)
        return out

    return Experience(
        input_ids=padded("input_ids", torch.int64),
        lengths=lengths.clone(),
        mask=padded("mask", torch.bool),
        log_probs=padded("log_probs", torch.float32),
        versions=padded("versions", torch.int32),
        rewards=flat["rewards"].clone(),
        groups=flat["groups"].clone(),
    )


def _width(sections: tuple[tuple[str, torch.dtype], ...]) -> int:
    return sum(dtype.itemsize for _, dtype in sections)


def _real_tokens(lengths: Tensor, longest: int) -> Tensor:
    return torch.arange(longest)[None] < lengths[:, None]  # [B, T] bool
