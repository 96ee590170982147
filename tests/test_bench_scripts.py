"""The benchmark scripts that need no more than a model run on the demo, and write what they show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("script", "options", "shown"),
    [
        ("overhead.py", ["--cache", "1MiB", "--tokens", "2", "--profile"], "outside kernels ms"),
        ("resident.py", ["--pairs", "2"], "share"),
        ("tracing.py", ["--rounds", "2", "--tokens", "2", "--cache", "1MiB", "--strict"], "overhead"),
    ],
)
def test_a_script_runs_on_the_demo(script: str, options: list[str], shown: str, packed_demo: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-P", str(BENCH / script), str(packed_demo), *options, "--threads", "2", "--json", str(result)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, shown in ran.stdout) == (0, True), ran.stderr
    assert json.loads(result.read_text())
