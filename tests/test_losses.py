import json
import math
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rayless.trainers.aggregation import AGGREGATIONS, Totals, token_weights, total_loss
from rayless.trainers.loss_config import Aggregation, LossConfig, RatioLevel
from rayless.trainers.losses import (
    LEVELS,
    RULES,
    Terms,
    Tokens,
    covariance_choice,
    entropy_threshold,
    off_policy_mask,
    policy_terms,
)

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/token_average_cases.jsonl").open()]


def one_row(ratios: list[float], advantages: list[float], *, old: float = -2.0, **given: Any) -> Tokens:
    """Tokens of one sequence, each of old log-prob `old` and the given ratio."""
    old_log_probs = torch.full((len(ratios),), old)
    return Tokens(
        log_probs=(old_log_probs + torch.tensor(ratios).log()).requires_grad_(),
        old_log_probs=old_log_probs,
        advantages=torch.tensor(advantages),
        rows=torch.zeros(len(ratios), dtype=torch.int64),
        num_rows=1,
        **given,
    )


def terms_and_gradient(tokens: Tokens, **settings: Any) -> tuple[Terms, list[float]]:
    terms = policy_terms(tokens, LossConfig(**settings))
    return terms, torch.autograd.grad(terms.loss.sum(), tokens.log_probs)[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, "neither"),
        (1.5, 2.0, -2.56, "high"),  # 1.28 * 2: already likely enough
        (1.5, -2.0, 3.0, "neither"),  # a bad token that got likelier is still pushed down
        (0.5, -2.0, 1.6, "low"),  # 0.8 * 2: already unlikely enough
        (0.5, 2.0, -1.0, "neither"),
        (1.25, 2.0, -2.5, "neither"),  # between 1 + clip_low and 1 + clip_high
        (1.5, 0.0, 0.0, "neither"),
    ],
)
def test_the_clip_holds_on_the_side_that_gains(ratio: float, advantage: float, loss: float, clipped: str) -> None:
    terms, gradient = terms_and_gradient(one_row([ratio], [advantage]), clip_low=0.2, clip_high=0.28)
    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert terms.ratio.item() == pytest.approx(ratio)
    assert (terms.clipped_low.item(), terms.clipped_high.item()) == (clipped == "low", clipped == "high")
    assert gradient == pytest.approx([-ratio * advantage if clipped == "neither" else 0.0])


@pytest.mark.parametrize("loss", RULES)
def test_the_first_on_policy_gradient_is_minus_the_advantage(loss: str) -> None:
    log_probs = torch.tensor([-0.5, -2.0, -7.0], requires_grad=True)
    tokens = Tokens(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        advantages=torch.tensor([1.0, -0.25, 0.0]),
        rows=torch.arange(3),
        num_rows=3,
        chosen=torch.zeros(3, dtype=torch.bool),
    )
    terms, gradient = terms_and_gradient(tokens, loss=loss)
    assert gradient == pytest.approx([-1.0, 0.25, 0.0])
    assert not (terms.clipped_low | terms.clipped_high | terms.bounded).any()


@pytest.mark.parametrize("bound", ["delta", "dual_clip"])
def test_a_bad_token_far_above_its_old_probability_is_bounded(bound: str) -> None:
    tokens = one_row([3.0, 3.0, 1.5], [-1.0, 1.0, -1.0])
    terms, gradient = terms_and_gradient(tokens, clip_low=0.2, clip_high=0.2, **{bound: 2.0})
    assert terms.loss.tolist() == pytest.approx([2.0, -1.2, 1.5])
    assert gradient == pytest.approx([0.0, 0.0, 1.5])
    assert terms.bounded.tolist() == [True, False, False]
    assert terms.clipped_high.tolist() == [False, True, False]
    assert terms.ratio.tolist() == pytest.approx([3.0, 3.0, 1.5])


def test_delta_leaves_the_clipped_ratio_alone() -> None:
    # The larger of the losses min(3, 1.1) and clip(3) = 1.5: without gradient, though above delta.
    terms, gradient = terms_and_gradient(one_row([3.0], [-1.0]), clip_low=0.2, clip_high=0.5, delta=1.1)
    assert terms.loss.tolist() == pytest.approx([1.5])
    assert gradient == [0.0]


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        ("token", [4.0, 1.0]),
        ("sequence", [2.0, 2.0]),  # the square root of 4 * 1
        ("sequence_token", [2.0, 2.0]),
        ("sequence_sum", [4.0, 4.0]),
    ],
)
def test_a_ratio_is_of_the_token_or_its_sequence(level: RatioLevel, ratios: list[float]) -> None:
    config = LossConfig(ratio_level=level)
    assert policy_terms(one_row([4.0, 1.0], [1.0, 1.0]), config).ratio.tolist() == pytest.approx(ratios)


