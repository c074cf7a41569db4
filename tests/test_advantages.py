import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayless.trainers.advantages import (
    ESTIMATORS,
    advantages,
    discounted_returns,
    estimate,
    group_advantages,
    has_signal,
    normalized_rewards,
    optimal_token_advantages,
    reinforce_pp_advantages,
    remax_advantages,
    reward_spread,
    standardized,
    weighted_rewards,
    whitened,
)
from rayless.trainers.loss_config import LossConfig

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


NAN = math.nan
# Groups of three, one and two, not in order: 1, 2, 6 of prompt 0; 5 of prompt 1; 4, 8 of prompt 2.
REWARDS = torch.tensor([1.0, 5.0, 2.0, 4.0, 6.0, 8.0])
GROUPS = torch.tensor([0, 1, 0, 2, 0, 2])
LENGTHS = torch.tensor([1, 1, 1, 3, 2, 1])


def close(found: Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=tolerance, rtol=tolerance)


def of_groups(estimator: str, *, scale: str = "none", eps: float = 0.0, keep_single: bool = False) -> Tensor:
    return estimate(
        REWARDS, GROUPS, lengths=LENGTHS, estimator=estimator, scale=scale, eps=eps, keep_single=keep_single
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("group", [-2.0, 0.0, -1.0, -2.0, 3.0, 2.0]),  # means 3 and 6
        ("rloo", [-3.0, 0.0, -1.5, -4.0, 4.5, 4.0]),  # others' means 4, 3.5, 1.5 and 8, 4
        ("opo", [-2.75, 0.0, -1.75, -1.0, 2.25, 3.0]),  # (1 + 2 + 6 * 2) / 4 and (4 * 3 + 8) / 4
        ("pass_at_k", [0.0, 0.0, 0.0, 0.0, 4.0, 4.0]),  # 6 - 2 and 8 - 4
        ("gpg", [-2.0, 0.0, -1.0, -2.0, 3.0, 2.0]),  # no reward is 0
    ],
)
def test_what_is_left_above_each_baseline(estimator: str, expected: list[float]) -> None:
    close(of_groups(estimator), expected)


def test_whitened_estimators_have_mean_0_and_spread_1_over_tokens() -> None:
    for estimator in ("reinforce_pp", "reinforce_pp_baseline"):
        tokens = of_groups(estimator).repeat_interleave(LENGTHS)
        close(torch.stack([tokens.mean(), tokens.std()]), [0.0, 1.0])


def test_reinforce_pp_does_not_look_at_groups() -> None:
    other = estimate(REWARDS, torch.zeros_like(GROUPS), lengths=LENGTHS, estimator="reinforce_pp", scale="none", eps=0)
    torch.testing.assert_close(of_groups("reinforce_pp"), other)
    # Two rows of one token: (1 - 2) / sqrt(2).
    two = estimate(
        torch.tensor([1.0, 3.0]), GROUPS[:2], lengths=LENGTHS[:2], estimator="reinforce_pp", scale="none", eps=0
    )
    close(two, [-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize(
    ("scale", "divisors"),
    [
        ("group", [7**0.5, 1.0, 7**0.5, 8**0.5, 7**0.5, 8**0.5]),  # (4 + 1 + 9) / 2 and (4 + 4) / 1
        ("batch", [(200 / 30) ** 0.5] * 6),  # mean 26/6: 146 - 26^2 / 6 = 33.33, over 5
        ("none", [1.0] * 6),
    ],
)
@pytest.mark.parametrize("estimator", ["group", "rloo", "opo", "pass_at_k"])
def test_a_scale_divides_what_any_baseline_leaves(estimator: str, scale: str, divisors: list[float]) -> None:
    torch.testing.assert_close(of_groups(estimator, scale=scale), of_groups(estimator) / torch.tensor(divisors))


def test_the_epsilon_adds_to_the_spread() -> None:
    assert of_groups("group", scale="group", eps=0.5)[0].item() == pytest.approx(-2 / (7**0.5 + 0.5))


@pytest.mark.parametrize("estimator", ["group", "rloo", "opo", "pass_at_k"])
def test_a_group_of_one_keeps_its_reward_if_asked(estimator: str) -> None:
    assert of_groups(estimator)[1].item() == 0.0
    assert of_groups(estimator, keep_single=True)[1].item() == 5.0
    assert of_groups(estimator, keep_single=True, scale="group", eps=0.25)[1].item() == 4.0  # 5 / (1 + 0.25)


def test_two_best_of_a_group_are_no_better_than_each_other() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 3.0]), torch.zeros(3, dtype=torch.int64)
    found = estimate(rewards, groups, lengths=groups, estimator="pass_at_k", scale="none", eps=0.0)
    assert found.tolist() == [0.0, 0.0, 0.0]


