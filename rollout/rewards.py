"""Score completions: built-in reward functions and the user's own, each named, weighted and checked.

A reward function is `fn(prompts, completions, **columns) -> list[float]`: the prompt N times, its N completions, and
each column of its row as a list of N values (`answer` is always there); the function's own options come as further
keywords.
`python -m rayless.rollout.rewards FILE.jsonl` grades a file of answers with the `math` reward.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import numbers
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

RewardFunction = Callable[..., list[float]]

_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]}}])[-+{_MINUS}])?"  # in "5-3" the sign belongs to the sum, not to the 3
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,4})?"
)
_LARGEST_REWARD = 1e15  # the square of a float32 has to be one, too: of such are spreads made
_SECONDS_TO_GRADE = 3  # for reading an answer, and again for comparing it
_DECIMAL_PLACES = 12  # a decimal equals a fraction or a root when it is right to so many places
_MAX_ANSWER_WORDS = 3  # a stored answer of more words is a remark ("see the attached figure"), not an answer
_WHOLE_BOX = [LatexExtractionConfig(boxed_match_priority=0)]
_TEXT = r"\\(?:text|math)(?:rm|bf|it|sf|normal)?\s*"
_WORD_ANSWER = re.compile(r"(?=.*(?:[a-z]{4}|[^\x00-\x7f]))[^\W\d_]+(?:[ '-][^\W\d_]+)*")
_TWO_NUMBERS = re.compile(r"(?<!frac )(?<!binom )\d \.?\d")
_THOUSANDS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/]| \d)")
_REWRITES = [
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"\\?\$|[€£¥]", " "),
        (r"(?<!\\)\\[,;: ]|\\q?quad|~", " "),
        # A number among words is no unit: "42 \text{ or maybe 43}" must not be read as 42.
        (_TEXT + r"\{([^{}]*\d[^{}]*)\}", r" \1 "),
        (r"\s+", " "),
        (r"^[ *]*(?:\\[(\[](.*)\\[)\]])?", r"\1"),
        (r"(?<!\.)\.?[ *]*$", ""),
        (r"(?<![\d/.,])(\d+) (\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
        (r"^([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d+)$", r"\1\\times 10^{\2}"),
        # The last letter of "2c" or "a + c" is a variable; math-verify takes it for a unit unless a space follows.
        (r"(?<=[^A-Za-z\\])(?<!\d )(?!(?:cm|mm|km|kg|mg|ml|ft|lb|hr)$)([a-z]{1,2})$", r"\1\\;"),
    )
]


OWN_METRICS = ("mean", "std", "zero_std_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One entry of the configuration's list `rewards`."""

    name: str
    """exact_match, number_match, math, reasoning_gym, or yours: package.module:function, path/to/file.py:function."""
    weight: float = 1.0
    """Factor of this function's value in a completion's reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that the function gets at each call."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"rewards.weight must be finite, got {self.weight} for {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the completions of one prompt earned."""

    total: list[float]  # per completion: sum of weight times value
    by_function: dict[str, list[float]]  # per function's name: its own values, unweighted


@dataclass(frozen=True, slots=True)
class Rewarder:
    """The run's reward functions, ready to be called; made by `load_rewards`."""

    functions: dict[str, tuple[RewardConfig, RewardFunction]]  # by display name

    @property
    def names(self) -> list[str]:
        return list(self.functions)

    def check(self, row: int, columns: dict[str, Any]) -> None:
        """Raises ValueError when a built-in function could never score this row (its position in the source)."""
        for config, _ in self.functions.values():
            if config.name in NEEDS:
                try:
                    NEEDS[config.name](columns)
                except ValueError as error:
                    raise ValueError(f"{error} (prompt {row}, counted from 0)") from None

    def score(self, prompt: str, completions: list[str], columns: dict[str, Any]) -> Scores:
        """Scores of the completions of one prompt; `columns` holds the prompt's `answer` and its row's other values.

        A function that returns anything but one finite number per completion is a ValueError that names it; what a
        function raises goes on with its name as a note.
        """
        assert "answer" in columns, "the columns of a prompt must hold its answer"
        count = len(completions)
        # A data column of such a name cannot be handed over beside the prompts and completions themselves.
        repeated = {name: [value] * count for name, value in columns.items() if name not in ("prompts", "completions")}
        by_function = {}
        total = [0.0] * count
        for name, (config, function) in self.functions.items():
            try:
                returned = function([prompt] * count, list(completions), **{**repeated, **config.options})
            except Exception as error:
                error.add_note(f"in reward function {name}")
                raise
            by_function[name] = _checked(name, returned, count)
            total = [so_far + config.weight * value for so_far, value in zip(total, by_function[name], strict=True)]
        if not all(abs(value) < _LARGEST_REWARD for value in total):
            raise ValueError(f"rewards must add up to less than {_LARGEST_REWARD:g} in size, got {max(total, key=abs)}")
        return Scores(total=total, by_function=by_function)


