import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayless.rollout.rewards import RewardConfig, last_box, load_rewards, main, math_reward

CASE_FILE = Path(__file__).parent / "cases/math_reward_cases.jsonl"
CASES = [json.loads(line) for line in CASE_FILE.read_text().splitlines()]


def score(name: str, completions: list[str], answer: Any, **columns: Any) -> list[float]:
    return load_rewards([RewardConfig(name=name)]).score("Q?", completions, {"answer": answer, **columns}).total


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """Writes the body of a reward function into a file and gives the name to configure it by."""

    def write(body: str) -> str:
        path = tmp_path / "my_rewards.py"
        path.write_text(f"def mine(prompts, completions, **columns):\n    {body}\n")
        return f"{path}:mine"

    return write


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']} {case['why']}" for case in CASES])
def test_every_row_of_the_case_file_is_graded_as_it_says(case: dict[str, Any]) -> None:
    columns = {name: value for name, value in case.items() if name not in ("completion", "answer")}
    assert score("math", [case["completion"]], case["answer"], **columns) == [case["expected_reward"]]


@pytest.mark.parametrize(
    "answer", ["", None, " ", "see the attached figure", "\\frac{1}{", "?", "\\boxed{}", "\\boxed{7"]
)
def test_a_stored_answer_that_cannot_be_read_pays_nobody(answer: str | None) -> None:
    completions = [
        "\\boxed{7}",
        "\\boxed{}",
        "",
        f"\\boxed{{{answer}}}",
        f"\\boxed{{{answer}}}}}",
        "\\boxed{\\frac{1}{}}",
    ]
    if answer is None:
        completions += ["\\boxed{None}", "\\boxed{null}"]
    if answer == "\\boxed{7":
        completions = completions[:3]  # the others would hold another last box
    assert score("math", completions, answer) == [0.0] * len(completions)


@pytest.mark.parametrize(
    ("answer", "box"),
    [
        ("42", "**42.**"),
        ("0.75", "\\(\\frac{3}{4}\\)"),
        ("$\\frac34$.", "0.75"),
        ("3 1/2", "\\frac{7}{2}"),
        ("1 000 000", "10^{6}"),
        ("1\\,000", "1000"),
        ("1e-05", "0.00001"),
        ("2ab", "2ba"),
        ("a + c", "c + a"),
        ("15", "15 cm"),
        ("\\text{5 cm}", "5"),
        ("Paris", "\\text{paris}."),
        ("no solution", "\\text{No solution}"),
    ],
)
def test_other_ways_to_write_the_same_answer_count(answer: str, box: str) -> None:
    assert math_reward(f"So \\boxed{{{box}}}", answer) == 1.0
    assert math_reward(f"So \\boxed{{{answer}}}", box) == 1.0


@pytest.mark.parametrize(
    ("answer", "box"),
    [
        ("42", "42 \\text{ or maybe 43}"),
        ("42", "42 \\quad 43"),
        ("12", "3 4"),
        ("3 1/2", "2"),
        ("1 000", "0"),
        ("2c", "2"),  # the c is no unit
        ("2ab", "2"),
        ("\\frac{1}{3}", "0.333333"),
        ("0.0000001", "0.0000002"),
        ("listen", "silent"),  # the same letters
        ("1, 2", "x = 1"),
        ("5", "x = 4, x = 5"),
    ],
)
def test_an_answer_that_only_looks_alike_is_wrong(answer: str, box: str) -> None:
    assert math_reward(f"So \\boxed{{{box}}}", answer) == 0.0
    assert math_reward(f"So \\boxed{{{answer}}}", box) == 0.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{a{b{c}}d} e}", "a{b{c}}d"),
        ("\\boxed {4}", "4"),
        ("\\boxed{\\left\\{ 3 \\right.}", "\\left\\{ 3 \\right."),
        ("\\boxed{1}\nthen \\boxed{2}", "2"),
        ("\\boxed{1} then \\boxed{2", None),
        ("\\boxed{1} then \\boxed", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_found_with_its_braces_matched(text: str, inside: str | None) -> None:
    assert last_box(text) == inside


def test_a_hopeless_expression_costs_seconds_and_the_rows_after_it_are_graded() -> None:
    assert score("math", ["\\boxed{42}", "\\boxed{2^{2^{100}}+1}", "\\boxed{42}"], "42") == [1.0, 0.0, 1.0]


def test_grading_outside_the_main_thread_is_refused_aloud() -> None:
    raised: list[ValueError] = []

    def grade() -> None:
        try:
            math_reward("\\boxed{42}", "42")
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert len(raised) == 1


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("5.0", "5", 1.0),
        ("First 3, then 5", "5", 1.0),
        ("First 5, then 3", "5", 0.0),
        ("It costs $1,234.50.", "1234.5", 1.0),
        ("1234", "1,234", 1.0),
        ("It is -3.", "-3", 1.0),
        ("It is −3.", "-3", 1.0),  # noqa: RUF001
        ("8-3", "3", 1.0),  # the sign belongs to the sum
        ("It is 3.", "-3", 0.0),
        (".5", "0.5", 1.0),
        ("1e5", "100000.0", 1.0),
        ("5 and a half", "5", 1.0),
        ("none", "5", 0.0),
        ("", "0", 0.0),
        ("42", 42, 1.0),
    ],
)
def test_number_match_compares_the_last_number(completion: str, answer: Any, value: float) -> None:
    assert score("number_match", [completion], answer) == [value]


