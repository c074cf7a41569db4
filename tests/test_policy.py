"""The learning-rate schedule by hand, and gradients that checkpointing does not change."""

from __future__ import annotations

from typing import Any

import pytest
from test_grpo_consumer import TINY, distance, update

from rayless.trainers.model_config import OptimizerConfig


def factors(**settings: Any) -> list[float]:
    """Learning rate over its peak at each of eight steps."""
    from rayless.trainers.policy import lr_factor

    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
    config = OptimizerConfig(**plain | settings)
    return [lr_factor(step, config) for step in range(config.total_steps)]


def test_the_rise_ends_at_the_peak_and_starts_above_zero() -> None:
    assert factors(warmup_steps=4, total_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_towards_zero() -> None:
    assert factors(schedule="linear", total_steps=4) == [1.0, 0.75, 0.5, 0.25]
    assert factors(schedule="cosine", total_steps=4) == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
    assert factors(schedule="linear", warmup_steps=2, total_steps=4) == [0.5, 1.0, 1.0, 0.5]


@pytest.mark.job
@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
def test_gradient_checkpointing_changes_no_update(layout: str) -> None:
    changes: dict[str, Any] = {"grpo_config": {"lr": 1e-3, "layout": layout}}
    ((losses, means, moved),) = update(1, **changes)
    model = {"path": TINY, "dtype": "float32", "gradient_checkpointing": True}
    ((again, means_again, moved_again),) = update(1, model_config=model, **changes)
    assert again == losses
    assert means_again["train/grad_norm"] == pytest.approx(means["train/grad_norm"], rel=1e-6)
    assert distance(moved, moved_again) < 1e-5


@pytest.mark.job
def test_the_kl_term_starts_at_zero_and_pulls_back() -> None:
    """At the first step policy and reference are one model: the KL is 0; at the second it is not."""
    settings = {"lr": 1e-3, "beta": 0.1}
    ((_, first, _),) = update(1, grpo_config=settings)
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    ((_, second, _),) = update(1, steps=2, grpo_config=settings)
    assert second["policy/kl"] > 1e-4
