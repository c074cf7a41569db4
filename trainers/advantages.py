"""Turn rewards into advantages: what is left of a reward above a baseline, over a scale; per completion or per token.

B completions, K rewards of each; M sampled tokens, those of a completion together and in order. `groups` ([B] int64,
0 to G - 1) says which prompt a completion answers, `rows` ([M] int64, 0 to B - 1) whose token each is. Standard
deviations are those of n - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rayless.trainers.loss_config import LossConfig
from rayless.trainers.rows import row_counts, row_means, row_sums

WHITEN_EPS = 1e-8
"""Added to the variance under the root when values are whitened."""

Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of rewards, groups and lengths ([B] each), what is taken off each reward ([B])."""
Scale = Callable[[Tensor, Tensor, float], Tensor]
"""Of rewards and groups ([B] each) and an epsilon, what each centred reward is divided by ([B] or a scalar)."""


def advantages(rewards: Tensor, group_size: int, *, lengths: Tensor, config: LossConfig) -> Tensor:
    """One advantage per completion ([B]), as config's `advantage`, `scale_rewards` and `advantage_eps` say.

    `rewards` ([B]) are whole groups of `group_size` neighbours, `lengths` ([B]) their sampled tokens. The batch must be
    the whole step's wherever an estimator or scale looks past its group. See `estimate`.
    """
    assert len(rewards) % group_size == 0, f"{len(rewards)} rewards do not make whole groups of {group_size}"
    assert config.advantage is not None, "LossConfig fills in `advantage`"
    assert config.scale_rewards is not None, "LossConfig fills in `scale_rewards`"
    return estimate(
        rewards,
        torch.arange(len(rewards), device=rewards.device) // group_size,
        lengths=lengths,
        estimator=config.advantage,
        scale=config.scale_rewards,
        eps=config.advantage_eps,
    )


def estimate(
    rewards: Tensor,
    groups: Tensor,
    *,
    lengths: Tensor,
    estimator: str,
    scale: str,
    eps: float,
    keep_single: bool = False,
) -> Tensor:
    """One advantage per completion ([B]) of groups of any sizes and order; see `ESTIMATORS` and `SCALES` for names.

    A group whose rewards are equal in float32 gets exactly 0: the mean and spread of equal values are rounding noise.
    A group of one gets 0, or with `keep_single` its reward (over 1 + eps, where groups have scales). A reward that is
    NaN was not given: it stays out of every mean, spread and count, and its advantage is 0.
    """
    chosen, given, found = ESTIMATORS[estimator], ~rewards.isnan(), torch.zeros_like(rewards)
    rewards, groups, lengths = rewards[given], groups[given], lengths[given]
    within = groups if chosen.by_group else torch.zeros_like(groups)
    low, high = _extremes(rewards, within, _num_ids(within))
    centred = (rewards - chosen.baseline(rewards, within, lengths)).masked_fill((low == high)[within], 0.0)
    if keep_single:
        centred = torch.where(row_counts(within, len(low))[within] == 1, rewards, centred)
    found[given] = chosen.finish(centred, rewards, lengths, SCALES[scale](rewards, groups, eps))
    return found


def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, eps: float = 1e-4) -> Tensor:
    """Reward minus its group's mean ([B] -> [B]), with `scale` over the group's standard deviation plus `eps`.

    Scaled it is the advantage of GRPO (DeepSeekMath, 2024), unscaled that of Dr. GRPO (2025). A group of one, or whose
    rewards are equal in float32, gets exactly 0.
    """
    assert len(rewards) % group_size == 0, f"{len(rewards)} rewards do not make whole groups of {group_size}"
    groups = torch.arange(len(rewards), device=rewards.device) // group_size
    scales = "group" if scale else "none"
    return estimate(rewards, groups, lengths=torch.ones_like(groups), estimator="group", scale=scales, eps=eps)


def has_signal(advantages: Tensor, group_size: int) -> Tensor:
    """[B/G] bool: True for groups in which any advantage ([B]) differs from 0; the others move no weight."""
    return (advantages.view(-1, group_size) != 0).any(dim=1)


class RewardSpread(NamedTuple):
    """What `reward_spread` says about a batch's rewards."""

    mean: Tensor  # scalar
    std: Tensor  # scalar   over the batch
    equal: Tensor  # [G] bool the group's rewards are equal in float32


