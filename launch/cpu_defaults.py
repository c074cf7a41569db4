"""What a process needs before its first computation on a CPU: import this before torch. What is set already stays."""

from __future__ import annotations

import os

# The ranks of one machine take turns. Threads that spin while they wait steal the cores of whoever has the turn: a
# weight sync between two ranks on two cores takes twice as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large tensors come in large pages, which saves a page fault for each 4 KiB of every new buffer.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch  # reads the above while it loads

# MKL picks the kernel of an elementwise function while that is first called. When two threads make this first call
# together, one of them now and then gets a kernel of half the accuracy for its share (cosines wrong by 1e-4 in the
# first forward pass), and two runs differ: https://github.com/pytorch/pytorch/issues/188792. One element is one thread.
_LAZY_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "sin", "tan", "sinh", "cosh", "tanh"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "sqrt", "rsqrt"),
    *("erf", "erfc", "erfinv", "lgamma"),
)
for _name in _LAZY_FUNCTIONS:
    for _dtype in (torch.float32, torch.float64):
        getattr(torch, _name)(torch.full((1,), 0.5, dtype=_dtype))
