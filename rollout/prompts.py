"""Prompts: from a reasoning-gym task, a JSONL or Parquet file or the hub to token ids, and the order of serving them.

All order is a pure function of seed and group number: a resumed run needs one integer, the groups started so far.
"""

from __future__ import annotations

import codecs
import difflib
import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Source = Literal["reasoning_gym", "jsonl", "parquet", "hub"]
Message = dict[str, Any]  # {"role": ..., "content": ...} and what else the chat template reads

_MAX_LISTED = 20  # bad rows and doubled ids named in one message
_SAMPLES_PER_GROUP = 2**10  # distance between the sampling seeds of neighbouring groups
_SAMPLING_SEEDS = 2**31 - 2**16  # below int32's end, with room for what is added per sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from; the config section `data`."""

    source: Source
    """A reasoning-gym task, a JSONL file, a Parquet file or a data set of the hub."""
    path: str | None = None
    """The file, or the data set's name on the hub."""
    subset: str | None = None
    """Which of the hub data set's configurations to load (`main` of openai/gsm8k), where it has several."""
    split: str = "train"
    """Split of the hub data set."""
    task: str | None = None
    """Name of the reasoning-gym task."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Settings of the reasoning-gym task; without `size` it has 1000 prompts, without `seed` it takes the run's."""
    system_prompt: str | None = None
    """System message put before every prompt whose own messages do not begin with one."""
    prompt_column: str = "prompt"
    """Column that holds the question: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column that holds the right answer: text or a number."""
    answer_after: str | None = None
    """Keep only what follows the last such mark in the stored answer (`####` for GSM8K)."""

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ValueError(f"data.source must be one of {', '.join(get_args(Source))}, got {self.source!r}")
        of_task, of_hub = self.source == "reasoning_gym", self.source == "hub"
        _check_place("task", self.task, absent=None, needed=of_task, allowed=of_task, source=self.source)
        _check_place("task_options", self.task_options, absent={}, allowed=of_task, source=self.source)
        _check_place("path", self.path, absent=None, needed=not of_task, allowed=not of_task, source=self.source)
        _check_place("subset", self.subset, absent=None, allowed=of_hub, source=self.source)
        _check_place("split", self.split, absent="train", allowed=of_hub, source=self.source)
        _check_place("prompt_column", self.prompt_column, absent="prompt", allowed=not of_task, source=self.source)
        _check_place("answer_column", self.answer_column, absent="answer", allowed=not of_task, source=self.source)
        _check_place("answer_after", self.answer_after, absent=None, allowed=not of_task, source=self.source)
        if self.prompt_column == self.answer_column:
            raise ValueError(
                f"data.answer_column must differ from data.prompt_column, got {self.answer_column!r} twice"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready for the engine, with what reward functions need."""

    row: int  # position in the source from 0; names the prompt for good
    text: str  # the question; of a list of messages the last that the user wrote
    token_ids: list[int]  # after the chat template, the assistant's turn opened
    answer: str  # "" where a reasoning-gym task has no single right answer
    columns: dict[str, Any]  # the source's other columns; for reasoning-gym its `entry`, whole


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a source gave: the prompts in its order, less those that are too long."""

    kept: list[Prompt]
    num_too_long: int


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_length: int, seed: int
) -> Prompts:
    """Read and tokenise every row, and leave out prompts of more than `max_prompt_length` tokens.

    ValueError for a source that cannot be read, for bad rows (one line each) and if nothing is left.
    """
    rows: Iterable[tuple[str, dict[str, Any] | str]]
    if config.source == "reasoning_gym":
        task = _open_task(config, seed)
        rows = ((f"{config.task} entry {number}", task[number]) for number in range(len(task)))
    elif config.source == "jsonl":
        rows = _jsonl_rows(_existing_file(config), config.answer_column)
    else:
        rows = _table_rows(config)
    prompts = _read(rows, config, tokenizer)
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_length]
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ValueError(
            f"rollout.max_prompt_length must let a prompt through, got {max_prompt_length}: "
            f"the shortest of {len(prompts)} prompts has {shortest} tokens"
        )
    return Prompts(kept=kept, num_too_long=len(prompts) - len(kept))


