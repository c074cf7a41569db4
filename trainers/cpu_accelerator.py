"""What ColossalAI's CPU accelerator lacks for ZeRO: streams that do nothing, and leave to run without a GPU.

Everything ColossalAI needs for its ZeRO plugin on a machine without a GPU stands here, and nothing else is patched.
When the library changes under it, `enable_cpu` fails with a sentence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import colossalai
import torch
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero.low_level.low_level_optim import LowLevelZeroOptimizer

KNOWN_VERSION = "0.5.0"


def enable_cpu() -> None:
    """Let LowLevelZeroPlugin run on CPU. Harmless when called twice."""
    assert colossalai.__version__ == KNOWN_VERSION, (
        f"the stand-ins for CPU were written for colossalai {KNOWN_VERSION}, found {colossalai.__version__}: check them"
    )
    _replace(CpuAccelerator, "Stream", lambda self, device=None, priority=0, **options: torch.cpu.Stream())
    _replace(CpuAccelerator, "current_stream", lambda self, device=None: torch.cpu.current_stream())
    _replace(CpuAccelerator, "stream", lambda self, stream: contextlib.nullcontext())
    _replace(CpuAccelerator, "empty_cache", lambda self: None)
    _replace(CpuAccelerator, "synchronize", lambda self, device=None: None)
    _replace(LowLevelZeroOptimizer, "_sanity_checks", _one_dtype)
    # Work on a CPU is finished when the call returns: there is nothing to wait for.
    _replace(torch.cpu.Stream, "wait_stream", lambda self, stream: None)
    _replace(torch.Tensor, "record_stream", lambda self, stream: None)


def _replace(owner: type, name: str, stand_in: Callable[..., Any]) -> None:
    assert name in dir(owner), f"{owner.__name__} no longer has {name}: check what ZeRO on CPU needs now"
    setattr(owner, name, stand_in)


def _one_dtype(self: Any) -> None:
    dtypes = {parameter.dtype for group in self.optim.param_groups for parameter in group["params"]}
    assert dtypes == {self._dtype}, f"ZeRO wants parameters of one dtype, got {dtypes}"
