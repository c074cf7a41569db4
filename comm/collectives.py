"""Agreements among the ranks of one role, over the role's own default group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def role_sum(values: Tensor) -> Tensor:
    """Sum over the role's ranks, element by element; `values` itself is overwritten and returned."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def role_max(values: Tensor) -> Tensor:
    """Maximum over the role's ranks, element by element; `values` itself is overwritten and returned."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def role_barrier() -> None:
    """Wait until every rank of the role is here."""
    dist.barrier()
