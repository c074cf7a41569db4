import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayless.trainers.losses import clipped_loss, kl_k3, token_mean

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/token_average_cases.jsonl").open()]


def clip_one(ratio: float, advantage: float) -> tuple[float, bool, float]:
    """Loss, clipped, and gradient of the log-prob of a single token, with the bounds 0.8 and 1.28."""
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    out = clipped_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    assert out.ratio.item() == pytest.approx(ratio)
    out.loss.sum().backward()
    assert log_probs.grad is not None
    return out.loss.item(), bool(out.clipped), log_probs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.56, True),  # 1.28 * 2: already likely enough
        (1.5, -2.0, 3.0, False),  # a bad token that got likelier is still pushed down
        (0.5, -2.0, 1.6, True),  # 0.8 * 2: already unlikely enough
        (0.5, 2.0, -1.0, False),
        (1.25, 2.0, -2.5, False),  # between 1 + clip_low and 1 + clip_high
        (1.5, 0.0, 0.0, False),
    ],
)
def test_the_clip_holds_on_the_side_that_gains(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    got, was_clipped, gradient = clip_one(ratio, advantage)
    assert got == pytest.approx(loss, abs=1e-6)
    assert was_clipped is clipped
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_the_first_on_policy_gradient_is_minus_the_advantage() -> None:
    log_probs = torch.tensor([-0.5, -2.0, -7.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.25, 0.0])
    out = clipped_loss(log_probs, log_probs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    out.loss.sum().backward()
    assert out.ratio.tolist() == [1.0, 1.0, 1.0]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-1.0, 0.25, 0.0]


def test_k3_is_zero_at_the_reference_and_right_at_a_factor_of_two() -> None:
    reference = torch.tensor([-1.0, -1.0, -1.0])
    log_probs = (reference + torch.tensor([0.0, math.log(2), -math.log(2)])).requires_grad_()
    kl = kl_k3(log_probs, reference)
    # d = -ln 2: 0.5 + ln 2 - 1 = 0.1931.  d = ln 2: 2 - ln 2 - 1 = 0.3069.
    torch.testing.assert_close(kl, torch.tensor([0.0, 0.193147, 0.306853]), atol=1e-6, rtol=0)
    kl.sum().backward()
    # d k3 / d log_prob = 1 - exp(d).
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 0.5, -1.0]), atol=1e-6, rtol=0)


def test_k3_averages_to_the_true_kl() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    expected = (policy * (policy / reference).log()).sum()  # KL(policy || reference) = 1.1019
    torch.testing.assert_close((policy * kl_k3(policy.log(), reference.log())).sum(), expected)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_one_average_over_all_ranks_and_micro_batches(case: dict[str, Any]) -> None:
    ranks = case["token_losses_by_rank_and_micro_batch"]
    weight = torch.ones((), requires_grad=True)
    gradients: list[Tensor] = []
    losses: list[Tensor] = []
    for rank in ranks:
        shares = [token_mean(weight * torch.tensor(values), case["tokens"], num_ranks=len(ranks)) for values in rank]
        losses.append(torch.stack(shares).sum())
        gradients += torch.autograd.grad(losses[-1], weight)
    # A data-parallel plugin takes the mean of the ranks' gradients; the loss is linear in the weight, so it agrees.
    assert torch.stack(gradients).mean().item() == pytest.approx(case["expected_loss"], abs=1e-6)
    assert torch.stack(losses).mean().item() == pytest.approx(case["expected_loss"], abs=1e-6)