def test_rows_have_their_own_ratios_wherever_their_tokens_lie() -> None:
    tokens = Tokens(
        log_probs=torch.tensor([1.0, 5.0, 2.0]).log(),
        old_log_probs=torch.zeros(3),
        advantages=torch.ones(3),
        rows=torch.tensor([2, 0, 2]),
        num_rows=4,
    )
    assert policy_terms(tokens, LossConfig(ratio_level="sequence_sum")).ratio.tolist() == pytest.approx([2, 5, 2])


def test_a_sequence_ratio_spreads_gradient_and_its_token_form_keeps_it_at_home() -> None:
    # r = 2, half of it each token's doing; the second token has no advantage.
    wide: dict[str, Any] = {"clip_low": 1.0, "clip_high": math.inf}
    spread = terms_and_gradient(one_row([4.0, 1.0], [1.0, 0.0]), ratio_level="sequence", **wide)[1]
    own = terms_and_gradient(one_row([4.0, 1.0], [1.0, 0.0]), ratio_level="sequence_token", **wide)[1]
    assert spread == pytest.approx([-1.0, -1.0])
    assert own == pytest.approx([-2.0, 0.0])


def test_a_log_ratio_past_the_clamp_is_cut_and_has_no_gradient() -> None:
    tokens = one_row([math.e**4], [-1.0])
    terms, gradient = terms_and_gradient(tokens, log_ratio_clamp=3.0)
    assert terms.loss.item() == pytest.approx(math.e**3)
    assert gradient == [0.0]
    assert terms_and_gradient(tokens, log_ratio_clamp=None)[1] == pytest.approx([math.e**4])


def test_cispo_weighs_the_gradient_by_the_clipped_ratio() -> None:
    tokens = one_row([0.5, 1.0, 3.0], [2.0, 2.0, -2.0])
    terms, gradient = terms_and_gradient(tokens, loss="cispo", clip_low=0.2, clip_high=0.5)
    assert gradient == pytest.approx([-1.6, -2.0, 3.0])
    assert (terms.clipped_low.tolist(), terms.clipped_high.tolist()) == ([True, False, False], [False, False, True])
    unbounded_below = terms_and_gradient(tokens, loss="cispo", clip_low=1.0, clip_high=0.5)
    assert unbounded_below[1] == pytest.approx([-1.0, -2.0, 3.0])
    assert not unbounded_below[0].clipped_low.any()


