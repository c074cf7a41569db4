import math
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from rayless.trainers.correction import (
    gap_summaries,
    importance_ratios,
    importance_weights,
    kept_tokens,
    log_ratios,
    merged,
    normalized_weights,
    rejection_values,
    summary,
    weight_mass,
)

# Two rows with tokens, of ratios 2 and 1/2 and 4, and 3; a row without any at the end.
ROWS = torch.tensor([0, 0, 0, 1])
LOG_RATIO = torch.tensor([2.0, 0.5, 4.0, 3.0]).log()


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        ("token", [2.0, 0.5, 4.0, 3.0]),
        ("sequence", [4.0, 4.0, 4.0, 3.0]),  # 2 * 1/2 * 4
        ("geometric", [4 ** (1 / 3)] * 3 + [3.0]),
    ],
)
def test_a_ratio_is_of_its_token_or_of_its_row(level: str, ratios: list[float]) -> None:
    close(importance_ratios(LOG_RATIO, ROWS, 3, level=level), ratios)


@pytest.mark.parametrize(
    ("mode", "low", "high", "weights"),
    [
        ("truncate", None, 3.0, [2.0, 0.5, 3.0, 3.0]),
        ("truncate", 1.0, 2.5, [2.0, 1.0, 2.5, 2.5]),
        ("truncate", None, None, [2.0, 0.5, 4.0, 3.0]),
        ("mask", 1.0, 3.5, [2.0, 0.0, 0.0, 3.0]),
        ("mask", None, 3.5, [2.0, 0.5, 0.0, 3.0]),
        ("mask", 1.0, None, [2.0, 0.0, 4.0, 3.0]),
    ],
)
def test_a_ratio_out_of_bounds_is_cut_or_dropped(
    mode: str, low: float | None, high: float | None, weights: list[float]
) -> None:
    close(importance_weights(torch.tensor([2.0, 0.5, 4.0, 3.0]), mode=mode, low=low, high=high), weights)


def test_a_bound_itself_is_inside() -> None:
    ratios = torch.tensor([0.5, 2.0])
    assert importance_weights(ratios, mode="mask", low=0.5, high=2.0).tolist() == [0.5, 2.0]


def test_a_gap_past_any_bound_stays_finite() -> None:
    ratios = importance_ratios(torch.tensor([500.0, -500.0]), torch.tensor([0, 1]), 2, level="token")
    assert ratios.square().isfinite().all()
    assert ratios[1] > 0


def test_a_log_prob_that_the_sampler_did_not_give_is_no_gap() -> None:
    assert log_ratios(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, math.nan])).tolist() == [0.5, 0.0]


def test_normalized_weights_have_mean_1_over_all_parts() -> None:
    weights = torch.tensor([2.0, 0.5, 3.0, 3.0])
    parts = [
        weight_mass(weights[:3], ROWS[:3], 3, level="token"),
        weight_mass(weights[3:], ROWS[3:], 3, level="token"),
    ]
    total, count = (torch.stack(values).sum() for values in zip(*parts, strict=True))
    assert (total.item(), count.item()) == (8.5, 4)
    close(normalized_weights(weights, total, count).mean(), 1.0)  # type: ignore[arg-type]


def test_weights_of_sequences_are_averaged_over_sequences_with_tokens() -> None:
    total, count = weight_mass(torch.tensor([4.0, 4.0, 4.0, 3.0]), ROWS, 3, level="sequence")
    assert (total.item(), count.item()) == (7.0, 2)


def test_weights_that_are_all_zero_stay_zero() -> None:
    assert normalized_weights(torch.zeros(2), torch.zeros(()), torch.tensor(2)).tolist() == [0.0, 0.0]


LN2, LN3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("statistic", "values"),
    [
        ("token_k1", [-LN2, LN2, -2 * LN2, -LN3]),
        ("token_k2", [LN2**2 / 2, LN2**2 / 2, 2 * LN2**2, LN3**2 / 2]),
        ("token_k3", [1 - LN2, LN2 - 0.5, 3 - 2 * LN2, 2 - LN3]),
        ("seq_sum_k1", [-2 * LN2] * 3 + [-LN3]),
        ("seq_mean_k1", [-2 * LN2 / 3] * 3 + [-LN3]),
        ("seq_max_k1", [LN2] * 3 + [-LN3]),
        ("seq_mean_k2", [LN2**2] * 3 + [LN3**2 / 2]),
        ("seq_max_k3", [3 - 2 * LN2] * 3 + [2 - LN3]),
        ("seq_sum_k3", [3.5 - 2 * LN2] * 3 + [2 - LN3]),
    ],
)
def test_a_rejection_statistic_is_a_scope_of_an_estimator(statistic: str, values: list[float]) -> None:
    close(rejection_values(LOG_RATIO, ROWS, 3, statistic=statistic), values)


