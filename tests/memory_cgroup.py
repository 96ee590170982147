"""A memory cgroup for a child process, of whichever version the machine has. Making one needs root, or a delegated subtree."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sparseflow.limits import _groups


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """The folder of a fresh cgroup of `limit` bytes without swap. Fails the test, with the reason, where none can be made."""
    found = list(_groups("memory"))
    # At the top of what is mounted: a group of version 2 that holds processes, as our own does, may have no children with limits.
    tops = [(folder, version) for folder, version in found if folder.parent not in [other for other, _ in found]]
    reasons = ["no cgroup file system is mounted"] if not tops else []
    for top, version in tops:
        folder = top / f"sparseflow-test-{os.getpid()}"
        try:
            if version == 2 and "memory" not in (top / "cgroup.subtree_control").read_text().split():
                (top / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            try:
                (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(limit))
                with suppress(OSError):  # a kernel without swap accounting has nothing to switch off
                    (folder / "memory.swap.max").write_text("0") if version == 2 else (folder / "memory.swappiness").write_text("0")
            except OSError:
                folder.rmdir()
                raise
        except OSError as error:
            reasons.append(f"{error.filename}: {error.strerror}")
            continue
        try:
            yield folder
        finally:
            folder.rmdir()
        return
    pytest.fail(f"this test needs a memory cgroup, and none can be made here ({'; '.join(reasons)}): run it as root")


def run_inside(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command inside of the cgroup from its first instruction on, and waits for it."""
    entered = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"), *command]
    return subprocess.run(entered, capture_output=True, text=True)
