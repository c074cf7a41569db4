"""One optimizer step's experience, dealt to the training ranks and cut into micro-batches.

B rows in groups of G. Every rank holds all rows; ranks agree on how many backward calls each call of `step` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rayless.comm.collectives import role_max
from rayless.comm.experience import Experience
from rayless.trainers.advantages import has_signal
from rayless.trainers.packing import Layout, MicroBatch, cheapest_layout, deal, empty_micro_batch, micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What a training rank works on between two optimizer steps."""

    experience: Experience
    """All rows of the step, over all ranks."""
    advantages: Tensor  # [B] float32
    num_tokens: int
    """Sampled tokens of the whole step: the loss denominator."""
    calls: list[list[MicroBatch]]
    """This rank's micro-batches for each call of `step`; their number is the same on every rank."""

    @property
    def num_passes(self) -> int:
        """Backward calls of the whole step."""
        return sum(len(call) for call in self.calls)


def make_step_batch(
    experience: Experience,
    advantages: Tensor,
    *,
    group_size: int,
    groups_per_call: int,
    rank: int,
    num_ranks: int,
    skip_without_signal: bool,
    layout: Layout | Literal["auto"],
    hidden_size: int,
    max_tokens: int,
    device: torch.device,
) -> StepBatch:
    """Called by every training rank with the same experience and advantages.

    Groups whose advantages are all 0 may be skipped when nothing but the policy loss pulls on them: their gradient is
    0. They stay in `num_tokens`, so skipping changes no gradient.
    """
    assert len(experience) % group_size == 0, f"{len(experience)} rows are no whole groups of {group_size}"
    groups = torch.arange(len(experience)).view(-1, group_size)  # [B/G, G]
    active = has_signal(advantages, group_size) | (not skip_without_signal)
    costs = (experience.lengths.view(-1, group_size).sum(dim=1) * active).tolist()
    mine = deal(costs, num_ranks)[rank]
    # Groups with work come first, so that the ranks' calls with work coincide.
    mine.sort(key=lambda group: costs[group] == 0)
    if layout == "auto":
        layout = cheapest_layout(experience, list(groups[active]), max_tokens=max_tokens, hidden_size=hidden_size)
    calls = []
    for start in range(0, len(mine), groups_per_call):
        chosen = [groups[group] for group in mine[start : start + groups_per_call] if active[group]]
        calls.append(micro_batches(experience, chosen, layout=layout, max_tokens=max_tokens))
    _make_equally_long(calls, device)
    return StepBatch(experience=experience, advantages=advantages, num_tokens=int(experience.mask.sum()), calls=calls)


def _make_equally_long(calls: list[list[MicroBatch]], device: torch.device) -> None:
    """Pad each call to the longest of all ranks; the first makes at least one pass, so that every gradient exists."""
    passes = role_max(torch.tensor([len(call) for call in calls], device=device))
    passes[0] = max(1, int(passes[0]))
    for call, wanted in zip(calls, passes.tolist(), strict=True):
        call += [empty_micro_batch()] * (wanted - len(call))
