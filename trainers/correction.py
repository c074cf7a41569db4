"""Correct for the gap between sampler and trainer, and measure it: weights, rejections and sums to report.

M tokens of R rows; `rows` ([M] int64) says whose token each is. The log-ratio of a token is the trainer's log-prob
minus the sampler's, both of the weights that sampled. Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayless.trainers.rows import row_counts, row_means, row_sums

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before they become ratios: e^20 is past any bound, and its square is still a float32."""


def log_ratios(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """[M]: trainer minus sampler; 0 where the sampler gave no log-prob (NaN)."""
    return torch.where(sampled_log_probs.isnan(), 0.0, log_probs - sampled_log_probs)


def importance_ratios(log_ratio: Tensor, rows: Tensor, num_rows: int, *, level: str) -> Tensor:
    """[M]: probability under the trainer over that under the sampler, of what `level` says.

    `token`: each token's; `sequence`: the product over its row; `geometric`: the geometric mean over its row.
    """
    return LEVELS[level](log_ratio, rows, num_rows).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_weights(ratios: Tensor, *, mode: str, low: float | None, high: float | None) -> Tensor:
    """[M]: the ratios inside [low, high]; those outside become the bound (`truncate`) or 0 (`mask`). None is no bound.

    Truncated importance sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
    training") and IcePop (Ring-1T, 2025), which masks.
    """
    return MODES[mode](ratios, -math.inf if low is None else low, math.inf if high is None else high)


def weight_mass(weights: Tensor, rows: Tensor, num_rows: int, *, level: str) -> tuple[Tensor, Tensor]:
    """Sum and count (scalars) of what the weights are averaged over: tokens, or rows where a row shares one weight.

    Rows without tokens don't count. Over micro-batches and ranks both add up; dividing weights by sum over count
    ("self-normalized" importance sampling) brings their mean to 1.
    """
    averaged = weights if level == "token" else row_means(weights, rows, num_rows)[row_counts(rows, num_rows) > 0]
    return averaged.sum(), torch.tensor(len(averaged), device=weights.device)


def normalized_weights(weights: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """[M]: weights over their mean, given the whole step's `weight_mass`; as they are when all are 0."""
    return weights if total == 0 else weights * (count / total)


def rejection_values(log_ratio: Tensor, rows: Tensor, num_rows: int, *, statistic: str) -> Tensor:
    """[M]: the statistic that `kept_tokens` bounds, by name: a scope and an estimator of the KL, as in `seq_mean_k1`.

    The scope is `token`, or the sum, mean or maximum over the token's row (`seq_sum`, `seq_mean`, `seq_max`). The
    estimators are those of Schulman, "Approximating KL Divergence" (2020), in KL(sampler || trainer).
    """
    scope, _, estimator = statistic.rpartition("_")
    return SCOPES[scope](ESTIMATORS[estimator](log_ratio), rows, num_rows)


def kept_tokens(values: Tensor, *, statistic: str, low: float | None, high: float | None) -> Tensor:
    """[M] bool: whose value lies within the bounds; None is no bound.

    Bounds of k1, the one that has a sign, are those of its exponential (sampler over trainer), as ratios are given.
    Over `seq_mean_k1` this is the geometric sequence mask (Liu et al., 2025, "When speed kills stability").
    """
    lower, upper = rejection_bounds(statistic=statistic, low=low, high=high)
    return (values >= lower) & (values <= upper)


def rejection_bounds(*, statistic: str, low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds on the statistic itself, infinite where None was given."""
    if statistic.endswith("k1"):
        return -math.inf if low is None else math.log(low), math.inf if high is None else math.log(high)
    return -math.inf if low is None else low, math.inf if high is None else high


@dataclass(frozen=True, slots=True)
class Summary:
    """What adds up about some values (float64 scalars): over parts, the first three by sum, then minimum, maximum."""

    count: Tensor
    total: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor

    def mean(self) -> float:
        """Mean of the values; NaN of none."""
        return float(self.total / self.count)

    def std(self, *, less: int = 0) -> float:
        """Standard deviation over n - `less`; of fewer values 0."""
        if self.count <= less:
            return 0.0
        variance = (self.squares - self.total.square() / self.count) / (self.count - less)
        return math.sqrt(max(float(variance), 0.0))

    def max_deviation(self, centre: float) -> float:
        """How far the farthest value is from `centre`."""
        return max(float(self.high) - centre, centre - float(self.low))

    def effective_share(self) -> float:
        """Effective sample size of weights (Kish, 1965) over their number: mean(w)^2 / mean(w^2); 0 if all are 0."""
        return float(self.total.square() / (self.squares * self.count)) if self.squares > 0 else 0.0


def summary(values: Tensor) -> Summary:
    """Of any number of values ([K], of any type); of none, the extremes are infinite."""
    values = values.double()
    low, high = values.new_tensor(math.inf), values.new_tensor(-math.inf)
    if len(values):
        low, high = values.aminmax()
    return Summary(values.new_tensor(len(values)), values.sum(), values.square().sum(), low, high)


def merged(first: Summary, second: Summary) -> Summary:
    """The summary of both parts' values together."""
    return Summary(
        first.count + second.count,
        first.total + second.total,
        first.squares + second.squares,
        torch.minimum(first.low, second.low),
        torch.maximum(first.high, second.high),
    )


def gap_summaries(log_probs: Tensor, sampled_log_probs: Tensor, rows: Tensor, num_rows: int) -> dict[str, Summary]:
    """How far the sampler is from the trainer, each as what adds up: a figure is the mean or an extreme of its values.

    Over tokens: `k1` and `k3` (KL), `abs` (absolute log-ratio), `ratio`, and `chi2_token` (squared ratio minus 1). Over
    all rows, where one without tokens counts as no gap: `log_perplexity` and `perplexity` of trainer and (`sampled_`)
    sampler, `log_perplexity_gap` (trainer minus sampler; also its absolute value), `perplexity_ratio`, and
    `chi2_sequence` (squared product minus 1). Tokens whose sampled log-prob is NaN stay out.
    """
    given = ~sampled_log_probs.isnan()
    log_probs, rows = log_probs[given], rows[given]
    log_ratio = log_probs - sampled_log_probs[given]
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    own = -row_means(log_probs, rows, num_rows)  # [R]
    gap = -row_means(log_ratio, rows, num_rows)  # [R]
    product = row_sums(log_ratio, rows, num_rows).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # [R]
    values = {
        "k1": ESTIMATORS["k1"](log_ratio),
        "k3": ESTIMATORS["k3"](log_ratio),
        "abs": log_ratio.abs(),
        "ratio": bounded.exp(),
        "chi2_token": torch.expm1(2 * bounded),
        "log_perplexity": own,
        "perplexity": own.exp(),
        "sampled_log_perplexity": own - gap,
        "sampled_perplexity": (own - gap).exp(),
        "log_perplexity_gap": gap,
        "log_perplexity_gap_abs": gap.abs(),
        "perplexity_ratio": gap.exp(),
        "chi2_sequence": torch.expm1(2 * product),
    }
    return {name: summary(value) for name, value in values.items()}


def _token(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values


def _row_sum(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return row_sums(values, rows, num_rows)[rows]


def _row_mean(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return row_means(values, rows, num_rows)[rows]


def _row_max(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values.new_zeros(num_rows).scatter_reduce(0, rows, values, "amax", include_self=False)[rows]


def _truncated(ratios: Tensor, low: float, high: float) -> Tensor:
    return ratios.clamp(low, high)


def _masked(ratios: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def _k3(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


Spread = Callable[[Tensor, Tensor, int], Tensor]
"""Of values and rows ([M] each) and the number of rows, a value for each token ([M])."""

LEVELS: dict[str, Spread] = {"token": _token, "sequence": _row_sum, "geometric": _row_mean}
MODES: dict[str, Callable[[Tensor, float, float], Tensor]] = {"truncate": _truncated, "mask": _masked}
SCOPES: dict[str, Spread] = {"token": _token, "seq_sum": _row_sum, "seq_mean": _row_mean, "seq_max": _row_max}
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": _k3,
}