def test_sapo_opens_its_gate_by_the_sign_of_the_advantage() -> None:
    terms, _ = terms_and_gradient(one_row([2.0, 2.0], [1.0, -1.0]), loss="sapo", sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    # 4 sigmoid(1) = 2.92423; (4 / 2) sigmoid(2) = 1.76159.
    assert terms.loss.tolist() == pytest.approx([-2.924234, 1.761594], abs=1e-6)


def test_geo_mean_clips_each_token_then_takes_the_rows_geometric_mean() -> None:
    # Log-ratios 0.4 (cut from ln 4) and 0: exp(0.2) = 1.2214. Weights 4 and 1 have the geometric mean 2.
    tokens = one_row([4.0, 1.0], [1.0, 1.0])
    terms, gradient = terms_and_gradient(tokens, loss="geo_mean", clip_low=0.4, clip_high=0.4)
    assert terms.loss.tolist() == pytest.approx([-1.221403, -1.221403], abs=1e-6)
    assert terms.clipped_high.tolist() == [True, False]
    assert gradient == pytest.approx([0.0, -1.221403], abs=1e-6)
    weighted = one_row([4.0, 1.0], [1.0, 1.0], weights=torch.tensor([4.0, 1.0]))
    assert terms_and_gradient(weighted, loss="geo_mean", clip_high=0.4)[0].loss.tolist() == pytest.approx(
        [-2.442806, -2.442806], abs=1e-6
    )


def test_geo_mean_leaves_the_side_that_loses_unclipped() -> None:
    terms, _ = terms_and_gradient(one_row([0.25], [1.0]), loss="geo_mean", clip_low=0.4, clip_high=0.4)
    assert terms.loss.tolist() == pytest.approx([-0.25])


def test_vespo_weighs_by_a_power_and_a_decay_of_the_sequences_ratio() -> None:
    # w = 2 * 1 and 4 e^3 e^-6 = 0.199148; with the weight 0.5 in it w = 1, which weighs 1.
    settings: dict[str, Any] = {"loss": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0}
    gradient = terms_and_gradient(one_row([2.0, 1.0], [1.0, 1.0]), **settings)[1]
    assert gradient == pytest.approx([-0.199148, -0.199148], abs=1e-6)
    weighted = one_row([2.0, 1.0], [1.0, 1.0], weights=torch.tensor([1.0, 0.5]))
    assert terms_and_gradient(weighted, **settings)[1] == pytest.approx([-1.0, -1.0], abs=1e-6)
    # A weight of 0 counts as 1e-8 for the row: e^3 1e-16.
    lost = one_row([1.0], [1.0], weights=torch.zeros(1))
    assert terms_and_gradient(lost, **settings)[1] == pytest.approx([-20.085536e-16], rel=1e-4, abs=0)
    # Below 0 the others hold: 2^3 e^2 e^-4 = 1.082682.
    negative = terms_and_gradient(one_row([2.0], [-1.0]), loss="vespo", vespo_k_neg=3.0, vespo_lambda_neg=2.0)[1]
    assert negative == pytest.approx([1.082682], abs=1e-6)


def test_clip_cov_drops_chosen_tokens_that_the_clip_leaves_alone() -> None:
    tokens = one_row([1.1, 1.1, 2.0], [1.0, 1.0, 1.0], chosen=torch.tensor([True, False, True]))
    terms, gradient = terms_and_gradient(tokens, loss="clip_cov", clip_low=0.2, clip_high=0.2)
    assert terms.loss.tolist() == pytest.approx([0.0, -1.1, -1.2])
    assert gradient == pytest.approx([0.0, -1.1, 0.0])
    assert (terms.bounded.tolist(), terms.clipped_high.tolist()) == ([True, False, False], [False, False, True])


def test_kl_cov_holds_chosen_tokens_by_their_distance() -> None:
    tokens = one_row([2.0, 2.0, 0.5], [1.0, 1.0, 1.0], chosen=torch.tensor([True, False, True]))
    terms, gradient = terms_and_gradient(tokens, loss="kl_cov", kl_cov_coef=0.5)
    assert terms.loss.tolist() == pytest.approx([-2.0 + 0.346574, -2.0, -0.5 + 0.346574], abs=1e-6)
    assert gradient == pytest.approx([-1.5, -2.0, -1.0])


def test_dro_pulls_the_log_ratio_back_by_its_square() -> None:
    terms, gradient = terms_and_gradient(one_row([math.e], [3.0], old=-2.0), loss="dro", dro_beta=0.5)
    assert terms.loss.tolist() == pytest.approx([3.0 + 0.25])  # -3 * -1 + 0.25 * 1^2
    assert gradient == pytest.approx([-3.0 + 0.5])


@pytest.mark.parametrize(
    ("loss", "near", "far"),
    [
        ("dppo_tv", 0.21, 0.19),  # |0.7 - 0.5| = 0.2
        ("dppo_kl", 0.0872, 0.0871),  # 0.5 ln(0.5/0.7) + 0.5 ln(0.5/0.3) = 0.0871770
    ],
)
def test_dppo_stops_tokens_that_have_gone_far_and_go_on(loss: str, near: float, far: float) -> None:
    # From 0.5 to 0.7 and 0.3, up and down: only the first and the last are pushed on.
    tokens = one_row([1.4, 1.4, 0.6, 0.6], [1.0, -1.0, 1.0, -1.0], old=math.log(0.5))
    stopped, gradient = terms_and_gradient(tokens, loss=loss, clip_low=far, clip_high=far)
    assert gradient == pytest.approx([0.0, 1.4, -0.6, 0.0])
    assert (stopped.clipped_high.tolist(), stopped.clipped_low.tolist()) == ([True] + [False] * 3, [False] * 3 + [True])
    free, gradient = terms_and_gradient(tokens, loss=loss, clip_low=near, clip_high=near, delta=1.2)
    assert gradient == pytest.approx([-1.2, 1.2, -0.6, 0.6])
    assert free.bounded.tolist() == [True, True, False, False]
    # Each side has its own bound.
    assert terms_and_gradient(tokens, loss=loss, clip_low=far, clip_high=near)[1] == pytest.approx([-1.4, 1.4, -0.6, 0])


def test_dppo_lets_certain_tokens_be() -> None:
    tokens = one_row([1.0], [1.0], old=0.0)
    assert terms_and_gradient(tokens, loss="dppo_kl")[1] == [-1.0]


@pytest.mark.parametrize("loss", sorted(set(RULES) - {"vespo", "geo_mean"}))
def test_sampler_weights_multiply_the_terms(loss: str) -> None:
    chosen = torch.tensor([True, False])
    plain = terms_and_gradient(one_row([1.1, 0.7], [1.0, -2.0], chosen=chosen), loss=loss)
    weights = torch.tensor([3.0, 0.0])
    weighted = terms_and_gradient(one_row([1.1, 0.7], [1.0, -2.0], chosen=chosen, weights=weights), loss=loss)
    assert weighted[0].loss.tolist() == pytest.approx([3 * plain[0].loss[0].item(), 0.0])
    assert weighted[1] == pytest.approx([3 * plain[1][0], 0.0])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8] * 4),
        ("sequence_mean", [1 / 15] * 3 + [1 / 5]),  # three tokens share 1/5
        ("sequence_sum", [1 / 5] * 4),
        ("fixed_length", [1 / 50] * 4),
        ("token_sum", [1.0] * 4),
    ],
)
def test_a_token_weighs_by_the_counts_of_the_step(aggregation: Aggregation, expected: list[float]) -> None:
    rows, totals = torch.tensor([0, 0, 0, 2]), Totals(num_tokens=8, num_rows=5, length=10)
    assert token_weights(rows, 3, aggregation, totals).tolist() == pytest.approx(expected)
    over_ranks = token_weights(rows, 3, aggregation, totals._replace(num_ranks=4))
    assert over_ranks.tolist() == pytest.approx([4 * one for one in expected])


