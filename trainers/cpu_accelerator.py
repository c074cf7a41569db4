"""What ColossalAI's CPU accelerator lacks for ZeRO: streams that do nothing, and leave to run without a GPU.

Everything ColossalAI needs for its ZeRO plugin on a machine without a GPU stands here, and nothing else is patched. When
the library changes under it, `enable_cpu` fails with a sentence.
"""

from __future__ import annotations

import contextlib
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
    for name, stand_in in _ACCELERATOR.items():
        assert name in vars(CpuAccelerator), f"colossalai's CPU accelerator no longer has {name}"
        setattr(CpuAccelerator, name, stand_in)
    assert "_sanity_checks" in vars(LowLevelZeroOptimizer), (
        "ColossalAI's ZeRO no longer has the check that refuses a CPU"
    )
    LowLevelZeroOptimizer._sanity_checks = _one_dtype  # type: ignore[method-assign]
    # Work on a CPU is finished when the call returns: there is nothing to wait for.
    torch.cpu.Stream.wait_stream = lambda self, other: None
    torch.cpu.Stream.synchronize = lambda self: None
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


def _one_dtype(self: Any) -> None:
    dtypes = {parameter.dtype for group in self.optim.param_groups for parameter in group["params"]}
    assert dtypes == {self._dtype}, f"ZeRO wants parameters of one dtype, got {dtypes}"


_ACCELERATOR: dict[str, Any] = {
    "Stream": lambda self, device=None, priority=0, **options: torch.cpu.Stream(),
    "current_stream": lambda self, device=None: torch.cpu.current_stream(),
    "stream": lambda self, stream: contextlib.nullcontext(),
    "empty_cache": lambda self: None,
    "synchronize": lambda self, device=None: None,
}
