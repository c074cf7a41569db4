"""Lay the completions of a batch out in micro-batches of bounded size, each prompt computed once for its group.

B rows of up to T tokens come in; a micro-batch is R lines of N places with M targets. In the layout `shared_prefix` a
line is the prompt of a group, then its completions one after another, blind to each other; in `padded` it is one row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayless.comm.experience import Experience

Layout = Literal["shared_prefix", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward call works on; M = 0 is allowed and gives gradients of zeros."""

    input_ids: Tensor  # [R, N] int64
    position_ids: Tensor  # [R, N] int64
    attention_mask: Tensor  # [R, 1, N, N] bool, True where a token may look; or [R, N] bool, True on real tokens
    predict: Tensor  # [M] int64    place in R*N whose hidden state predicts the target
    targets: Tensor  # [M] int64    the sampled token itself
    rows: Tensor  # [M] int64    the target's row in the Experience
    columns: Tensor  # [M] int64    and its column

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        return MicroBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


class _Line(NamedTuple):
    input_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64
    segments: Tensor  # [N] int64    0 in the prompt, 1, 2, … in the completions
    predict: Tensor  # [M] int64    place in the line
    rows: Tensor  # [M] int64
    columns: Tensor  # [M] int64


def micro_batches(
    experience: Experience, row_groups: list[Tensor], *, layout: Layout, max_tokens: int
) -> list[MicroBatch]:
    """All rows in `row_groups` (one [G] int64 of row indices per group), each in one micro-batch of R*N <= max_tokens.

    A group over the budget is split, and its prompt repeated; a single row over it stands alone. Rows without sampled
    tokens are left out, so the list may be empty. Longest lines come first. Everything is on the CPU.
    """
    prompts = prompt_lengths(experience)
    lines: list[_Line] = []
    for group in row_groups:
        rows = group[experience.mask[group].any(dim=1)].tolist()
        if not rows:
            continue
        prompt = int(prompts[rows].min())
        parts = _parts(experience, rows, prompt, max_tokens) if layout == "shared_prefix" else [[row] for row in rows]
        lines += [_line(experience, part, prompt) for part in parts]
    lines.sort(key=lambda line: -len(line.input_ids))
    batches = []
    while lines:
        count = max(1, max_tokens // len(lines[0].input_ids))
        batches.append(_stack(lines[:count], experience, layout))
        lines = lines[count:]
    return batches


def empty_micro_batch() -> MicroBatch:
    """A line of two tokens without targets, for a rank that has fewer micro-batches than the others.

    Every data-parallel rank must call backward equally often; this call adds zeros to every gradient.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        position_ids=torch.arange(2)[None],
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        predict=nothing,
        targets=nothing,
        rows=nothing,
        columns=nothing,
    )


def prompt_lengths(experience: Experience) -> Tensor:
    """[B] int64: tokens before the first sampled one; T in rows where nothing was sampled."""
    return (experience.mask.cumsum(dim=1) == 0).sum(dim=1)


def deal(costs: list[int], num_ranks: int) -> list[list[int]]:
    """Indices of `costs` for each rank, ascending and equally many, so that the sums of costs come out close.

    Longest first, each to the rank with the least so far that still has room.
    """
    assert len(costs) % num_ranks == 0, f"{len(costs)} groups cannot be dealt evenly to {num_ranks} ranks"
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        open_ranks = [rank for rank in range(num_ranks) if len(dealt[rank]) < len(costs) // num_ranks]
        rank = min(open_ranks, key=loads.__getitem__)
        dealt[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(indices) for indices in dealt]


def _parts(experience: Experience, rows: list[int], prompt: int, max_tokens: int) -> list[list[int]]:
    """Consecutive rows whose completions fit into `max_tokens` together with the prompt."""
    parts: list[list[int]] = []
    used = 0
    for row in rows:
        length = int(experience.lengths[row]) - prompt
        if not parts or used + length > max_tokens:
            parts.append([])
            used = prompt
        parts[-1].append(row)
        used += length
    return parts


def _line(experience: Experience, rows: list[int], prompt: int) -> _Line:
    """The first `prompt` tokens of the rows, which are the same in all, and then what follows them in each."""
    shared = experience.input_ids[rows, :prompt]
    assert prompt > 0, "the first sampled token needs a token before it"
    assert bool((shared == shared[0]).all()), f"rows {rows} are one group, but their prompts differ"
    input_ids, positions, segments = [shared[0]], [torch.arange(prompt)], [torch.zeros(prompt, dtype=torch.int64)]
    predict, row_of, columns = [], [], []
    start = prompt
    for segment, row in enumerate(rows, start=1):
        length = int(experience.lengths[row])
        input_ids.append(experience.input_ids[row, prompt:length])
        positions.append(torch.arange(prompt, length))
        segments.append(torch.full((length - prompt,), segment))
        column = experience.mask[row, :length].nonzero().squeeze(1)
        # The token before the completion's first is the prompt's last, wherever in the line the completion stands.
        predict.append(torch.where(column == prompt, prompt - 1, column - prompt + start - 1))
        row_of.append(torch.full_like(column, row))
        columns.append(column)
        start += length - prompt
    pieces = (input_ids, positions, segments, predict, row_of, columns)
    return _Line(*(torch.cat(piece) for piece in pieces))


def _stack(lines: list[_Line], experience: Experience, layout: Layout) -> MicroBatch:
    segments = pad_sequence([line.segments for line in lines], batch_first=True, padding_value=-1)  # [R, N]
    offsets = [index * segments.shape[1] for index in range(len(lines))]
    rows = torch.cat([line.rows for line in lines])
    columns = torch.cat([line.columns for line in lines])
    return MicroBatch(
        input_ids=pad_sequence([line.input_ids for line in lines], batch_first=True),
        position_ids=pad_sequence([line.position_ids for line in lines], batch_first=True),
        attention_mask=_may_look(segments) if layout == "shared_prefix" else segments >= 0,
        predict=torch.cat([line.predict + offset for line, offset in zip(lines, offsets, strict=True)]),
        targets=experience.input_ids[rows, columns],
        rows=rows,
        columns=columns,
    )


def _may_look(segments: Tensor) -> Tensor:
    """[R, 1, N, N] bool: back at the prompt and the token's own completion; a padded place at itself.

    A place that may look nowhere would make the softmax over its scores NaN, and NaN times 0 is NaN in backward.
    """
    looker, seen = segments[:, :, None], segments[:, None, :]
    allowed = (looker >= 0) & ((seen == 0) | (seen == looker))  # [R, N, N]
    itself = torch.eye(segments.shape[1], dtype=torch.bool)
    return (allowed.tril() | itself)[:, None]
