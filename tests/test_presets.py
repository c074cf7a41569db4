from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from rayless.trainers import loss_config
from rayless.trainers.loss_config import LossConfig
from rayless.trainers.presets import DEFAULTS, PRESETS

NULL = {field.name for field in fields(LossConfig) if field.default is None}


def allowed(key: str) -> list[Any]:
    """The words a key may take; none where it takes a number."""
    hint = get_type_hints(LossConfig)[key]
    return [word for one in get_args(hint) for word in get_args(one)]


def test_the_table_and_the_type_name_the_same_presets() -> None:
    assert set(PRESETS) == set(get_args(loss_config.Preset))


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_gives_values_to_null_keys_alone(name: str) -> None:
    assert set(PRESETS[name]) <= NULL - {"preset"}


@pytest.mark.parametrize("row", [DEFAULTS, *PRESETS.values()], ids=["none", *PRESETS])
def test_every_word_is_one_that_its_key_takes(row: dict[str, Any]) -> None:
    for key, value in row.items():
        assert value in allowed(key) if isinstance(value, str) else not allowed(key), key


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_fills_what_the_user_left_and_defaults_fill_the_rest(name: Any) -> None:
    config = LossConfig(preset=name)
    for key, value in {**DEFAULTS, **PRESETS[name]}.items():
        assert getattr(config, key) == value


def test_what_the_user_says_stands() -> None:
    config = LossConfig(preset="dapo", clip_high=0.4, beta=0.01)
    assert (config.clip_high, config.beta, config.clip_low) == (0.4, 0.01, 0.2)


def test_a_zero_is_a_value_and_not_a_null() -> None:
    assert LossConfig(preset="grpo", beta=0.0).beta == 0.0


def test_no_two_presets_are_the_same() -> None:
    filled = [{**DEFAULTS, **row} for row in PRESETS.values()]
    assert all(first != second for place, first in enumerate(filled) for second in filled[:place])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("grpo", "aggregation", "sequence_mean"),
        ("grpo", "beta", 0.04),
        ("grpo", "scale_rewards", "group"),
        ("dapo", "clip_high", 0.28),
        ("dapo", "aggregation", "token_mean"),
        ("dr_grpo", "scale_rewards", "none"),
        ("dr_grpo", "aggregation", "fixed_length"),
        ("rloo", "advantage", "rloo"),
        ("rloo", "aggregation", "sequence_sum"),
        ("reinforce_pp", "advantage", "reinforce_pp"),
        ("gspo", "ratio_level", "sequence"),
        ("gspo", "clip_high", 4e-4),
        ("cispo", "loss", "cispo"),
        ("cispo", "clip_low", 1.0),
    ],
)
def test_the_choice_that_makes_the_algorithm(name: Any, key: str, value: Any) -> None:
    assert getattr(LossConfig(preset=name), key) == value
