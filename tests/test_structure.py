"""The rooms keep their rules: who imports whom, which libraries stand behind one file, sizes, and what is never loaded.

Each rule takes a repository's root and returns one line per violation. The last tests plant violations, so that a rule
which sees nothing cannot pass for one that holds.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("comm", "launch", "rollout", "trainers")
MAY_IMPORT = {"comm": {"comm"}, "rollout": {"rollout", "comm"}, "trainers": {"trainers", "comm"}, "launch": set(ROOMS)}
BEHIND_ONE_DOOR = {
    "vllm": {"rollout/vllm_engine.py"},
    "colossalai": {"trainers/policy.py", "trainers/cpu_accelerator.py"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Rule = Callable[[Path], list[str]]


def source_files(root: Path, *folders: str) -> Iterator[tuple[str, Path]]:
    """Every Python file inside the folders, with its path as seen from `root`."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def syntax(root: Path, *folders: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of every Python file inside the folders, with the file's path as seen from `root`."""
    for name, path in source_files(root, *folders):
        for node in ast.walk(ast.parse(path.read_text(), filename=name)):
            yield name, node


def imports(root: Path, *folders: str) -> Iterator[tuple[str, str]]:
    """Every absolute import as (file, dotted name), also inside functions; `from a.b import c` gives a.b.c."""
    for name, node in syntax(root, *folders):
        if isinstance(node, ast.Import):
            yield from ((name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((name, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_rooms(root: Path) -> list[str]:
    found = []
    for name, imported in imports(root, *ROOMS):
        package, _, rest = imported.partition(".")
        if package == "rayless" and rest.partition(".")[0] not in MAY_IMPORT[name.partition("/")[0]]:
            found.append(f"{name} imports {imported}")
    return found


def third_parties_in_comm(root: Path) -> list[str]:
    allowed = sys.stdlib_module_names | {"torch", "rayless"}
    return [
        f"{name} imports {imported}"
        for name, imported in imports(root, "comm")
        if imported.partition(".")[0] not in allowed
    ]


def libraries_past_their_door(root: Path) -> list[str]:
    return [
        f"{name} imports {imported}"
        for name, imported in imports(root, *ROOMS)
        if name not in BEHIND_ONE_DOOR.get(imported.partition(".")[0], {name})
    ]


def relative_imports(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno} imports relatively"
        for name, node in syntax(root, *ROOMS, "tests")
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def package_markers(root: Path) -> list[str]:
    return [name for name, path in source_files(root, *ROOMS) if path.name == "__init__.py"]


def launch_files_named_like_the_standard_library(root: Path) -> list[str]:
    return [name for name, path in source_files(root, "launch") if path.stem in sys.stdlib_module_names]


def long_files(root: Path) -> list[str]:
    lengths = {name: len(path.read_text().splitlines()) for name, path in source_files(root, *ROOMS, "tests")}
    return [f"{name} has {length} lines" for name, length in lengths.items() if length > MAX_FILE_LINES]


def long_functions(root: Path) -> list[str]:
    found = []
    for name, node in syntax(root, *ROOMS, "tests"):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None, "a parsed file has line numbers"
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    return found


def unpickling(root: Path) -> list[str]:
    found = []
    for name, imported in imports(root, *ROOMS):
        if imported.partition(".")[0] == "pickle" or imported == "torch.load":
            found.append(f"{name} imports {imported}")
    for name, node in syntax(root, *ROOMS):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append(f"{name}:{node.lineno} uses torch.load")
    return found


def trusted_remote_code(root: Path) -> list[str]:
    """As an argument (`f(trust_remote_code=True)`) and as a default (`trust_remote_code: bool = True`)."""
    found = []
    for name, node in syntax(root, *ROOMS):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            value: ast.expr | None = node.value
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "trust_remote_code":
            value = node.value
        else:
            continue
        if isinstance(value, ast.Constant) and value.value is True:
            found.append(f"{name}:{node.lineno} trusts remote code")
    return found


def test_comm_rollout_and_trainers_import_no_room_but_comm() -> None:
    assert wrong_rooms(ROOT) == []


def test_comm_needs_torch_alone() -> None:
    assert third_parties_in_comm(ROOT) == []


def test_vllm_and_colossalai_stand_behind_their_files() -> None:
    assert libraries_past_their_door(ROOT) == []


def test_every_import_is_absolute() -> None:
    assert relative_imports(ROOT) == []


def test_no_room_holds_an_init_file() -> None:
    assert package_markers(ROOT) == []


def test_no_file_of_launch_is_called_like_a_standard_module() -> None:
    assert launch_files_named_like_the_standard_library(ROOT) == []


def test_no_file_is_over_400_lines() -> None:
    assert long_files(ROOT) == []


def test_no_function_is_over_60_lines() -> None:
    assert long_functions(ROOT) == []


def test_nothing_is_unpickled() -> None:
    assert unpickling(ROOT) == []


def test_remote_code_is_never_trusted_by_default() -> None:
    assert trusted_remote_code(ROOT) == []


def test_every_room_is_walked() -> None:
    assert [room for room in ROOMS if not list(source_files(ROOT, room))] == []


@pytest.mark.parametrize(
    ("rule", "file", "source"),
    [
        (wrong_rooms, "comm/a.py", "from rayless.trainers.losses import policy_terms"),
        (wrong_rooms, "rollout/a.py", "def f():\n    import rayless.trainers.losses"),
        (wrong_rooms, "trainers/a.py", "from rayless import rollout"),
        (wrong_rooms, "trainers/sub/a.py", "from rayless.launch.config import load"),
        (third_parties_in_comm, "comm/a.py", "import transformers"),
        (libraries_past_their_door, "launch/a.py", "from vllm.config import VllmConfig"),
        (libraries_past_their_door, "trainers/losses.py", "import colossalai"),
        (relative_imports, "comm/a.py", "from .b import c"),
        (package_markers, "comm/__init__.py", ""),
        (launch_files_named_like_the_standard_library, "launch/profile.py", ""),
        (long_files, "tests/a.py", "\n" * 401),
        (long_functions, "launch/a.py", "def f():\n" + "    pass\n" * 60),
        (unpickling, "comm/a.py", "from pickle import loads"),
        (unpickling, "trainers/a.py", "from torch import load"),
        (unpickling, "trainers/a.py", "import torch\ntorch.load('file')"),
        (trusted_remote_code, "rollout/a.py", "load('model', trust_remote_code=True)"),
        (trusted_remote_code, "launch/a.py", "class C:\n    trust_remote_code: bool = True"),
    ],
)
def test_a_planted_violation_is_seen(rule: Rule, file: str, source: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert len(rule(tmp_path)) == 1


@pytest.mark.parametrize(
    ("rule", "file", "source"),
    [
        (wrong_rooms, "launch/a.py", "from rayless.trainers.losses import clipped_loss"),
        (wrong_rooms, "rollout/a.py", "from rayless.comm.experience import Experience"),
        (third_parties_in_comm, "comm/a.py", "import json\nimport torch.distributed as dist"),
        (libraries_past_their_door, "rollout/vllm_engine.py", "import vllm"),
        (libraries_past_their_door, "trainers/policy.py", "from colossalai.booster import Booster"),
        (long_files, "tests/a.py", "\n" * 400),
        (long_functions, "launch/a.py", "def f():\n" + "    pass\n" * 59),
        (trusted_remote_code, "launch/a.py", "class C:\n    trust_remote_code: bool = False"),
    ],
)
def test_what_is_allowed_is_not_reported(rule: Rule, file: str, source: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert rule(tmp_path) == []
