"""The whole job over real processes, with both engines."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from jobs import ROOT, logs, metrics, run_job, start_job, without_times
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.job

HF = ("--rollout.engine", "hf")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of two trainers and one HF engine, checkpoints after every second."""
    folder = tmp_path_factory.mktemp("runs")
    run_job(
        *(3, "--topology.rollout_ranks", "1", *HF, "--run.name", "whole", "--run.steps", "4"),
        *("--checkpoint.save_interval", "2", "--checkpoint.keep_last", "0"),
        *("--rewards", '[{"name": "REWARD"}]'.replace("REWARD", str(_length_reward(folder)))),
        folder=folder,
    )
    return folder


def _length_reward(folder: Path) -> str:
    """A reward function of the user's own that tells random answers apart."""
    path = folder / "own_reward.py"
    path.write_text(
        "def vowels(prompts, completions, **columns):\n"
        "    return [float(sum(letter in 'aeiou' for letter in text)) for text in completions]\n"
    )
    return f"{path}:vowels"


def test_a_job_logs_every_step_and_its_curves(finished: Path) -> None:
    rows = metrics(finished, "whole")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["weights/version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["policy/ratio_max"] == pytest.approx(1, abs=1e-3) for row in rows)
    assert all(row["staleness/max"] == 0 for row in rows)
    assert all(row["reward/vowels"] == row["reward/mean"] for row in rows)
    board = EventAccumulator(str(finished / "whole" / "tensorboard")).Reload()
    for name in set(rows[0]) - {"step"}:
        assert [point.step for point in board.Scalars(name)] == [1, 2, 3, 4], name
    assert board.Tags()["tensors"] == ["samples/text_summary"]


def test_the_checkpoint_opens_in_transformers_and_holds_what_was_trained(finished: Path) -> None:
    first, last = (finished / "whole" / "checkpoints" / f"step_{step:08d}" for step in (2, 4))
    model = AutoModelForCausalLM.from_pretrained(last)
    assert AutoTokenizer.from_pretrained(last).chat_template
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    before, after = load_file(first / "model.safetensors"), load_file(last / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert not list((finished / "whole" / "checkpoints").glob("partial*"))


def test_the_same_seed_gives_the_same_metrics(finished: Path, tmp_path: Path) -> None:
    reward = str(finished / "own_reward.py") + ":vowels"
    run_job(
        *(3, "--topology.rollout_ranks", "1", *HF, "--run.name", "again", "--run.steps", "4"),
        *("--rewards", f'[{{"name": "{reward}"}}]'),
        folder=tmp_path,
    )
    assert without_times(metrics(tmp_path, "again")) == without_times(metrics(finished, "whole"))


def test_a_resumed_run_equals_the_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    reward = str(finished / "own_reward.py") + ":vowels"
    run_job(
        *(3, "--topology.rollout_ranks", "1", *HF, "--run.name", "resumed", "--run.steps", "4"),
        *("--checkpoint.resume", str(finished / "whole" / "checkpoints" / "step_00000002")),
        *("--rewards", f'[{{"name": "{reward}"}}]'),
        folder=tmp_path,
    )
    assert without_times(metrics(tmp_path, "resumed")) == without_times(metrics(finished, "whole"))[2:]


def test_two_zero_trainers_and_two_vllm_engines_train(tmp_path: Path) -> None:
    zero = ("--plugin_config.plugin", "zero", "--plugin_config.zero_stage", "2", "--plugin_config.precision", "bf16")
    rewards = ("--rewards", f'[{{"name": "{_length_reward(tmp_path)}"}}]', "--grpo_config.lr", "1e-3")
    run_job(
        *(4, *zero, *rewards, "--model_config.dtype", "bfloat16", "--run.name", "zero", "--run.steps", "2"),
        folder=tmp_path,
    )
    rows = metrics(tmp_path, "zero")
    assert [row["weights/version"] for row in rows] == [1, 2]
    assert all(row["policy/logprob_diff_mean"] < 0.05 for row in rows)
    checkpoint = tmp_path / "zero" / "checkpoints" / "step_00000002"
    assert len(list((checkpoint / "training").glob("optimizer_*"))) == 2
    before, after = (load_file(path / "model.safetensors") for path in (ROOT / "models" / "tiny", checkpoint))
    # A norm's weight is 1, where a bfloat16 is too coarse for two steps.
    assert [name for name in before if torch.equal(before[name], after[name]) and "norm" not in name] == []


def test_a_tensor_parallel_engine_trains_with_ratio_one(tmp_path: Path) -> None:
    reward = _length_reward(tmp_path)
    run_job(
        *(
            3,
            "--topology.rollout_ranks",
            "2",
            "--topology.rollout_tp_size",
            "2",
            "--run.name",
            "tp",
            "--run.steps",
            "3",
        ),
        *("--rewards", f'[{{"name": "{reward}"}}]', "--rollout.temperature", "0.6"),
        folder=tmp_path,
    )
    rows = metrics(tmp_path, "tp")
    assert len(rows) == 3
    assert all(row["policy/logprob_diff_mean"] < 1e-3 for row in rows), rows
    assert not list(Path("/dev/shm").glob("rayless.*"))


@pytest.mark.parametrize("victim", ["trainer[0]", "rollout[0]"])
def test_a_killed_rank_ends_the_job_and_is_named(victim: str, tmp_path: Path) -> None:
    job = start_job(
        2, *HF, "--run.name", "killed", "--run.steps", "2000", "--run.num_episodes", "2000", folder=tmp_path
    )
    path = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, logs(tmp_path)
        time.sleep(0.2)
    rank = {"trainer[0]": 0, "rollout[0]": 1}[victim]
    os.kill(_pid_of_rank(job.pid, rank), signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert time.monotonic() - killed_at < 30
    assert job.returncode != 0
    assert re.search(rf"Root Cause.*?rank\s+: {rank} ", output, re.DOTALL), output
    assert re.search(rf"rank {rank} .*{re.escape(victim)} .*logs/", output), output


def _pid_of_rank(launcher: int, rank: int) -> int:
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(pid)
    raise AssertionError(f"no child of {launcher} has rank {rank}")


def test_an_exception_names_its_rank_with_its_traceback_last(tmp_path: Path) -> None:
    own = tmp_path / "own_reward.py"
    own.write_text("def broken(prompts, completions, **columns):\n    raise RuntimeError('no verifier today')\n")
    job = start_job(3, *HF, "--rewards", f'[{{"name": "{own}:broken"}}]', folder=tmp_path)
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    said = output.split("rollout[0]: ", 1)[1]
    assert said.startswith("RuntimeError: no verifier today")
    assert "own_reward.py" in said.split("Root Cause")[0]
    assert not re.search(r"^(trainer|rollout)\[\d\]: ", said, re.MULTILINE), "another rank speaks after the guilty one"