def random_step(num_rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.arange(num_rows).repeat_interleave(torch.tensor([3, 1, 5, 2, 4, 1]))
    old = -3 * torch.rand(len(rows), generator=generator)
    return {
        "log_probs": old + 0.3 * torch.randn(len(rows), generator=generator),
        "old_log_probs": old,
        "advantages": torch.randn(len(rows), generator=generator),
        "weights": torch.rand(len(rows), generator=generator) + 0.5,
        "chosen": torch.rand(len(rows), generator=generator) < 0.3,
        "rows": rows,
    }


def step_gradient(step: dict[str, Tensor], parts: list[Tensor], num_rows: int, config: LossConfig) -> Tensor:
    """The gradient of the step's log-probs, its rows dealt out to calls as `parts` ([M] bool each) say."""
    totals = Totals(num_tokens=len(step["rows"]), num_rows=num_rows, length=6)
    whole = step["log_probs"].clone().requires_grad_()
    for part in parts:
        own = {name: values[part] for name, values in step.items()} | {"log_probs": whole[part]}
        terms = policy_terms(Tokens(**own, num_rows=num_rows), config)
        assert config.aggregation is not None, "filled in"
        total_loss(terms.loss, token_weights(own["rows"], num_rows, config.aggregation, totals)).backward()
    assert whole.grad is not None
    return whole.grad


@pytest.mark.parametrize("loss", RULES)
def test_no_loss_depends_on_how_rows_are_dealt_out(loss: Any) -> None:
    step = random_step(6)
    parts = [(step["rows"] % 2 == 1), (step["rows"] % 2 == 0) & (step["rows"] > 0), step["rows"] == 0]
    for level, aggregation in product(LEVELS, AGGREGATIONS):
        config = LossConfig(loss=loss, ratio_level=level, aggregation=aggregation)
        together = step_gradient(step, [torch.ones_like(step["chosen"])], 6, config)
        torch.testing.assert_close(step_gradient(step, parts, 6, config), together, atol=1e-6, rtol=1e-5)
        assert together.abs().max() > 0


@pytest.mark.parametrize("loss", RULES)
def test_a_call_without_tokens_has_loss_zero(loss: Any) -> None:
    none = torch.zeros(0)
    tokens = Tokens(
        log_probs=torch.zeros(0, requires_grad=True),
        old_log_probs=none,
        advantages=none,
        rows=none.long(),
        num_rows=2,
        chosen=none.bool(),
    )
    for aggregation in get_args(Aggregation):
        weights = token_weights(tokens.rows, 2, aggregation, Totals(num_tokens=0, num_rows=0))
        assert total_loss(policy_terms(tokens, LossConfig(loss=loss)).loss, weights).item() == 0.0


def test_the_loss_adds_kl_and_takes_the_entropy_off() -> None:
    policy, kl, entropy = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.0]), torch.tensor([3.0, 5.0])
    weights = torch.tensor([0.5, 0.5])
    assert total_loss(policy, weights).item() == 1.5
    assert total_loss(policy, weights, kl=kl, beta=0.25).item() == 2.0
    only_second = torch.tensor([0.0, 1.0])
    loss = total_loss(policy, weights, kl=kl, beta=0.25, entropy=entropy, entropy_weights=only_second, entropy_coef=0.1)
    assert loss.item() == pytest.approx(1.5)


