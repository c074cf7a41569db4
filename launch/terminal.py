"""What a run shows: a log file per rank, a progress bar on rank 0, the guilty rank's own words when something fails."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# How long a rank waits for the launcher to end it before it speaks up as well.
GRACE_SECONDS = 5.0
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def redirect_output(path: Path) -> TextIO:
    """Send all that this process and its libraries print to a file; gives the terminal's own stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(log)
    return terminal


def refuse(error: ValueError, *, speaks: bool) -> NoReturn:
    """End with code 2 for a user's mistake; every rank makes it, the one that `speaks` says it."""
    if not speaks:
        time.sleep(GRACE_SECONDS)  # by now the launcher has ended this rank, unless it is alone with its mistake
    print(f"rayless: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextmanager
def blaming_lost_peers() -> Iterator[None]:
    """Around a rank's work: when a peer went away, let the launcher find that out before this rank fails of it too.

    torchrun takes the failure that was reported first for the root cause, and this rank would be quicker to report.
    """
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST_PEER):
            time.sleep(GRACE_SECONDS)
        raise


def report_errors(name: str, terminal: TextIO) -> None:
    """Make an uncaught exception end with this rank's name and traceback, in its log and on the terminal."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = f"{name}: {kind.__name__}: {error}\n" + "".join(traceback.format_exception(kind, error, trace))
        for stream in (sys.stderr, terminal):
            stream.write(text)
            stream.flush()

    sys.excepthook = report


class ProgressDisplay:
    """A progress bar with tqdm's `update` and `set_postfix`; plain lines where the output is no terminal."""

    def __init__(self, terminal: TextIO, *, total: int, done: int) -> None:
        self.console = Console(file=terminal)
        self.total, self.done = total, done
        self.clock = time.perf_counter()
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                redirect_stdout=False,  # they lead to this rank's log
                redirect_stderr=False,
            )
            self.task = self.bar.add_task("", total=total, completed=done)
            self.bar.start()

    def set_postfix(self, *, step: int, reward: float, loss: float, tokens: int) -> None:
        """What the line says; `tokens` were generated and trained since the last call."""
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        words = f"reward {reward:.3f}  loss {loss:+.4f}  {tokens / seconds:.0f} tokens/s  {seconds:.1f} s"
        if self.bar:
            self.bar.update(self.task, description=words)
        else:
            self.console.print(f"step {step}/{self.total}  {words}", soft_wrap=True, highlight=False)

    def update(self, steps: int) -> None:
        """So many more steps are done."""
        if self.bar:
            self.bar.update(self.task, advance=steps)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar:
            self.bar.stop()