@pytest.mark.parametrize(
    ("statistic", "low", "high", "kept"),
    [
        ("token_k1", 0.4, 1.5, [True, False, False, False]),  # sampler over trainer: 1/2, 2, 1/4, 1/3
        ("token_k1", None, 1.5, [True, False, True, True]),
        ("token_k2", None, 0.5, [True, True, False, False]),  # 0.24, 0.24, 0.96, 0.60
        ("seq_max_k2", None, 0.7, [False, False, False, True]),
        ("seq_mean_k1", 0.5, 1.0, [True, True, True, False]),  # 0.63 and 0.33
        ("token_k3", 0.25, None, [True, False, True, True]),  # 0.31, 0.19, 1.61, 0.90
    ],
)
def test_tokens_within_the_bounds_are_kept(
    statistic: str, low: float | None, high: float | None, kept: list[bool]
) -> None:
    values = rejection_values(LOG_RATIO, ROWS, 3, statistic=statistic)
    assert kept_tokens(values, statistic=statistic, low=low, high=high).tolist() == kept


def test_a_summary_of_parts_is_that_of_the_whole() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, -3.0, 4.0])
    whole = summary(values)
    parts = merged(merged(summary(values[:2]), summary(values[2:])), summary(values[:0]))
    assert astuple(parts) == astuple(whole) == (5.0, 10.0, 66.0, -3.0, 6.0)
    assert whole.mean() == 2.0
    assert whole.std() == pytest.approx(math.sqrt(46 / 5))
    assert whole.std(less=1) == pytest.approx(math.sqrt(46 / 4))
    assert (whole.max_deviation(0.0), whole.max_deviation(2.0)) == (6.0, 5.0)


def test_equal_weights_are_all_effective_and_one_of_four_is_a_quarter() -> None:
    assert summary(torch.full((4,), 0.3)).effective_share() == pytest.approx(1.0)
    assert summary(torch.tensor([0.0, 5.0, 0.0, 0.0])).effective_share() == pytest.approx(0.25)
    assert summary(torch.zeros(4)).effective_share() == 0.0


def test_a_single_value_has_no_spread() -> None:
    assert summary(torch.tensor([3.0])).std(less=1) == 0.0


def test_diagnostics_by_hand() -> None:
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -2.0])
    gaps = gap_summaries(log_probs, log_probs - LOG_RATIO, ROWS, 3)
    found = {name: one.mean() for name, one in gaps.items()}
    expected = {
        "k1": -(2 * LN2 + LN3) / 4,
        "k3": (1 - LN2 + LN2 - 0.5 + 3 - 2 * LN2 + 2 - LN3) / 4,
        "abs": (4 * LN2 + LN3) / 4,
        "ratio": 9.5 / 4,
        "chi2_token": (4 + 0.25 + 16 + 9) / 4 - 1,
        "log_perplexity": 1.0,  # 1, 2 and 0 of the row without tokens
        "perplexity": (math.e + math.e**2 + 1) / 3,
        "sampled_log_perplexity": (1 + 2 * LN2 / 3 + 2 + LN3) / 3,
        "sampled_perplexity": (math.e * 4 ** (1 / 3) + math.e**2 * 3 + 1) / 3,
        "log_perplexity_gap": -(2 * LN2 / 3 + LN3) / 3,
        "log_perplexity_gap_abs": (2 * LN2 / 3 + LN3) / 3,
        "perplexity_ratio": (4 ** (-1 / 3) + 1 / 3 + 1) / 3,
        "chi2_sequence": (16 + 9 + 1) / 3 - 1,
    }
    assert found == pytest.approx(expected, rel=1e-6)
    assert gaps["ratio"].high.item() == pytest.approx(4.0)


def test_equal_log_probs_have_no_gap_at_all() -> None:
    log_probs = torch.tensor([-0.1, -3.7, -0.9, -12.0])
    gaps = gap_summaries(log_probs, log_probs, ROWS, 3)
    for name in ("k1", "k3", "abs", "chi2_token", "chi2_sequence", "log_perplexity_gap"):
        assert (gaps[name].low.item(), gaps[name].high.item()) == (0.0, 0.0)


def test_tokens_without_a_sampled_log_prob_stay_out_of_the_diagnostics() -> None:
    log_probs, sampled = torch.tensor([-1.0, -9.0, -2.0]), torch.tensor([-1.5, math.nan, -2.0])
    with_gap = gap_summaries(log_probs, sampled, torch.tensor([0, 0, 1]), 2)
    without = gap_summaries(log_probs[[0, 2]], sampled[[0, 2]], torch.tensor([0, 1]), 2)
    assert with_gap == without


def test_no_tokens_have_empty_summaries() -> None:
    gaps = gap_summaries(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64), 0)
    assert all(one.count == 0 and one.total == 0 for one in gaps.values())
