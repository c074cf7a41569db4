"""Policy losses as terms per token, the masks that leave tokens out, and the weights that sum terms to a scalar.

M sampled tokens of R rows (sequences), flat, all tokens of a row in the same call; float32. A term is a clip rule of
RULES over log-ratios of one of LEVELS. A weight never depends on how a step's rows are dealt out to calls: counts are
those of the whole step. N tokens and B rows make a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rayless.trainers.loss_config import LossConfig, RatioLevel
from rayless.trainers.rows import row_means, row_sums

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a policy loss is computed from."""

    log_probs: Tensor  # [M]      of the policy now; alone to carry a gradient
    old_log_probs: Tensor  # [M]  what ratios are taken against
    advantages: Tensor  # [M]
    rows: Tensor  # [M] int64     0 to num_rows - 1: the sequence of each token
    num_rows: int
    weights: Tensor | None = None  # [M]     of the gap between sampler and trainer
    chosen: Tensor | None = None  # [M] bool by `covariance_choice`, for clip_cov and kl_cov


class Terms(NamedTuple):
    """What a policy loss says about each token."""

    loss: Tensor  # [M]
    ratio: Tensor  # [M]             probability now over probability when sampled; carries gradient
    clipped_low: Tensor  # [M] bool  `clip_low` took effect
    clipped_high: Tensor  # [M] bool `clip_high` took effect
    bounded: Tensor  # [M] bool      `delta`, `dual_clip` or the choice by covariance took effect where no clip did


class Ratios(NamedTuple):
    """Log-ratios of the chosen level, cut to `log_ratio_clamp`, and their exponentials; [M]."""

    log: Tensor
    ratio: Tensor


def off_policy_mask(tokens: Tokens, threshold: float) -> Tensor:
    """[M] bool, True to keep: off-policy sequence masking of DeepSeek-V3.2 (2025).

    Drops tokens of negative advantage in rows whose mean of old minus present log-prob exceeds `threshold` (nats).
    """
    drift = -log_ratios(tokens, "sequence").detach()
    return ~((tokens.advantages < 0) & (drift > threshold))


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """The 1 - `share` quantile, linearly interpolated ([]), of a step's entropies ([N], N > 0).

    Tokens of at least this entropy are the ones to train on in Wang et al., "Beyond the 80/20 rule" (2025).
    """
    ordered = entropy.detach().sort().values
    place = (1 - share) * (len(ordered) - 1)
    below = math.floor(place)
    return torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], place - below)


def covariance_choice(
    log_probs: Tensor, advantages: Tensor, config: LossConfig, *, generator: torch.Generator | None = None
) -> Tensor:
    """[N] bool: the tokens of a step that clip_cov drops or kl_cov holds, by the covariance of log-prob and advantage.

    max(1, floor(cov_fraction N)) tokens: for kl_cov those of largest covariance, for clip_cov drawn at random among
    those strictly between clip_cov_low and clip_cov_high, or all of these where they are fewer (Cui et al., 2025).
    """
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean()).detach()
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    count = min(max(1, math.floor(config.cov_fraction * len(chosen))), len(chosen))
    if config.loss == "kl_cov":
        chosen[covariance.topk(count).indices] = True
        return chosen
    candidates = ((covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)).nonzero()[:, 0]
    drawn = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
    chosen[candidates[drawn]] = True
    return chosen


def policy_terms(tokens: Tokens, config: LossConfig) -> Terms:
    """The policy loss of each token, to be summed with `token_weights`.

    `weights` multiply the terms, but for vespo, where they join the sequence's ratio, and geo_mean, where their
    geometric mean over the sequence multiplies.
    """
    log_ratio = log_ratios(tokens, _filled(config.ratio_level), clamp=config.log_ratio_clamp)
    terms = RULES[_filled(config.loss)](tokens, Ratios(log_ratio, log_ratio.exp()), config)
    if tokens.weights is not None and config.loss not in ("vespo", "geo_mean"):
        terms = terms._replace(loss=terms.loss * tokens.weights)
    return terms


def log_ratios(tokens: Tokens, level: RatioLevel, *, clamp: float | None = None) -> Tensor:
    """[M]: log of the probability now over that when sampled, of each token or its sequence; beyond +-clamp it is cut.

    `sequence` and `sequence_token` are GSPO and GSPO-token (Zheng et al., 2025).
    """
    log_ratio = LEVELS[level](tokens)
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)


