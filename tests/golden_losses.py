"""Golden cases of policy losses: the peers' names, mapped to the product's functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import golden_kl
import torch
from golden_tools import Grid
from torch import Tensor

from rayless.trainers import correction
from rayless.trainers.aggregation import Totals, token_weights, total_loss
from rayless.trainers.kl import kl_per_token
from rayless.trainers.loss_config import Aggregation, LossConfig
from rayless.trainers.losses import (
    Terms,
    Tokens,
    covariance_choice,
    entropy_threshold,
    off_policy_mask,
    policy_terms,
    vespo_weights,
)
from rayless.trainers.rows import row_counts, row_means

Case = dict[str, Any]

# The peer's name for a whole loss: our term and our aggregation.
TRL_LOSSES: dict[str, tuple[str, Aggregation]] = {
    "grpo": ("ppo", "sequence_mean"),
    "bnpo": ("ppo", "token_mean"),
    "dr_grpo": ("ppo", "fixed_length"),
    "dapo": ("ppo", "token_mean"),
    "luspo": ("ppo", "sequence_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "token_mean"),
    "gmpo": ("geo_mean", "sequence_mean"),
}
VERL_TERMS = {"vanilla": "ppo", "gspo": "ppo", "gpg": "reinforce"}
VERL_CLAMPS = {"vanilla": 20.0, "cispo": 20.0, "sapo": 20.0, "dppo_tv": 20.0, "dppo_kl": 20.0, "gspo": 10.0}
VERL_AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "fixed_length",
    "token-sum": "token_sum",
}
# The peer's parameter: our key.
KEYS = {
    "level": "ratio_level",
    "eps_low": "clip_low",
    "eps_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_eps_low": "clip_low",
    "clip_eps_high": "clip_high",
    "eps_clip": "clip_low",
    "eps_clip_high": "clip_high",
    "eps_clip_c": "dual_clip",
    "tau_pos": "sapo_tau_pos",
    "tau_neg": "sapo_tau_neg",
    "clip_cov_ratio": "cov_fraction",
    "kl_cov_ratio": "cov_fraction",
    "clip_cov_lb": "clip_cov_low",
    "clip_cov_ub": "clip_cov_high",
    "ppo_kl_coef": "kl_cov_coef",
}
SAME_NAMES = (
    "delta dual_clip dro_beta sapo_tau_pos sapo_tau_neg vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg"
)
KEYS |= {name: name for name in SAME_NAMES.split()}


def make_config(params: dict[str, Any], **chosen: Any) -> LossConfig:
    named = {KEYS[name]: value for name, value in params.items() if name in KEYS}
    return LossConfig(**{"log_ratio_clamp": None, **named, **chosen})


def make_tokens(grid: Grid, inputs: dict[str, Any]) -> Tokens:
    return Tokens(
        log_probs=grid.flat(inputs["logp"], gradient=True),
        old_log_probs=grid.flat(inputs["old_logp"]),
        advantages=grid.flat(inputs["advantages"]),
        rows=grid.rows,
        num_rows=grid.num_rows,
        weights=grid.flat(inputs["is_weights"]) if "is_weights" in inputs else None,
    )


def backward(grid: Grid, loss: Tensor, log_probs: Tensor) -> Case:
    loss.backward()
    assert log_probs.grad is not None, "the loss depends on the log-probs"
    return {"loss": loss.item(), "grad": grid.spread(log_probs.grad)}


def mean(values: Tensor, tokens: Tokens, aggregation: Aggregation = "token_mean") -> float:
    totals = Totals(num_tokens=len(tokens.rows), num_rows=tokens.num_rows)
    weights = token_weights(tokens.rows, tokens.num_rows, aggregation, totals)
    return total_loss(values.float(), weights).item()


def full_rows(tokens: Tokens) -> int:
    """Rows that hold a token."""
    return int((row_counts(tokens.rows, tokens.num_rows) > 0).sum())


def trl_policy(case: Case) -> Case:
    inputs, params = case["inputs"], case["params"]
    grid = Grid(inputs["mask"])
    tokens = make_tokens(grid, inputs)
    config = trl_config(params)
    found: Case = {}
    if params.get("is_mode"):
        tokens = replace(tokens, weights=trl_correction(case, grid, tokens, found))
    terms = policy_terms(tokens, config)
    totals = Totals(len(tokens.rows), grid.num_rows, params.get("max_completion_length", 1))
    weights = token_weights(tokens.rows, tokens.num_rows, TRL_LOSSES[params["loss_type"]][1], totals)
    policy, keep = terms.loss, torch.ones_like(terms.clipped_low)
    entropy = grid.flat(inputs["entropy"], gradient=True) if "entropy" in inputs else None
    if "top_entropy_quantile" in params:
        assert entropy is not None, "the mask needs entropies"
        keep = entropy >= entropy_threshold(entropy, params["top_entropy_quantile"])
        policy = policy.masked_fill(~keep, 0.0)
    if "off_policy_threshold" in params:
        sampled = grid.flat(inputs.get("sampling_logp", inputs["old_logp"]))
        policy = policy.masked_fill(
            ~off_policy_mask(replace(tokens, old_log_probs=sampled), params["off_policy_threshold"]), 0.0
        )
    kl = trl_kl(case, grid, tokens, terms)
    entropy_weights = token_weights(grid.rows, grid.num_rows, "token_mean", Totals(int(keep.sum()), 1)) * keep
    loss = total_loss(
        policy,
        weights,
        kl=kl,
        beta=params.get("beta", 0.0),
        entropy=entropy,
        entropy_weights=entropy_weights,
        entropy_coef=params.get("entropy_coef", 0.0),
    )
    found |= backward(grid, loss, tokens.log_probs)
    if entropy is not None and entropy.grad is not None:
        found["grad_entropy"] = grid.spread(entropy.grad)
    found["metrics"] = trl_metrics(params, tokens, terms, config) | {
        "policy_loss": total_loss(policy, weights).item(),
        "kl": 0.0 if kl is None else mean(kl.detach(), tokens),
    }
    return found


def trl_config(params: dict[str, Any]) -> LossConfig:
    loss = TRL_LOSSES[params["loss_type"]][0]
    if loss == "cispo":  # its eps_high is the bound itself, and the only one
        return make_config(params, loss=loss, clip_low=1.0, clip_high=params["eps_high"] - 1)
    return make_config(params, loss=loss)


def trl_kl(case: Case, grid: Grid, tokens: Tokens, terms: Terms) -> Tensor | None:
    if "ref_logp" not in case["inputs"]:
        return None
    ratio = terms.ratio if case["params"].get("kl_is_weight") else None
    return kl_per_token(tokens.log_probs, grid.flat(case["inputs"]["ref_logp"]), ratio=ratio)


def trl_metrics(params: dict[str, Any], tokens: Tokens, terms: Terms, config: LossConfig) -> dict[str, float]:
    over: Aggregation = "token_mean" if params["level"] == "token" else "sequence_mean"
    found = {
        "clip_ratio/low_mean": mean(terms.clipped_low, tokens, over),
        "clip_ratio/high_mean": mean(terms.clipped_high, tokens, over),
        "clip_ratio/region_mean": mean(terms.clipped_low | terms.clipped_high, tokens, over),
    }
    if config.loss == "cispo":  # counted where the PPO clip would be
        clipped = policy_terms(tokens, replace(config, loss="ppo")).clipped_high
        found["cispo_clip_ratio"] = mean(clipped, tokens)
    if config.loss == "vespo":
        found["vespo/phi_seq_mean"] = mean(vespo_weights(tokens, config), tokens, "sequence_mean")
    return found


def trl_correction(case: Case, grid: Grid, tokens: Tokens, found: Case) -> Tensor:
    params = case["params"]
    level, mode = params["is_mode"].split("_")
    given = [[math.nan if one is None else one for one in row] for row in case["inputs"]["sampling_logp"]]
    sampled = grid.flat(given)
    ratios = correction.importance_ratios(
        correction.log_ratios(tokens.old_log_probs, sampled), grid.rows, grid.num_rows, level=level
    )
    weights = correction.importance_weights(ratios, mode=mode, low=params["is_clip_min"], high=params["is_clip_max"])
    spread = torch.tensor(grid.spread(weights, fill=1.0))
    if level == "sequence":  # one per row, and every row has its first token
        spread = spread[:, :1]
    known = ~sampled.isnan()
    gap = correction.gap_summaries(tokens.old_log_probs[known], sampled[known], grid.rows[known], grid.num_rows)["abs"]
    mass = correction.summary(spread.flatten() if level == "sequence" else weights)
    found["is_ratio"] = spread.tolist()
    found["is_metrics"] = {
        "sampling_logp_difference/mean": gap.mean(),
        "sampling_logp_difference/max": gap.high.item(),
        "importance_sampling_ratio/min": mass.low.item(),
        "importance_sampling_ratio/mean": mass.mean(),
        "importance_sampling_ratio/max": mass.high.item(),
    }
    return weights


def trl_policy_micro(case: Case) -> Case:
    inputs, params = case["inputs"], case["params"]
    steps, losses, gradients, start = params["grad_accum_steps"], [], [], 0
    for size in params["micro_batch_sizes"]:
        part = {name: values[start : start + size] for name, values in inputs.items()}
        start += size
        grid = Grid(part["mask"])
        tokens = make_tokens(grid, part)
        own_count = params["loss_type"] == "bnpo"
        num_tokens = len(grid.rows) * steps if own_count else params["num_items_in_step"]
        totals = Totals(num_tokens, size * steps, params.get("max_completion_length", 1))
        weights = token_weights(grid.rows, size, TRL_LOSSES[params["loss_type"]][1], totals)
        one = backward(grid, total_loss(policy_terms(tokens, trl_config(params)).loss, weights), tokens.log_probs)
        losses.append(one["loss"])
        gradients += one["grad"]
    return {"losses": losses, "loss": sum(losses), "grad": gradients}


def trl_rloo_loss(case: Case) -> Case:
    params = {**case["params"], "loss_type": "grpo", "level": "sequence_sum"}
    found = trl_policy({**case, "params": params})
    # The peer gives a row without tokens the ratio 1, which adds a constant: as one token that has not moved.
    inputs = case["inputs"]
    lost = [one for one, mask in zip(inputs["advantages"], inputs["mask"], strict=True) if not any(mask)]
    still, rows = torch.zeros(len(lost)), torch.arange(len(lost))
    tokens = Tokens(log_probs=still, old_log_probs=still, advantages=torch.tensor(lost), rows=rows, num_rows=len(lost))
    weights = token_weights(rows, len(lost), "sequence_mean", Totals(num_tokens=0, num_rows=len(inputs["mask"])))
    found["loss"] += total_loss(policy_terms(tokens, make_config(case["params"])).loss, weights).item()
    return found


def verl_policy(case: Case) -> Case:
    inputs, params = case["inputs"], case["params"]
    grid = Grid(inputs["mask"])
    tokens = make_tokens(grid, inputs)
    log_probs, mode = tokens.log_probs, params["loss_mode"]
    if mode == "bypass_mode":
        tokens = verl_bypass(params["rollout_correction"], tokens)
        mode = {"reinforce": "gpg", "ppo_clip": "vanilla"}[params["rollout_correction"]["loss_type"]]
    config = verl_config({**params, "loss_mode": mode})
    if mode in ("clip_cov", "kl_cov"):
        tokens = replace(tokens, chosen=covariance_choice(tokens.log_probs, tokens.advantages, config))
    terms = policy_terms(tokens, config)
    aggregation = VERL_AGGREGATIONS[params["loss_agg_mode"]]
    if mode in ("sapo", "geo_mean"):
        aggregation = "sequence_mean"
    rows = grid.num_rows if mode == "geo_mean" else full_rows(tokens)
    whole = params.get("global", {})
    totals = Totals(
        num_tokens=whole.get("batch_num_tokens", len(tokens.rows)),
        num_rows=whole.get("global_batch_size", rows),
        length=whole.get("loss_scale_factor", grid.mask.shape[1]),
        num_ranks=whole.get("dp_size", 1),
    )
    weights = token_weights(tokens.rows, tokens.num_rows, aggregation, totals)
    metrics = verl_metrics(mode, tokens, terms, config)
    return backward(grid, total_loss(terms.loss, weights), log_probs) | {"metrics": metrics}


def verl_bypass(params: dict[str, Any], tokens: Tokens) -> Tokens:
    """The tokens that are kept, with weights of their present probability over the sampled one."""
    drift = correction.log_ratios(tokens.log_probs.detach(), tokens.old_log_probs)
    weights = None
    if params["rollout_is"]:
        ratios = correction.importance_ratios(drift, tokens.rows, tokens.num_rows, level=params["rollout_is"])
        weights = correction.importance_weights(ratios, mode="truncate", low=None, high=params["rollout_is_threshold"])
    kept = torch.ones_like(drift, dtype=torch.bool)
    if params.get("rollout_rs"):
        values = correction.rejection_values(drift, tokens.rows, tokens.num_rows, statistic=params["rollout_rs"])
        *low, high = [float(one) for one in str(params["rollout_rs_threshold"]).split("_")]
        kept = correction.kept_tokens(values, statistic=params["rollout_rs"], low=low[0] if low else None, high=high)
    return Tokens(
        log_probs=tokens.log_probs[kept],
        old_log_probs=tokens.old_log_probs[kept],
        advantages=tokens.advantages[kept],
        rows=tokens.rows[kept],
        num_rows=tokens.num_rows,
        weights=weights if weights is None else weights[kept],
    )


def verl_config(params: dict[str, Any]) -> LossConfig:
    mode = params["loss_mode"]
    chosen: dict[str, Any] = {
        "loss": VERL_TERMS.get(mode, mode),
        "ratio_level": "sequence_token" if mode == "gspo" else "token",
        "log_ratio_clamp": VERL_CLAMPS.get(mode),
    }
    if "clip_ratio_c" in params:  # bounds the loss, but where the ratio is a weight, the ratio
        chosen["delta" if mode.startswith("dppo") else "dual_clip"] = params["clip_ratio_c"]
    return make_config(params, **chosen)


def verl_metrics(mode: str, tokens: Tokens, terms: Terms, config: LossConfig) -> dict[str, float]:
    estimator: Any = "abs" if mode == "kl_cov" else "k1"
    clamp = VERL_CLAMPS.get(mode) if mode != "gspo" else None
    drift = kl_per_token(tokens.old_log_probs, tokens.log_probs.detach(), estimator=estimator, log_ratio_clamp=clamp)
    clipped, below = terms.clipped_low | terms.clipped_high, terms.bounded
    if mode == "clip_cov":  # only what the choice drops
        clipped = terms.bounded
    if mode == "geo_mean":  # beyond either bound, and told apart by the sign of the advantage
        signs = [torch.full_like(tokens.advantages, sign) for sign in (1.0, -1.0)]
        up, down = (policy_terms(replace(tokens, advantages=sign), config) for sign in signs)
        beyond = up.clipped_high | down.clipped_low
        clipped, below = beyond & (tokens.advantages > 0), beyond & (tokens.advantages < 0)
    return {
        "ppo_kl": mean(drift, tokens),
        "pg_clipfrac": mean(clipped, tokens),
        "pg_clipfrac_lower": mean(below, tokens),
    }


def openrlhf_policy(case: Case) -> Case:
    inputs, params = case["inputs"], case["params"]
    grid = Grid(inputs["mask"])
    tokens = make_tokens(grid, inputs)
    drift = kl_per_token(tokens.old_log_probs, tokens.log_probs.detach(), estimator="k1")
    metrics = {"ppo_kl": mean(drift, tokens)}
    is_gspo = params.get("policy_loss_type") == "gspo"
    if params.get("enable_vllm_is_correction"):
        rollout = grid.flat(inputs["rollout_logp"])
        if is_gspo:
            tokens = replace(tokens, old_log_probs=rollout)
        else:
            metrics["rollout_kl"] = mean(kl_per_token(rollout, tokens.old_log_probs, estimator="k1"), tokens)
            tokens = replace(tokens, weights=openrlhf_correction(params, tokens, rollout))
    level, clamp = ("sequence", None) if is_gspo else ("token", 20.0)
    terms = policy_terms(tokens, make_config(params, loss="ppo", ratio_level=level, log_ratio_clamp=clamp))
    metrics["clip_ratio"] = mean(terms.clipped_low | terms.clipped_high, tokens)
    aggregation: Aggregation = "sequence_mean" if is_gspo or not params.get("token_level_loss", True) else "token_mean"
    totals = Totals(
        num_tokens=params.get("batch_num_tokens", len(grid.rows)),
        num_rows=params.get("global_batch_size", full_rows(tokens)),
        num_ranks=params.get("dp_size", 1),
    )
    weights = token_weights(grid.rows, grid.num_rows, aggregation, totals)
    return backward(grid, total_loss(terms.loss, weights), tokens.log_probs) | {"metrics": metrics}


def openrlhf_correction(params: dict[str, Any], tokens: Tokens, rollout: Tensor) -> Tensor:
    gap = correction.log_ratios(tokens.old_log_probs, rollout)
    low, high = params["vllm_is_truncated_threshold"]
    by_token = correction.importance_ratios(gap, tokens.rows, tokens.num_rows, level="token")
    kind = params["vllm_is_correction_type"]
    if kind != "seq-mask-tis":
        mode = {"tis": "truncate", "icepop": "mask"}[kind]
        return correction.importance_weights(by_token, mode=mode, low=low, high=high)
    by_row = correction.importance_ratios(gap, tokens.rows, tokens.num_rows, level="geometric")
    return by_token.masked_fill(correction.importance_weights(by_row, mode="mask", low=low, high=high) == 0, 0.0)


def slime_policy(case: Case) -> Case:
    grid = Grid(case["inputs"]["mask"])
    tokens = make_tokens(grid, case["inputs"])
    terms = policy_terms(tokens, make_config(case["params"], loss=case["params"]["kind"]))
    totals = Totals(len(grid.rows), grid.num_rows)
    loss = total_loss(terms.loss, token_weights(grid.rows, grid.num_rows, "token_mean", totals))
    return backward(grid, loss, tokens.log_probs) | {
        "per_token_loss": grid.spread(terms.loss),
        "metrics": {"clipfrac": mean(terms.clipped_low | terms.clipped_high, tokens)},
    }


def slime_opsm(case: Case) -> Case:
    grid = Grid(case["inputs"]["mask"])
    keep = off_policy_mask(make_tokens(grid, case["inputs"]), case["params"]["opsm_delta"])
    # The peer counts all places of a dropped row, with tokens or without, each as one over the row's tokens.
    lengths = row_counts(grid.rows, grid.num_rows)
    places = row_means((~keep).float(), grid.rows, grid.num_rows) * grid.mask.shape[1]
    return {"keep": grid.spread(keep.float()), "count": (places / lengths).sum().item()}


OPS: dict[str, Callable[[Case], Case]] = {
    "trl_policy": trl_policy,
    "trl_gmpo": trl_policy,
    "trl_policy_micro": trl_policy_micro,
    "trl_rloo_loss": trl_rloo_loss,
    "verl_policy": verl_policy,
    "openrlhf_policy": openrlhf_policy,
    "slime_policy": slime_policy,
    "slime_opsm": slime_opsm,
    **golden_kl.OPS,
}
