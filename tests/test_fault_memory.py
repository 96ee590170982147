"""Too little address space at any point of a run: one line and an exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20

# The limit is set when the program is loaded: what Python and its libraries do without memory is not ours.
PROGRAM = """
import resource, sys
from sparseflow.cli.main import main

with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
limit = used + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main(prog_name="sparseflow")
"""


def limited(room: int, *args: str) -> subprocess.CompletedProcess[str]:
    """A command that may take so much more address space than it has at the start."""
    return subprocess.run([sys.executable, "-P", "-c", PROGRAM, str(room), *args], capture_output=True, text=True, timeout=120)


def is_told(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the command succeeded; else it must have told why, in one line, with the status of its kind."""
    if done.returncode == 0:
        return True
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert done.returncode in (5, 6), (done.returncode, done.stderr)
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return False


@pytest.mark.parametrize("options", [[], ["--strict"], ["--cache", "resident"]], ids=["mapped", "strict", "resident"])
def test_what_does_not_fit_is_refused(packed_demo: Path, options: list[str]) -> None:
    done = limited(8 * MIB, "run", str(packed_demo), "The red fox", "--max-new-tokens", "4", "--threads", "1", *options)
    assert not is_told(done)
    assert done.returncode == 5 and "RLIMIT_AS" in done.stderr


def test_verify_tells_why_it_cannot(packed_demo: Path) -> None:
    fits = [is_told(limited(room * MIB, "verify", str(packed_demo))) for room in (1, 8, 32, 100, 8192)]
    assert not fits[0] and fits[-1]


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("options", [["--cache", "1MiB"], ["--cache", "1MiB", "--strict"], ["--cache", "resident"]], ids=["mapped", "strict", "resident"])
def test_forced_it_runs_or_tells_why_not(packed_demo: Path, options: list[str], threads: str) -> None:
    command = ["run", str(packed_demo), "The red fox", "--max-new-tokens", "4", "--threads", threads, "--force", *options]
    fits = [is_told(limited(room * MIB, *command)) for room in (1, 6, 8, 9, 10, 11, 12, 14, 18, 24, 32, 48, 128, 1024)]
    assert not fits[0] and fits[-1]