def test_rows_that_have_become_unlikely_are_masked_if_they_are_bad() -> None:
    # Mean of old minus present: ln(4) / 2 = 0.693 in row 0, 0 in row 1.
    tokens = Tokens(
        log_probs=torch.tensor([0.25, 1.0, 1.0]).log(),
        old_log_probs=torch.zeros(3),
        advantages=torch.tensor([-1.0, 1.0, -1.0]),
        rows=torch.tensor([0, 0, 1]),
        num_rows=2,
    )
    assert off_policy_mask(tokens, 0.69).tolist() == [False, True, True]
    assert off_policy_mask(tokens, 0.70).tolist() == [True, True, True]


def test_the_entropy_threshold_lies_between_tokens() -> None:
    entropy = torch.tensor([4.0, 1.0, 3.0, 2.0])
    assert [entropy_threshold(entropy, share).item() for share in (1.0, 0.5, 0.25)] == [1.0, 2.5, 3.25]


def test_the_covariance_choice_takes_the_largest_or_draws_between_bounds() -> None:
    # Their means are -2.5 and 0.
    log_probs = torch.tensor([-1.0, -1.5, -2.0, -4.0, -3.0, -3.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, 2.0, -1.0, -2.0])
    covariance = [1.5, 1.0, -0.5, -3.0, 0.5, 2.0]
    two = LossConfig(loss="kl_cov", cov_fraction=0.4)
    assert covariance_choice(log_probs, advantages, two).tolist() == [one in (1.5, 2.0) for one in covariance]
    all_between = LossConfig(loss="clip_cov", cov_fraction=1.0, clip_cov_low=0.5, clip_cov_high=2.0)
    assert covariance_choice(log_probs, advantages, all_between).tolist() == [one in (1.5, 1.0) for one in covariance]
    one_between = LossConfig(loss="clip_cov", cov_fraction=0.2, clip_cov_low=0.5, clip_cov_high=2.0)
    drawn = [
        covariance_choice(log_probs, advantages, one_between, generator=torch.Generator().manual_seed(seed))
        for seed in range(20)
    ]
    assert {tuple(one.nonzero()[:, 0].tolist()) for one in drawn} == {(0,), (1,)}
    assert not covariance_choice(torch.zeros(0), torch.zeros(0), two).any()


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_one_average_over_all_ranks_and_micro_batches(case: dict[str, Any]) -> None:
    ranks = case["token_losses_by_rank_and_micro_batch"]
    totals = Totals(num_tokens=case["tokens"], num_rows=1, num_ranks=len(ranks))
    weight = torch.ones((), requires_grad=True)
    gradients: list[Tensor] = []
    losses: list[Tensor] = []
    for rank in ranks:
        shares = [
            total_loss(
                weight * torch.tensor(values),
                token_weights(torch.zeros(len(values), dtype=torch.int64), 1, "token_mean", totals),
            )
            for values in rank
        ]
        losses.append(torch.stack(shares).sum())
        gradients += torch.autograd.grad(losses[-1], weight)
    # A data-parallel plugin takes the mean of the ranks' gradients; the loss is linear in the weight, so it agrees.
    assert torch.stack(gradients).mean().item() == pytest.approx(case["expected_loss"], abs=1e-6)
    assert torch.stack(losses).mean().item() == pytest.approx(case["expected_loss"], abs=1e-6)