def _of_token(tokens: Tokens) -> Tensor:
    return tokens.log_probs - tokens.old_log_probs


def _of_sequence(tokens: Tokens) -> Tensor:
    return row_means(_of_token(tokens), tokens.rows, tokens.num_rows)[tokens.rows]


def _of_sequence_sum(tokens: Tokens) -> Tensor:
    return row_sums(_of_token(tokens), tokens.rows, tokens.num_rows)[tokens.rows]


def _of_sequence_token(tokens: Tokens) -> Tensor:
    return _of_sequence(tokens).detach() + (tokens.log_probs - tokens.log_probs.detach())


LEVELS: dict[RatioLevel, Callable[[Tokens], Tensor]] = {
    "token": _of_token,
    "sequence": _of_sequence,
    "sequence_sum": _of_sequence_sum,
    "sequence_token": _of_sequence_token,
}


def _ppo(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, Schulman et al., 2017; clip-higher, DAPO, 2025).

    `delta` bounds the first r (two-sided clip, INTELLECT-2, 2025); `dual_clip` bounds the term (Ye et al., 2020).
    """
    advantages = tokens.advantages
    low, high = _clip(config)
    ratio, beyond = _at_most_delta(ratios.ratio, config)
    loss = -torch.min(ratio * advantages, ratios.ratio.clamp(1 - low, 1 + high) * advantages)
    if config.dual_clip is not None:
        beyond = beyond | ((ratios.ratio > config.dual_clip) & (advantages < 0))
        loss = torch.where(advantages < 0, torch.min(loss, -config.dual_clip * advantages), loss)
    too_low = (ratio < 1 - low) & (advantages < 0)
    too_high = (ratio > 1 + high) & (advantages > 0)
    return _terms(loss, ratios, low=too_low, high=too_high, bounded=beyond)


def _cispo(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-clip(r) A log p, without gradient through r (CISPO, MiniMax-M1, 2025). clip_low of 1 bounds from above alone."""
    low, high = _clip(config)
    ratio = ratios.ratio.detach()
    loss = -ratio.clamp(1 - low, 1 + high) * tokens.advantages * tokens.log_probs
    return _terms(loss, ratios, low=ratio < 1 - low, high=ratio > 1 + high)


