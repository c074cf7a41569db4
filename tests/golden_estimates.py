"""Golden cases of advantages, of the sampler's correction and of log-probs: names are mapped, the product computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from golden_tools import Grid, NotApplicable
from torch import Tensor

from rayless.trainers import advantages, correction
from rayless.trainers.correction import Summary, summary
from rayless.trainers.logprobs import log_probs_and_entropy
from rayless.trainers.loss_config import LossConfig
from rayless.trainers.rows import row_means

Case = dict[str, Any]


def _numbers(values: Any) -> Tensor:
    """float32, with NaN for null."""

    def filled(value: Any) -> Any:
        return [filled(one) for one in value] if isinstance(value, list) else math.nan if value is None else value

    return torch.tensor(filled(values), dtype=torch.float32)


def _per_token(case: Case, by_row: Tensor) -> dict[str, Any]:
    """Advantages, which are the returns as well, of each row's tokens."""
    grid = Grid(case["inputs"]["mask"])
    spread = grid.spread(by_row[grid.rows])
    return {"advantages": spread, "returns": spread}


def _lengths(case: Case) -> Tensor:
    return torch.tensor(case["inputs"]["mask"]).sum(dim=1)


# By the peer's name: the estimator, its scale unless a parameter takes it away, whether a group of one keeps rewards.
VERL_ESTIMATORS = {
    "grpo": ("group", "group", True),
    "grpo_vectorized": ("group", "group", True),
    "grpo_passk": ("pass_at_k", "group", False),
    "rloo": ("rloo", "none", True),
    "rloo_vectorized": ("rloo", "none", False),
    "opo": ("opo", "none", True),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "none", True),
    "gpg": ("gpg", "none", True),
}


def verl_adv(case: Case) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    if params["estimator"] == "optimal_token_baseline":
        return _verl_token_baseline(case)
    estimator, scale, keep_single = VERL_ESTIMATORS[params["estimator"]]
    found = advantages.estimate(
        torch.tensor(inputs["rewards"]) / params.get("f_norm", 1),
        torch.tensor(inputs["group"]),
        lengths=_lengths(case),
        estimator=estimator,
        scale=scale if params.get("norm_adv_by_std_in_grpo", True) else "none",
        eps=params.get("epsilon", 1e-6),
        keep_single=keep_single,
    )
    return _per_token(case, found)


def _verl_token_baseline(case: Case) -> dict[str, Any]:
    inputs = case["inputs"]
    grid = Grid(inputs["mask"])
    rewards = grid.flat(inputs["token_level_rewards"])
    found = advantages.optimal_token_advantages(
        rewards,
        grid.flat(inputs["old_log_probs"]),
        grid.flat(inputs["sum_pi_squared"]),
        grid.rows,
        torch.tensor(inputs["group"]),
    )
    returns = advantages.discounted_returns(rewards, grid.rows)
    return {"advantages": grid.spread(found), "returns": grid.spread(returns)}


def verl_rpp(case: Case) -> dict[str, Any]:
    grid = Grid(case["inputs"]["mask"])
    rewards, gamma = grid.flat(case["inputs"]["token_level_rewards"]), case["params"]["gamma"]
    return {
        "advantages": grid.spread(advantages.reinforce_pp_advantages(rewards, grid.rows, gamma=gamma)),
        "returns": grid.spread(advantages.discounted_returns(rewards, grid.rows, gamma=gamma)),
    }


def verl_remax(case: Case) -> dict[str, Any]:
    """Both hold what follows at the places that the mask leaves out, so these are tokens too, of reward 0."""
    inputs = case["inputs"]
    grid, whole = Grid(inputs["mask"]), Grid(torch.ones_like(torch.tensor(inputs["mask"])).tolist())
    rewards = grid.flat(inputs["token_level_rewards"])
    everywhere = whole.flat(grid.spread(rewards))
    returns = whole.spread(advantages.discounted_returns(everywhere, whole.rows))
    found = torch.tensor(returns)
    found[grid.mask] = advantages.remax_advantages(rewards, grid.rows, torch.tensor(inputs["reward_baselines"]))
    return {"advantages": found.tolist(), "returns": returns}


