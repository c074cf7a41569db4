"""Settings of losses, advantages and corrections: each key is one choice of one of the functions that are composed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rayless.trainers.presets import DEFAULTS, PRESETS

Preset = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo"]
Loss = Literal[
    "ppo",
    "cispo",
    "sapo",
    "geo_mean",
    "vespo",
    "clip_cov",
    "kl_cov",
    "reinforce",
    "dro",
    "dppo_tv",
    "dppo_kl",
]
RatioLevel = Literal["token", "sequence", "sequence_sum", "sequence_token"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "token_sum"]
Advantage = Literal[
    "group",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "pass_at_k",
    "gpg",
]
Scale = Literal["group", "batch", "none"]
KL = Literal["k1", "k2", "k3", "abs"]
KLIn = Literal["loss", "reward"]
Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Losses, advantages and corrections."""

    preset: Preset | None = None
    """A published algorithm: its choice for every key below whose own value is null; see presets.py."""
    loss: Loss | None = None
    """Term per token; null takes the preset's, or else ppo."""
    ratio_level: RatioLevel | None = None
    """Probability ratio of each token; of its sequence as a geometric mean (`sequence`, GSPO) or product
    (`sequence_sum`); or the geometric mean whose gradient goes to the own token alone (`sequence_token`)."""
    aggregation: Aggregation | None = None
    """Of the step's tokens to one loss: one mean over all; mean over sequences of their means or sums, or of their sums
    over `loss_length`; or the sum. null takes the preset's, or else token_mean."""
    loss_length: int | None = None
    """Length that `fixed_length` divides by; null takes rollout.max_new_tokens."""
    clip_low: float | None = None
    """Ratios below 1 - clip_low get no gradient where the advantage is negative (cispo: weigh 1 - clip_low; geo_mean:
    bound of the log-ratio; dppo_tv, dppo_kl: bound of the divergence). null takes the preset's, or 0.2."""
    clip_high: float | None = None
    """Ratios above 1 + clip_high get no gradient where the advantage is positive (and alike); .inf stops none."""
    delta: float | None = None
    """ppo, clip_cov: bound of the ratio outside the clip, whatever the advantage's sign; dppo_tv, dppo_kl: bound of the
    ratio that weights a token; null for none."""
    dual_clip: float | None = None
    """ppo, clip_cov: where the advantage A is negative, the term is at most dual_clip * |A| (dual-clip PPO); null for
    none."""
    log_ratio_clamp: float | None = 20.0
    """Log-ratios beyond plus or minus this are cut, and get no gradient, those of policy to reference too; null for
    none."""
    sapo_tau_pos: float = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_tau_neg: float = 1.05
    """sapo: temperature of the gate elsewhere."""
    vespo_k_pos: float = 2.0
    """vespo: power of the sequence's ratio where the advantage is at least 0."""
    vespo_k_neg: float = 3.0
    """vespo: power elsewhere."""
    vespo_lambda_pos: float = 3.0
    """vespo: decay where the advantage is at least 0."""
    vespo_lambda_neg: float = 2.0
    """vespo: decay elsewhere."""
    cov_fraction: float = 0.0002
    """clip_cov, kl_cov: share of the tokens that are clipped or held by a penalty."""
    clip_cov_low: float = 1.0
    """clip_cov: covariances between this and clip_cov_high are candidates."""
    clip_cov_high: float = 5.0
    """clip_cov: see clip_cov_low."""
    kl_cov_coef: float = 1.0
    """kl_cov: weight of the penalty on the tokens of largest covariance."""
    dro_beta: float = 1.0
    """dro: weight of the squared log-ratio."""
    off_policy_threshold: float | None = None
    """Sequences of negative advantage whose mean of sampled minus present log-prob exceeds this get no policy loss."""
    top_entropy: float = 1.0
    """Share of the step's tokens, those of highest entropy, that get a policy loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    beta: float | None = None
    """Weight of the KL term that holds the policy to the model it started from; 0 loads no second model."""
    kl_estimator: KL = "k3"
    """Estimator of the KL per token."""
    kl_in: KLIn = "loss"
    """Whether the KL is a term of the loss or taken off the rewards."""
    kl_k2_gradient: bool = False
    """Give the KL term the gradient of k2, unbounded, whatever the estimator of its value."""
    kl_importance_weight: bool = False
    """Weight the KL term by the ratio, which carries gradient."""
    kl_clamp: float | None = None
    """Bound of the KL per token from both sides; null for none."""
    kl_target: float | None = None
    """KL per token that `beta` is steered to; null leaves it fixed."""
    kl_horizon: int = 10_000
    """Sequences over which `beta` is steered."""
    advantage: Advantage | None = None
    """Baseline: the group's mean, the mean of the others (rloo), the batch's mean with whitening (reinforce_pp, after
    the group's mean: reinforce_pp_baseline), the length-weighted mean (opo), best against second (pass_at_k), or the
    group's mean over the share of rewards that are not 0 (gpg). null takes the preset's, or group."""
    scale_rewards: Scale | None = None
    """What centred rewards are divided by: their group's standard deviation, the batch's, or nothing. Whitening
    (reinforce_pp and its baseline form) does without. null takes the preset's, or group, whatever `advantage` is."""
    advantage_eps: float = 1e-4
    """Added to that standard deviation."""
    correction: Correction = "none"
    """Importance weights for the gap between sampler and trainer: cut to the bounds, or 0 outside of them."""
    correction_level: CorrectionLevel = "token"
    """Of each token's gap, of the sum over its sequence, or of the sequence's mean."""
    correction_low: float | None = None
    """Lower bound of the weights; null for none."""
    correction_high: float = 2.0
    """Upper bound of the weights."""
    correction_normalize: bool = False
    """Divide the weights by their mean."""
    rejection: Rejection | None = None
    """Leave out tokens, or whole sequences, by how far sampler and trainer are apart: the token's KL by an estimator,
    or the sum, mean or maximum over its sequence. null leaves out none. See correction.py."""
    rejection_low: float | None = None
    """What lies below is left out; null for none. Bounds of k1 are those of its exponential, sampler over trainer."""
    rejection_high: float | None = None
    """What lies above is left out; null for none."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """What ratios are taken against: the sampler's log-probs, or the trainer's own from before the update."""

    def __post_init__(self) -> None:
        chosen = {**DEFAULTS, **PRESETS.get(self.preset or "", {})}
        for name, value in chosen.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_losses(self)

    @property
    def follows_advantages(self) -> bool:
        """Whether a group whose advantages are all 0 adds nothing to the gradient, nor to a choice among tokens."""
        looks_around = self.top_entropy < 1 or self.correction_normalize or self.loss in ("clip_cov", "kl_cov", "dro")
        return not (self.beta or self.entropy_coef or looks_around)


def _check_losses(config: LossConfig) -> None:
    for names, must, holds in RANGES:
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise ValueError(f"grpo_config.{name} must {must}, got {value}")
    if not config.clip_cov_high > config.clip_cov_low:
        raise ValueError(
            f"grpo_config.clip_cov_high must be above clip_cov_low = {config.clip_cov_low}, got {config.clip_cov_high}"
        )
    if config.correction_low is not None and not config.correction_low <= config.correction_high:
        raise ValueError(
            f"grpo_config.correction_low must be at most correction_high = {config.correction_high}, "
            f"got {config.correction_low}"
        )
    bounds = (config.rejection_low, config.rejection_high)
    if (config.rejection is None) != (bounds == (None, None)):
        raise ValueError("grpo_config.rejection needs rejection_low or rejection_high, and these need a rejection")
    if None not in bounds and not bounds[0] < bounds[1]:  # type: ignore[operator]
        raise ValueError(f"grpo_config.rejection_low must be below rejection_high = {bounds[1]}, got {bounds[0]}")
    if config.correction != "none" and config.old_logprobs != "recompute":
        raise ValueError(
            "grpo_config.correction needs old_logprobs=recompute: ratios against the sampler hold the gap already"
        )
    if config.kl_target is not None and not config.beta:
        raise ValueError(f"grpo_config.kl_target must be null where beta is 0, got {config.kl_target}")


# Names of keys, what their values must do, and whether one does; null is always allowed.
RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("clip_low", "lie between 0 and 1", lambda value: 0 <= value <= 1),
    ("clip_high", "be at least 0 (.inf for no bound)", lambda value: value >= 0),
    ("delta dual_clip", "be finite and above 1 (null for none)", lambda value: 1 < value < math.inf),
    (
        "log_ratio_clamp kl_clamp kl_target",
        "be finite and above 0 (null for none)",
        lambda value: 0 < value < math.inf,
    ),
    ("sapo_tau_pos sapo_tau_neg", "be finite and above 0", lambda value: 0 < value < math.inf),
    (
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg kl_cov_coef dro_beta entropy_coef beta",
        "be finite and at least 0",
        lambda value: 0 <= value < math.inf,
    ),
    ("clip_cov_low clip_cov_high off_policy_threshold", "be finite", math.isfinite),
    ("correction_low", "be finite and at least 0", lambda value: 0 <= value < math.inf),
    ("advantage_eps", "be finite and above 0", lambda value: 0 < value < math.inf),
    ("rejection_low rejection_high", "be finite and above 0 (null for none)", lambda value: 0 < value < math.inf),
    ("correction_high", "be above 0 (.inf for no bound)", lambda value: value > 0),
    ("cov_fraction top_entropy", "be above 0 and at most 1", lambda value: 0 < value <= 1),
    ("loss_length kl_horizon", "be at least 1", lambda value: value >= 1),
)
