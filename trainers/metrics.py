"""Write what a run measures: TensorBoard scalars and text, the same numbers as metrics.jsonl. One writer per run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Section `logging`."""

    samples: int = 2
    """Groups per weight update whose completions are shown as text (TensorBoard's text page and samples.jsonl)."""
    tensorboard: bool = True
    """Write TensorBoard files; metrics.jsonl is written either way."""

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"logging.samples must be at least 0, got {self.samples}")


class Recorder:
    """The run's one writer; steps are optimizer steps. What an earlier part logged from `first_step` on is cut off."""

    def __init__(self, folder: Path, config: LoggingConfig, *, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics_path = folder / "metrics.jsonl"
        self.samples_path = folder / "samples.jsonl"
        for path in (self.metrics_path, self.samples_path):
            _cut(path, first_step)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step) if config.tensorboard else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line and one point per name."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def show(self, step: int, samples: list[dict[str, Any]]) -> None:
        """A table of completions; each sample holds prompt, completion, answer, reward and the like."""
        if not samples:
            return
        with self.samples_path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples)
        if self.board:
            self.board.add_text("samples", _table(samples), step)
            self.board.flush()

    def close(self) -> None:
        if self.board:
            self.board.close()


def _cut(path: Path, first_step: int) -> None:
    """Keep the lines of earlier steps; a last line that a kill tore goes too."""
    if path.exists():
        with path.open(encoding="utf-8") as file:  # lines of a file end at line feeds alone, unlike str.splitlines
            kept = [line for line in file if line.endswith("\n") and json.loads(line)["step"] < first_step]
        whole = path.with_suffix(".whole")
        whole.write_text("".join(kept), encoding="utf-8")
        whole.rename(path)


def _table(samples: list[dict[str, Any]]) -> str:
    """Markdown; a cell is one line."""
    names = list(samples[0])
    rows = [names, ["---"] * len(names), *([_cell(sample[name]) for name in names] for sample in samples)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


class StepCounts:
    """Sums, counts and maxima that make up one step's metrics; a mean is a sum of numerators over a sum of counts."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """`total` summed over `count` things."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        """By name; what was never counted has no mean and is left out."""
        return {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name]}
