import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rayless.trainers.advantages import group_advantages, has_signal

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/group_advantage_cases.jsonl").open()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_advantages_match_the_case_file(case: dict[str, Any], dtype: torch.dtype) -> None:
    rewards = torch.tensor(case["rewards"], dtype=dtype)
    centred = group_advantages(rewards, case["group_size"], scale=False)
    torch.testing.assert_close(centred, torch.tensor(case["expected_centered"], dtype=dtype), atol=1e-6, rtol=0)
    scaled = group_advantages(rewards, case["group_size"])
    assert scaled.dtype == dtype
    assert scaled.abs().max() <= case["abs_max_scaled"]


@pytest.mark.parametrize("reward", [0.35, 0.1, 1e6, -3.3])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, scale: bool) -> None:
    for group_size in (2, 3, 7, 8):
        advantages = group_advantages(torch.full((2 * group_size,), reward), group_size, scale=scale)
        assert advantages.tolist() == [0.0] * (2 * group_size)


def test_rewards_that_differ_below_float32_are_equal() -> None:
    rewards = torch.tensor([2.0, 2.0, 2.0, 2.0000001], dtype=torch.float64)
    assert group_advantages(rewards, 4).tolist() == [0.0] * 4


def test_one_right_answer_of_two_is_one_over_root_two() -> None:
    # Mean 0.5, spread sqrt(0.5): 0.5 / 0.7071 = 0.7071.
    advantages = group_advantages(torch.tensor([1.0, 0.0]), 2, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([0.5**0.5, -(0.5**0.5)]))


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([1.0, 0.3]), 1).tolist() == [0.0, 0.0]


def test_signal_is_found_group_by_group() -> None:
    advantages = group_advantages(torch.tensor([0.35, 0.35, 0.35, 1.0, 0.0, 0.0]), 3)
    assert has_signal(advantages, 3).tolist() == [False, True]
