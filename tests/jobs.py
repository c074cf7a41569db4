"""Start whole jobs with torchrun, as a user would, and read what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "launch" / "recipes" / "tiny.yaml"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What depends on the clock.
TIMES = ("time/", "bubble/", "perf/", "weights/sync_seconds", "weights/gigabytes_per_second")


def start_job(num_ranks: int, *arguments: str, folder: Path) -> subprocess.Popen[str]:
    """torchrun on the tiny recipe, its runs inside `folder`."""
    command = [
        *(str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(num_ranks)),
        *(str(ROOT / "launch" / "grpo.py"), "--config", str(TINY), "--run.dir", str(folder), *arguments),
    ]
    # A launcher of the test run itself would shadow the job's own.
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
    )


def run_job(num_ranks: int, *arguments: str, folder: Path, timeout: float = 300) -> str:
    """The job's output; it has to end well."""
    job = start_job(num_ranks, *arguments, folder=folder)
    try:
        output, _ = job.communicate(timeout=timeout)
    finally:
        job.kill()
    assert job.returncode == 0, output + logs(folder)
    return output


def logs(folder: Path) -> str:
    """The ends of all rank logs below `folder`."""
    return "".join(f"\n== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*/logs/*.log")))


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    """A run's metrics.jsonl, a dictionary per step."""
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows less what depends on the clock."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]
