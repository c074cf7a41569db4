"""What the launcher's environment says of this process: torchrun's variables, or srun's where torchrun is not there.

Pure functions of a mapping; every mistake is one ValueError that names the variable. Rank = number in the whole job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

HOW_TO_START = (
    "start it with `torchrun --nproc_per_node N launch/grpo.py`, "
    "or with `srun python launch/grpo.py` inside a SLURM allocation"
)
# Ports that Linux does not hand out by itself; a job and step id always give the same one.
FIRST_PORT, NUM_PORTS = 15000, 17000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process's place in the job, as its launcher set it."""

    rank: int
    local_rank: int
    nodes: tuple[int, ...]
    """The node of each rank, in rank order."""
    master_addr: str
    master_port: int

    @property
    def world_size(self) -> int:
        """Processes in the whole job."""
        return len(self.nodes)


def read_launcher(environ: Mapping[str, str]) -> Launch:
    """This process's place; torchrun's variables win over the scheduler's. Raises ValueError with one line."""
    if "RANK" in environ:
        return _read_torchrun(environ)
    if "SLURM_STEP_ID" in environ:
        return _read_srun(environ)
    if "SLURM_JOB_ID" in environ:
        raise ValueError(
            "this is the batch script itself, not a step of it (no SLURM_STEP_ID): put `srun` before the command"
        )
    raise ValueError(f"no launcher set RANK: {HOW_TO_START}")


def _read_torchrun(environ: Mapping[str, str]) -> Launch:
    rank, world_size, local_rank = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK must lie between 0 and WORLD_SIZE - 1, got RANK={rank} and WORLD_SIZE={world_size}")
    per_node = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size
    if "LOCAL_WORLD_SIZE" in environ and (world_size % per_node or rank % per_node != local_rank):
        raise ValueError(
            f"every node must run the same number of ranks: RANK={rank}, WORLD_SIZE={world_size}, "
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={per_node}"
        )
    return Launch(
        rank=rank,
        local_rank=local_rank,
        nodes=tuple(number // per_node for number in range(world_size)),
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_number(environ, "MASTER_PORT"),
    )


def _read_srun(environ: Mapping[str, str]) -> Launch:
    rank, world_size, local_rank = (
        _number(environ, name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    )
    if not 0 <= rank < world_size:
        raise ValueError(f"SLURM_PROCID must lie below SLURM_NTASKS, got {rank} and {world_size}")
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    hosts = expand_hosts(_text(environ, name))
    nodes = _task_nodes(environ, world_size, len(hosts))
    if rank - nodes.index(nodes[rank]) != local_rank:
        raise ValueError(
            f"ranks of one node must follow each other (srun --distribution=block), got SLURM_PROCID={rank} "
            f"as SLURM_LOCALID={local_rank}"
        )
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else FIRST_PORT + (job * 31 + step) % NUM_PORTS
    return Launch(
        rank=rank,
        local_rank=local_rank,
        nodes=nodes,
        master_addr=environ.get("MASTER_ADDR", hosts[0]),
        master_port=port,
    )


def _task_nodes(environ: Mapping[str, str], world_size: int, num_hosts: int) -> tuple[int, ...]:
    """The node of each task, from SLURM's `2(x3),1`; without it tasks are spread evenly in blocks."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    if name not in environ:
        if world_size % num_hosts:
            raise ValueError(f"{name} is not set, and {world_size} tasks do not divide over {num_hosts} nodes")
        return tuple(task * num_hosts // world_size for task in range(world_size))
    counts: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"{name} must look like 2(x3),1, got {environ[name]!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) != world_size:
        raise ValueError(f"{name}={environ[name]} adds up to {sum(counts)} tasks, SLURM_NTASKS says {world_size}")
    return tuple(node for node, count in enumerate(counts) for _ in range(count))


def expand_hosts(nodelist: str) -> list[str]:
    """Host names of a SLURM node list such as `node[01-03,07],login1`, in order. Raises ValueError if malformed."""
    hosts: list[str] = []
    for item in _split_outside_brackets(nodelist):
        hosts += _expand_item(item, nodelist)
    return hosts


def _split_outside_brackets(nodelist: str) -> list[str]:
    depth, cuts = 0, [-1]
    for place, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"unbalanced brackets in the node list {nodelist!r}")
        if letter == "," and depth == 0:
            cuts.append(place)
    if depth:
        raise ValueError(f"unbalanced brackets in the node list {nodelist!r}")
    items = [nodelist[start + 1 : stop].strip() for start, stop in pairwise([*cuts, len(nodelist)])]
    if not all(items):
        raise ValueError(f"empty host name in the node list {nodelist!r}")
    return items


def _expand_item(item: str, nodelist: str) -> list[str]:
    """`n[1-2]x[a]` style items: every bracket multiplies the names before it, the rightmost varies fastest."""
    names = [""]
    for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        choices = [text] if text else [number for part in ranges.split(",") for number in _expand_range(part, nodelist)]
        names = [name + choice for name in names for choice in choices]
    return names


def _expand_range(part: str, nodelist: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise ValueError(f"{part!r} is no number range in the node list {nodelist!r}")
    width = len(match[1])  # zeros in front are kept: 08-11 gives 08, 09, 10, 11
    return [str(number).zfill(width) for number in range(int(match[1]), int(match[2] or match[1]) + 1)]


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(f"the launcher did not set {name}: {HOW_TO_START}")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(text)
