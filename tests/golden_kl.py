"""Golden cases of KL estimators, KL in the reward and its coefficient: the peers' names, mapped to the product's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from golden_tools import Grid

from rayless.trainers.aggregation import total_loss
from rayless.trainers.kl import adapted_coefficient, kl_in_reward, kl_per_token, last_token_scores

Case = dict[str, Any]


def kl(case: Case) -> Case:
    inputs, params = case["inputs"], case["params"]
    log_probs = torch.tensor(inputs["logp"], requires_grad=True)
    kind, peer = params["kind"].rstrip("+"), params["clamp"]
    estimator: Any = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind, kind)
    clamped = {"verl": estimator == "k3", "openrlhf": True, "slime": kind == "low_var_kl"}[peer]
    found = kl_per_token(
        log_probs,
        torch.tensor(inputs["ref_logp"]),
        estimator=estimator,
        log_ratio_clamp=20.0 if peer == "verl" and clamped else None,
        clamp=10.0 if clamped else None,
        k2_gradient=params["kind"].endswith("+"),
        ratio=(log_probs - torch.tensor(inputs["old_logp"])).exp() if params.get("is_weight") else None,
    )
    total_loss(found, torch.tensor(inputs["weight"])).backward()
    assert log_probs.grad is not None, "an estimate depends on the log-probs"
    return {"kl": found.tolist(), "grad": log_probs.grad.tolist()}


def kl_reward(case: Case) -> Case:
    inputs, params = case["inputs"], case["params"]
    grid = Grid(inputs["mask"])
    rewards = torch.tensor(inputs["reward"])
    if params["clip"]:
        rewards = rewards.clamp(*params["clip"])
    scores = last_token_scores(rewards, grid.rows)
    return {"rewards": grid.spread(kl_in_reward(scores, grid.flat(inputs["kl"]), params["kl_coef"]))}


def kl_reward_verl(case: Case) -> Case:
    inputs = case["inputs"]
    drift = kl_per_token(torch.tensor(inputs["logp"]), torch.tensor(inputs["ref_logp"]), estimator="k1")
    scores = torch.tensor(inputs["token_level_scores"])
    return {"rewards": kl_in_reward(scores, drift, case["params"]["kl_coef"]).tolist()}


def kl_adaptive(case: Case) -> Case:
    params, values = case["params"], [case["params"]["init"]]
    for observed, steps in case["inputs"]["updates"]:
        values.append(
            adapted_coefficient(values[-1], observed, steps, target=params["target"], horizon=params["horizon"])
        )
    return {"values": values[1:]}


OPS: dict[str, Callable[[Case], Case]] = {
    "kl": kl,
    "kl_reward": kl_reward,
    "kl_reward_verl": kl_reward_verl,
    "kl_adaptive": kl_adaptive,
}
