"""Models whose log-probs would come out wrong are refused before they load."""

from __future__ import annotations

from typing import Any

import pytest

from rayless.trainers.model_config import check_network


@pytest.mark.parametrize(
    ("network", "line"),
    [
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0"),
        ({"text_config": {"max_position_embeddings": 99}}, "must be at most 99"),
        ({"sliding_window": 99}, "must be padded for a model with sliding_attention layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "must be padded for a model with linear_attention"),
        ({"resid_pdrop": 0.1}, "needs a model without dropout, got resid_pdrop=0.1"),
    ],
)
def test_what_would_come_out_wrong_is_refused(network: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        check_network(network, longest=100, masks=True, checkpointing=True)


@pytest.mark.parametrize(
    "network",
    [
        {"logit_scale": 1.0, "max_position_embeddings": 100, "attention_dropout": 0.0},
        {"sliding_window": 100, "layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 50, "use_sliding_window": False},
        {"sliding_window": None},
    ],
)
def test_what_comes_out_right_is_taken(network: dict[str, Any]) -> None:
    check_network(network, longest=100, masks=True, checkpointing=True)


def test_other_layouts_and_plain_training_take_more() -> None:
    check_network({"sliding_window": 9, "resid_pdrop": 0.1}, longest=100)