def verl_gdpo(case: Case) -> dict[str, Any]:
    combined = advantages.normalized_rewards(
        torch.tensor(case["inputs"]["component_rewards"]).T,
        torch.tensor(case["params"]["weights"]),
        torch.tensor(case["inputs"]["group"]),
        eps=case["params"]["epsilon"],
        keep_single=True,
    )
    return _per_token(case, advantages.whitened(combined, _lengths(case)))


def trl_adv(case: Case) -> dict[str, Any]:
    params, groups = case["params"], torch.tensor(case["inputs"]["group"])
    rewards, weights = _numbers(case["inputs"]["rewards"]), torch.tensor(params["reward_weights"])
    summed = advantages.weighted_rewards(rewards, weights)
    if params["aggregation"] == "normalize_then_sum":
        combined = advantages.normalized_rewards(rewards, weights, groups, eps=params["epsilon"])
        found = advantages.standardized(combined, eps=params["epsilon"])
        spread = advantages.reward_spread(combined, torch.zeros_like(groups))
    else:
        config = LossConfig(advantage="group", scale_rewards=params["scale_rewards"], advantage_eps=params["epsilon"])
        found = _by_config(summed, params["num_generations"], config)
        within = torch.zeros_like(groups) if params["scale_rewards"] == "batch" else groups
        spread = advantages.reward_spread(summed, within)
    over_all = advantages.reward_spread(summed, groups)
    metrics = {
        "reward": over_all.mean.item(),
        "reward_std": over_all.std.item(),
        "frac_reward_zero_std": spread.equal.float().mean().item(),
    }
    return {"advantages": found.tolist(), "metrics": metrics}


def trl_rloo_adv(case: Case) -> dict[str, Any]:
    params = case["params"]
    rewards = advantages.weighted_rewards(_numbers(case["inputs"]["rewards"]), torch.ones(1))
    config = LossConfig(advantage="rloo", scale_rewards="none")
    found = _by_config(rewards, params["num_generations"], config)
    if params["normalize_advantages"]:
        found = advantages.standardized(found, eps=params["epsilon"])
    return {"advantages": found.tolist()}


def _by_config(rewards: Tensor, group_size: int, config: LossConfig) -> Tensor:
    return advantages.advantages(rewards, group_size, lengths=torch.ones_like(rewards), config=config)


def slime_returns(case: Case) -> dict[str, Any]:
    rewards = case["inputs"]["token_level_rewards"]
    grid = Grid(torch.ones_like(torch.tensor(rewards)).tolist())
    returns = advantages.discounted_returns(grid.flat(rewards), grid.rows, gamma=case["params"]["gamma"])
    return {"returns": grid.spread(returns)}


def belongs_to_ppo(case: Case) -> dict[str, Any]:
    raise NotApplicable("belongs to PPO")


def _bounds(threshold: float | str) -> tuple[float | None, float]:
    """`u` bounds from above, `l_u` from both sides."""
    if isinstance(threshold, str) and "_" in threshold:
        low, high = threshold.split("_")
        return float(low), float(high)
    return None, float(threshold)


def verl_is(case: Case) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    grid = Grid(inputs["mask"])
    log_probs, sampled = grid.flat(inputs["old_logp"]), grid.flat(inputs["rollout_logp"])
    log_ratio = correction.log_ratios(log_probs, sampled)
    metrics = _gap_metrics(correction.gap_summaries(log_probs, sampled, grid.rows, grid.num_rows))
    found: dict[str, Any] = {"metrics": metrics}
    if params["rollout_is"]:
        found["weights"] = grid.spread(_verl_weights(params, grid, log_ratio, metrics))
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    if params.get("rollout_rs"):
        thresholds = str(params["rollout_rs_threshold"]).split(",")
        for statistic, threshold in zip(params["rollout_rs"].split(","), thresholds, strict=True):
            kept &= ~_rejected(statistic, threshold, grid, log_ratio, metrics)
        metrics |= _masked("rollout_rs", kept, grid, num_rows=grid.num_rows)
    found["mask"] = grid.spread(kept.float())
    return found