def test_gpg_weighs_the_batch_by_its_share_of_rewards_that_are_not_zero() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    found = estimate(rewards, groups, lengths=groups, estimator="gpg", scale="none", eps=0.0)
    assert found.tolist() == [2.0, -2.0, 0.0, 0.0]  # 0.5 * 4 / 1


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 0.35, -3.3, 1e6])
def test_equal_rewards_give_exactly_zero_whatever_the_estimator(estimator: str, scale: str, reward: float) -> None:
    config = LossConfig(advantage=estimator, scale_rewards=scale)  # type: ignore[arg-type]
    lengths = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7])
    found = advantages(torch.full((14,), reward), 7, lengths=lengths, config=config)
    assert found.tolist() == [0.0] * 14


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_reward_that_was_not_given_stays_out(estimator: str, scale: str) -> None:
    config = LossConfig(advantage=estimator, scale_rewards=scale)  # type: ignore[arg-type]
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    found = advantages(torch.tensor([1.0, NAN, 4.0, 2.0, 0.0, 1.0]), 3, lengths=lengths, config=config)
    given = torch.tensor([0, 2, 3, 4, 5])
    without = estimate(
        torch.tensor([1.0, 4.0, 2.0, 0.0, 1.0]),
        torch.tensor([0, 0, 1, 1, 1]),
        lengths=lengths[given],
        estimator=estimator,
        scale=scale,
        eps=config.advantage_eps,
    )
    assert found[1].item() == 0.0
    assert found[given].tolist() == without.tolist()


def test_a_batch_without_any_given_reward_has_no_advantages() -> None:
    for estimator in ESTIMATORS:
        config = LossConfig(advantage=estimator)  # type: ignore[arg-type]
        found = advantages(torch.full((4,), NAN), 2, lengths=torch.ones(4), config=config)
        assert found.tolist() == [0.0] * 4


def test_the_default_config_gives_what_group_advantages_gives() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.25, 0.5, 1.0])
    found = advantages(rewards, 3, lengths=torch.ones(6), config=LossConfig())
    assert found.tolist() == group_advantages(rewards, 3).tolist()


def test_reward_spread_by_hand() -> None:
    spread = reward_spread(torch.tensor([1.0, 1.0, 3.0, NAN, 3.0, 7.0, NAN]), torch.tensor([0, 0, 1, 1, 1, 2, 3]))
    assert spread.mean.item() == 3.0
    assert spread.std.item() == pytest.approx(6**0.5)  # (4 + 4 + 0 + 0 + 16) / 4
    assert spread.equal.tolist() == [True, True, True, True]
    assert reward_spread(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1])).equal.tolist() == [False, True]


def test_several_rewards_are_weighed_and_summed() -> None:
    rewards = torch.tensor([[1.0, 2.0], [NAN, 3.0], [NAN, NAN]])
    found = weighted_rewards(rewards, torch.tensor([0.5, 2.0]))
    assert found[:2].tolist() == [4.5, 6.0]
    assert found[2].isnan()


def test_normalizing_before_the_sum_gives_a_small_reward_its_say() -> None:
    # Both columns are 0.7071 apart from their means once divided, however large they are.
    rewards = torch.tensor([[100.0, 0.0], [0.0, 0.001]])
    found = normalized_rewards(rewards, torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), eps=0.0)
    close(found, [(1 - 3) * 0.5**0.5, (3 - 1) * 0.5**0.5])


