"""One micro-batch's share of the step's loss, composed as LossConfig says, and what it adds to the step's metrics.

M sampled tokens of the B rows of a whole optimizer step, flat; a row's tokens are all here or none is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rayless.comm.collectives import role_max, role_sum
from rayless.trainers.aggregation import Totals, token_weights, total_loss
from rayless.trainers.correction import gap_summaries
from rayless.trainers.kl import configured_kl
from rayless.trainers.loss_config import LossConfig
from rayless.trainers.losses import Terms, Tokens, off_policy_mask, policy_terms
from rayless.trainers.step_scores import KnownTokens


class StepLoss(NamedTuple):
    """What `step_loss` gives."""

    loss: Tensor  # scalar to call backward on
    terms: Terms
    kl: Tensor | None  # [M], or None without a reference


def step_loss(
    log_probs: Tensor,
    entropy: Tensor,
    *,
    known: KnownTokens,
    reference: Tensor | None,
    advantages: Tensor,
    rows: Tensor,
    config: LossConfig,
    beta: float,
    totals: Totals,
) -> StepLoss:
    """Everything is [M]; `log_probs`, and `entropy` where it has a weight, carry the gradient.

    `rows` are places among the step's `totals.num_rows`; `beta` is the KL's weight now.
    """
    assert config.aggregation, "a LossConfig fills it in"
    tokens = Tokens(
        log_probs=log_probs,
        old_log_probs=known.old_log_probs,
        advantages=advantages,
        rows=rows,
        num_rows=totals.num_rows,
        weights=known.weights,
        chosen=known.chosen,
    )
    terms = policy_terms(tokens, config)
    policy = terms.loss
    if known.kept is not None:
        policy = policy.masked_fill(~known.kept, 0.0)
    if config.off_policy_threshold is not None:
        since = replace(tokens, old_log_probs=known.sampled_log_probs)
        policy = policy.masked_fill(~off_policy_mask(since, config.off_policy_threshold), 0.0)
    kl = None if reference is None else configured_kl(log_probs, reference, config, ratio=terms.ratio)
    loss = total_loss(
        policy,
        token_weights(rows, totals.num_rows, config.aggregation, totals),
        kl=kl,
        beta=beta if config.kl_in == "loss" else 0.0,
        entropy=entropy,
        entropy_weights=token_weights(rows, totals.num_rows, "token_mean", totals),
        entropy_coef=config.entropy_coef,
    )
    return StepLoss(loss, terms, kl)


class UpdateCounts:
    """Sums and maxima over a step's micro-batches, and over the training ranks in the end; float64."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.zero = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, result: StepLoss, log_probs: Tensor, entropy: Tensor, known: KnownTokens, rows: Tensor) -> None:
        """Count one micro-batch; everything as in `step_loss`. Every rank counts the same names, at least once."""
        gap = gap_summaries(log_probs, known.sampled_log_probs, rows, int(rows.max()) + 1 if len(rows) else 0)
        terms, kl = result.terms, result.kl
        sums = {
            "loss": result.loss,
            "policy/kl": torch.zeros_like(log_probs).sum() if kl is None else kl.double().sum(),
            "policy/entropy": entropy.double().sum(),
            "policy/clip_fraction": (terms.clipped_low | terms.clipped_high).sum(),
            "policy/ratio_mean": terms.ratio.double().sum(),
            "policy/logprob_diff_mean": gap["abs"].total,
            "correction/k1": gap["k1"].total,
            "correction/k3": gap["k3"].total,
            "correction/chi2": gap["chi2_token"].total,
            "ratios": gap["ratio"].total,
            "squared_ratios": gap["ratio"].squares,
            "tokens": gap["abs"].count,
        }
        peaks = {
            "policy/ratio_max": terms.ratio.max() if len(rows) else self.zero,
            "policy/logprob_diff_max": gap["abs"].high.clamp(min=0),
            "correction/ratio_max": gap["ratio"].high.clamp(min=0),
        }
        self.sums = {name: self.sums.get(name, self.zero) + value.double() for name, value in sums.items()}
        self.maxima = {
            name: torch.maximum(self.maxima.get(name, self.zero), value.double()) for name, value in peaks.items()
        }

    def over_ranks(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all training ranks, called by each of them."""
        sums = role_sum(torch.stack(list(self.sums.values()))).tolist()
        maxima = role_max(torch.stack(list(self.maxima.values()))).tolist()
        return dict(zip(self.sums, sums, strict=True)), dict(zip(self.maxima, maxima, strict=True))
