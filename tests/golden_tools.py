"""What the golden cases' rooms share: tensors from JSON, and flat tokens from sequences under a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NotApplicable(Exception):
    """The product has no such function; the message says why."""


class Grid:
    """The tokens of a case under its mask: [B][T] lists to flat [M] tensors and back."""

    def __init__(self, mask: list[list[float]]) -> None:
        self.mask = torch.tensor(mask) != 0  # [B, T]
        self.num_rows = len(mask)
        self.rows = self.mask.nonzero()[:, 0]  # [M]

    def flat(self, values: Any, *, gradient: bool = False) -> Tensor:
        """[M] float32 of what is given per token ([B][T]) or per row ([B])."""
        given = torch.tensor(values, dtype=torch.float32)
        given = given[:, None].expand(self.mask.shape) if given.dim() == 1 else given
        return given[self.mask].clone().requires_grad_(gradient)

    def spread(self, flat: Tensor, fill: float = 0.0) -> list[list[float]]:
        """[B][T] of [M], with `fill` where the mask is 0."""
        whole = torch.full(self.mask.shape, fill, dtype=flat.dtype)
        whole[self.mask] = flat.detach()
        return whole.tolist()