def test_a_reward_that_was_not_given_adds_nothing_to_normalized_rewards() -> None:
    rewards = torch.tensor([[2.0, NAN], [1.0, 0.0], [0.0, 4.0]])
    found = normalized_rewards(rewards, torch.ones(2), torch.tensor([0, 0, 0]), eps=0.0)
    close(found, [1.0, -(0.5**0.5), -1 + 0.5**0.5])


def test_standardized_values() -> None:
    close(standardized(torch.tensor([1.0, 2.0, 6.0]), eps=0.0), [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5])
    assert standardized(torch.full((7,), 0.1), eps=0.0).tolist() == [0.0] * 7


def test_whitening_counts_a_value_once_per_token() -> None:
    values = whitened(torch.tensor([1.0, 4.0]), torch.tensor([2, 1]))
    # Tokens 1, 1, 4: mean 2, variance (1 + 1 + 4) / 2.
    close(values, [-1 / 3**0.5, 2 / 3**0.5])
    assert whitened(torch.tensor([1.0, 4.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert whitened(torch.tensor([1.0, 4.0]), torch.tensor([5, 0])).tolist() == [0.0, 0.0]


# A row of four tokens and one of two.
ROWS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_returns_are_discounted_and_end_with_their_row() -> None:
    found = discounted_returns(torch.tensor([1.0, 0.0, 2.0, 4.0, 8.0, 16.0]), ROWS, gamma=0.5)
    assert found.tolist() == [2.0, 2.0, 4.0, 4.0, 16.0, 16.0]
    assert discounted_returns(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])).tolist() == [1.0, 2.0]
    assert discounted_returns(torch.empty(0), torch.empty(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_returns_agree_with_going_back_token_by_token(length: int) -> None:
    rewards = torch.arange(1.0, 2 * length + 1)
    rows = torch.tensor([0] * length + [1] * length)
    expected = []
    for part in (rewards[:length], rewards[length:]):
        running, row = 0.0, []
        for reward in reversed(part.tolist()):
            running = reward + 0.9 * running
            row.append(running)
        expected += row[::-1]
    close(discounted_returns(rewards, rows, gamma=0.9), expected)


def test_a_reward_on_the_last_token_makes_reinforce_pp_one_number_per_row() -> None:
    found = reinforce_pp_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 3.0]), ROWS)
    by_row = estimate(
        torch.tensor([1.0, 3.0]),
        torch.tensor([0, 1]),
        lengths=torch.tensor([4, 2]),
        estimator="reinforce_pp",
        scale="none",
        eps=0.0,
    )
    torch.testing.assert_close(found, by_row[ROWS])


def test_remax_takes_off_the_greedy_reward() -> None:
    found = remax_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 3.0]), ROWS, torch.tensor([0.5, 4.0]))
    assert found.tolist() == [0.5] * 4 + [-1.0] * 2


def test_the_optimal_token_baseline_weighs_returns_by_squared_scores() -> None:
    # Squared scores 1 - 2 * 0.5 + 1 = 1 in row 0 and 1 - 2 * 0.5 + 3 = 3 in row 1, which no policy has: plain numbers.
    log_probs = torch.full((6,), math.log(0.5))
    squares = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 3.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 8.0, 0.0, 4.0])
    found = optimal_token_advantages(rewards, log_probs, squares, ROWS, torch.tensor([0, 0]))
    # At both places that the rows share: (8 * 1 + 4 * 3) / 4 = 5, and (8 * 2 + 4 * 6) / 8 = 5. Alone, no baseline.
    close(found, [3.0, 3.0, 8.0, 8.0, -1.0, -1.0])
    apart = optimal_token_advantages(rewards, log_probs, squares, ROWS, torch.tensor([0, 1]))
    close(apart, [8.0] * 4 + [4.0] * 2)
