"""Checkpoints: a Hugging Face folder that anything can open, with what an exact resume needs inside it.

    save_dir/step_00000100/            config.json, model.safetensors, tokenizer files
    save_dir/step_00000100/training/   optimizer_00000.safetensors (one per training rank under ZeRO), progress.json

A checkpoint is written under another name and renamed when whole: a folder called step_… is complete.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayless.comm.collectives import role_barrier
from rayless.comm.topology import Topology

# ColossalAI is not loaded where the settings are read. To resolve postponed annotations there, jsonargparse would run
# this block, so this file does not postpone them.
if TYPE_CHECKING:
    from rayless.trainers.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Section `checkpoint`."""

    save_interval: int = 100
    """A checkpoint after every so many optimizer steps; one is written at the end of the run in any case."""
    save_dir: str = "checkpoints"
    """Where they go; a relative folder lies inside the run's own."""
    keep_last: int = 2
    """Older ones are deleted; 0 keeps all."""
    resume: str = "auto"
    """`auto`: the newest of this run, if there is one. `never`: start afresh. Else the path of a checkpoint."""

    def __post_init__(self) -> None:
        if self.save_interval < 1:
            raise ValueError(f"checkpoint.save_interval must be at least 1, got {self.save_interval}")
        if self.keep_last < 0:
            raise ValueError(f"checkpoint.keep_last must be at least 0, got {self.keep_last}")
        if not self.save_dir or not self.resume:
            raise ValueError("checkpoint.save_dir and checkpoint.resume must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

    steps: int = 0
    """Optimizer steps."""
    groups: int = 0
    """Groups consumed: the cursor of the prompt stream."""
    beta: float | None = None
    """The KL coefficient where it is steered; null as long as it is the configured one."""


def find_checkpoint(save_dir: Path, resume: str) -> Path | None:
    """What to resume from; None for a fresh start. Raises ValueError if a path was given and holds no checkpoint."""
    if resume == "never":
        return None
    if resume == "auto":
        found = _complete(save_dir)
        return found[-1] if found else None
    path = Path(resume)
    if not (path / "training" / "progress.json").is_file():
        raise ValueError(f"checkpoint.resume must be auto, never or a checkpoint's folder, got {resume!r}")
    return path


def _complete(save_dir: Path) -> list[Path]:
    """All complete checkpoints, oldest first, by number (step_9900 before step_10000)."""
    folders = [path for path in save_dir.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))


def read_progress(path: Path) -> Progress:
    """Of a checkpoint."""
    return Progress(**_read_state(path)["progress"])


def save_checkpoint(
    topology: Topology,
    save_dir: Path,
    policy: "Policy",
    tokenizer: Any,
    progress: Progress,
    fixed: dict[str, Any],
    *,
    keep_last: int,
) -> None:
    """Write one together with all trainers, and delete all but the last `keep_last` (0: none is deleted)."""
    final = save_dir / f"step_{progress.steps:08d}"
    partial = save_dir / f"partial_{progress.steps:08d}"
    if topology.is_leader:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "training").mkdir(parents=True)
    role_barrier()
    if topology.is_leader or policy.plugin.plugin == "zero":
        save_file(_optimizer_tensors(policy), _optimizer_file(partial, topology))
    if topology.is_leader:
        policy.network.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        state = {"progress": asdict(progress), "fixed": fixed}
        (partial / "training" / "progress.json").write_text(json.dumps(state, indent=1))
    role_barrier()
    if topology.is_leader:
        partial.rename(final)
        for old in _complete(save_dir)[:-keep_last] if keep_last else []:
            shutil.rmtree(old)
    role_barrier()


def check_resumable(path: Path, fixed: dict[str, Any]) -> None:
    """Raises ValueError when the checkpoint was written under other numbers than this run's, naming the first."""
    saved = _read_state(path)["fixed"]
    for name, value in fixed.items():
        if saved.get(name) != value:
            raise ValueError(f"{path} was written with {name} = {saved.get(name)}, this run has {value}")


def check_unclaimed(save_dir: Path, resumed: Path | None) -> None:
    """Raises ValueError when `save_dir` holds steps beyond where this run starts: it would take them for its own."""
    newest = find_checkpoint(save_dir, "auto")
    start = read_progress(resumed).steps if resumed else 0
    if newest and read_progress(newest).steps > start:
        raise ValueError(f"{newest} is beyond step {start}, where this run starts: take a new run.name")


def load_training_state(topology: Topology, path: Path, policy: "Policy") -> None:
    """Put optimizer and master weights where they stood; the policy has the checkpoint's weights already."""
    saved = load_file(_optimizer_file(path, topology if policy.plugin.plugin == "zero" else None))
    inner = policy.optimizer.optim
    for name, parameter in _numbered_parameters(inner):
        if f"{name}.master" in saved:
            parameter.data.copy_(saved[f"{name}.master"])
        keys = [key for key in saved if key.startswith(f"{name}.") and key != f"{name}.master"]
        inner.state[parameter] = {key.rpartition(".")[2]: _place(saved[key], parameter) for key in keys}


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / "training" / "progress.json").read_text())
    return state


def _optimizer_file(path: Path, topology: Topology | None) -> Path:
    index = 0 if topology is None else topology.seat.index
    return path / "training" / f"optimizer_{index:05d}.safetensors"


def _place(value: Tensor, parameter: Tensor) -> Tensor | int:
    if value.dim():
        return value.to(parameter.device)
    # Step counts stay on the CPU: torch's AdamW keeps a float tensor, HybridAdam an int.
    return value if value.is_floating_point() else int(value)


def _optimizer_tensors(policy: "Policy") -> dict[str, Tensor]:
    """Moments and step counts of this rank's optimizer, and the fp32 master weights where ZeRO keeps them apart."""
    inner = policy.optimizer.optim
    tensors: dict[str, Tensor] = {}
    for name, parameter in _numbered_parameters(inner):
        if policy.plugin.plugin == "zero":
            tensors[f"{name}.master"] = parameter.detach().cpu().contiguous()
        for key, value in inner.state[parameter].items():
            tensors[f"{name}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def _numbered_parameters(optimizer: Any) -> list[tuple[str, Tensor]]:
    return [
        (f"{number}.{place}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
