"""The speed of light: that memory and disk are really read, and what follows from the figures. No figure itself is tested."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from expert_store import disk_path  # noqa: F401

from sparseflow import disk_speed, memory_speed
from sparseflow.disk_speed import DiskSpeed, measure_disk
from sparseflow.errors import StorageError
from sparseflow.kernels.bandwidth import read_once
from sparseflow.memory_speed import MemorySpeed, buffer_size, last_level_cache_bytes, measure_memory
from sparseflow.packfile import EXPERTS_FILE, Manifest, read_manifest
from sparseflow.speed_of_light import Rates, SpeedOfLight
from sparseflow.store import PackedStore

MIB, GIB = 1 << 20, 1 << 30


# --- memory ---


@pytest.mark.parametrize("count", [256, MIB, MIB + 256, 3 * MIB + 512])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_read(each_isa: str, count: int, threads: int) -> None:
    words = np.random.default_rng(count).integers(0, 2**64, count // 8, np.uint64)
    words.flags.writeable = False
    seconds, folded = read_once(words.view(np.uint8), threads)
    assert seconds > 0
    assert folded == int(np.bitwise_xor.reduce(words))


@pytest.mark.parametrize("count", [0, 64, 300])
def test_sizes_that_cannot_be_read(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} bytes"):
        read_once(np.zeros(count, np.uint8))


def test_memory_is_measured_over_several_passes() -> None:
    speed = measure_memory(2, buffer_bytes=4 * MIB, passes=3)
    assert (speed.threads, speed.buffer_bytes, len(speed.passes)) == (2, 4 * MIB, 3)
    assert speed.best >= speed.median > 0
    assert json.loads(json.dumps(speed.to_json()))["best"] == speed.best


@pytest.mark.parametrize(
    ("cache", "available", "expected"),
    [
        (32 * MIB, 24 * GIB, 512 * MIB),  # never less
        (260 * MIB, 24 * GIB, 1040 * MIB),  # 4 times the cache
        (GIB, 24 * GIB, 3 * GIB),  # an eighth of the memory
        (260 * MIB, GIB // 2, 256 * MIB),  # half of it
        (None, 24 * GIB, 512 * MIB),
        (32 * MIB, 0, 2 * MIB),
    ],
)
def test_the_buffer_exceeds_the_cache_as_far_as_memory_allows(cache: int | None, available: int, expected: int) -> None:
    assert buffer_size(cache, available) == expected


def test_the_last_level_cache_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_speed, "_CACHES", tmp_path)
    assert last_level_cache_bytes() is None
    for index, size in enumerate(["48K\n", "2048K\n", "266240K\n", "unknown\n"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_level_cache_bytes() == 260 * MIB


# --- disk ---


@pytest.fixture
def manifest(packed_demo: Path, disk_path: Path) -> Manifest:  # noqa: F811
    return read_manifest(shutil.copytree(packed_demo, disk_path / "demo"))


def test_the_disk_is_read_both_ways(manifest: Manifest) -> None:
    before = Path("/proc/self/io").read_text()
    speed = measure_disk(manifest, passes=2)
    after = Path("/proc/self/io").read_text()
    assert speed.extent_bytes == manifest.stride
    assert len(speed.admitted) == 2 and len(speed.direct) in (0, 2)
    assert speed.bytes_per_second >= np.median(speed.admitted) > 0
    read = [int(text.split("\nread_bytes: ")[1].split()[0]) for text in (before, after)]
    experts = manifest.folder / EXPERTS_FILE
    assert read[1] - read[0] >= (2 + len(speed.direct)) * (experts.stat().st_size - 4096)
    assert json.loads(json.dumps(speed.to_json()))["bytes_per_second"] == speed.bytes_per_second


def test_a_pass_ends_in_time(manifest: Manifest) -> None:
    with PackedStore(manifest.folder / EXPERTS_FILE) as store:
        extents = [(layer, expert) for layer in range(store.num_layers) for expert in range(store.num_experts)]
        assert disk_speed._admit(store, extents, deadline=0.0) == 0
        assert disk_speed._read_direct(store, extents, deadline=0.0) == 0
    speed = measure_disk(manifest, passes=1, pass_bytes=1)
    assert len(speed.admitted) == 1


def test_a_file_system_without_direct_reads(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(os, "preadv", refuse)
    speed = measure_disk(manifest, passes=2)
    assert speed.direct == () and len(speed.admitted) == 2


def test_a_disk_that_fails(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match="cannot be read: Input/output error"):
        measure_disk(manifest)


def test_experts_that_cannot_be_dropped_are_not_measured(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_speed, "buffer_size", lambda cache, available: 2 * MIB)
    with PackedStore(manifest.folder / EXPERTS_FILE) as other:
        for expert in range(other.num_experts):
            for layer in range(other.num_layers):
                other.admit(layer, expert)
        with pytest.raises(StorageError, match="stay in the page cache, so the disk cannot be measured"):
            measure_disk(manifest)
        light = SpeedOfLight.measure(manifest, 1)
        assert light.disk == () and light.disk_error is not None and "stay in the page cache" in light.disk_error


# --- what follows ---


def light(memory: float, disk: float | None) -> SpeedOfLight:
    return SpeedOfLight(
        (MemorySpeed(2, GIB, None, (memory / 2, memory)),), () if disk is None else (DiskSpeed(4096, (), (disk,)),)
    )


def test_bounds() -> None:
    bound = Rates(20e9, 2e9).bound(3e9, 1e9)
    assert (bound.memory_s, bound.disk_s, bound.overlapped_s, bound.sum_s) == (0.15, 0.5, 0.5, 0.65)
    bound = Rates(20e9, 2e9).bound(3e9, 0.1e9)
    assert (bound.overlapped_s, bound.sum_s) == (0.15, pytest.approx(0.2))


def test_without_a_disk_figure_there_is_a_bound_only_when_nothing_is_missed() -> None:
    bound = Rates(20e9, None).bound(3e9, 1e9)
    assert (bound.memory_s, bound.disk_s, bound.overlapped_s, bound.sum_s) == (0.15, None, None, None)
    bound = Rates(20e9, None).bound(3e9, 0)
    assert (bound.overlapped_s, bound.sum_s) == (0.15, 0.15)


def test_the_faster_of_two_looks() -> None:
    assert Rates(2.0, 3.0).faster(Rates(1.0, 4.0)) == Rates(2.0, 4.0)
    assert Rates(2.0, None).faster(Rates(1.0, 4.0)).disk == 4.0 and Rates(2.0, None).faster(Rates(1.0, None)).disk is None


def test_of_several_measurements_the_best_counts() -> None:
    both = light(20e9, 1e9) + light(15e9, 2e9)
    assert (both.memory_bytes_per_second, both.disk_bytes_per_second) == (20e9, 2e9)
    written = json.loads(json.dumps(both.to_json()))
    assert len(written["memory"]) == len(written["disk"]) == 2
    assert (light(20e9, None) + light(20e9, 3e9)).disk_bytes_per_second == 3e9


def test_the_faster_way_by_its_middle_pass_is_the_disk() -> None:
    assert DiskSpeed(4096, (1.0, 9.0, 2.0), (3.0, 1.0, 4.0)).bytes_per_second == 3.0
    assert DiskSpeed(4096, (5.0,), (3.0,)).bytes_per_second == 5.0
