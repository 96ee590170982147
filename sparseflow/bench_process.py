"""Starts one run of a benchmark in a process of its own, waits, and brings back what it said and took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sparseflow.bench_cell import Run
from sparseflow.errors import CapacityError, SparseFlowError
from sparseflow.evidence import peak_rss_bytes

COMMAND = (sys.executable, "-P", "-m", "sparseflow.bench_cell")

_FIRST_POLL_SECONDS = 0.01
_POLL_SECONDS = 0.2
_BLOCK_BYTES = 512  # of ru_inblock, whatever the disk's are


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended by itself.

    Attributes
        output, errors: what it wrote to standard output and standard error.
        seconds: from its start to its end.
        peak_rss_bytes: its largest resident set, as seen five times a second; None when it was gone before.
        bytes_read: what the disk moved for it.
    """

    output: str
    errors: str
    seconds: float
    peak_rss_bytes: int | None
    bytes_read: int


def run_in_process(run: Run, waiting: Callable[[], None]) -> dict[str, Any]:
    """Measures `run` in a fresh process; `waiting` is called a few times a second meanwhile, and may raise to end it.

    Raises what the run raised, as SparseFlowError with its message and exit status; CapacityError when it was killed.
    """
    return answer(COMMAND, asdict(run), waiting)


def answer(command: Sequence[str], question: dict[str, Any], waiting: Callable[[], None]) -> dict[str, Any]:
    """Runs a command that is told something as a line of JSON, and tells something as the last one. Errors as `run_in_process`."""
    lines = run_command(command, waiting, json.dumps(question).encode()).output.splitlines()
    if not lines:
        raise SparseFlowError("the measuring process ended well, but it said nothing")
    told: dict[str, Any] = json.loads(lines[-1])
    if "error" in told:
        error = SparseFlowError(told["error"])
        error.exit_status = told["exit_status"]
        raise error
    return told


def run_command(command: Sequence[str], waiting: Callable[[], None], line: bytes | None = None) -> Ended:
    """Runs a command to its end, `waiting` meanwhile; on any exception of that the process is killed.

    line: given to it on its standard input, which stays open afterwards: its end tells the process that nobody waits any more.
    With None its standard input is empty. Raises CapacityError when it was killed, SparseFlowError when it failed or cannot be started.
    """
    # Files rather than pipes: nobody reads while the process runs, and a pipe that is full would stop it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given = subprocess.DEVNULL if line is None else subprocess.PIPE
        with _start(command, given, output, errors) as process:
            try:
                if line is not None:
                    _send(process, line)
                ended = _watch(process, waiting)
            finally:
                process.kill()  # does nothing to one that ended
        told = Ended(_content(output), _content(errors), *ended)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise CapacityError(f"the process was killed by {name}: most likely the machine ran out of memory, use a smaller cache")
    if process.returncode > 0:
        last = (told.errors.strip().splitlines() or ["it said nothing"])[-1]
        raise SparseFlowError(f"{Path(command[0]).name} failed with status {process.returncode}: {last.removeprefix('error: ')}")
    return told


def _start(command: Sequence[str], given: int, output: BinaryIO, errors: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, bufsize=0, stdin=given, stdout=output, stderr=errors)
    except OSError as error:
        raise SparseFlowError(f"{command[0]}: cannot be run: {error.strerror}") from error


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line + b"\n")
    except BrokenPipeError:
        pass  # it ended already, and its standard error says why


def _watch(process: subprocess.Popen[bytes], waiting: Callable[[], None]) -> tuple[float, int | None, int]:
    """Waits for the end; seconds, peak resident set, bytes read. The system's own account of the peak is no use: it counts this
    process's memory before the other began."""
    begun, peak = time.monotonic(), None
    pause = _FIRST_POLL_SECONDS
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return time.monotonic() - begun, peak, usage.ru_inblock * _BLOCK_BYTES
        peak = peak_rss_bytes(process.pid) or peak
        waiting()
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
