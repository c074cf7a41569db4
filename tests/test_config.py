"""The configuration: what is written is what is meant, flags win over files, the saved text gives the same job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rayless.launch.config import RECIPES, ROOT, SECTIONS, TYPES, JobConfig, find_path, read_config
from rayless.launch.yaml_text import dump_yaml, load_yaml
from rayless.rollout.rewards import RewardConfig

TINY = ["--config", str(RECIPES / "tiny.yaml")]
CASES = Path(__file__).parent / "cases"
# The keys of the case file, as they are called here.
OURS = {
    "learning_rate": "grpo_config.lr",
    "learing_rate": "grpo_config.lrr",
    "kl_coefficient": "grpo_config.beta",
    "temperature": "rollout.temperature",
    "num_generations": "rollout.num_generations",
    "shuffle": "logging.tensorboard",
    "run_name": "run.name",
    "save_every": "checkpoint.save_interval",
}
# Where the case file allows a refusal instead of the value.
REFUSED = ("num_generations: 8.0", "run_name: 007")


def read(*arguments: str) -> JobConfig:
    return read_config([*TINY, *arguments])


def read_file(folder: Path, text: str, *arguments: str) -> JobConfig:
    """The tiny recipe with a second file over it."""
    path = folder / "over.yaml"
    path.write_text(text)
    return read("--config", str(path), *arguments)


@pytest.mark.parametrize(
    "case",
    [json.loads(line) for line in (CASES / "config_value_cases.jsonl").read_text().splitlines()],
    ids=lambda case: case["yaml"],
)
def test_values_of_the_case_file_are_read_as_meant_or_refused_by_name(case: dict[str, Any], tmp_path: Path) -> None:
    name, _, value = case["yaml"].partition(": ")
    section, _, key = OURS[name].partition(".")
    text = f"{section}:\n  {key}: {value}\n"
    if "error" in case or case["yaml"] in REFUSED:
        with pytest.raises(ValueError, match=rf"^[^\n]*{re.escape(OURS[name])}[^\n]*$"):
            read_file(tmp_path, text)
        return
    found = getattr(getattr(read_file(tmp_path, text), section), key)
    assert (found, type(found)) == (case["must_be"], type(case["must_be"]))


def test_the_misspelt_learning_rate_is_answered_with_the_right_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown key 'grpo_config.lrr'; the nearest is 'grpo_config.lr'$"):
        read_file(tmp_path, "grpo_config: {lrr: 1e-6}")


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_read(recipe: Path) -> None:
    assert read_config(["--config", str(recipe)]).title == recipe.stem


def test_without_a_file_a_recipe_is_taken() -> None:
    assert read_config(["--run.steps", "1"]).title in ("quickstart", "qwen_gsm8k")


def test_a_mark_of_hashes_is_a_text_and_no_comment() -> None:
    assert read_config(["--config", str(RECIPES / "qwen_gsm8k.yaml")]).data.answer_after == "####"
    assert read("--data.system_prompt", "# Sums").data.system_prompt == "# Sums"


@pytest.mark.parametrize("text", ["7", "1e5", "true", "a: b", "[a]", '"q"', "a # b", "", " x", "- x", "x\ny"])
def test_text_given_as_a_flag_stays_as_it_is(text: str) -> None:
    assert read("--data.system_prompt", text).data.system_prompt == text


def test_null_as_a_flag_means_nothing() -> None:
    config = read("--data.system_prompt", "null", "--run.steps", "null")
    assert (config.data.system_prompt, config.run.steps) == (None, None)


def test_a_date_is_a_text(tmp_path: Path) -> None:
    assert read_file(tmp_path, "run: {name: 2026-11-30}").run.name == "2026-11-30"


@pytest.mark.parametrize("value", ["7", "1e5", "null", "true", "####", "a: b", "Answer:"])
def test_quoted_values_inside_free_keys_stay_text(value: str, tmp_path: Path) -> None:
    own = f"{{own: '{value}'}}"
    config = read_file(tmp_path, f"data: {{task_options: {own}}}\nrewards: [{{name: math, options: {own}}}]")
    assert config.data.task_options == {"own": value}
    assert config.rewards == [RewardConfig(name="math", options={"own": value})]


def test_flags_win_over_files_wherever_they_stand() -> None:
    assert read_config(["--run.steps", "7", *TINY]).run.steps == 7
    assert read_config([*TINY, "--run.steps=7"]).run.steps == 7


def test_of_a_flag_or_file_given_twice_the_later_one_wins(tmp_path: Path) -> None:
    assert read("--run.steps", "7", "--run.steps=8").run.steps == 8
    config = read_file(tmp_path, "run: {steps: 9}")
    assert (config.run.steps, config.run.seed, config.title) == (9, 1, "over")


def test_reward_functions_are_replaced_or_appended() -> None:
    assert [reward.name for reward in read("--rewards", "[{name: math}]").rewards] == ["math"]
    assert [reward.name for reward in read("--rewards+", "{name: math}").rewards] == ["number_match", "math"]


def test_an_entry_given_anew_takes_nothing_from_the_old_one() -> None:
    with pytest.raises(ValueError, match=r"^rewards\.name must be given$"):
        read("--rewards", "[{weight: 2}]")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--run.name", "007", "--grpo_config.lr", "1e-6", "--plugin_config.max_norm", ".inf"],
        [
            "--run.name",
            "1234e56",
            "--data.system_prompt",
            "####",
            "--rollout.stop",
            '["1e5", "yes", "a: b", "\\n", "é"]',
        ],
        [
            "--data.system_prompt",
            "two\n\nlines: # x",
            "--data.task_options",
            "{a: '1e5', b: 1e5, c: null, d: [1, '2']}",
        ],
        ["--rewards", "[{name: math, weight: -1e-7, options: {a: '7', b: 7}}]", "--rollout.kv_cache_gib", "0.5"],
        ["--grpo_config.temperature", "1", "--grpo_config.num_generations", "4", "--dry-run"],
    ],
)
def test_the_saved_text_gives_the_same_job_again(arguments: list[str], tmp_path: Path) -> None:
    config = read(*arguments)
    (tmp_path / "config.yaml").write_text(config.text)
    again = read_config(["--config", str(tmp_path / "config.yaml")])
    assert replace(again, title=config.title, dry_run=config.dry_run) == config


def test_the_saved_text_names_every_key() -> None:
    saved = load_yaml(read().text)
    assert list(saved) == [*SECTIONS, "rewards"]
    for name, kind in SECTIONS.items():
        assert set(saved[name]) == {field.name for field in fields(kind)}
    assert saved["rewards"] == [{"name": "number_match", "weight": 1.0, "options": {}}]


def test_dumped_yaml_is_loaded_equal() -> None:
    value = {
        "a": ["1e5", "1.0", "7", "007", "null", "~", "yes", "2026-11-30", "####", "", "0x1F"],
        "b": [1e-7, 1e22, 3],
    }
    assert load_yaml(dump_yaml(value)) == value


def test_temperature_and_group_size_are_set_once_and_known_to_both_roles() -> None:
    grpo = read("--rollout.temperature", "0.7").grpo_config
    assert (grpo.temperature, grpo.num_generations) == (0.7, 4)


def test_a_model_is_found_here_in_the_checkout_or_by_its_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_path("models/tiny", "model_config.path") == str(ROOT / "models" / "tiny")
    assert find_path("Qwen/Qwen2.5-1.5B-Instruct", "model_config.path") == "Qwen/Qwen2.5-1.5B-Instruct"
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert find_path("models/tiny", "model_config.path") == str(tmp_path / "models" / "tiny")


def test_data_is_found_in_the_checkout_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = ("--data.source", "jsonl", "--data.task", "null", "--data.task_options", "{}")
    assert read(*source, "--data.path", "tests/cases/x.jsonl").data.path == "tests/cases/x.jsonl"
    path = "tests/cases/messy_prompts.jsonl"
    assert read(*source, "--data.path", path).data.path == str(ROOT / path)


def test_help_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Flags win over files; of the same flag given twice, the later one." in text
    assert [key for key in TYPES if not key.startswith("rewards.") and f"--{key} " not in text] == []
    assert "Of prompt order and sampling. (type: int, default: 0)" in text


def test_printed_configuration_can_be_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--run.steps", "7", "--print_config")
    assert ended.value.code == 0
    printed = load_yaml(capsys.readouterr().out)
    assert printed["run"]["steps"] == 7
    assert printed["rewards"] == [{"name": "number_match"}]


def test_reading_the_configuration_loads_neither_vllm_nor_colossalai() -> None:
    program = (
        "import sys; from rayless.launch.config import read_config; read_config(sys.argv[1:]);"
        "print([name for name in ('vllm', 'colossalai', 'rayless.trainers.policy') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program, *TINY], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
