"""Every golden case passes, and one that does not is seen."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden_tools import NotApplicable
from goldens import misses

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "tests/golden").glob("*.json"))
BELONG_TO_PPO = ("verl_gae", "slime_gae")


def cases(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return found


def run_goldens(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.goldens", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def test_the_files_are_there() -> None:
    assert [file.stem for file in FILES] == ["advantages", "is_correction", "kl", "policy_loss", "sampling"]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_case_of_the_file_passes(file: Path) -> None:
    missed, left_out, required = [], [], 0
    for case in cases(file):
        required += case["op"] not in BELONG_TO_PPO
        try:
            missed += misses(case)
        except NotApplicable as reason:
            if case["op"] not in BELONG_TO_PPO:
                left_out.append(f"{case['name']}: {reason}")
    assert missed == []
    assert len(left_out) < 0.05 * required, left_out


def test_a_planted_miss_is_named_and_exits_with_1(tmp_path: Path) -> None:
    kept = [case for case in cases(ROOT / "tests/golden/advantages.json") if case["name"] == "trl/none_binary"]
    passing, missing = tmp_path / "passing.json", tmp_path / "missing.json"
    passing.write_text(json.dumps({"cases": kept}))
    kept[0]["expected"]["advantages"][3] += 1e-5
    missing.write_text(json.dumps({"cases": kept}))
    good, bad = run_goldens(passing), run_goldens(passing, missing)
    assert (good.returncode, good.stderr) == (0, "")
    assert f"{passing}: 1/1" in good.stdout
    assert (bad.returncode, bad.stderr) == (1, "")
    assert "trl/none_binary: advantages[3] is" in bad.stdout
    assert f"{missing}: 0/1" in bad.stdout


@pytest.mark.parametrize(("metric", "planted"), [("reward", 1e-4), ("frac_reward_zero_std", 0.01)])
def test_a_planted_miss_among_metrics_is_seen(metric: str, planted: float) -> None:
    case = next(case for case in cases(ROOT / "tests/golden/advantages.json") if case["name"] == "trl/group_float")
    assert misses(case) == []
    case["expected"]["metrics"][metric] += planted
    assert [line.split(" is ")[0] for line in misses(case)] == [f"trl/group_float: metrics[{metric}]"]
