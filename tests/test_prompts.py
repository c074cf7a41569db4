"""Prompts: messy and broken sources, chat templates, and an order that is a pure function of seed and number."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rayless.rollout.prompts import (
    DataConfig,
    Prompt,
    Prompts,
    PromptStream,
    episode_order,
    load_prompts,
    sampling_seed,
)

CASES = Path(__file__).parent / "cases"
ONE_DIGIT_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "models/tiny")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_length: int = 1000) -> Prompts:
    return load_prompts(config, tokenizer, max_prompt_length=max_prompt_length, seed=0)


def jsonl(path: Path, *rows: Any, **keys: Any) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source="jsonl", path=str(path), **keys)


def plain_prompts(count: int) -> list[Prompt]:
    return [Prompt(row=row, text=str(row), token_ids=[row], answer="", columns={}) for row in range(count)]


def test_messy_file_loads_as_it_was_meant(tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture) -> None:
    config = DataConfig(source="jsonl", path=str(CASES / "messy_prompts.jsonl"))
    with caplog.at_level(logging.WARNING, logger="rayless.rollout.prompts"):
        prompts = load(config, tokenizer).kept
    assert [prompt.row for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [prompt.columns["id"] for prompt in prompts] == ["m1", "m2", "m3", "m4", "m1"]
    assert [prompt.answer for prompt in prompts] == ["5", "56", "0", "1,250", "5"]
    assert [prompt.text for prompt in prompts] == [
        "What is 2+3?",
        "Wie viel ist 7×8? „Nur die Zahl“",  # noqa: RUF001
        "line one\u2028line two",
        "\U0001f600 plus nothing",
        "What is 2+3?",
    ]
    assert prompts[3].columns == {"id": "m4", "extra": {"level": 3}}
    assert [record.getMessage() for record in caplog.records] == [f"{config.path}: more than one row has id m1"]


def test_broken_file_names_every_bad_line_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    path = str(CASES / "broken_prompts.jsonl")
    with pytest.raises(ValueError, match="not JSON") as caught:
        load(DataConfig(source="jsonl", path=path), tokenizer)
    assert str(caught.value).splitlines() == [
        f"{path}:3: not JSON: Expecting value at column 49",
        f"{path}:4: no answer, only id, prompt",
        f"{path}:5: not an object",
        f"{path}:6: prompt is empty",
        f"{path}:7: answer is null",
    ]


def test_list_of_bad_lines_stops_at_twenty(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x.jsonl:1: not an object") as caught:
        load(jsonl(tmp_path / "x.jsonl", *range(23)), tokenizer)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "(+3 more)"


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_folder_and_missing_path_are_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, source: Any) -> None:
    with pytest.raises(ValueError, match=r"data.path must be a file, got the folder"):
        load(DataConfig(source=source, path=str(tmp_path)), tokenizer)
    with pytest.raises(ValueError, match=r"data.path must be a file, got .*nowhere, which does not exist"):
        load(DataConfig(source=source, path=str(tmp_path / "nowhere")), tokenizer)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf\r\n  \r\n"])
def test_empty_file_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"data.path must have rows, got .*empty.jsonl without"):
        load(DataConfig(source="jsonl", path=str(tmp_path / "empty.jsonl")), tokenizer)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8"),
        (b'{"prompt": "\\ud83d", "answer": "1"}', "prompt holds half a surrogate pair"),
        (b'{"answer": "1"}', "no prompt, only answer"),
        (b'{"prompt": " ", "answer": "1"}', "prompt is empty"),
        (b'{"prompt": 3, "answer": "1"}', "prompt is of type int"),
        (b'{"prompt": "p", "answer": true}', "answer is of type bool"),
        (b'{"prompt": "p", "answer": NaN}', "answer is of type float"),
        (b'{"prompt": "p", "answer": ["1"]}', "answer is of type list"),
        (b'{"prompt": [], "answer": "1"}', "prompt has no message of the user"),
        (b'{"prompt": ["p"], "answer": "1"}', "prompt message 0 must be an object with role and content"),
        (b'{"prompt": [{"role": "user", "content": null}], "answer": "1"}', "prompt message 0 content is null"),
        (
            b'{"prompt": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "1"}], "answer": "1"}',
            "prompt ends with the assistant's message",
        ),
    ],
)
def test_bad_row_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: bytes, fault: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "good", "answer": "1"}\n\n' + row)
    with pytest.raises(ValueError, match=r"x.jsonl:3") as caught:
        load(DataConfig(source="jsonl", path=str(path)), tokenizer)
    assert str(caught.value) == f"{path}:3: {fault}"


def test_number_answers_keep_their_digits(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "p", "answer": 0.10}\n{"prompt": "p", "answer": -3}\n{"prompt": "p", "answer": 1e3}')
    prompts = load(DataConfig(source="jsonl", path=str(path)), tokenizer).kept
    assert [prompt.answer for prompt in prompts] == ["0.10", "-3", "1e3"]


def test_long_prompts_are_left_out_and_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config = jsonl(
        tmp_path / "x.jsonl",
        {"prompt": "a " * 100, "answer": "1"},
        {"prompt": "hello", "answer": "2"},
        {"prompt": "b " * 100, "answer": "3"},
    )
    prompts = load(config, tokenizer, max_prompt_length=50)
    assert [prompt.row for prompt in prompts.kept] == [1]
    assert prompts.num_too_long == 2
    length = len(prompts.kept[0].token_ids)
    assert len(load(config, tokenizer, max_prompt_length=length).kept) == 1
    with pytest.raises(ValueError, match=rf"rollout.max_prompt_length .* got {length - 1}: .* 3 prompts has {length} "):
        load(config, tokenizer, max_prompt_length=length - 1)


def test_prompt_ids_are_the_chat_with_one_open_assistant_turn(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = jsonl(tmp_path / "x.jsonl", {"prompt": "What is 2+3?", "answer": 5}, system_prompt="Be brief.")
    (prompt,) = load(config, tokenizer).kept
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompt.token_ids).count("<|im_start|>assistant") == 1


def test_messages_keep_their_turns_and_their_own_system_message(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "2+3?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    config = jsonl(
        tmp_path / "x.jsonl",
        {"prompt": messages, "answer": "5"},
        {"prompt": [{"role": "system", "content": "Mine."}, *messages], "answer": "5"},
        system_prompt="Yours.",
    )
    without, with_own = load(config, tokenizer).kept
    assert without.text == with_own.text == "2+3?"
    rest = (
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(without.token_ids) == f"<|im_start|>system\nYours.{rest}"
    assert tokenizer.decode(with_own.token_ids) == f"<|im_start|>system\nMine.{rest}"


def test_without_chat_template_the_text_stays_plain(tmp_path: Path) -> None:
    bare = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "models/tiny")
    bare.chat_template = None
    config = jsonl(tmp_path / "x.jsonl", {"prompt": "2+3?", "answer": "5"}, system_prompt="Be brief.")
    assert bare.decode(load(config, bare).kept[0].token_ids) == "Be brief.\n\n2+3?"


def test_a_refusing_chat_template_is_a_bad_row(tmp_path: Path) -> None:
    strict = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "models/tiny")
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"x.jsonl:1: the tokenizer's chat template refuses it: no system role"):
        load(jsonl(tmp_path / "x.jsonl", {"prompt": "2+3?", "answer": "5"}), strict)


def test_answer_after_keeps_what_follows_the_last_mark(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    config = jsonl(path, {"prompt": "p", "answer": "#### 1, no\n#### 72\n"}, answer_after="####")
    assert load(config, tokenizer).kept[0].answer == "72"
    rows = [{"prompt": "p", "answer": answer} for answer in ("72", "72 ####")]
    with pytest.raises(ValueError, match="lacks") as caught:
        load(jsonl(path, *rows, answer_after="####"), tokenizer)
    assert str(caught.value) == f"{path}:1: answer lacks '####'\n{path}:2: answer has nothing after '####'"


def test_parquet_rows_load_with_their_other_columns(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    chat = [{"role": "user", "content": "2+3?"}]
    Dataset.from_list([{"question": chat, "answer": 5, "level": 1}]).to_parquet(path)
    config = DataConfig(source="parquet", path=path, prompt_column="question")
    (prompt,) = load(config, tokenizer).kept
    assert (prompt.row, prompt.text, prompt.answer, prompt.columns) == (0, "2+3?", "5", {"level": 1})


def test_bad_parquet_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    Dataset.from_list([{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": None}]).to_parquet(path)
    with pytest.raises(ValueError, match="row 1") as caught:
        load(DataConfig(source="parquet", path=path), tokenizer)
    assert str(caught.value) == f"{path} row 1: answer is null"
    with pytest.raises(ValueError, match=r"data.prompt_column must be one of prompt, answer, got 'question'"):
        load(DataConfig(source="parquet", path=path, prompt_column="question"), tokenizer)
    Path(path).write_text("not a table")
    with pytest.raises(ValueError, match=r"data.path must be a Parquet file, got .*x.parquet: "):
        load(DataConfig(source="parquet", path=path), tokenizer)


def test_hub_out_of_reach_is_one_line(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data.path must be a hub data set within reach, got some/set: ") as caught:
        load(DataConfig(source="hub", path="some/set"), tokenizer)
    assert "\n" not in str(caught.value)


def test_reasoning_gym_entries_can_be_scored_by_their_task(tokenizer: PreTrainedTokenizerBase) -> None:
    config = DataConfig(source="reasoning_gym", task="chain_sum", task_options={**ONE_DIGIT_SUMS, "size": 5})
    prompts = load(config, tokenizer)
    assert len(prompts.kept) == 5
    first = prompts.kept[0]
    left, sign, right = first.columns["entry"]["metadata"]["expression"].split()
    assert int(first.answer) == int(left) + int(right) * (1 if sign == "+" else -1)


def test_reasoning_gym_takes_the_runs_seed_and_a_thousand_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    def texts(run_seed: int, **options: int) -> list[str]:
        config = DataConfig(source="reasoning_gym", task="chain_sum", task_options={**ONE_DIGIT_SUMS, **options})
        return [prompt.text for prompt in load_prompts(config, tokenizer, max_prompt_length=99, seed=run_seed).kept]

    assert len(texts(1)) == 1000
    assert texts(1, size=9) == texts(2, size=9, seed=1) != texts(2, size=9)


def test_reasoning_gym_without_a_single_answer_still_loads(tokenizer: PreTrainedTokenizerBase) -> None:
    config = DataConfig(source="reasoning_gym", task="propositional_logic", task_options={"size": 1})
    assert [prompt.answer for prompt in load(config, tokenizer).kept] == [""]


def test_reasoning_gym_mistakes_are_named(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"data.task must be .* got 'chain_sums'; nearest: chain_sum"):
        load(DataConfig(source="reasoning_gym", task="chain_sums"), tokenizer)
    for options in ({"max_term": 2}, {"min_terms": 3, "max_terms": 2}, {"size": "many"}):
        with pytest.raises(ValueError, match=r"data.task_options must suit reasoning-gym's chain_sum, got "):
            load(DataConfig(source="reasoning_gym", task="chain_sum", task_options=options), tokenizer)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "csv"}, "data.source must be one of reasoning_gym, jsonl, parquet, hub, got 'csv'"),
        ({"source": "jsonl"}, "data.path must be given with data.source jsonl, got None"),
        ({"source": "hub", "path": ""}, "data.path must hold some text, got ''"),
        ({"source": "reasoning_gym"}, "data.task must be given with data.source reasoning_gym, got None"),
        (
            {"source": "reasoning_gym", "task": "chain_sum", "path": "x"},
            "data.path must be left out with data.source reasoning_gym, got 'x'",
        ),
        (
            {"source": "jsonl", "path": "x", "task": "chain_sum"},
            "data.task must be left out with data.source jsonl, got 'chain_sum'",
        ),
        (
            {"source": "parquet", "path": "x", "split": "test"},
            "data.split must be left out with data.source parquet, got 'test'",
        ),
        (
            {"source": "jsonl", "path": "x", "answer_column": "prompt"},
            "data.answer_column must differ from data.prompt_column, got 'prompt' twice",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^data\.") as caught:
        DataConfig(**keys)
    assert str(caught.value) == message


def test_an_episode_is_a_permutation_that_repeats_only_for_its_seed_and_number() -> None:
    order = episode_order(20, seed=1, episode=0)
    assert sorted(order) == list(range(20))
    assert order == episode_order(20, seed=1, episode=0)
    others = [episode_order(20, seed=seed, episode=episode) for seed, episode in ((1, 1), (2, 0), (0, 1))]
    assert len({tuple(each) for each in (order, list(range(20)), *others)}) == 5


def test_stream_serves_every_prompt_once_an_episode_from_any_starting_number() -> None:
    stream = PromptStream(prompts=plain_prompts(7), groups_per_episode=7, seed=3)
    rows = [stream.prompt(number).row for number in range(21)]
    assert [sorted(rows[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert rows[:7] != rows[7:14]
    resumed = PromptStream(prompts=plain_prompts(7), groups_per_episode=7, seed=3)
    assert [resumed.prompt(number).row for number in range(10, 21)] == rows[10:]


def test_short_episodes_repeat_no_prompt() -> None:
    stream = PromptStream(prompts=plain_prompts(7), groups_per_episode=6, seed=3)
    assert [len({stream.prompt(number).row for number in range(start, start + 6)}) for start in (0, 6)] == [6, 6]


def test_sampling_seeds_leave_room_for_samples_and_never_meet() -> None:
    seeds = [sampling_seed(1, number) for number in range(5000)]
    assert all(0 <= seed < 2**31 - 2**16 for seed in seeds)
    ordered = sorted(seeds)
    assert min(high - low for low, high in pairwise(ordered)) == 1024
    assert sampling_seed(1, 7) == seeds[7] != sampling_seed(2, 7)