def load_rewards(configs: list[RewardConfig]) -> Rewarder:
    """Find every function of the list; a name that leads nowhere is a ValueError of one line."""
    if not configs:
        raise ValueError("rewards must name at least one reward function, got an empty list")
    functions: dict[str, tuple[RewardConfig, RewardFunction]] = {}
    for config in configs:
        name = config.name.rpartition(":")[2]
        if name in OWN_METRICS:
            raise ValueError(f"rewards.name must not end in {name!r}: reward/{name} is a metric of its own")
        if name in functions:
            raise ValueError(
                f"rewards must have different names, got {name!r} from {functions[name][0].name} and {config.name}"
            )
        functions[name] = (config, _load_own(config.name) if ":" in config.name else _built_in(config.name))
    return Rewarder(functions)


def exact_match(prompts: list[str], completions: list[str], *, answer: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is the answer, but for white space at both ends; an empty answer pays nobody."""
    wanted = [_stored(one).strip() for one in answer]
    return [float(bool(want) and text.strip() == want) for text, want in zip(completions, wanted, strict=True)]


def number_match(prompts: list[str], completions: list[str], *, answer: list[Any], **columns: Any) -> list[float]:
    """1 where the last number of the completion equals the answer: "It is 1,005.0." for "1005"."""
    wanted = [_number(one) for one in answer]
    last = [_NUMBER.findall(text)[-1:] for text in completions]
    return [float([_decimal(one) for one in found] == [want]) for found, want in zip(last, wanted, strict=True)]


def math_match(prompts: list[str], completions: list[str], *, answer: list[Any], **columns: Any) -> list[float]:
    """`math_reward` of each completion."""
    return [math_reward(text, one) for text, one in zip(completions, answer, strict=True)]


def reasoning_gym(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The task's own score, 0 to 1, of each completion; the column `entry` holds the task's entry.

    The scorer sees the completion without the white space around it and nothing else taken away: a chain_sum answer in
    a sentence earns only the share of its characters that are the answer, so ask for the bare answer in the prompt.
    """
    return [
        float(_reasoning_gym_scorer(entry["metadata"]["source_dataset"])(answer=text.strip(), entry=entry))
        for text, entry in zip(completions, columns["entry"], strict=True)
    ]


BUILT_IN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "number_match": number_match,
    "math": math_match,
    "reasoning_gym": reasoning_gym,
}


def _need_number(columns: dict[str, Any]) -> None:
    _number(columns["answer"])


def _need_entry(columns: dict[str, Any]) -> None:
    if "entry" not in columns:
        raise ValueError(
            "rewards: reasoning_gym needs prompts of data.source reasoning_gym, got a prompt without entry"
        )


NEEDS: dict[str, Callable[[dict[str, Any]], None]] = {"number_match": _need_number, "reasoning_gym": _need_entry}


def math_reward(completion: str, answer: str | float | None) -> float:
    r"""1.0 if the last `\boxed{}` of the completion is the stored answer as mathematics, else 0.0.

    The answer has to be boxed and the last box counts, alone and whole: a list that holds the answer is wrong, so is a
    box that never closes. The stored answer is read by the same rules, bare or boxed; one that cannot be read (empty,
    broken LaTeX, a remark of four words or more) pays nobody. Units are optional, sets have no order, pairs do, an
    equation counts by its last side, and a decimal has to be exact to 12 places. math-verify's time limit (3 s to read,
    3 s to compare, then 0.0) is an alarm signal: in any thread but the main one this raises ValueError.
    """
    gold, box = _stored(answer), last_box(completion)
    if "\\boxed" in gold:
        gold = last_box(gold) or ""
    if box is None:
        return 0.0
    gold_words, box_words = _words(gold), _words(box)
    if gold_words is not None and (box_words is not None or len(gold_words.split()) > _MAX_ANSWER_WORDS):
        return float(gold_words == box_words and len(gold_words.split()) <= _MAX_ANSWER_WORDS)
    same = verify(_read(gold), _read(box), float_rounding=_DECIMAL_PLACES, timeout_seconds=_SECONDS_TO_GRADE)
    return float(same)


