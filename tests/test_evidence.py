"""Evidence: what the operating system tells about this process, and how a run is summed up."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_store import disk_path, write_expert_store  # noqa: F401

from sparseflow import evidence
from sparseflow.evidence import RunEvidence, disk_bytes_read, peak_rss_bytes, rss_bytes
from sparseflow.leases import LeaseTable
from sparseflow.store import PackedStore

RUN = RunEvidence(
    prompt_tokens=12,
    new_tokens=65,
    ttft_seconds=0.25,
    decode_seconds=2.0,
    peak_rss_bytes=150 << 20,
    cache_slots=28,
    cache_bytes=1 << 20,
    requests=1000,
    hits=700,
    evictions=272,
    bytes_asked=36 << 20,
    bytes_read=11 << 20,
    strict=False,
    threads=2,
    isa="avx512vnni",
)


def test_disk_bytes_are_those_that_a_strict_store_admits(disk_path: Path) -> None:  # noqa: F811
    path = write_expert_store(disk_path / "experts.sfx", 1, 16, 1 << 20)
    with PackedStore(path, strict=True) as store:
        table = LeaseTable(store, 4)
        before = disk_bytes_read()
        for _ in range(2):
            for first in range(0, 16, 4):
                with table.acquire(0, np.arange(first, first + 4, dtype=np.int32)) as lease:
                    lease.wait()
        after = disk_bytes_read()
        assert before is not None and after is not None
        asked = table.counters()["admitted_bytes"]
        assert asked <= after - before < asked + (1 << 20)  # the interpreter may read a file of its own meanwhile


def test_resident_set() -> None:
    slack = 1 << 20  # the kernel counts pages per processor, and adds up with some delay
    before, peak = rss_bytes(), peak_rss_bytes()
    assert before is not None and peak is not None and 0 < before <= peak + slack
    with mmap.mmap(-1, 32 << 20) as ballast:  # fresh from the kernel, unlike memory that an allocator hands out again
        for offset in range(0, len(ballast), mmap.PAGESIZE):
            ballast[offset] = 1
        after = rss_bytes()
        assert after is not None and before + len(ballast) // 2 < after
    peak = peak_rss_bytes()
    assert peak is not None and peak >= after - slack


def test_what_the_system_does_not_tell_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_PROCESS", tmp_path)
    assert (disk_bytes_read(), peak_rss_bytes(), rss_bytes()) == (None, None, None)
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    1000 kB\n")
    assert (disk_bytes_read(), peak_rss_bytes(), rss_bytes()) == (None, None, 1_024_000)


@pytest.mark.parametrize("content", [None, "rchar: 5\n", "rchar: 5\nread_bytes: many\n"])
def test_disk_bytes_are_none_where_the_kernel_does_not_count_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(evidence, "_PROCESS", tmp_path)
    if content is None:
        (tmp_path / "io").mkdir()
    else:
        (tmp_path / "io").write_text(content)
    assert disk_bytes_read() is None


def test_disk_bytes_are_those_of_proc(disk_path: Path) -> None:  # noqa: F811
    path = write_expert_store(disk_path / "experts.sfx", 1, 16, 1 << 20)
    program = """
import sys
from pathlib import Path
from sparseflow.evidence import disk_bytes_read
from sparseflow.leases import LeaseTable
from sparseflow.store import PackedStore
import numpy as np
with PackedStore(sys.argv[1], strict=True) as store, LeaseTable(store, 16).acquire(0, np.arange(16, dtype=np.int32)) as lease:
    lease.wait()
print(disk_bytes_read(), Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
"""
    # In a process of its own: there, too, are the bytes of children that ended, of which this one has some.
    found, told = map(int, subprocess.run([sys.executable, "-P", "-c", program, path], check=True, capture_output=True, text=True).stdout.split())
    assert found >= 16 << 20
    assert 0 <= told - found < 1 << 20  # the interpreter may read a file of its own in between


def test_derived_numbers() -> None:
    assert (RUN.tokens_per_second, RUN.misses, RUN.hit_rate) == (32.0, 300, 0.7)
    assert replace(RUN, new_tokens=1).tokens_per_second is None
    assert replace(RUN, new_tokens=0, decode_seconds=0.0).tokens_per_second is None
    assert replace(RUN, requests=0, hits=0).hit_rate is None


def test_the_line() -> None:
    assert RUN.line() == (
        "12 + 65 tokens, 32.00 tok/s, first token after 0.25 s | peak RSS 150.0 MiB"
        " | cache 28 experts, 1.0 MiB, hit rate 70.0 % | asked 36.0 MiB, read 11.0 MiB from disk | 2 threads, avx512vnni"
    )
    unknown = replace(RUN, new_tokens=1, peak_rss_bytes=None, requests=0, hits=0, bytes_read=None, strict=True, threads=1)
    assert unknown.line() == (
        "12 + 1 tokens, n/a tok/s, first token after 0.25 s | peak RSS n/a"
        " | cache 28 experts, 1.0 MiB, strict, hit rate n/a | asked 36.0 MiB, read n/a from disk | 1 thread, avx512vnni"
    )


def test_json_holds_everything() -> None:
    values = json.loads(json.dumps(RUN.to_json()))
    assert values["bytes_read"] == 11 << 20 and values["isa"] == "avx512vnni"
    assert (values["tokens_per_second"], values["misses"], values["hit_rate"]) == (32.0, 300, 0.7)
    assert json.loads(json.dumps(replace(RUN, bytes_read=None).to_json()))["bytes_read"] is None
