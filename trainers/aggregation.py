"""From a loss per token to the scalar to call backward on: the weight of each token, and their sum.

M sampled tokens of R rows (sequences), flat, all tokens of a row in the same call. A weight never depends on how a
step's rows are dealt out to calls and ranks: counts are those of the whole step, of N tokens and B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rayless.trainers.loss_config import Aggregation
from rayless.trainers.rows import row_counts


class Totals(NamedTuple):
    """What a whole optimizer step counts, over all its calls and ranks."""

    num_tokens: int  # N
    num_rows: int  # B      with or without rows that have no tokens: the sequence means follow
    length: float = 1.0  # L for fixed_length
    num_ranks: int = 1  # data-parallel ranks, whose gradients are averaged instead of added


def token_weights(rows: Tensor, num_rows: int, aggregation: Aggregation, totals: Totals) -> Tensor:
    """[M]: what each token's term weighs in the step's loss; `rows` [M] holds every token of its `num_rows` rows.

    token_mean is DAPO's 1/N (2025), sequence_mean GRPO's 1/(B n) for a row of n (DeepSeekMath, 2024), sequence_sum 1/B,
    fixed_length Dr. GRPO's 1/(B L) (Liu et al., 2025), token_sum 1. All times `num_ranks`, which undoes the average of
    gradients over ranks.
    """
    return totals.num_ranks / AGGREGATIONS[aggregation](row_counts(rows, num_rows)[rows].float(), totals)


AGGREGATIONS: dict[Aggregation, Callable[[Tensor, Totals], Tensor]] = {
    # One over the weight, from the length of each token's row ([M]). A step may be empty, a row with a token is not.
    "token_mean": lambda lengths, totals: torch.full_like(lengths, max(totals.num_tokens, 1)),
    "sequence_mean": lambda lengths, totals: lengths * max(totals.num_rows, 1),
    "sequence_sum": lambda lengths, totals: torch.full_like(lengths, max(totals.num_rows, 1)),
    "fixed_length": lambda lengths, totals: torch.full_like(lengths, max(totals.num_rows, 1) * totals.length),
    "token_sum": lambda lengths, totals: torch.ones_like(lengths),
}


def total_loss(
    policy: Tensor,
    weights: Tensor,
    *,
    kl: Tensor | None = None,
    beta: float = 0.0,
    entropy: Tensor | None = None,
    entropy_weights: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Tensor:
    """The scalar to call backward on: sum of weights (policy + beta kl) less entropy_coef times the mean entropy.

    All tensors are [M]. `entropy_weights` are the bonus's own: token_mean's over the tokens whose entropy is to rise.
    """
    terms = policy if kl is None else policy + beta * kl
    loss = (weights * terms).sum()
    if entropy is None or entropy_weights is None:
        return loss
    return loss - entropy_coef * (entropy_weights * entropy).sum()