def last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{}` of the text; None without a box, or if the last one never closes."""
    opening = re.match(r"\s*\{", text.rpartition("\\boxed")[2]) if "\\boxed" in text else None
    if opening is None:
        return None
    inside = text.rpartition("\\boxed")[2][opening.end() :]
    depth = 1
    for token in re.finditer(r"\\.|[{}]", inside, re.DOTALL):  # "\{" and "\}" are characters, not braces
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return inside[: token.start()]
    return None


def _read(text: str) -> list[Any]:
    """The text as one sympy expression in a list, or an empty list if it is no mathematics as a whole."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)
    if not text or _TWO_NUMBERS.search(text):
        return []
    # first_match: the whole box or nothing; math-verify would otherwise go on to a fraction or number inside it.
    return parse(
        f"\\boxed{{{text}}}",
        _WHOLE_BOX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=_SECONDS_TO_GRADE,
    )


def _words(text: str) -> str | None:
    """The text in lower case if it is an answer in words; math-verify would compare these as products of letters."""
    plain = " ".join(re.sub(_TEXT + r"\{([^{}]*)\}", r"\1", text).split()).strip(" .*").lower()
    return plain if _WORD_ANSWER.fullmatch(plain) else None


def _stored(answer: object) -> str:
    return "" if answer is None else str(answer)


def _number(answer: object) -> Decimal:
    text = _stored(answer).strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"rewards: number_match needs answers that are numbers, got {text!r}")
    return _decimal(text)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace(_MINUS, "-"))


@cache
def _reasoning_gym_scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn  # takes seconds to import

    return get_score_answer_fn(task)


def _checked(name: str, returned: object, count: int) -> list[float]:
    if not isinstance(returned, list | tuple):
        kind = type(returned).__name__
        raise ValueError(f"reward function {name} must return a list of {count} numbers, got {kind}: {returned!r}")
    if len(returned) != count:
        raise ValueError(f"reward function {name} must return {count} numbers, one per completion, got {len(returned)}")
    for row, value in enumerate(returned):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"reward function {name} must return finite numbers, got {value!r} for completion {row}")
    return [float(value) for value in returned]


def _built_in(name: str) -> RewardFunction:
    if name not in BUILT_IN:
        (nearest,) = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.0)
        raise ValueError(
            f"rewards.name must be one of {', '.join(BUILT_IN)} (nearest: {nearest}), or your own function as "
            f"package.module:function or path/to/file.py:function, got {name!r}"
        )
    return BUILT_IN[name]


def _load_own(path: str) -> RewardFunction:
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ValueError(f"rewards.name must be package.module:function or path/to/file.py:function, got {path!r}")
    try:
        module = _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise ValueError(f"rewards: cannot import {place} for the reward {path}: {error}") from error
    if name not in vars(module):
        raise ValueError(f"rewards: {place} has no {name!r}, wanted by the reward {path}")
    function = vars(module)[name]
    if not callable(function):
        raise ValueError(f"rewards: {path} must be a function, got {type(function).__name__}")
    return function


def _run_file(path: Path) -> ModuleType:
    loader = SourceFileLoader(f"rayless_own_reward_{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    sys.modules[loader.name] = module  # a dataclass in the file looks its own module up here
    loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> int:
    """Print by kind how many rows of a file `math_reward` grades as the file expects; 1 if a `must` row differs."""
    parser = argparse.ArgumentParser(prog="python -m rayless.rollout.rewards", description=main.__doc__)
    parser.add_argument("file", type=Path, help="JSON lines with completion, answer, expected_reward and kind")
    rows = [json.loads(line) for line in parser.parse_args(arguments).file.read_text().splitlines() if line.strip()]
    agreed, counts = Counter[str](), Counter(row["kind"] for row in rows)
    for row in rows:
        agreed[row["kind"]] += math_reward(row["completion"], row["answer"]) == row["expected_reward"]
    for kind, count in counts.items():
        print(f"{kind} {agreed[kind]}/{count}")
    return int(agreed["must"] < counts["must"])


if __name__ == "__main__":
    sys.exit(main())
