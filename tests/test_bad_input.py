"""Bad input ends in one readable line before any model loads: arguments, files, models, data, reward functions.

The first tests call `read_config`, the next `prepare`, which also opens tokenizer and data; the last are real jobs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from jobs import ROOT, start_job

from rayless.launch.config import RECIPES, TYPES, read_config
from rayless.launch.grpo import prepare

TINY = ["--config", str(RECIPES / "tiny.yaml")]
JSONL = ["--data.source", "jsonl", "--data.task", "null", "--data.task_options", "{}"]
CASES = Path(__file__).parent / "cases"
# Keys where a number out of the ordinary means something, and says so in its description.
MEANINGFUL = {
    ("grpo_config.clip_high", ".inf"),
    ("grpo_config.clip_cov_low", "-1"),
    ("grpo_config.off_policy_threshold", "-1"),
    ("grpo_config.correction_high", ".inf"),
    ("plugin_config.max_norm", ".inf"),
}
REWARDS = "a list of {name, weight, options}"
TEXT = "text (quoted if it reads as a number)"


def refusal(*arguments: str) -> str:
    """What `read_config` says about the tiny recipe with these arguments."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        read_config([*TINY, *arguments])
    return str(caught.value)


def refusal_of_file(folder: Path, text: str | bytes) -> str:
    """What `read_config` says about the tiny recipe with a file over it, less the file's folder."""
    path = folder / "own.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return refusal("--config", str(path)).replace(f"{folder}/", "")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of 2."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("foo", "unrecognized arguments: foo; settings are given as --section.key VALUE"),
        ("--run.steps 3 4", "unrecognized arguments: 4; settings are given as --section.key VALUE"),
        ("-c", "unrecognized arguments: -c; settings are given as --section.key VALUE"),
        ("--run.steps", "argument --run.steps: expected one argument"),
        ("--run.steps --dry-run", "argument --run.steps: expected one argument"),
        ("--dry_run", "unknown flag '--dry_run'; the nearest is '--dry-run'"),
        ("--dry", "unknown flag '--dry'; the nearest is '--dry-run'"),
        ("--dry-run=yes", "argument --dry-run: ignored explicit argument 'yes'"),
        ("--conf x.yaml", "unknown flag '--conf'; the nearest is '--config'"),
        ("--run.step 3", "unknown flag '--run.step'; the nearest is '--run.steps'"),
        ("--run.step=3", "unknown flag '--run.step'; the nearest is '--run.steps'"),
        ("--rollout.temp 1", "unknown flag '--rollout.temp'; the nearest is '--rollout.temperature'"),
        ("--temperature 1", "unknown flag '--temperature'; the nearest is '--rollout.temperature'"),
        ("--grpo.lr 1", "unknown flag '--grpo.lr'; the nearest is '--grpo_config.lr'"),
        ("--run.steps.x 1", "unknown flag '--run.steps.x'; the nearest is '--run.steps'"),
        ("--data.task_options.size 9", "unknown flag '--data.task_options.size'; the nearest is '--data.task_options'"),
        ("--run.seed null", "run.seed must be a whole number, got null"),
        ("--run.seed 1.5", "run.seed must be a whole number, got '1.5'"),
        ("--run.seed x", "run.seed must be a whole number, got 'x'"),
        ("--run.seed true", "run.seed must be a whole number, got 'True'"),
        ("--run.seed=", "run.seed must be a whole number, got ''"),
        ("--run.seed 4294967296", "run.seed must lie between 0 and 4294967295, got 4294967296"),
        ("--run.steps x", "run.steps must be a whole number or null, got 'x'"),
        ("--run.name a/b", "run.name must be a plain folder name, got 'a/b'"),
        ("--run.name ..", "run.name must be a plain folder name, got '..'"),
        ("--run.dir=", "run.dir must be a folder, got ''"),
        ("--grpo_config.lr nan", "grpo_config.lr must be a number, got 'nan'"),
        (
            "--grpo_config.scale_rewards 1",
            "grpo_config.scale_rewards must be one of group, batch, none or null, got '1'",
        ),
        ("--grpo_config.schedule cos", "grpo_config.schedule must be one of constant, linear, cosine, got 'cos'"),
        ("--run.device gpu", "run.device must be one of auto, cpu, cuda, got 'gpu'"),
        ("--rollout.stop [a,1]", "rollout.stop must be a list of texts, got '1'"),
        ("--rollout.temperature 0.001", "rollout.temperature must be finite and at least 0.01, got 0.001"),
        ("--data.task_options 3", "data.task_options must be keys with values, got '3'"),
        ("--rewards null", f"rewards must be {REWARDS}, got null"),
        ("--rewards [math]", f"rewards must be {REWARDS}, got 'math'"),
        ("--rewards '[{name: math, wight: 2}]'", "unknown key 'rewards.wight'; the nearest is 'rewards.weight'"),
        ("--rewards '[{name: math, weight: x}]'", "rewards.weight must be a number, got 'x'"),
        ("--rewards '[{name: math, weight: null}]'", "rewards.weight must be a number, got null"),
        ("--rewards '[{name: math, weight: .inf}]'", "rewards.weight must be finite, got inf for 'math'"),
        ("--rewards '[{name: 7}]'", f"rewards.name must be {TEXT}, got '7'"),
        ("--config", "--config must name a file, got ''"),
        ("--config nowhere.yaml", "--config must name a file, got 'nowhere.yaml'"),
        ("--config .", "--config must name a file, got '.'"),
        ("--plugin_config.plugin hybrid", "plugin_config.plugin 'hybrid' is not there yet; there are ddp and zero"),
        ("--plugin_config.plugin fsdp", "plugin_config.plugin 'fsdp' is not there yet; there are ddp and zero"),
        ("--plugin_config.plugin gemini", "plugin_config.plugin 'gemini' is not there yet; there are ddp and zero"),
        ("--plugin_config.plugin dpd", "plugin_config.plugin must be ddp or zero, got 'dpd'"),
        (
            "--grpo_config.temperature 0.5",
            "grpo_config.temperature must equal rollout.temperature = 1.0, got 0.5",
        ),
        (
            "--rollout.temperature 0.5 --grpo_config.temperature 1",
            "grpo_config.temperature must equal rollout.temperature = 0.5, got 1.0",
        ),
        (
            "--grpo_config.num_generations 8",
            "grpo_config.num_generations must equal rollout.num_generations = 4, got 8",
        ),
        (
            "--rollout.num_generations 1",
            "rollout.num_generations must be at least 2: a group of one has no signal, got 1",
        ),
        (
            "--model_config.path models/tony",
            "model_config.path: 'models/tony' does not exist, and is no model of the hub; "
            "`make install` builds models/smollm2 and models/tiny",
        ),
        (
            "--model_config.path .",
            "model_config.path: '.' is no model folder (no config.json in it), and is no model of the hub",
        ),
        (
            "--model_config.attn_implementation eager --grpo_config.layout shared_prefix",
            "grpo_config.layout=shared_prefix needs model_config.attn_implementation=sdpa, got eager; "
            "take grpo_config.layout=padded",
        ),
    ],
)
def test_a_bad_argument_is_answered_in_one_line(arguments: str, message: str) -> None:
    assert refusal(*shlex.split(arguments)) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.yaml must hold sections with keys, got nothing"),
        ("# nothing yet", "own.yaml must hold sections with keys, got nothing"),
        ("- run", "own.yaml must hold sections with keys, got list"),
        ("run", "own.yaml must hold sections with keys, got str"),
        ("run:", "own.yaml: section 'run' must hold keys"),
        ("run: 3", "own.yaml: section 'run' must hold keys"),
        ("run: [3]", "own.yaml: section 'run' must hold keys"),
        ("run: {step: 3}", "own.yaml: unknown key 'run.step'; the nearest is 'run.steps'"),
        (
            "rolout: {temperature: 1}",
            "own.yaml: unknown key 'rolout.temperature'; the nearest is 'rollout.temperature'",
        ),
        ("reward: []", "own.yaml: unknown key 'reward'; the nearest is 'rewards'"),
        ("temperature: 1", "own.yaml: unknown key 'temperature'; the nearest is 'rollout.temperature'"),
        ("run: {grpo_config: {lr: 1}}", "own.yaml: unknown key 'run.grpo_config.lr'; the nearest is 'grpo_config.lr'"),
        ("data: {task: {size: 3}}", f"data.task must be {TEXT} or null, got \"{{'size': 3}}\""),
        ("data: {size: 3}", "own.yaml: unknown key 'data.size'; the nearest is 'data.split'"),
        ("dry_run: true", "own.yaml: unknown key 'dry_run'; the nearest is 'run.dir'"),
        ("run: {seed: null}", "run.seed must be a whole number, got null"),
        ("grpo_config: {lr: }", "grpo_config.lr must be a number, got null"),
        ("data: {source: }", "data.source must be given"),
        ("run: {name: 007}", f"run.name must be {TEXT} or null, got '7'"),
        ("run: {steps: [3]}", "run.steps must be a whole number or null, got '[3]'"),
        ("rollout: {num_generations: 8.5}", "rollout.num_generations must be a whole number, got '8.5'"),
        ("rewards: {name: math}", f"rewards must be {REWARDS}, got \"{{'name': 'math'}}\""),
        ("rewards:", f"rewards must be {REWARDS}, got null"),
        ("rewards: [{name: math, wait: 1}]", "unknown key 'rewards.wait'; the nearest is 'rewards.weight'"),
        ("rewards: [{name: math, options: 3}]", "rewards.options must be keys with values, got '3'"),
    ],
)
def test_a_bad_file_is_answered_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    assert refusal_of_file(tmp_path, text) == message


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("run: {steps: 3", "line 1", "expected ',' or '}'"),
        ("run:\n\tsteps: 3", "line 2", "cannot start any token"),
        ("run: {seed: 1}\ndata: {split: a}\nrun: {steps: 3}", "line 3", "'run' stands twice"),
        ("run: {steps: 3, steps: 4}", "line 1", "'steps' stands twice"),
        ("run: !!python/name:os.system", "line 1", "could not determine a constructor"),
        (b"run: {name: \xff}", "position 12", "can't decode byte 0xff"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_the_place(
    text: str | bytes, place: str, reason: str, tmp_path: Path
) -> None:
    message = refusal_of_file(tmp_path, text)
    assert message.startswith("own.yaml cannot be read as YAML: ")
    assert place in message
    assert reason in message


@pytest.mark.parametrize("section", ["model_config", "data", "rewards"])
def test_what_has_no_default_has_to_be_given(section: str, tmp_path: Path) -> None:
    recipe = (RECIPES / "tiny.yaml").read_text()
    path = tmp_path / "own.yaml"
    path.write_text(re.sub(rf"^{section}:\n(  .*\n)+", "", recipe, flags=re.MULTILINE))
    with pytest.raises(ValueError, match=rf"^({section}\.\w+ must be given|rewards must be .*, got null)$"):
        read_config(["--config", str(path)])


NUMERIC_KEYS = [key for key, hint in TYPES.items() if {int, float} & {hint, *get_args(hint)}]


@pytest.mark.parametrize("value", ["-1", ".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", [key for key in NUMERIC_KEYS if not key.startswith("rewards.")])
def test_a_number_out_of_range_is_refused_by_name_or_means_something(key: str, value: str) -> None:
    if (key, value) in MEANINGFUL:
        read_config([*TINY, f"--{key}={value}"])
        return
    assert refusal(f"--{key}={value}").startswith(f"{key} must ")


def test_the_walk_over_numbers_sees_them_all() -> None:
    assert len(NUMERIC_KEYS) >= 28
    assert {"run.steps", "rollout.kv_cache_gib", "rewards.weight", "grpo_config.lr"} <= set(NUMERIC_KEYS)


def test_a_negative_weight_is_a_penalty() -> None:
    assert read_config([*TINY, "--rewards", "[{name: math, weight: -1}]"]).rewards[0].weight == -1


def refusal_of_job(*arguments: str) -> str:
    """What `prepare` says about the tiny recipe with these arguments."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        prepare([*TINY, *arguments])
    return str(caught.value)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--grpo_config.minibatch_size 3",
            "grpo_config.batch_size must be a multiple of training ranks x grpo_config.minibatch_size = 1 x 3, got 4",
        ),
        (
            "--topology.rollout_ranks 2",
            "the job needs at least one rollout rank and one trainer rank, got 2 rollout ranks "
            "(topology.rollout_ranks=2, rollout_tp_size=1) of 2 ranks",
        ),
        (
            "--topology.rollout_ranks 1 --topology.rollout_tp_size 2",
            "topology.rollout_ranks must be a multiple of topology.rollout_tp_size, got 1 and 2",
        ),
        (
            "--rollout.max_prompt_length 1",
            "rollout.max_prompt_length must let a prompt through, got 1: the shortest of 64 prompts has 46 tokens",
        ),
        (
            "--rewards '[{name: \"no_module:reward\"}]'",
            "rewards: cannot import no_module for the reward no_module:reward: No module named 'no_module'",
        ),
        (
            "--rewards '[{name: \"nowhere.py:reward\"}]'",
            "rewards: cannot import nowhere.py for the reward nowhere.py:reward: "
            "[Errno 2] No such file or directory: 'nowhere.py'",
        ),
        (
            "--rewards '[{name: \"json:reward\"}]'",
            "rewards: json has no 'reward', wanted by the reward json:reward",
        ),
        (
            "--rewards '[{name: mat}]'",
            "rewards.name must be one of exact_match, number_match, math, reasoning_gym (nearest: math), or your own "
            "function as package.module:function or path/to/file.py:function, got 'mat'",
        ),
        ("--rewards []", "rewards must name at least one reward function, got an empty list"),
        (
            "--data.task chain_sums",
            "data.task must be a task of reasoning-gym, got 'chain_sums'; nearest: chain_sum, decimal_chain_sum",
        ),
        (
            "--checkpoint.resume nowhere",
            "checkpoint.resume must be auto, never or a checkpoint's folder, got 'nowhere'",
        ),
    ],
)
def test_a_job_that_cannot_start_is_answered_in_one_line(arguments: str, message: str) -> None:
    assert refusal_of_job(*shlex.split(arguments)) == message


@pytest.mark.usefixtures("launcher")
def test_a_missing_data_file_is_named() -> None:
    message = refusal_of_job(*JSONL, "--data.path", "nowhere.jsonl")
    assert message == "data.path must be a file, got nowhere.jsonl, which does not exist"


@pytest.mark.usefixtures("launcher")
def test_every_broken_row_is_one_line_with_file_and_number() -> None:
    path = CASES / "broken_prompts.jsonl"
    lines = refusal_of_job(*JSONL, "--data.path", str(path)).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{path}:{number}" for number in (3, 4, 5, 6, 7)]


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config.json": "{"}, "cannot be opened: .*is not a valid JSON file"),
        ({"config.json": "{}"}, "cannot be opened: .*model_type"),
        ({"tokenizer.json": "{"}, "cannot be opened: "),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, "holds no tokenizer"),
    ],
)
def test_a_model_folder_that_cannot_be_opened_is_named(
    change: dict[str, str | None], reason: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny", model, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, text in change.items():
        (model / name).unlink()
        if text is not None:
            (model / name).write_text(text)
    message = refusal_of_job("--model_config.path", str(model))
    assert re.fullmatch(rf"model_config\.path: '{re.escape(str(model))}' {reason}.*", message)


def test_without_a_launcher_the_line_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_STEP_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert refusal_of_job().startswith("no launcher set RANK: start it with `torchrun ")


def test_alone_the_script_explains_itself_and_refuses_with_two() -> None:
    def alone(*arguments: str) -> Any:
        return subprocess.run(
            [sys.executable, str(ROOT / "launch" / "grpo.py"), *arguments], capture_output=True, text=True
        )

    helped, refused = alone("--help"), alone("--run.step", "3")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--run.steps" in helped.stdout
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "rayless: unknown flag '--run.step'; the nearest is '--run.steps'\n"


@pytest.mark.usefixtures("launcher")
def test_a_dry_run_shows_the_ranks_and_the_arithmetic() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "grpo.py"), *TINY, "--dry-run"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[2] for line in lines[:2]] == ["trainer[0]", "rollout[0]"]
    assert lines[-1] == "run              1 episodes x 16 updates, 3 optimizer steps in all"


@pytest.mark.job
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rollout.temprature", "1"], "unknown flag '--rollout.temprature'; the nearest is '--rollout.temperature'"),
        ([*JSONL, "--data.path", "nowhere.jsonl"], "data.path must be a file, got nowhere.jsonl, which does not exist"),
    ],
)
def test_a_real_job_says_it_once_and_its_worker_exits_with_two(arguments: list[str], line: str, tmp_path: Path) -> None:
    job = start_job(2, *arguments, folder=tmp_path)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 1, output
    assert re.findall(r"^.*rayless: .*$", output, flags=re.MULTILINE) == [f"rayless: {line}"]
    assert "Traceback" not in output.partition("rayless: ")[0]
    assert re.findall(r"exitcode\s*: (-?\d+)", output)[-1] == "2", output
    assert "launch/config.py" not in output
    assert list(tmp_path.iterdir()) == []