def episode_order(num_prompts: int, *, seed: int, episode: int) -> list[int]:
    """The permutation of the prompts in one episode."""
    generator = torch.Generator().manual_seed(random.Random(f"episode order {seed}:{episode}").getrandbits(63))
    return torch.randperm(num_prompts, generator=generator).tolist()


_recent_order = lru_cache(maxsize=2)(episode_order)  # two, for groups on both sides of an episode's end


@dataclass(frozen=True, slots=True)
class PromptStream:
    """Which prompt each group of the whole run gets; prompts beyond `groups_per_episode` sit that episode out."""

    prompts: list[Prompt]
    groups_per_episode: int
    seed: int

    def __post_init__(self) -> None:
        assert 0 < self.groups_per_episode <= len(self.prompts), "an episode serves no prompt twice"

    def prompt(self, number: int) -> Prompt:
        """The prompt of group `number`, counted from 0 over the whole run."""
        episode, position = divmod(number, self.groups_per_episode)
        return self.prompts[_recent_order(len(self.prompts), seed=self.seed, episode=episode)[position]]


def sampling_seed(seed: int, number: int) -> int:
    """Seed of group `number`'s first sample; sample i adds i. At most 2**31 - 2**16 - 1.

    Groups of up to 1024 samples share no seed within 2 million groups: neighbours stand 1024 apart on a ring.
    """
    start = random.Random(f"sampling {seed}").randrange(_SAMPLING_SEEDS)
    return (start + number * _SAMPLES_PER_GROUP) % _SAMPLING_SEEDS


def _check_place(
    key: str, value: object, *, absent: object, allowed: bool, source: Source, needed: bool = False
) -> None:
    if needed and value == absent:
        raise ValueError(f"data.{key} must be given with data.source {source}, got {value!r}")
    if not allowed and value != absent:
        raise ValueError(f"data.{key} must be left out with data.source {source}, got {value!r}")
    if value == "":
        raise ValueError(f"data.{key} must hold some text, got {value!r}")


def _open_task(config: DataConfig, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset  # takes seconds to import

    if config.task not in DATASETS:
        nearest = difflib.get_close_matches(str(config.task), DATASETS, cutoff=0.5)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        raise ValueError(f"data.task must be a task of reasoning-gym, got {config.task!r}{hint}")
    try:
        return create_dataset(config.task, **{"size": 1000, "seed": seed, **config.task_options})
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"data.task_options must suit reasoning-gym's {config.task}, got {config.task_options}: {_one_line(error)}"
        ) from error


def _existing_file(config: DataConfig) -> Path:
    path = Path(str(config.path))
    if path.is_dir():
        raise ValueError(f"data.path must be a file, got the folder {path}")
    if not path.is_file():
        raise ValueError(f"data.path must be a file, got {path}, which does not exist")
    return path


