"""What the trainers know about a step's tokens before they train on them: their own log-probs, entropies and the KL.

B rows of up to T tokens; every rank scores its own micro-batches, and all ranks end up with all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rayless.comm.collectives import role_sum
from rayless.comm.experience import Experience
from rayless.trainers.correction import (
    importance_ratios,
    importance_weights,
    kept_tokens,
    log_ratios,
    normalized_weights,
    rejection_values,
    weight_mass,
)
from rayless.trainers.kl import configured_kl
from rayless.trainers.loss_config import LossConfig
from rayless.trainers.losses import covariance_choice, entropy_threshold
from rayless.trainers.packing import MicroBatch
from rayless.trainers.rows import row_sums
from rayless.trainers.step_batch import StepBatch

if TYPE_CHECKING:
    from rayless.trainers.policy import Policy, ReferencePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """Of every sampled token of the step; 0 elsewhere."""

    log_probs: Tensor  # [B, T] float32
    entropy: Tensor  # [B, T] float32
    reference: Tensor | None  # [B, T] float32     None without a reference model


def needs_scores(config: LossConfig) -> bool:
    """Whether this choice takes a pass over the whole step before its first gradient."""
    return (
        config.old_logprobs == "recompute"
        or config.correction != "none"
        or config.rejection is not None
        or config.top_entropy < 1
        or config.loss in ("clip_cov", "kl_cov")
        or (config.kl_in == "reward" and bool(config.beta))
    )


@torch.no_grad()
def score_step(
    policy: Policy,
    reference: ReferencePolicy | None,
    batches: list[MicroBatch],
    experience: Experience,
    *,
    temperature: float,
    device: torch.device,
) -> StepScores:
    """Called by every rank with equally many `batches`."""
    scores = torch.zeros(3, *experience.mask.shape, device=device)
    for batch in batches:
        moved = batch.to(device)
        place = (batch.rows.to(device), batch.columns.to(device))
        log_probs, entropy = policy.log_probs(moved, temperature)
        scores[0].index_put_(place, log_probs)
        scores[1].index_put_(place, entropy)
        if reference:
            scores[2].index_put_(place, reference.log_probs(moved, temperature))
    own_log_probs, entropy, reference_log_probs = role_sum(scores).cpu()
    return StepScores(log_probs=own_log_probs, entropy=entropy, reference=reference_log_probs if reference else None)


def kl_of_rows(scores: StepScores, experience: Experience, config: LossConfig) -> Tensor:
    """[B] float32: each row's KL to the reference, summed over its tokens."""
    assert scores.reference is not None, "a KL needs a reference model"
    kl = configured_kl(scores.log_probs[experience.mask], scores.reference[experience.mask], config)
    return row_sums(kl, experience.mask.nonzero()[:, 0], len(experience))


class KnownTokens(NamedTuple):
    """What is fixed about tokens before the first gradient; of a whole step [B, T] each, of a micro-batch [M]."""

    sampled_log_probs: Tensor
    old_log_probs: Tensor
    """What ratios are taken against."""
    weights: Tensor | None = None
    """Importance weights for the gap between sampler and trainer."""
    chosen: Tensor | None = None
    """bool: what clip_cov or kl_cov picked."""
    kept: Tensor | None = None
    """bool: False where a token gets no policy loss."""
    reference: Tensor | None = None
    """Log-probs of the reference model, where they are known already."""

    def of(self, batch: MicroBatch, device: torch.device) -> KnownTokens:
        """The micro-batch's targets."""

        def at(whole: Tensor) -> Tensor:
            return whole[batch.rows, batch.columns].to(device)

        more = (None if one is None else at(one) for one in (self.weights, self.chosen, self.kept, self.reference))
        return KnownTokens(at(self.sampled_log_probs), at(self.old_log_probs), *more)


def prepare_tokens(batch: StepBatch, scores: StepScores | None, config: LossConfig, *, seed: int) -> KnownTokens:
    """All that one token's loss takes from the rest of the step; `seed` is that of clip_cov's draw."""
    sampled, mask = batch.experience.log_probs, batch.experience.mask
    if scores is None:
        return KnownTokens(sampled, sampled)
    rows, own, entropy = mask.nonzero()[:, 0], scores.log_probs[mask], scores.entropy[mask]
    weights = chosen = kept = None
    if config.correction != "none":
        weights = _spread(_sampler_weights(own, sampled[mask], rows, len(mask), config), mask)
    if config.loss in ("clip_cov", "kl_cov"):
        generator = torch.Generator().manual_seed(seed)
        chosen = _spread(covariance_choice(own, batch.advantages[rows], config, generator=generator), mask)
    if config.top_entropy < 1 and len(rows):
        kept = _spread(entropy >= entropy_threshold(entropy, config.top_entropy), mask)
    if config.rejection is not None:
        near = _spread(_is_near(own, sampled[mask], rows, len(mask), config), mask)
        kept = near if kept is None else kept & near
    old = scores.log_probs if config.old_logprobs == "recompute" else sampled
    return KnownTokens(sampled, old, weights, chosen, kept, scores.reference)


def _sampler_weights(
    log_probs: Tensor, sampled_log_probs: Tensor, rows: Tensor, num_rows: int, config: LossConfig
) -> Tensor:
    level, (low, high) = config.correction_level, (config.correction_low, config.correction_high)
    ratios = importance_ratios(log_ratios(log_probs, sampled_log_probs), rows, num_rows, level=level)
    weights = importance_weights(ratios, mode=config.correction, low=low, high=high)
    if not config.correction_normalize:
        return weights
    return normalized_weights(weights, *weight_mass(weights, rows, num_rows, level=level))


def _is_near(log_probs: Tensor, sampled_log_probs: Tensor, rows: Tensor, num_rows: int, config: LossConfig) -> Tensor:
    statistic, (low, high) = str(config.rejection), (config.rejection_low, config.rejection_high)
    values = rejection_values(log_ratios(log_probs, sampled_log_probs), rows, num_rows, statistic=statistic)
    return kept_tokens(values, statistic=statistic, low=low, high=high)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    whole = torch.zeros(mask.shape, dtype=values.dtype)
    whole[mask] = values
    return whole