def reward_spread(rewards: Tensor, groups: Tensor) -> RewardSpread:
    """Mean and spread of the rewards ([B]), and which groups have none; NaN rewards stay out."""
    given = ~rewards.isnan()
    low, high = _extremes(rewards[given], groups[given], _num_ids(groups))
    return RewardSpread(rewards[given].mean(), _std(rewards[given]), low == high)


def weighted_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """[B]: the weighted sum of several rewards ([B, K], weights [K]); NaNs count 0, and only NaNs make a NaN."""
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def normalized_rewards(
    rewards: Tensor, weights: Tensor, groups: Tensor, *, eps: float, keep_single: bool = False
) -> Tensor:
    """[B]: the weighted sum of several rewards ([B, K], weights [K]), each turned into GRPO's advantage before.

    GDPO (Liu et al., 2026): rewards that differ in scale keep their say; those not given (NaN) add 0. GDPO whitens the
    sum by the lengths (`whitened`); `standardized` does so over completions.
    """
    parts = [
        weight
        * estimate(reward, groups, lengths=groups, estimator="group", scale="group", eps=eps, keep_single=keep_single)
        for reward, weight in zip(rewards.unbind(dim=1), weights, strict=True)
    ]
    return torch.stack(parts).sum(dim=0)


def standardized(values: Tensor, *, eps: float) -> Tensor:
    """Values minus their mean, over their standard deviation plus `eps`; exactly 0 where all are equal in float32."""
    if not len(values) or _all_equal(values):
        return torch.zeros_like(values)
    return (values - values.mean()) / (_std(values) + eps)


def whitened(values: Tensor, counts: Tensor) -> Tensor:
    """Values minus their mean, over the root of their variance plus 1e-8, where each stands for `counts` tokens.

    Both are [B], or [M] with ones. Values all equal in float32 give exactly 0, as does a batch without tokens.
    """
    if not (counts > 0).any() or _all_equal(values[counts > 0]):
        return torch.zeros_like(values)
    total = counts.sum()
    centred = values - (values * counts).sum() / total
    variance = (centred.square() * counts).sum() / (total - 1).clamp(min=1)
    return centred / (variance + WHITEN_EPS).sqrt()


