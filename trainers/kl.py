"""KL between policy and reference, estimated per token: as a term of the loss, in the reward, and its coefficient.

M sampled tokens of R rows (sequences), flat; float32, in nats. Only `log_probs` is meant to carry a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rayless.trainers.loss_config import KL, LossConfig

# From policy minus reference ([M]) to the estimate ([M]); k1, k2 and k3 as named by Schulman (2020).
ESTIMATORS: dict[KL, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
    "abs": torch.abs,
}


def kl_per_token(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    *,
    estimator: KL = "k3",
    log_ratio_clamp: float | None = None,
    clamp: float | None = None,
    k2_gradient: bool = False,
    ratio: Tensor | None = None,
) -> Tensor:
    """KL(policy || reference) of each token; everything is [M].

    Estimators of Schulman, "Approximating KL Divergence" (2020), for tokens drawn from the policy: k1, the log-ratio
    itself, is unbiased; k2, half its square, is never negative; k3 is both. `log_ratio_clamp` bounds the log-ratio
    that enters, `clamp` the result, from both sides; what is cut has no gradient. `k2_gradient` keeps the value and
    takes the gradient of k2 without bounds, whose mean is the KL's own gradient (Tang and Munos, 2025). `ratio`, the
    policy's probability over the sampler's, makes up for tokens drawn from the sampler; its gradient counts.
    """
    log_ratio = log_probs - reference_log_probs
    bounded = log_ratio if log_ratio_clamp is None else log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    kl = ESTIMATORS[estimator](bounded)
    if ratio is not None:
        kl = ratio * kl
    if clamp is not None:
        kl = kl.clamp(-clamp, clamp)
    if k2_gradient:
        square = ESTIMATORS["k2"](log_ratio)
        kl = kl.detach() + (square - square.detach())
    return kl


def configured_kl(
    log_probs: Tensor, reference_log_probs: Tensor, config: LossConfig, *, ratio: Tensor | None = None
) -> Tensor:
    """`kl_per_token` with what the configuration says; `ratio` counts only where it asks for a weight."""
    return kl_per_token(
        log_probs,
        reference_log_probs,
        estimator=config.kl_estimator,
        log_ratio_clamp=config.log_ratio_clamp,
        clamp=config.kl_clamp,
        k2_gradient=config.kl_k2_gradient,
        ratio=ratio if config.kl_importance_weight else None,
    )


def last_token_scores(rewards: Tensor, rows: Tensor) -> Tensor:
    """[M]: each row's reward ([R]) at its last token, 0 elsewhere; a row's tokens stand in order in `rows` ([M])."""
    place = torch.arange(len(rows), device=rows.device)
    last = torch.full_like(rewards, -1, dtype=torch.int64).scatter_reduce(0, rows, place, "amax")  # [R]
    return torch.where(last[rows] == place, rewards[rows], 0.0)


def kl_in_reward(scores: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """Reward less KL, of `scores` and `kl` per token ([M]), or of both summed over each row ([R]).

    InstructGPT (Ouyang et al., 2022), token by token as in Ziegler et al. (2019).
    """
    return scores - coefficient * kl.detach()


def adapted_coefficient(coefficient: float, kl: float, num_rows: int, *, target: float | None, horizon: int) -> float:
    """The KL coefficient after `num_rows` sequences of mean KL `kl`, steered to `target`; fixed where that is None.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019): proportional control of the relative
    error, bounded to +-0.2, over `horizon` sequences; one call at most halves it.
    """
    if target is None:
        return coefficient
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * max(1 + error * num_rows / horizon, 0.5)
