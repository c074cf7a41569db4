"""The configuration of a job: one YAML file, dotted flags over it, each section a typed dataclass beside its reader.

Flags win over files wherever they stand; of a flag or file given twice the later one wins. Every mistake is one
ValueError of one line: what was given, what is allowed, the nearest name.
"""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentError
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from rayless.comm.topology import TopologyConfig
from rayless.comm.weights import WeightsConfig
from rayless.launch.yaml_text import MODE, read_yaml
from rayless.rollout.engine import RolloutConfig
from rayless.rollout.prompts import DataConfig
from rayless.rollout.rewards import RewardConfig
from rayless.trainers.checkpoint import CheckpointConfig
from rayless.trainers.grpo_config import GRPOConfig
from rayless.trainers.metrics import LoggingConfig
from rayless.trainers.model_config import ModelConfig, PluginConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "launch" / "recipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Section `run`: the run as a whole."""

    name: str | None = None
    """The run's folder inside `dir`; null starts a new run under the recipe's name and the time."""
    dir: str = "runs"
    """Where runs lie."""
    seed: int = 0
    """Of prompt order and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is a GPU."""
    num_episodes: int = 1
    """Passes over the prompts."""
    steps: int | None = None
    """Optimizer steps after which the run ends even if num_episodes would go on; null does not cap."""

    def __post_init__(self) -> None:
        if self.name is not None and not re.fullmatch(r"(?!\.)[\w.@+=-]+", self.name):
            raise ValueError(f"run.name must be a plain folder name, got {self.name!r}")
        if not self.dir:
            raise ValueError(f"run.dir must be a folder, got {self.dir!r}")
        if self.num_episodes < 1:
            raise ValueError(f"run.num_episodes must be at least 1, got {self.num_episodes}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"run.steps must be at least 1, got {self.steps}")
        if not 0 <= self.seed < 2**32:  # NumPy takes no other
            raise ValueError(f"run.seed must lie between 0 and {2**32 - 1}, got {self.seed}")


SECTIONS: dict[str, type] = {
    "run": RunConfig,
    "model_config": ModelConfig,
    "topology": TopologyConfig,
    "rollout": RolloutConfig,
    "data": DataConfig,
    "grpo_config": GRPOConfig,
    "plugin_config": PluginConfig,
    "weights": WeightsConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


set_parsing_settings(docstring_parse_attribute_docstrings=True)

# Of every key, dotted; those under `rewards` stand in each entry of that list.
TYPES: dict[str, Any] = {"rewards": list[dict[str, Any]]} | {
    f"{name}.{key}": hint
    for name, kind in {**SECTIONS, "rewards": RewardConfig}.items()
    for key, hint in get_type_hints(kind).items()
}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (quoted if it reads as a number)",
    list[str]: "a list of texts",
    dict[str, Any]: "keys with values",
    list[dict[str, Any]]: "a list of {name, weight, options}",
    type(None): "null",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """All sections of one GRPO job."""

    run: RunConfig
    model_config: ModelConfig
    topology: TopologyConfig
    rollout: RolloutConfig
    data: DataConfig
    rewards: list[RewardConfig]
    grpo_config: GRPOConfig
    plugin_config: PluginConfig
    weights: WeightsConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    title: str
    """The recipe's file name without its ending."""
    text: str
    """The resolved configuration as YAML."""
    dry_run: bool

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What the job runs on."""
        if self.run.device != "auto":
            return self.run.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def read_config(arguments: list[str]) -> JobConfig:
    """The job that the command line describes. Raises ValueError; exits after --help and --print_config."""
    files, flags = _split(arguments)
    for file in files:
        _check_file(file)
    _check_flags(flags)
    parser = _parser()
    try:
        settings = parser.parse_args([*(f"--config={file}" for file in files), *flags])
        rewards = _rewards(settings.rewards)
    except ArgumentError as error:
        raise ValueError(_readable(str(error))) from None
    sections = {name: _section(settings, name, kind) for name, kind in SECTIONS.items()}
    dry_run = settings.pop("dry_run")
    settings.rewards = [asdict(reward) for reward in rewards]
    text = parser.dump(settings, skip_unset=False)
    return _settle(JobConfig(**sections, rewards=rewards, title=files[-1].stem, text=text, dry_run=dry_run))


def _split(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """The configuration files, a recipe where none is named, and all other arguments."""
    named: list[str] = []
    flags: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            named.append(next(rest, ""))
        elif argument.startswith("--config="):
            named.append(argument.removeprefix("--config="))
        else:
            flags.append(argument)
    for name in named:
        if not Path(name).is_file():
            raise ValueError(f"--config must name a file, got {name!r}")
    recipe = RECIPES / ("qwen_gsm8k.yaml" if torch.cuda.is_available() else "quickstart.yaml")
    return [Path(name) for name in named] or [recipe], flags


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        exit_on_error=False,
        parser_mode=MODE,
        usage="torchrun ... launch/grpo.py [--config FILE] [--dry-run] [--section.key VALUE ...]",
        description="GRPO as one torchrun job. Flags win over files; of the same flag given twice, the later one.",
    )
    parser.add_argument("--config", action="config", help="a YAML file, such as those in launch/recipes")
    parser.add_argument("--dry-run", action="store_true", help="show the rank map and the batch arithmetic, then exit")
    for name, kind in SECTIONS.items():
        _add_section(parser, name, kind)
    entries: Any = list[dict]  # type: ignore[type-arg]  # plain dict, as in _add_section
    parser.add_argument("--rewards", type=entries, help="reward functions: a list of {name, weight, options}")
    return parser


def _add_section(parser: ArgumentParser, name: str, kind: type) -> None:
    """The section's keys as arguments; free ones as plain dict, for in a dict[str, Any] the text "7" would become 7."""
    free = {key for key in get_type_hints(kind) if TYPES[f"{name}.{key}"] == dict[str, Any]}
    group = parser.add_argument_group(str(kind.__doc__).rstrip("."))
    group.add_class_arguments(kind, name, skip=free, as_group=False)
    for key in free:
        group.add_argument(f"--{name}.{key}", type=dict, default={}, help="keys with values, all of them at once")


def _check_file(file: Path) -> None:
    """Raises ValueError unless the file is YAML and its keys are all known."""
    content = read_yaml(file)
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ValueError(f"{file} must hold sections with keys, got {found}")
    for key in _flatten(content):
        if key in SECTIONS:
            raise ValueError(f"{file}: section {key!r} must hold keys")
        if key not in TYPES:
            raise ValueError(f"{file}: unknown key {key!r}; the nearest is {_nearest(key, TYPES)!r}")


def _flatten(content: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, down to those that are known."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in TYPES:
            yield from _flatten(value, f"{name}.")
        else:
            yield name


def _check_flags(arguments: list[str]) -> None:
    flags = ["config", "dry-run", "print_config", "help", *(key for key in TYPES if not key.startswith("rewards."))]
    for argument in arguments:
        flag = argument.removeprefix("--").partition("=")[0].removesuffix("+")
        if argument.startswith("--") and flag not in flags:
            key = ".".join(flag.split(".")[:2])
            raise ValueError(f"unknown flag '--{flag}'; the nearest is '--{_nearest(key, flags)}'")


def _nearest(name: str, known: Collection[str]) -> str:
    """The same key in another section, or else the most similar one of its own section, or else of any."""
    section, _, key = name.rpartition(".")

    def likeness(other: str) -> tuple[bool, float]:
        last = other.rpartition(".")[2]
        return last.startswith(key), difflib.SequenceMatcher(None, key, last).ratio()

    same_key = [other for other in known if other.rpartition(".")[2] == key]
    same_section = [other for other in known if section and other.startswith(f"{section}.")]
    return max(same_key or same_section or known, key=likeness)


def _section(settings: Namespace, name: str, kind: type) -> Any:
    """One section as its dataclass; a null is refused where the type does not allow it."""
    values = settings[name].as_dict()
    for key, value in values.items():
        if value is None and type(None) not in get_args(TYPES[f"{name}.{key}"]):
            raise ValueError(f"{name}.{key} must be {_wanted(f'{name}.{key}')}, got null")
    return kind(**values)


def _rewards(entries: list[dict[str, Any]] | None) -> list[RewardConfig]:
    if entries is None:
        raise ValueError(f"rewards must be {_wanted('rewards')}, got null")
    parser = ArgumentParser(exit_on_error=False, parser_mode=MODE)
    _add_section(parser, "rewards", RewardConfig)
    for key in (f"rewards.{key}" for entry in entries for key in entry):
        if key not in TYPES:
            raise ValueError(f"unknown key {key!r}; the nearest is {_nearest(key, TYPES)!r}")
    return [_section(parser.parse_object({"rewards": entry}), "rewards", RewardConfig) for entry in entries]


def _settle(config: JobConfig) -> JobConfig:
    """Checks that span sections, and values that one section takes from another."""
    grpo, rollout = config.grpo_config, config.rollout
    for name in ("temperature", "num_generations"):
        own, sampled = getattr(grpo, name), getattr(rollout, name)
        if own not in (None, sampled):
            raise ValueError(f"grpo_config.{name} must equal rollout.{name} = {sampled}, got {own}")
    if rollout.num_generations == 1 and grpo.advantage != "reinforce_pp" and not (grpo.beta and grpo.kl_in == "loss"):
        raise ValueError("rollout.num_generations must be at least 2: a group of one has no signal, got 1")
    if config.model_config.attn_implementation != "sdpa" and grpo.layout in ("shared_prefix", "packed"):
        raise ValueError(
            f"grpo_config.layout={grpo.layout} needs model_config.attn_implementation=sdpa, "
            f"got {config.model_config.attn_implementation}; take grpo_config.layout=padded"
        )
    sees_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not sees_gpu:
        raise ValueError("run.device=cuda needs a GPU, and torch sees none")
    if config.device == "cpu" and sees_gpu:  # vLLM and ColossalAI take the GPU that they see
        raise ValueError("run.device=cpu needs the GPUs hidden: set CUDA_VISIBLE_DEVICES= (nothing) and start again")
    model = replace(config.model_config, path=find_path(config.model_config.path, "model_config.path"))
    data, in_checkout = config.data, ROOT / str(config.data.path)
    if data.source in ("jsonl", "parquet") and not Path(str(data.path)).exists() and in_checkout.exists():
        data = replace(data, path=str(in_checkout))
    return replace(
        config,
        model_config=model,
        data=data,
        grpo_config=replace(
            grpo,
            temperature=rollout.temperature,
            num_generations=rollout.num_generations,
            loss_length=grpo.loss_length or rollout.max_new_tokens,
        ),
    )


def find_path(path: str, key: str) -> str:
    """A folder here or in the checkout, or else a model's name on the hub, which has the form owner/name."""
    for base in (Path(), ROOT):
        if (base / path / "config.json").is_file():
            return str((base / path).resolve())
    local = path.startswith((".", "/", "~")) or (ROOT / path).parent.is_dir() or Path(path).parent.is_dir()
    if local or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        where = "is no model folder (no config.json in it)" if Path(path).is_dir() else "does not exist"
        hint = "; `make install` builds models/smollm2 and models/tiny" if path.startswith("models/") else ""
        raise ValueError(f"{key}: {path!r} {where}, and is no model of the hub{hint}")
    return path


def _readable(message: str) -> str:
    """jsonargparse's message as one line in our words."""
    line = " ".join(message.split())
    key = re.search(r'Parser key "([\w.]+)"', line)
    value = re.search(r"(?:Got value|Given value): ?(.*)", line)
    if key and value and key[1] in TYPES:
        return f"{key[1]} must be {_wanted(key[1])}, got {'null' if value[1] == 'None' else repr(value[1])}"
    if missing := re.search(r"arguments are required: (.*)", line):
        return f"{missing[1]} must be given"
    if line.startswith("unrecognized arguments"):
        return f"{line}; settings are given as --section.key VALUE"
    return line


def _wanted(key: str) -> str:
    """What the key's type allows, in words."""
    return _in_words(TYPES[key])


def _in_words(hint: Any) -> str:
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(choices)}"
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, choices))
    return _WORDS[hint]
