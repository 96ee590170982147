"""The bound: a streaming run's peak RSS, and in strict mode the page cache, on the demo and on a model of over 2 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from expert_store import READ_MAPPED

MIB = 1 << 20
ALLOWANCE = 150 * MIB
TOOLS = Path(__file__).parent.parent / "tools"

RUN = READ_MAPPED + """
import json, os, sys
import numpy as np
import sparseflow
from sparseflow.evidence import peak_rss_bytes

folder, cache, strict, tokens = sys.argv[1], sys.argv[2], bool(sys.argv[3]), int(sys.argv[4])
most_cached = 0
if sys.argv[3] == "mapped":
    read_mapped()
with sparseflow.load(folder, cache=cache, threads=2, strict=strict, context=256) as model:
    session = model.session()
    ids = np.random.default_rng(0).integers(0, model.geometry.vocab_size, tokens)
    for start in (0, *range(tokens // 2, tokens)):
        stop = tokens // 2 if start == 0 else start + 1
        session.forward(ids[start:stop], last_only=True)
        most_cached = max(most_cached, model.store.resident_bytes())
    print(json.dumps({
        "peak": peak_rss_bytes(), "core": model.core_bytes, "cache": model.leases.slots * model.layout.stride,
        "most_cached": most_cached, "direct": model.leases.direct,
        "misses": sum(u.requests - u.hits for u in session.usage),
        "asked": sum(u.bytes_asked for u in session.usage), "evictions": model.leases.counters()["evictions"],
    }))
"""


def measured(folder: Path, cache: str, strict: str, tokens: int) -> dict[str, int]:
    arguments = [str(folder), cache, strict, str(tokens)]
    done = subprocess.run([sys.executable, "-P", "-c", RUN, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(run: dict[str, int], strict: str) -> None:
    assert run["evictions"] > 0, "nothing was evicted: the run was too short to show a bound"
    assert run["peak"] <= run["core"] + run["cache"] + ALLOWANCE
    assert run["direct"] == (strict == "direct")
    if strict:  # slots hold the experts, or pages of the file do
        assert run["most_cached"] <= (0 if run["direct"] else run["cache"])


@pytest.mark.parametrize("strict", ["", "mapped", "direct"])
def test_the_demo(packed_demo: Path, strict: str) -> None:
    check(measured(packed_demo, "1MiB", strict, 60), strict)


@pytest.mark.slow
def test_a_model_of_over_two_gib(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make = [sys.executable, "-P", str(TOOLS / "make_model.py"), str(folder), "--layers", "3", "--vocab", "4096"]
    subprocess.run(make, check=True, capture_output=True)
    assert (folder / "experts.sfx").stat().st_size > 2 << 30
    for cache, strict in (("64MiB", "direct"), ("256MiB", ""), ("256MiB", "direct"), ("256MiB", "mapped"), ("1GiB", "")):
        check(measured(folder, cache, strict, 80), strict)