def _jsonl_rows(path: Path, answer_column: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    # Read as bytes: only there is a line what ends in a line feed, whatever separators stand inside the strings.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            stripped = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if stripped:
                yield f"{path}:{number}", _parse_line(stripped, answer_column)


def _parse_line(line: bytes, answer_column: str) -> dict[str, Any] | str:
    try:
        text = line.decode()
        row = json.loads(text)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    if not isinstance(row, dict):
        return "not an object"
    if isinstance(row.get(answer_column), int | float):  # 0.10 must not become 0.1
        row[answer_column] = json.loads(text, parse_int=str, parse_float=str)[answer_column]
    return row


def _table_rows(config: DataConfig) -> Iterator[tuple[str, dict[str, Any] | str]]:
    import datasets  # takes seconds to import

    if config.source == "parquet":
        arguments: dict[str, str | None] = {
            "path": "parquet",
            "data_files": str(_existing_file(config)),
            "split": "train",
        }
    else:
        arguments = {"path": config.path, "name": config.subset, "split": config.split}
    try:
        table = datasets.load_dataset(**arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        wanted = "a Parquet file" if config.source == "parquet" else "a hub data set within reach"
        raise ValueError(f"data.path must be {wanted}, got {config.path}: {_one_line(error)}") from error
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", config.answer_column)):
        if column not in table.column_names:
            raise ValueError(f"data.{key} must be one of {', '.join(table.column_names)}, got {column!r}")
    for number, row in enumerate(table):
        yield f"{config.path} row {number}", row


def _read(
    rows: Iterable[tuple[str, dict[str, Any] | str]], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    prompts: list[Prompt] = []
    faults: list[str] = []
    for number, (place, row) in enumerate(rows):
        prompt = row if isinstance(row, str) else _prompt(number, row, config, tokenizer)
        if isinstance(prompt, str):
            faults.append(f"{place}: {prompt}")
        else:
            prompts.append(prompt)
    if faults:
        raise ValueError("\n".join(_first(faults)))
    if not prompts:
        raise ValueError(
            f"data.{'path' if config.path else 'task'} must have rows, got {config.path or config.task} without"
        )
    counts = Counter(str(prompt.columns["id"]) for prompt in prompts if prompt.columns.get("id") is not None)
    doubled = [name for name, count in counts.items() if count > 1]
    if doubled:
        logger.warning("%s: more than one row has id %s", config.path, ", ".join(_first(doubled)))
    return prompts


def _first(lines: list[str]) -> list[str]:
    left_out = len(lines) - _MAX_LISTED
    return [*lines[:_MAX_LISTED], f"(+{left_out} more)"] if left_out > 0 else lines


def _prompt(number: int, row: dict[str, Any], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt | str:
    """The row as a prompt, or what is wrong with it."""
    if config.source == "reasoning_gym":
        question, answer, columns = row["question"], row["answer"] or "", {"entry": row}
    else:
        for column in (config.prompt_column, config.answer_column):
            if column not in row:
                return f"no {column}, only {', '.join(row) or 'an empty object'}"
        question, answer = row[config.prompt_column], row[config.answer_column]
        columns = {key: row[key] for key in row if key not in (config.prompt_column, config.answer_column)}
        if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
            answer = str(answer)
        if fault := _answer_fault(answer, config.answer_after):
            return f"{config.answer_column} {fault}"
        if config.answer_after is not None:
            answer = answer.rpartition(config.answer_after)[2].strip()
        if fault := _question_fault(question):
            return f"{config.prompt_column} {fault}"
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    token_ids = _encode(messages, config.system_prompt, tokenizer)
    if isinstance(token_ids, str):
        return token_ids
    text = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    return Prompt(row=number, text=text, token_ids=token_ids, answer=answer, columns=columns)


def _text_fault(text: object) -> str | None:
    if text is None:
        return "is null"
    if not isinstance(text, str):
        return f"is of type {type(text).__name__}"
    if not text.strip():
        return "is empty"
    return "holds half a surrogate pair" if re.search("[\ud800-\udfff]", text) else None


def _answer_fault(answer: object, mark: str | None) -> str | None:
    fault = _text_fault(answer)
    if fault or mark is None:
        return fault
    _, found, rest = str(answer).rpartition(mark)
    return None if found and rest.strip() else f"has nothing after {mark!r}" if found else f"lacks {mark!r}"


def _question_fault(question: object) -> str | None:
    if not isinstance(question, list):
        return _text_fault(question)
    for position, message in enumerate(question):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"message {position} must be an object with role and content"
        if fault := _text_fault(message["content"]):
            return f"message {position} content {fault}"
    roles = [message["role"] for message in question]
    if "user" not in roles:
        return "has no message of the user"
    return "ends with the assistant's message" if roles[-1] == "assistant" else None


def _encode(messages: list[Message], system_prompt: str | None, tokenizer: PreTrainedTokenizerBase) -> list[int] | str:
    """Token ids up to where the answer begins, or why the chat template refuses the messages."""
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(message["content"] for message in messages))
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        return f"the tokenizer's chat template refuses it: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
