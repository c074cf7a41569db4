"""Which checkpoint a run goes on from, and which it must not touch; test_job.py shows that a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayless.trainers.checkpoint import (
    Progress,
    check_resumable,
    check_unclaimed,
    find_checkpoint,
    read_progress,
)


def checkpoint(save_dir: Path, steps: int) -> Path:
    """A complete one as far as these functions look at it."""
    folder = save_dir / f"step_{steps:08d}" / "training"
    folder.mkdir(parents=True)
    state = {"progress": {"steps": steps, "groups": 8 * steps}, "fixed": {"run.seed": 1, "number of prompts": 100}}
    (folder / "progress.json").write_text(json.dumps(state))
    return folder.parent


def test_the_newest_complete_one_is_taken_by_its_number(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto") is None
    checkpoint(tmp_path, 9900)
    newest = checkpoint(tmp_path, 123456789)  # its name is longer, and sorts before the other as text
    (tmp_path / "partial_00020000").mkdir()
    assert find_checkpoint(tmp_path, "auto") == newest
    assert find_checkpoint(tmp_path, "never") is None
    assert read_progress(newest) == Progress(steps=123456789, groups=987654312)


def test_a_path_that_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.resume must be auto, never or a checkpoint's folder"):
        find_checkpoint(tmp_path, str(tmp_path / "nowhere"))


def test_other_numbers_than_the_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 3)
    check_resumable(path, {"run.seed": 1, "number of prompts": 100})
    with pytest.raises(ValueError, match="was written with number of prompts = 100, this run has 99"):
        check_resumable(path, {"run.seed": 1, "number of prompts": 99})


def test_a_run_does_not_start_inside_what_another_has_saved(tmp_path: Path) -> None:
    check_unclaimed(tmp_path, None)
    middle, last = checkpoint(tmp_path, 50), checkpoint(tmp_path, 60)
    check_unclaimed(tmp_path, last)
    for start, steps in ((None, 0), (middle, 50)):
        with pytest.raises(ValueError, match=f"is beyond step {steps}, where this run starts: take a new run.name"):
            check_unclaimed(tmp_path, start)