@pytest.mark.parametrize("answer", ["forty-two", "", "5 apples", None])
def test_number_match_refuses_an_answer_that_is_no_number(answer: str | None) -> None:
    with pytest.raises(ValueError, match=f"needs answers that are numbers, got '{answer or ''}'"):
        score("number_match", ["5"], answer)


def test_exact_match_ignores_white_space_at_the_ends_and_pays_no_empty_answer() -> None:
    assert score("exact_match", [" 42\n", "42.", "4 2", ""], "42 ") == [1.0, 0.0, 0.0, 0.0]
    assert score("exact_match", ["", " ", "None"], "") == [0.0, 0.0, 0.0]
    assert score("exact_match", ["", "None"], None) == [0.0, 0.0]


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    from reasoning_gym import create_dataset

    entry = create_dataset("chain_sum", seed=1, size=1)[0]
    answer = entry["answer"]
    wordy = f"{answer} it is now"  # 10 characters beyond the answer
    scores = score("reasoning_gym", [f" {answer}\n", f"{answer}.0", wordy, "x"], answer, entry=entry)
    assert scores == pytest.approx([1.0, 1.0, len(answer) / (len(answer) + 10), 0.0])


def test_a_reward_too_large_for_a_spread_is_refused(own: Callable[[str], str]) -> None:
    rewarder = load_rewards([RewardConfig(name=own("return [1e16] * len(completions)"))])
    with pytest.raises(ValueError, match=r"must add up to less than 1e\+15 in size, got 1e\+16"):
        rewarder.score("p", ["a"], {"answer": ""})


@pytest.mark.parametrize(
    ("name", "answer", "line"),
    [
        ("reasoning_gym", "5", r"got a prompt without entry \(prompt 7, counted from 0\)"),
        ("number_match", "five", r"needs answers that are numbers, got 'five' \(prompt 7, counted from 0\)"),
    ],
)
def test_a_row_that_could_never_be_scored_is_found_beforehand(name: str, answer: str, line: str) -> None:
    rewarder = load_rewards([RewardConfig(name="exact_match"), RewardConfig(name=name)])
    with pytest.raises(ValueError, match=line):
        rewarder.check(7, {"answer": answer})
    rewarder.check(7, {"answer": "5", "entry": {}})


def test_weights_sum_up_and_the_single_values_stay_unweighted(own: Callable[[str], str]) -> None:
    path = own("return [len(completion) / columns['per'] for completion in completions]")
    configs = [
        RewardConfig(name="exact_match", weight=2.0),
        RewardConfig(name=path, weight=-0.5, options={"per": 2}),
    ]
    rewarder = load_rewards(configs)
    assert rewarder.names == ["exact_match", "mine"]
    scores = rewarder.score("Q?", ["42", "4"], {"answer": "42"})
    assert scores.by_function == {"exact_match": [1.0, 0.0], "mine": [1.0, 0.5]}
    assert scores.total == [1.5, -0.25]  # 2 * 1 - 0.5 * 1 and 2 * 0 - 0.5 * 0.5