def _sapo(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate for the clip, tau by the sign of A (SAPO, Gao et al., 2025)."""
    positive = tokens.advantages > 0
    tau = torch.where(positive, config.sapo_tau_pos, config.sapo_tau_neg)
    return _terms(-tokens.advantages * (4 / tau) * torch.sigmoid(tau * (ratios.ratio - 1)), ratios)


def _geo_mean(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-mean(A) exp(mean(clipped log r)) of the row, at each of its tokens (GMPO, Zhao et al., 2025).

    Log-ratios are clipped to clip_high where A is positive, to -clip_low where it is negative.
    """
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    low, high = _clip(config)
    log_ratio = ratios.log.clamp(torch.where(negative, -low, -math.inf), torch.where(positive, high, math.inf))
    if tokens.weights is not None:
        log_ratio = log_ratio + tokens.weights.log()
    advantages = row_means(tokens.advantages, tokens.rows, tokens.num_rows)  # [R]
    loss = -advantages * row_means(log_ratio, tokens.rows, tokens.num_rows).exp()
    too_low, too_high = (ratios.log < -low) & negative, (ratios.log > high) & positive
    return _terms(loss[tokens.rows], ratios, low=too_low, high=too_high)


def _vespo(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-phi A log p, without gradient through phi (VESPO, 2026); see `vespo_weights`."""
    return _terms(-vespo_weights(tokens, config) * tokens.advantages * tokens.log_probs, ratios)


def vespo_weights(tokens: Tokens, config: LossConfig) -> Tensor:
    """[M], no gradient: e^lambda w^k e^(-lambda w), k and lambda by the sign of A, w the product of the row's ratios.

    VESPO (2026). The row's sampler weights are factors of w; log w is cut to [log 1e-8, 20].
    """
    log_ratio = log_ratios(tokens, "token", clamp=config.log_ratio_clamp).detach()
    if tokens.weights is not None:
        log_ratio = log_ratio + tokens.weights.log()
    log_weight = row_sums(log_ratio, tokens.rows, tokens.num_rows)[tokens.rows].clamp(math.log(1e-8), 20.0)
    good = tokens.advantages >= 0
    power = torch.where(good, config.vespo_k_pos, config.vespo_k_neg)
    decay = torch.where(good, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return torch.exp(decay + power * log_weight - decay * log_weight.exp())


def _clip_cov(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """The PPO clip; chosen tokens that it leaves alone drop out (Clip-Cov, Cui et al., 2025)."""
    assert tokens.chosen is not None, "clip_cov needs the step's choice of tokens"
    terms = _ppo(tokens, ratios, config)
    dropped = tokens.chosen & ~(terms.clipped_low | terms.clipped_high)
    return terms._replace(loss=terms.loss.masked_fill(dropped, 0.0), bounded=terms.bounded | dropped)


def _kl_cov(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-r A, and kl_cov_coef |log r| more at the chosen tokens (KL-Cov, Cui et al., 2025)."""
    assert tokens.chosen is not None, "kl_cov needs the step's choice of tokens"
    penalty = config.kl_cov_coef * ratios.log.abs()
    return _terms(torch.where(tokens.chosen, penalty, 0.0) - ratios.ratio * tokens.advantages, ratios)


def _reinforce(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-A log p (REINFORCE, Williams, 1992; with group advantages GPG, Chu et al., 2025)."""
    return _terms(-tokens.advantages * tokens.log_probs, ratios)


def _dro(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
    """-A log p + dro_beta / 2 (log r)^2 (DRO, Richemond et al., 2024)."""
    return _terms(config.dro_beta / 2 * ratios.log.square() - tokens.advantages * tokens.log_probs, ratios)


def _dppo(divergence: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """-r A log p, no gradient through r, where p is near old p or moves back to it (DPPO, 2026); r is cut to delta.

    Near is a divergence of at most clip_high for tokens that A pushes up, of at most clip_low for those pushed down.
    """

    def rule(tokens: Tokens, ratios: Ratios, config: LossConfig) -> Terms:
        low, high = _clip(config)
        now, advantages = tokens.log_probs.detach(), tokens.advantages
        distance = divergence(now, tokens.old_log_probs)
        too_low = (now < tokens.old_log_probs) & (distance > low) & (advantages < 0)
        too_high = (now > tokens.old_log_probs) & (distance > high) & (advantages > 0)
        ratio, beyond = _at_most_delta(ratios.ratio.detach(), config)
        loss = (-ratio * advantages * tokens.log_probs).masked_fill(too_low | too_high, 0.0)
        return _terms(loss, ratios, low=too_low, high=too_high, bounded=beyond)

    return rule


def _total_variation(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs.exp() - old_log_probs.exp()).abs()


def _binary_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(old || now) of "this token or another"; infinite where others were possible and are no more."""
    others, old_others = -torch.expm1(log_probs), -torch.expm1(old_log_probs)
    own = old_log_probs.exp() * (old_log_probs - log_probs)
    return own + torch.xlogy(old_others, old_others) - torch.xlogy(old_others, others)


def _filled(choice: Choice | None) -> Choice:
    assert choice is not None, "a LossConfig fills its choices in"
    return choice


def _clip(config: LossConfig) -> tuple[float, float]:
    return _filled(config.clip_low), _filled(config.clip_high)


def _at_most_delta(ratio: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The ratio, bounded by `delta` where that is set, and where it was beyond ([M] bool)."""
    if config.delta is None:
        return ratio, torch.zeros_like(ratio, dtype=torch.bool)
    return ratio.clamp(max=config.delta), ratio > config.delta


def _terms(
    loss: Tensor,
    ratios: Ratios,
    *,
    low: Tensor | None = None,
    high: Tensor | None = None,
    bounded: Tensor | None = None,
) -> Terms:
    none = torch.zeros_like(loss, dtype=torch.bool)
    low, high = none if low is None else low, none if high is None else high
    return Terms(loss, ratios.ratio, low, high, none if bounded is None else bounded & ~(low | high))


Rule = Callable[[Tokens, Ratios, LossConfig], Terms]
RULES: dict[str, Rule] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "geo_mean": _geo_mean,
    "vespo": _vespo,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "reinforce": _reinforce,
    "dro": _dro,
    "dppo_tv": _dppo(_total_variation),
    "dppo_kl": _dppo(_binary_kl),
}
