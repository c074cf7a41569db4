import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rayless.trainers.kl import ESTIMATORS, adapted_coefficient, kl_in_reward, kl_per_token, last_token_scores


def kl_and_gradient(factors: list[float], **settings: Any) -> tuple[list[float], list[float]]:
    """KL and gradient of tokens that are `factors` times as likely as under the reference."""
    reference = torch.full((len(factors),), -1.0)
    log_probs = (reference + torch.tensor(factors).log()).requires_grad_()
    kl = kl_per_token(log_probs, reference, **settings)
    return kl.tolist(), torch.autograd.grad(kl.sum(), log_probs)[0].tolist()


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        ("k1", [0.0, 0.693147, -0.693147], [1.0, 1.0, 1.0]),
        ("k2", [0.0, 0.240227, 0.240227], [0.0, 0.693147, -0.693147]),  # ln(2)^2 / 2
        ("k3", [0.0, 0.193147, 0.306853], [0.0, 0.5, -1.0]),  # 0.5 + ln 2 - 1 and 2 - ln 2 - 1; 1 - exp(d)
        ("abs", [0.0, 0.693147, 0.693147], [0.0, 1.0, -1.0]),
    ],
)
def test_estimators_at_the_reference_and_a_factor_of_two(
    estimator: str, expected: list[float], gradient: list[float]
) -> None:
    found = kl_and_gradient([1.0, 2.0, 0.5], estimator=estimator)
    assert found[0] == pytest.approx(expected, abs=1e-6)
    assert found[1] == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_unbiased_estimator_averages_to_the_true_kl(estimator: Any) -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    expected = (policy * (policy / reference).log()).sum()  # KL(policy || reference) = 1.1019
    kl = kl_per_token(policy.log(), reference.log(), estimator=estimator)
    torch.testing.assert_close((policy * kl).sum(), expected)


def test_k2s_gradient_averages_to_the_kls_own() -> None:
    logits = torch.tensor([1.0, 0.0, -2.0], requires_grad=True)
    reference = torch.tensor([0.1, 0.3, 0.6])

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits)[0]

    policy = logits.softmax(0)
    expected = gradient((policy * (policy / reference).log()).sum())
    log_probs = logits.log_softmax(0)
    sampled = policy.detach()
    found = (sampled * kl_per_token(log_probs, reference.log(), estimator="k3", k2_gradient=True)).sum()
    torch.testing.assert_close(gradient(found), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_borrowed_gradient_keeps_the_value(estimator: str) -> None:
    value, gradient = kl_and_gradient([2.0, 0.5], estimator=estimator, k2_gradient=True)
    assert value == pytest.approx(kl_and_gradient([2.0, 0.5], estimator=estimator)[0])
    assert gradient == pytest.approx([0.693147, -0.693147], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "value", "gradient"),
    [
        ({}, 16.085537, 1 - math.e**3),  # k3: e^3 - 3 - 1
        ({"log_ratio_clamp": 2.0}, 4.389056, 0.0),  # e^2 - 2 - 1
        ({"clamp": 10.0}, 10.0, 0.0),
        ({"estimator": "k1", "clamp": 2.5}, -2.5, 0.0),
        ({"clamp": 10.0, "k2_gradient": True}, 10.0, -3.0),
    ],
)
def test_what_a_clamp_cuts_has_no_gradient(settings: dict[str, Any], value: float, gradient: float) -> None:
    found = kl_and_gradient([math.exp(-3.0)], **settings)
    assert found[0] == pytest.approx([value])
    assert found[1] == pytest.approx([gradient])


def test_the_ratio_weighs_the_kl_and_has_its_gradient() -> None:
    log_probs = torch.tensor([math.log(0.5)], requires_grad=True)
    ratio = (log_probs - math.log(0.25)).exp()
    kl = kl_per_token(log_probs, torch.tensor([math.log(0.25)]), ratio=ratio)
    kl.sum().backward()
    assert kl.item() == pytest.approx(2 * 0.193147, abs=1e-6)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(2 * 0.193147 + 2 * 0.5, abs=1e-6)  # r kl + r kl'


def test_rewards_stand_at_last_tokens_and_kl_comes_off_every_token() -> None:
    rows = torch.tensor([0, 0, 2, 2, 2])
    scores = last_token_scores(torch.tensor([5.0, 9.0, -1.0]), rows)  # row 1 has no token
    assert scores.tolist() == [0.0, 5.0, 0.0, 0.0, -1.0]
    kl = torch.tensor([1.0, 2.0, 0.0, -4.0, 0.0], requires_grad=True)
    rewards = kl_in_reward(scores, kl, 0.5)
    assert rewards.tolist() == [-0.5, 4.0, 0.0, 2.0, -1.0]
    assert not rewards.requires_grad


def test_the_coefficient_follows_the_target_within_bounds() -> None:
    # 10 % too much over 50 of 100 sequences: 5 % up. Far off counts as 20 %.
    assert adapted_coefficient(2.0, 0.11, 50, target=0.1, horizon=100) == pytest.approx(2.1)
    assert adapted_coefficient(2.0, 5.0, 50, target=0.1, horizon=100) == pytest.approx(2.2)
    assert adapted_coefficient(2.0, 0.0, 50, target=0.1, horizon=100) == pytest.approx(1.8)
    assert adapted_coefficient(2.0, 5.0, 50, target=None, horizon=100) == 2.0
    assert adapted_coefficient(2.0, 0.0, 50, target=0.1, horizon=1) == 1.0  # never past zero