def _gap_metrics(gaps: dict[str, Summary]) -> dict[str, float]:
    log_gap = gaps["log_perplexity_gap"]
    return {
        "training_ppl": gaps["perplexity"].mean(),
        "training_log_ppl": gaps["log_perplexity"].mean(),
        "rollout_ppl": gaps["sampled_perplexity"].mean(),
        "rollout_log_ppl": gaps["sampled_log_perplexity"].mean(),
        "kl": gaps["k1"].mean(),
        "k3_kl": gaps["k3"].mean(),
        "log_ppl_diff": log_gap.mean(),
        "log_ppl_abs_diff": gaps["log_perplexity_gap_abs"].mean(),
        "log_ppl_diff_max": log_gap.high.item(),
        "log_ppl_diff_min": log_gap.low.item(),
        "ppl_ratio": gaps["perplexity_ratio"].mean(),
        "chi2_token": gaps["chi2_token"].mean(),
        "chi2_seq": gaps["chi2_sequence"].mean(),
    }


def _verl_weights(params: Case, grid: Grid, log_ratio: Tensor, metrics: dict[str, float]) -> Tensor:
    level, (low, high) = params["rollout_is"], _bounds(params["rollout_is_threshold"])
    ratios = correction.importance_ratios(log_ratio, grid.rows, grid.num_rows, level=level)
    mode = "truncate" if low is None else "mask"
    weights = correction.importance_weights(ratios, mode=mode, low=low, high=high)
    outside = low or 1 / high, high
    by_token, by_row = summary(weights), row_means(weights, grid.rows, grid.num_rows)
    ratio_by_row = row_means(ratios, grid.rows, grid.num_rows)
    # Where a row has one ratio, rows are counted (all, but an empty one is within), and the extremes are the ratios'.
    units, count, extremes = ratios, len(ratios), by_token
    if level == "sequence":
        units, count = ratio_by_row[_filled(grid)], grid.num_rows
        extremes = summary(units)
    metrics |= _spreads("rollout_is", by_token, extremes, summary(by_row), centre=1.0)
    metrics |= _outside("rollout_is_ratio_fraction", units, *outside, count=count)
    metrics |= _outside("rollout_is_seq_fraction", ratio_by_row, *outside, count=grid.num_rows)
    metrics["rollout_is_std"] = by_token.std()
    metrics["rollout_is_eff_sample_size"] = by_token.effective_share()
    metrics["rollout_is_oob_ratio"] = summary(weights == 0).mean()
    if params.get("rollout_is_batch_normalize"):
        total, count_averaged = correction.weight_mass(weights, grid.rows, grid.num_rows, level=level)
        metrics["rollout_is_batch_norm_factor"] = (total / count_averaged).item()
        weights = correction.normalized_weights(weights, total, count_averaged)
    return weights


def _rejected(statistic: str, threshold: str, grid: Grid, log_ratio: Tensor, metrics: dict[str, float]) -> Tensor:
    low, high = _bounds(threshold)
    if statistic.endswith("k1") and low is None:
        low = 1 / high
    values = correction.rejection_values(log_ratio, grid.rows, grid.num_rows, statistic=statistic)
    kept = correction.kept_tokens(values, statistic=statistic, low=low, high=high)
    lower, upper = correction.rejection_bounds(statistic=statistic, low=low, high=high)
    by_token, by_row = summary(values), row_means(values, grid.rows, grid.num_rows)[_filled(grid)]
    units = values if statistic.startswith("token") else by_row
    name = f"rollout_rs_{statistic}"
    metrics |= _spreads(name, by_token, by_token, summary(by_row), centre=0.0)
    metrics |= _outside(f"{name}_fraction", units, lower, upper, count=len(units))
    metrics |= _outside(f"{name}_seq_fraction", by_row, lower, upper, count=len(by_row))
    metrics[f"{name}_std"] = summary(values.clamp(lower, upper)).std()
    metrics |= _masked(name, kept, grid, num_rows=len(by_row))
    return ~kept


