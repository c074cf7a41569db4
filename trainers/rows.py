"""Sums over the sampled tokens of each row, where tokens lie flat.

M tokens of R rows; `rows` ([M] int64, 0 to R - 1) says whose token each is. A row without tokens has sum and mean 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_counts(rows: Tensor, num_rows: int) -> Tensor:
    """[R] int64: tokens of each row."""
    return torch.bincount(rows, minlength=num_rows)


def row_sums(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[R]: the sum of each row's values ([M])."""
    return values.new_zeros(num_rows).index_add(0, rows, values)


def row_means(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[R]: the mean of each row's values ([M])."""
    return row_sums(values, rows, num_rows) / row_counts(rows, num_rows).clamp(min=1)
