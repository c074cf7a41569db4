"""The configuration of a job: one YAML file, dotted flags over it, each section a typed dataclass of the file that reads it.

Every mistake is one ValueError of one line: what was given, what is allowed, the nearest name.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from argparse import ArgumentError
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from rayless.comm.topology import TopologyConfig
from rayless.comm.weights import WeightsConfig
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
    """Optimizer steps after which the run ends, whatever num_episodes says."""

    def __post_init__(self) -> None:
        if self.name is not None and not re.fullmatch(r"[\w.@+=-]+", self.name):
            raise ValueError(f"run.name must be a plain folder name, got {self.name!r}")
        if self.num_episodes < 1:
            raise ValueError(f"run.num_episodes must be at least 1, got {self.num_episodes}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"run.steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"run.seed must be at least 0, got {self.seed}")


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
    arguments, files = _with_recipe(arguments)
    parser = _parser()
    _check_names(arguments, files)
    try:
        settings = parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(_readable(str(error))) from None
    sections = {name: _section(settings, name, kind) for name, kind in SECTIONS.items()}
    rewards = [RewardConfig(**vars(entry)) if isinstance(entry, Namespace) else entry for entry in settings.rewards]
    config = JobConfig(
        **sections,
        rewards=rewards,
        title=files[-1].stem,
        text=parser.dump(settings, skip_none=False),
        dry_run=settings.dry_run,
    )
    return _settle(config)


def _with_recipe(arguments: list[str]) -> tuple[list[str], list[Path]]:
    """The arguments with a recipe in them, and the configuration files they name."""
    files = []
    for place, argument in enumerate(arguments):
        if argument == "--config" and place + 1 < len(arguments):
            files.append(Path(arguments[place + 1]))
        elif argument.startswith("--config="):
            files.append(Path(argument.removeprefix("--config=")))
    if not files:
        recipe = RECIPES / ("qwen_gsm8k.yaml" if torch.cuda.is_available() else "quickstart.yaml")
        return ["--config", str(recipe), *arguments], [recipe]
    for file in files:
        if not file.is_file():
            raise ValueError(f"--config must name a file, got {str(file)!r}")
    return arguments, files


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="grpo.py", exit_on_error=False, description="GRPO as one torchrun job")
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file, such as those in launch/recipes")
    parser.add_argument("--dry-run", action="store_true", help="show the rank map and the batch arithmetic, then exit")
    for name, kind in SECTIONS.items():
        parser.add_class_arguments(kind, name)
    parser.add_argument(
        "--rewards", type=list[RewardConfig], help="reward functions: a list of {name, weight, options}"
    )
    return parser


def known_keys() -> list[str]:
    """All keys that a file or a flag may set, dotted."""
    return ["rewards", *(f"{name}.{field.name}" for name, kind in SECTIONS.items() for field in fields(kind))]


def _check_names(arguments: list[str], files: list[Path]) -> None:
    """Every key of the files and every flag has to be known: ValueError with the nearest one."""
    for file in files:
        try:
            content = yaml.safe_load(file.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no YAML file: {_one_line(str(error))}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file} must hold sections with keys, got {type(content).__name__}")
        for section, value in content.items():
            keys = [f"{section}.{key}" for key in value] if isinstance(value, dict) else [str(section)]
            for key in keys:
                if key not in known_keys() and not (value is None and section in SECTIONS):
                    raise ValueError(f"{file}: {_unknown(key)}")
    for argument in arguments:
        flag = argument.removeprefix("--").partition("=")[0].removesuffix("+")
        if argument.startswith("--") and "." in flag:
            key = ".".join(flag.split(".")[:2])
            if key not in known_keys():
                raise ValueError(_unknown(key))


def _unknown(key: str) -> str:
    name = key.rpartition(".")[2]
    same_name = [known for known in known_keys() if known.rpartition(".")[2] == name]
    near = same_name or difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.0)
    return f"unknown key {key!r}; the nearest is {near[0]!r}"


def _section(settings: Namespace, name: str, kind: type) -> Any:
    """One section as its dataclass; a null is refused where the type does not allow it."""
    values = vars(settings[name])
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if values[field.name] is None and not _may_be_null(hints[field.name]):
            default = "" if field.default is MISSING else f" (default {field.default!r})"
            raise ValueError(f"{name}.{field.name} must not be null{default}")
    return kind(**{key: _plain(value) for key, value in values.items()})


def _may_be_null(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Namespace) else value


def _settle(config: JobConfig) -> JobConfig:
    """Checks that span sections, and values that one section takes from another."""
    grpo, rollout = config.grpo_config, config.rollout
    for name in ("temperature", "num_generations"):
        own, sampled = getattr(grpo, name), getattr(rollout, name)
        if own not in (None, sampled):
            raise ValueError(f"grpo_config.{name} must equal rollout.{name} = {sampled}, got {own}")
    if rollout.num_generations == 1 and grpo.beta == 0:
        raise ValueError("rollout.num_generations must be at least 2: a group of one has no signal, got 1")
    if config.model_config.attn_implementation != "sdpa" and grpo.layout == "shared_prefix":
        raise ValueError(
            f"grpo_config.layout=shared_prefix needs model_config.attn_implementation=sdpa, "
            f"got {config.model_config.attn_implementation}; take grpo_config.layout=padded"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("run.device=cuda needs a GPU, and torch sees none")
    model = replace(config.model_config, path=find_path(config.model_config.path, "model_config.path"))
    data = config.data
    if (
        data.source in ("jsonl", "parquet")
        and data.path
        and not Path(data.path).exists()
        and (ROOT / data.path).exists()
    ):
        data = replace(data, path=str(ROOT / data.path))
    return replace(
        config,
        model_config=model,
        data=data,
        grpo_config=replace(grpo, temperature=rollout.temperature, num_generations=rollout.num_generations),
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
    line = _one_line(message)
    if match := re.match(r"Parser key \"([\w.]+)\": Expected a <class '(\w+)'>\. Got value: (.*)", line):
        return f"{match[1]} must be of type {match[2]}, got {match[3]!r}"
    return line.replace('Parser key "', "").replace('":', ":")


def _one_line(text: str) -> str:
    return " ".join(text.split())