def _spreads(name: str, by_token: Summary, extremes: Summary, by_row: Summary, *, centre: float) -> dict[str, float]:
    return {
        f"{name}_mean": by_token.mean(),
        f"{name}_max": extremes.high.item(),
        f"{name}_min": extremes.low.item(),
        f"{name}_seq_mean": by_row.mean(),
        f"{name}_seq_std": by_row.std(less=1),
        f"{name}_seq_max": by_row.high.item(),
        f"{name}_seq_min": by_row.low.item(),
        f"{name}_seq_max_deviation": by_row.max_deviation(centre),
    }


def _outside(name: str, values: Tensor, low: float, high: float, *, count: int) -> dict[str, float]:
    return {
        f"{name}_low": summary(values < low).total.item() / count,
        f"{name}_high": summary(values > high).total.item() / count,
    }


def _masked(name: str, kept: Tensor, grid: Grid, *, num_rows: int) -> dict[str, float]:
    """Shares of the tokens and of the rows, which count from their first token on."""
    rows_hit = row_means((~kept).float(), grid.rows, grid.num_rows) > 0
    return {
        f"{name}_masked_fraction": summary(~kept).mean(),
        f"{name}_seq_masked_fraction": summary(rows_hit).total.item() / num_rows,
    }


def _filled(grid: Grid) -> Tensor:
    return grid.mask.any(dim=1)


def trl_is(case: Case) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    grid = Grid(inputs["mask"])
    level, mode = params["is_mode"].split("_")
    log_probs, sampled = grid.flat(inputs["old_logp"]), _numbers(inputs["rollout_logp"])[grid.mask]
    log_ratio = correction.log_ratios(log_probs, sampled)
    ratios = correction.importance_ratios(log_ratio, grid.rows, grid.num_rows, level=level)
    weights = correction.importance_weights(ratios, mode=mode, low=params["is_clip_min"], high=params["is_clip_max"])
    by_row = row_means(weights, grid.rows, grid.num_rows)
    gap = correction.gap_summaries(log_probs, sampled, grid.rows, grid.num_rows)["abs"]
    weight = summary(weights if level == "token" else by_row)
    metrics = {
        "sampling_logp_difference/mean": gap.mean(),
        "sampling_logp_difference/max": gap.high.item(),
        "importance_sampling_ratio/min": weight.low.item(),
        "importance_sampling_ratio/mean": weight.mean(),
        "importance_sampling_ratio/max": weight.high.item(),
    }
    spread = grid.spread(weights, fill=1.0) if level == "token" else by_row[:, None].tolist()
    return {"weights": spread, "metrics": metrics}


def logp_entropy(case: Case) -> dict[str, Any]:
    inputs, temperature = case["inputs"], case["params"]["temperature"]
    logits = torch.tensor(inputs["logits"], requires_grad=True)
    targets, flat = torch.tensor(inputs["ids"]).flatten(), logits.flatten(0, 1)
    log_probs, entropy = log_probs_and_entropy(flat, targets, temperature, entropy_gradient=True)
    if "keep" in inputs:  # the log-probs alone are those among the kept tokens and the target
        kept = (torch.tensor(inputs["keep"]) != 0).flatten(0, 1).scatter(1, targets[:, None], True)
        log_probs, _ = log_probs_and_entropy(flat.masked_fill(~kept, -torch.inf), targets, temperature)
    weighted = (torch.tensor(inputs["weight"]).flatten() * log_probs).sum()
    weighted_entropy = (torch.tensor(inputs["entropy_weight"]).flatten() * entropy).sum()
    (gradient,) = torch.autograd.grad(weighted, logits, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(weighted_entropy, logits)
    shape = logits.shape[:2]
    return {
        "logp": log_probs.view(shape).tolist(),
        "entropy": entropy.view(shape).tolist(),
        "grad_logp": gradient.tolist(),
        "grad_entropy": entropy_gradient.tolist(),
    }


OPS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "verl_adv": verl_adv,
    "verl_gae": belongs_to_ppo,
    "verl_rpp": verl_rpp,
    "verl_remax": verl_remax,
    "verl_gdpo": verl_gdpo,
    "trl_adv": trl_adv,
    "trl_rloo_adv": trl_rloo_adv,
    "slime_gae": belongs_to_ppo,
    "slime_returns": slime_returns,
    "verl_is": verl_is,
    "trl_is": trl_is,
    "logp_entropy": logp_entropy,
}
