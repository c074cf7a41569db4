"""Lay the completions of a batch out in micro-batches of bounded size, so that little is computed twice or for nothing.

B rows of up to T tokens come in; a micro-batch is R lines of N places with M targets. A line holds documents, blind to
each other. In the layout `shared_prefix` a document is the prompt of a group, then its completions one after another,
blind to each other; in `packed` it is one row; in both, lines are filled. In `padded` each line is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayless.comm.experience import Experience

Layout = Literal["shared_prefix", "packed", "padded"]

# Places of a line that further documents may fill: attention costs as many scores per place.
LINE_PLACES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward call works on; M = 0 is allowed and gives gradients of zeros."""

    input_ids: Tensor  # [R, N] int64
    position_ids: Tensor  # [R, N] int64
    documents: Tensor  # [R, N] int64    which document of its line; -1 on padding
    segments: Tensor | None  # [R, N] int64    0 in the prompt, 1, 2, … in completions; None: each line is one row
    predict: Tensor  # [M] int64    place in R*N whose hidden state predicts the target
    targets: Tensor  # [M] int64    the sampled token itself
    rows: Tensor  # [M] int64    the target's row in the Experience
    columns: Tensor  # [M] int64    and its column

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            moved[field.name] = None if tensor is None else tensor.to(device)
        return MicroBatch(**moved)

    @property
    def attention_mask(self) -> Tensor:
        """[R, 1, N, N] bool, True where a token may look; [R, N] bool, True on real tokens, where each line is one row.

        Made anew at each call: of a whole step's micro-batches only one at a time needs R*N*N bytes.
        """
        if self.segments is None:
            return self.documents >= 0
        return _may_look(self.documents, self.segments)


class _Document(NamedTuple):
    input_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64
    segments: Tensor  # [N] int64    0 in the prompt, 1, 2, … in the completions
    predict: Tensor  # [M] int64    place in the document
    rows: Tensor  # [M] int64
    columns: Tensor  # [M] int64


_Line = list[_Document]


def micro_batches(
    experience: Experience, row_groups: list[Tensor], *, layout: Layout, max_tokens: int
) -> list[MicroBatch]:
    """All rows in `row_groups` (one [G] int64 of row indices per group), each in one micro-batch of R*N <= max_tokens.

    A group over the budget is split, and its prompt repeated; a single row over it stands alone. Rows without sampled
    tokens are left out, so the list may be empty. Longest lines come first. Everything is on the CPU.
    """
    return [_stack(lines, experience, layout) for lines in _cut(experience, row_groups, layout, max_tokens)]


def cheapest_layout(experience: Experience, row_groups: list[Tensor], *, max_tokens: int, hidden_size: int) -> Layout:
    """The layout whose micro-batches cost least: places, each with its share of scores in the attention.

    A place costs 12 H^2 multiplications per layer and one score 2 H, forward (Kaplan et al., 2020, counts the same);
    scores under an explicit mask are written out and read several times, which makes them about four times as dear.
    """
    costs: dict[Layout, float] = {}
    dearness: dict[Layout, float] = {"padded": 1.0, "packed": 4.0, "shared_prefix": 4.0}
    for layout, dear in dearness.items():
        cuts = _cut(experience, row_groups, layout, max_tokens)
        sizes = [(len(lines), _length(lines[0])) for lines in cuts]
        costs[layout] = sum(count * places * (1 + dear * places / (6 * hidden_size)) for count, places in sizes)
    return min(costs, key=costs.__getitem__)


def empty_micro_batch() -> MicroBatch:
    """A line of two tokens without targets, for a rank that has fewer micro-batches than the others.

    Every data-parallel rank must call backward equally often; this call adds zeros to every gradient.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        position_ids=torch.arange(2)[None],
        documents=torch.zeros(1, 2, dtype=torch.int64),
        segments=None,
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


def _cut(experience: Experience, row_groups: list[Tensor], layout: Layout, max_tokens: int) -> list[list[_Line]]:
    """The lines of each micro-batch, the longest first."""
    documents = _documents(experience, row_groups, shares=layout == "shared_prefix", max_tokens=max_tokens)
    lines = _lines(documents, 0 if layout == "padded" else min(LINE_PLACES, max_tokens))
    cuts = []
    while lines:
        count = max(1, max_tokens // _length(lines[0]))
        cuts.append(lines[:count])
        lines = lines[count:]
    return cuts


def _documents(experience: Experience, row_groups: list[Tensor], *, shares: bool, max_tokens: int) -> list[_Document]:
    """The documents of all groups, longest first."""
    prompts = prompt_lengths(experience)
    documents: list[_Document] = []
    for group in row_groups:
        rows = group[experience.mask[group].any(dim=1)].tolist()
        if not rows:
            continue
        prompt = int(prompts[rows].min())
        parts = _parts(experience, rows, prompt, max_tokens) if shares else [[row] for row in rows]
        documents += [_document(experience, part, prompt) for part in parts]
    return sorted(documents, key=lambda document: -len(document.input_ids))


def _lines(documents: list[_Document], places: int) -> list[_Line]:
    """Each document in the first line that has room for it among `places`, or in a line of its own; longest first."""
    lines: list[_Line] = []
    room: list[int] = []
    for document in documents:
        length = len(document.input_ids)
        place = next((place for place, left in enumerate(room) if left >= length), len(lines))
        if place == len(lines):
            lines.append([])
            room.append(max(places, length))
        lines[place].append(document)
        room[place] -= length
    return sorted(lines, key=lambda line: -_length(line))


def _length(line: _Line) -> int:
    return sum(len(document.input_ids) for document in line)


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


def _document(experience: Experience, rows: list[int], prompt: int) -> _Document:
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
    return _Document(*(torch.cat(piece) for piece in pieces))


def _stack(lines: Sequence[_Line], experience: Experience, layout: Layout) -> MicroBatch:
    width = max(_length(line) for line in lines)
    predict = []
    for index, line in enumerate(lines):
        start = index * width
        for document in line:
            predict.append(document.predict + start)
            start += len(document.input_ids)
    documents = [document for line in lines for document in line]
    rows, columns = torch.cat([one.rows for one in documents]), torch.cat([one.columns for one in documents])
    return MicroBatch(
        input_ids=_padded([torch.cat([one.input_ids for one in line]) for line in lines], 0),
        position_ids=_padded([torch.cat([one.position_ids for one in line]) for line in lines], 0),
        documents=_padded(
            [torch.cat([torch.full_like(one.segments, place) for place, one in enumerate(line)]) for line in lines], -1
        ),
        segments=None
        if layout == "padded"
        else _padded([torch.cat([one.segments for one in line]) for line in lines], 0),
        predict=torch.cat(predict),
        targets=experience.input_ids[rows, columns],
        rows=rows,
        columns=columns,
    )


def _padded(lines: list[Tensor], fill: int) -> Tensor:
    return pad_sequence(lines, batch_first=True, padding_value=fill)


def _may_look(documents: Tensor, segments: Tensor) -> Tensor:
    """[R, 1, N, N] bool: back within the document, at its prompt and the own completion; a padded place at itself.

    A place that may look nowhere would make the softmax over its scores NaN, and NaN times 0 is NaN in backward.
    """
    own = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]  # [R, N, N]
    seen = segments[:, None, :]
    allowed = own & ((seen == 0) | (seen == segments[:, :, None]))
    itself = torch.eye(segments.shape[1], dtype=torch.bool, device=segments.device)
    return (allowed.tril() | itself)[:, None]
