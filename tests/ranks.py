"""Run a function on real processes of this machine that are connected as one job."""

import multiprocessing
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from rayless.comm.launcher import Launch
from rayless.comm.topology import TopologyConfig, connect, disconnect, meet

# Seconds for the other ranks to report once one has failed.
GRACE = 1.0
PROCESSES = multiprocessing.get_context("forkserver")
# The fork server imports these once (torch, ColossalAI); every rank is a fork of it.
PROCESSES.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.device_mesh",
        "rayless.comm.collectives",
        "rayless.comm.topology",
        "rayless.comm.transfer",
        "rayless.comm.weights",
        "rayless.trainers.grpo_consumer",
    ]
)


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *,
    config: TopologyConfig | None = None,
    nodes: Sequence[int] | None = None,
    arguments: tuple[Any, ...] = (),
    timeout: float = 60.0,
) -> list[Any]:
    """What `function(topology, *arguments)` returned on each rank, in rank order.

    `function` stands at the top level of its file. `nodes` gives the node that each rank pretends to be on, all on one
    by default. A rank's exception fails the test with its traceback; no rank outlives the call, which
    may take `timeout` seconds.
    """
    homes = tuple(nodes) if nodes is not None else (0,) * num_ranks
    assert len(homes) == num_ranks, f"{num_ranks} ranks stand on {len(homes)} nodes"
    # Plain pickle copies tensors; multiprocessing's own would share their memory with processes about to end.
    work = pickle.dumps((function, config or TopologyConfig(), arguments))
    port = _free_port()
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank, home in enumerate(homes):
            local_rank = homes[:rank].count(home)
            launch = Launch(rank=rank, local_rank=local_rank, nodes=homes, master_addr="127.0.0.1", master_port=port)
            receiver, sender = PROCESSES.Pipe(duplex=False)
            process = PROCESSES.Process(target=_run_rank, args=(sender, launch, work), daemon=True)
            process.start()
            sender.close()  # the rank holds the only writing end, so that its death reads as an end of file
            processes.append(process)
            pipes.append(receiver)
        return _collect(pipes, processes, timeout)
    finally:
        for started in processes:
            started.kill()
            started.join()
            started.close()
        for pipe in pipes:
            pipe.close()


def _collect(pipes: list[Connection], processes: list[BaseProcess], timeout: float) -> list[Any]:
    values: dict[int, Any] = {}
    failures: list[str] = []
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)
            values[rank], failure = _report(pipes[rank], processes[rank], rank)
            if failure:
                failures.append(failure)
                # The others may notice only that its connections closed, and earlier than we see its death.
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    if waiting:
        late = sorted(waiting.values())
        pytest.fail(f"ranks {late} of {len(pipes)} were not done after {timeout:g} seconds", pytrace=False)
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    assert codes == [0] * len(processes), f"the ranks ended with exit codes {codes}"
    return [values[rank] for rank in range(len(pipes))]


def _report(pipe: Connection, process: BaseProcess, rank: int) -> tuple[Any, str]:
    """A rank's value and, if it failed, how."""
    try:
        value, failure = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return None, f"rank {rank} died with exit code {process.exitcode}"
    return value, failure


def _run_rank(pipe: Connection, launch: Launch, work: bytes) -> None:
    torch.set_num_threads(1)
    name = f"rank {launch.rank}"
    try:
        function, config, arguments = pickle.loads(work)
        topology = connect(launch, config, device="cpu")
        name += f", {topology.seat.name}"
        value = function(topology, *arguments)
        meet(topology)
        disconnect()
        report = pickle.dumps((value, ""))
    except BaseException:
        report = pickle.dumps((None, f"{name}:\n{traceback.format_exc()}"))
    pipe.send_bytes(report)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
