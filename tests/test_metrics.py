"""What is written survives a resume, line by line and point by point."""

from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayless.trainers.metrics import LoggingConfig, Recorder, StepCounts

ODD = {"prompt": "a|b\nc", "completion": "line\u2028separator <b>", "reward": 1.0}


def record(folder: Path, steps: range) -> None:
    """A recorder's life over `steps`."""
    recorder = Recorder(folder, LoggingConfig(), first_step=steps.start)
    for step in steps:
        recorder.log(step, {"reward/mean": float(step)})
        recorder.show(step, [ODD])
    recorder.close()


def steps_of(path: Path) -> list[int]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["step"] for line in file]


def test_a_resumed_run_has_each_step_once_whatever_was_sampled_and_torn(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 6, "prom')  # killed while writing
    record(tmp_path, range(4, 8))
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7]
    assert steps_of(tmp_path / "samples.jsonl") == [1, 2, 3, 4, 5, 6, 7]
    points = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6, 7]


def test_without_tensorboard_only_the_json_lines_are_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, LoggingConfig(tensorboard=False), first_step=1)
    recorder.log(1, {"train/loss": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_mean_is_the_sum_of_numerators_over_the_sum_of_counts() -> None:
    counts = StepCounts()
    counts.add("reward/mean", 5.0, 5)
    counts.add("reward/mean", 4.0, 1)
    counts.add("policy/kl", 0.0, 0)
    assert counts.means() == {"reward/mean": 1.5}  # not 2.5, and nothing where nothing was counted
