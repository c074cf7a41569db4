"""YAML for configurations: 1e-6 is a number, a date is text, no key stands twice, and what is dumped is loaded equal.

Importing this file teaches jsonargparse the mode `MODE`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import set_dumper, set_loader

MODE = "yaml_text"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name!r} stands twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


# YAML 1.1 wants a point and a sign, as in 1.0e-6.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_yaml(text: str) -> Any:
    """The value of a text; one that is all comment stays a text, as a mark like `####` means itself."""
    value = yaml.load(text, _Loader)
    return text if value is None and text.lstrip().startswith("#") else value


def dump_yaml(value: Any) -> str:
    """A text that `load_yaml` turns into the value again."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def read_yaml(file: Path) -> Any:
    """The value of a file. Raises ValueError, in one line, if it is no YAML."""
    try:
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from None


set_loader(MODE, load_yaml, (yaml.YAMLError,))
set_dumper(MODE, dump_yaml)