def discounted_returns(token_rewards: Tensor, rows: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[M]: each token's reward plus gamma times the return of the next token of its row."""
    returns, step = token_rewards, 1
    # After each round a token holds its next `step` rewards; rows of any length take log2 of it rounds.
    while step < len(rows) and (same := rows[step:] == rows[:-step]).any():
        ahead = torch.where(same, returns[step:], 0.0) * gamma**step
        returns = torch.cat([returns[:-step] + ahead, returns[-step:]])
        step *= 2
    return returns


def reinforce_pp_advantages(token_rewards: Tensor, rows: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[M]: discounted returns, whitened over all tokens of the batch. REINFORCE++ (Hu, 2025).

    With one reward on a row's last token and gamma 1 it is `estimate`'s reinforce_pp, spread over the row.
    """
    returns = discounted_returns(token_rewards, rows, gamma=gamma)
    return whitened(returns, torch.ones_like(returns))


def remax_advantages(token_rewards: Tensor, rows: Tensor, greedy_rewards: Tensor) -> Tensor:
    """[M]: returns minus the reward of the prompt's greedy completion ([B], one per row). ReMax (Li et al., 2023)."""
    return discounted_returns(token_rewards, rows) - greedy_rewards[rows]


def optimal_token_advantages(
    token_rewards: Tensor, log_probs: Tensor, sum_squared_probs: Tensor, rows: Tensor, groups: Tensor
) -> Tensor:
    """[M]: returns minus the baseline of least gradient variance for their place in the completion.

    The baseline of a place is the group's mean return, each weighted by its row's squared score norm up to there:
    the sum of 1 - 2 p + sum_v p_v^2, where p is the token's probability and v goes over the vocabulary ("The Optimal
    Token Baseline", Li et al., 2026). Where a single row of the group is that long, the baseline is 0.
    """
    ones = torch.ones_like(token_rewards)
    energies = 1 - 2 * log_probs.exp() + sum_squared_probs
    backwards = rows.flip(0)
    reached = discounted_returns(energies.flip(0), backwards).flip(0)  # [M] sum up to the token
    places = discounted_returns(ones.flip(0), backwards).flip(0).long() - 1  # [M]
    cells = groups[rows] * (int(places.max()) + 1) + places if len(rows) else rows  # [M] one id per group and place
    num_cells = _num_ids(cells)
    returns = discounted_returns(token_rewards, rows)
    baselines = row_sums(returns * reached, cells, num_cells) / (row_sums(reached, cells, num_cells) + WHITEN_EPS)
    alone = row_counts(cells, num_cells) == 1
    return returns - baselines.masked_fill(alone, 0.0)[cells]


def _group_mean(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    return row_means(rewards, groups, _num_ids(groups))[groups]


def _mean_of_others(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    num_groups = _num_ids(groups)
    others = row_sums(rewards, groups, num_groups)[groups] - rewards
    return others / (row_counts(groups, num_groups)[groups] - 1).clamp(min=1)


def _mean_by_length(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    num_groups = _num_ids(groups)
    tokens = row_sums(lengths, groups, num_groups).clamp(min=1)
    return (row_sums(rewards * lengths, groups, num_groups) / tokens)[groups]


def _second_best(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """The second-best reward of the group for its best completion; for every other its own reward."""
    num_groups = _num_ids(groups)
    _, best = _extremes(rewards, groups, num_groups)
    is_best = rewards.float() == best[groups]
    _, second = _extremes(rewards.masked_fill(is_best, -torch.inf), groups, num_groups)
    tied = row_sums(is_best.float(), groups, num_groups) > 1
    return torch.where(is_best, torch.where(tied, best, second)[groups], rewards)


def _divided(centred: Tensor, rewards: Tensor, lengths: Tensor, divisor: Tensor) -> Tensor:
    return centred / divisor


def _divided_by_share(centred: Tensor, rewards: Tensor, lengths: Tensor, divisor: Tensor) -> Tensor:
    return centred / divisor * (len(rewards) / rewards.count_nonzero().clamp(min=1))


def _whitened(centred: Tensor, rewards: Tensor, lengths: Tensor, divisor: Tensor) -> Tensor:
    return whitened(centred, lengths)


class Estimator(NamedTuple):
    """One row of `ESTIMATORS`."""

    baseline: Baseline
    by_group: bool
    """Whether the baseline is the group's or the batch's."""
    finish: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """Of centred rewards, rewards, lengths and divisor, the advantages."""


ESTIMATORS: dict[str, Estimator] = {
    # GRPO (DeepSeekMath, 2024): the group's mean.
    "group": Estimator(_group_mean, True, _divided),
    # RLOO (Kool et al., 2019; Ahmadian et al., 2024): the mean of the group's others.
    "rloo": Estimator(_mean_of_others, True, _divided),
    # OPO (Hao et al., 2025): the group's mean, weighted by length.
    "opo": Estimator(_mean_by_length, True, _divided),
    # Pass@k (Tang et al., 2025): the best of a group against the second-best, nothing for the others.
    "pass_at_k": Estimator(_second_best, True, _divided),
    # GPG (Chu et al., 2025): the group's mean, and the whole over the batch's share of rewards that are not 0.
    "gpg": Estimator(_group_mean, True, _divided_by_share),
    # REINFORCE++ (Hu, 2025), also with the group's mean as baseline: whitened over the batch's tokens, not scaled.
    "reinforce_pp": Estimator(_mean_by_length, False, _whitened),
    "reinforce_pp_baseline": Estimator(_group_mean, True, _whitened),
}


def _group_scale(rewards: Tensor, groups: Tensor, eps: float) -> Tensor:
    num_groups = _num_ids(groups)
    counts = row_counts(groups, num_groups)
    squares = (rewards - row_means(rewards, groups, num_groups)[groups]).square()
    spread = (row_sums(squares, groups, num_groups) / (counts - 1).clamp(min=1)).sqrt()
    return spread.masked_fill(counts == 1, 1.0)[groups] + eps


def _batch_scale(rewards: Tensor, groups: Tensor, eps: float) -> Tensor:
    return _std(rewards) + eps


def _no_scale(rewards: Tensor, groups: Tensor, eps: float) -> Tensor:
    return torch.ones_like(rewards)


SCALES: dict[str, Scale] = {"group": _group_scale, "batch": _batch_scale, "none": _no_scale}


def _num_ids(ids: Tensor) -> int:
    return int(ids.max()) + 1 if len(ids) else 0


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())


def _all_equal(values: Tensor) -> bool:
    low, high = values.float().aminmax()
    return bool(low == high)


def _extremes(values: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each group ([G] float32 each); 0 of an empty one."""
    empty = torch.zeros(num_groups, device=values.device)
    low = empty.scatter_reduce(0, groups, values.float(), "amin", include_self=False)
    return low, empty.scatter_reduce(0, groups, values.float(), "amax", include_self=False)
