"""Policy losses as terms per token, and the one average that turns them into a scalar.

M sampled tokens; log-probs, advantages and losses are float32. A loss is a sum of terms: clip, plus a weight times KL.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ClippedLoss(NamedTuple):
    """What `clipped_loss` says about each token."""

    loss: Tensor  # [M]
    ratio: Tensor  # [M]      probability now over probability when sampled
    clipped: Tensor  # [M] bool the clip took this token's gradient away


def clipped_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> ClippedLoss:
    """The clipped surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token; everything is [M].

    PPO (Schulman et al., 2017) with one bound for both sides; GRPO (DeepSeekMath, 2024) takes it token by token; DAPO
    (2025) sets clip_high above clip_low ("clip-higher"). Only `log_probs` is meant to carry a gradient.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.min(ratio * advantages, bounded * advantages)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return ClippedLoss(loss, ratio, too_high | too_low)


def kl_k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """KL(policy || reference) of each token ([M]), estimated as exp(d) - d - 1 with d = reference - policy.

    "k3" of Schulman, "Approximating KL Divergence" (2020): never negative, and unbiased for tokens of the policy.
    """
    difference = reference_log_probs - log_probs
    return torch.expm1(difference) - difference


def token_mean(values: Tensor, denominator: int | float, *, num_ranks: int) -> Tensor:
    """This micro-batch's share of the mean over all tokens of the step: the scalar to call backward on.

    `denominator` counts the sampled tokens of the whole step, over all micro-batches and all ranks. Gradients add up
    over micro-batches, so every token weighs 1/denominator however rows are dealt out. Over the `num_ranks`
    data-parallel ranks they are averaged instead of added, which the factor undoes. A step without tokens gives 0.
    """
    return values.sum() / max(denominator, 1) * num_ranks