def test_a_users_function_gets_every_column_once_per_completion(own: Callable[[str], str]) -> None:
    path = own("return [float((prompts, columns) == (['Q?'] * 2, {'answer': ['a'] * 2, 'level': [3] * 2}))] * 2")
    assert score(path, ["x", "y"], "a", level=3) == [1.0, 1.0]


def test_a_users_function_is_found_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "house_of_rewards").mkdir()
    (tmp_path / "house_of_rewards/short.py").write_text("def one(prompts, completions, **columns): return [1] * 2")
    monkeypatch.syspath_prepend(tmp_path)
    assert score("house_of_rewards.short:one", ["a", "b"], "") == [1.0, 1.0]


def test_a_users_file_may_hold_a_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "with_class.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Half:\n    value: float = 0.5\n"
        "def half(prompts, completions, **columns): return [Half().value]\n"
    )
    assert score(f"{path}:half", ["a"], "") == [0.5]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "mine must return 4 numbers, one per completion, got 1"),
        ("return [1, 0, 1, 0, 1]", "mine must return 4 numbers, one per completion, got 5"),
        ("return 1.0", "mine must return a list of 4 numbers, got float: 1.0"),
        ("return None", "mine must return a list of 4 numbers, got NoneType: None"),
        ("return [1, None, 0, 1]", "mine must return finite numbers, got None for completion 1"),
        ("return [1, 0, float('nan'), 1]", "mine must return finite numbers, got nan for completion 2"),
        ("return [1, 0, 1, float('inf')]", "mine must return finite numbers, got inf for completion 3"),
        ("return ['1', 0, 1, 1]", "mine must return finite numbers, got '1' for completion 0"),
    ],
)
def test_a_function_that_returns_something_else_is_named(own: Callable[[str], str], body: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^reward function {message}$"):
        score(own(body), ["a", "b", "c", "d"], "")


def test_what_a_users_function_raises_goes_on_with_its_name(own: Callable[[str], str]) -> None:
    with pytest.raises(KeyError) as caught:
        score(own("raise KeyError('level')"), ["a"], "")
    assert caught.value.__notes__ == ["in reward function mine"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "at least one reward function, got an empty list"),
        (["maths"], "exact_match, number_match, math, reasoning_gym .nearest: math., or your own .* got 'maths'"),
        (["math", "math"], "rewards must have different names, got 'math' from math and math"),
        (["no.such.module:fn"], "cannot import no.such.module for the reward no.such.module:fn: No module named 'no'"),
        (["no_such_file.py:fn"], "cannot import no_such_file.py for the reward .* No such file"),
        (["json:load_all"], "json has no 'load_all', wanted by the reward json:load_all"),
        (["json:decoder"], "json:decoder must be a function, got module"),
        (["json:"], "must be package.module:function or path/to/file.py:function, got 'json:'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_one_clear_line(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_rewards([RewardConfig(name=name) for name in names])
    assert "\n" not in str(caught.value)


def test_a_users_file_with_a_syntax_error_is_one_clear_line(own: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match=r"cannot import .*my_rewards.py for the reward .* line 2") as caught:
        load_rewards([RewardConfig(name=own("return ]"))])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_must_be_finite(weight: float) -> None:
    with pytest.raises(ValueError, match=r"rewards.weight must be finite, got (nan|inf) for 'math'"):
        RewardConfig(name="math", weight=weight)


def test_the_command_prints_agreement_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.jsonl"
    rows = [
        {"completion": "\\boxed{1}", "answer": "1", "expected_reward": 1.0, "kind": "must"},
        {"completion": "\\boxed{2}", "answer": 1, "expected_reward": 0.0, "kind": "must"},
        {"completion": "1", "answer": "1", "expected_reward": 1.0, "kind": "policy"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "must 2/2\npolicy 0/1\n"
    path.write_text(json.dumps({**rows[0], "expected_reward": 0.0}))
    assert main([str(path)]) == 1
    assert capsys.readouterr().out == "must 0/1\n"
