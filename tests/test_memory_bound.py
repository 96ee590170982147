"""The memory bound on a store of 2 GiB: what a process that streams experts holds, by the kernel's own books."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from expert_store import disk_folder, write_expert_store

LAYERS, EXPERTS, SLICE = 4, 172, 3 << 20
BUDGET = 256 << 20

# Waves of random experts, each page of each read. Memory for the numbers and for page tables is not the experts': 16 MiB.
STREAM = """
import json, sys
sys.path.insert(0, {tests!r})
import numpy as np
from expert_store import expected_marks, mapped_bytes, page_marks
from sparseflow.evidence import disk_bytes_read, peak_rss_bytes
from sparseflow.leases import LeaseTable
from sparseflow.store import PackedStore

rng = np.random.default_rng(3)
with PackedStore({path!r}, strict={strict}) as store:
    table = LeaseTable(store, {budget} // store.stride, direct={direct})
    with table.acquire(0, np.zeros(1, np.int32)) as lease:
        lease.wait()
        assert (page_marks(int(lease.addresses[0]), store.stride) == expected_marks(0, store.stride)).all()
    cached, mapped, before, read_before = [], [], peak_rss_bytes(), disk_bytes_read()
    admitted_before = table.counters()["admitted_bytes"]
    for wave in range(160):
        layer = int(rng.integers(store.num_layers))
        experts = np.sort(rng.choice(store.num_experts, 8, replace=False)).astype(np.int32)
        with table.acquire(layer, experts) as lease:
            lease.wait()
            mapped.append(mapped_bytes(store))
            cached.append(store.resident_bytes())
            for expert, address in zip(experts, lease.addresses):
                marks = page_marks(int(address), store.stride)
                assert (marks == expected_marks(layer * store.num_experts + int(expert), store.stride)).all()
    print(json.dumps({{
        "budget": table.slots * store.stride, "before": before, "peak": peak_rss_bytes(), "cached": cached, "mapped": mapped,
        "read": disk_bytes_read() - read_before, "admitted": table.counters()["admitted_bytes"] - admitted_before,
    }}))
"""


@pytest.fixture(scope="module")
def big_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with disk_folder(tmp_path_factory.mktemp("big")) as folder:
        path = write_expert_store(folder / "experts.sfx", LAYERS, EXPERTS, SLICE)
        assert path.stat().st_size >= 2 << 30
        yield path
        path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("strict", "direct"), [(False, False), (True, False), (True, True)])
def test_streaming_stays_within_the_budget(big_store: Path, strict: bool, direct: bool) -> None:
    folder = str(Path(__file__).parent)
    program = STREAM.format(tests=folder, path=str(big_store), strict=strict, direct=direct, budget=BUDGET)
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    run = json.loads(result.stdout)
    assert run["admitted"] > 4 * BUDGET  # the cache went round several times
    assert run["peak"] <= run["before"] + BUDGET + (16 << 20)
    assert max(run["mapped"]) == (0 if direct else run["budget"]) <= BUDGET
    if direct:
        assert max(run["cached"]) == 0
        assert run["admitted"] == run["read"]
    elif strict:
        assert max(run["cached"]) == run["budget"]
        assert run["admitted"] <= run["read"] <= run["admitted"] + (1 << 20)
