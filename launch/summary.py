"""The short table at the end of a run, out of its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

FIRST, LAST = 3, 16
PHASES = {
    "time/step": "a step (median)",
    "time/wait_experience": "waiting for experience",
    "time/update": "update",
    "time/publish": "publishing weights",
}


def summarize(folder: Path, checkpoint: Path | None) -> Table:
    """First and last rewards, seconds per phase, where things are."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    table = Table(title=f"{folder.name}: {len(rows)} steps", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")  # paths are to be copied
    table.add_row(f"mean reward, first {FIRST} steps", f"{fmean(rewards[:FIRST]):.3f}")
    table.add_row(f"mean reward, last {LAST} steps", f"{fmean(rewards[-LAST:]):.3f}")
    for name, words in PHASES.items():
        table.add_row(f"seconds, {words}", f"{median(row[name] for row in rows if name in row):.2f}")
    if checkpoint:
        table.add_row("checkpoint", str(checkpoint))
    table.add_row("TensorBoard", f"tensorboard --logdir {folder / 'tensorboard'}")
    return table
