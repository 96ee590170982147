"""Starts `sparseflow.bench_cell` in a process of its own and brings back what it measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO

from sparseflow.bench_cell import Run
from sparseflow.errors import CapacityError, SparseFlowError

COMMAND = (sys.executable, "-P", "-m", "sparseflow.bench_cell")

_POLL_SECONDS = 0.2


def run_in_process(run: Run, waiting: Callable[[], None]) -> dict[str, Any]:
    """Measures `run` in a fresh process; `waiting` is called a few times a second meanwhile, and may raise to end it.

    Raises what the run raised, as SparseFlowError with its message and exit status; CapacityError when it was killed.
    """
    # Files rather than pipes: nobody reads while the process runs, and a pipe that is full would stop it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(COMMAND, bufsize=0, stdin=subprocess.PIPE, stdout=output, stderr=errors) as process:
            try:
                _send(process, run)
                while not _ended(process):
                    waiting()
            finally:
                process.kill()  # does nothing to one that ended
        return _answer(process.returncode, _content(output), _content(errors))


def _send(process: subprocess.Popen[bytes], run: Run) -> None:
    """The pipe stays open afterwards: its end tells the process that nobody waits for it any more."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(asdict(run)).encode() + b"\n")
    except BrokenPipeError:
        pass  # it ended already, and its standard error says why


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _answer(status: int, output: str, errors: str) -> dict[str, Any]:
    if status < 0:
        name = signal.Signals(-status).name
        raise CapacityError(f"the process was killed by {name}: most likely the machine ran out of memory, use a smaller cache")
    if status > 0 or not output:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise SparseFlowError(f"the measuring process failed with status {status}: {last}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    if "error" in answer:
        error = SparseFlowError(answer["error"])
        error.exit_status = answer["exit_status"]
        raise error
    return answer
