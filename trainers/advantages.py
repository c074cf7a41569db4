"""Turn the rewards of a batch into one advantage per completion.

B completions in whole groups, G completions of one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, eps: float = 1e-4) -> Tensor:
    """Reward minus its group's mean ([B] -> [B]), with `scale` over the group's standard deviation (n - 1) plus `eps`.

    Scaled it is the advantage of GRPO (DeepSeekMath, 2024), unscaled that of Dr. GRPO (2025). A group of one, or whose
    rewards are equal in float32, gets exactly 0: the mean and spread of equal values are rounding noise, not 0.
    """
    assert len(rewards) % group_size == 0, f"{len(rewards)} rewards do not make whole groups of {group_size}"
    if group_size == 1:
        return torch.zeros_like(rewards)
    groups = rewards.view(-1, group_size)  # [B/G, G]
    low, high = groups.float().aminmax(dim=1, keepdim=True)  # [B/G, 1]
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    return advantages.masked_fill(low == high, 0.0).view(-1)


def has_signal(advantages: Tensor, group_size: int) -> Tensor:
    """[B/G] bool: True for groups in which any advantage ([B]) differs from 0; the others move no weight."""
    return (advantages.view(-1, group_size) != 0).any(dim=1)
