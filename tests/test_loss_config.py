import math
from typing import Any

import pytest

from rayless.trainers.grpo_config import GRPOConfig, as_config
from rayless.trainers.loss_config import LossConfig
from rayless.trainers.model_config import ModelConfig, PluginConfig


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("clip_low", 1.5, "clip_low must lie between 0 and 1, got 1.5"),
        ("clip_high", math.nan, "clip_high must be at least 0"),
        ("delta", 1.0, "delta must be finite and above 1"),
        ("dual_clip", 0.5, "dual_clip must be finite and above 1"),
        ("log_ratio_clamp", 0.0, "log_ratio_clamp must be finite and above 0"),
        ("sapo_tau_neg", 0.0, "sapo_tau_neg must be finite and above 0"),
        ("vespo_k_pos", -1.0, "vespo_k_pos must be finite and at least 0"),
        ("clip_cov_high", 0.5, "clip_cov_high must be above clip_cov_low = 1.0, got 0.5"),
        ("correction_low", 3.0, "correction_low must be at most correction_high = 2.0, got 3.0"),
        ("correction", "mask", "correction needs old_logprobs=recompute"),
        ("correction_high", 0.0, "correction_high must be above 0"),
        ("rejection_low", 0.0, "rejection_low must be finite and above 0"),
        ("rejection_high", 1.0, "rejection needs rejection_low or rejection_high"),
        ("rejection", "token_k3", "rejection needs rejection_low or rejection_high"),
        ("advantage_eps", 0.0, "advantage_eps must be finite and above 0"),
        ("off_policy_threshold", math.inf, "off_policy_threshold must be finite"),
        ("top_entropy", 0.0, "top_entropy must be above 0 and at most 1, got 0.0"),
        ("beta", -0.1, "beta must be finite and at least 0"),
        ("kl_target", 0.1, "kl_target must be null where beta is 0, got 0.1"),
        ("loss_length", 0, "loss_length must be at least 1"),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^grpo_config.{message}"):
        LossConfig(**{key: value})


@pytest.mark.parametrize(
    ("section", "kind", "key", "message"),
    [
        ("grpo_config", GRPOConfig, "loss", "one of ppo, cispo"),
        ("grpo_config", GRPOConfig, "preset", "one of grpo, dapo, dr_grpo, rloo, reinforce_pp, gspo, cispo, None"),
        ("grpo_config", GRPOConfig, "layout", "one of auto, shared_prefix, packed, padded"),
        ("plugin_config", PluginConfig, "precision", "one of bf16, fp32"),
        ("model_config", ModelConfig, "dtype", "one of bfloat16, float32"),
    ],
)
def test_a_choice_that_is_none_is_refused_in_a_dictionary_too(section: str, kind: type, key: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{section}.{key} must be {message}.*, got 'paded'$"):
        as_config(kind, {key: "paded", **({"path": "x"} if kind is ModelConfig else {})}, section)
