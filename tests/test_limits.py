"""What the system grants, read from trees of files like the kernel's: cgroups of both versions, /proc, and rlimits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from fake_system import MIB, FakeSystem, write
from hypothesis import given
from hypothesis import strategies as st

from sparseflow import limits
from sparseflow.errors import CapacityError
from sparseflow.limits import MemoryLimit, Processors, memory_limits, processors
from sparseflow.memory import LEAST_CACHE, available_memory, recommended_cache, require_memory, spare_memory, tightest_limit, total_memory

GIB = 1 << 30


def rooms() -> dict[str, int]:
    """Room by the limit's name without its folder."""
    return {"/".join(Path(limit.name).parts[-2:]): limit.room() for limit in memory_limits()}


# --- memory ---


def test_without_cgroups_memavailable_counts(system: FakeSystem) -> None:
    assert memory_limits() == [MemoryLimit("MemAvailable", 800 * MIB)]
    assert available_memory() == 800 * MIB and total_memory() == 1000 * MIB


def test_a_system_that_tells_nothing(system: FakeSystem) -> None:
    for file in ("meminfo", "self/cgroup", "self/mountinfo", "self/status"):
        (system.proc / file).unlink()
    assert memory_limits() == [] and available_memory() is None and total_memory() is None
    assert processors() == Processors(4, None)


def test_version_2_and_all_ancestors(system: FakeSystem) -> None:
    root = system.mount("cgroup2", "rw,nsdelegate")
    system.member("0::/slice/unit/leaf")
    write(root / "slice", memory__max=700 * MIB, memory__high="max", memory__current=300 * MIB,
          memory__stat=f"anon 1\ninactive_file {MIB}\nactive_file {2 * MIB}")
    write(root / "slice/unit", memory__max=600 * MIB, memory__high=500 * MIB, memory__current=100 * MIB,
          memory__stat="inactive_file 0")
    write(root / "slice/unit/leaf", memory__max="max", memory__high="max", memory__current=50 * MIB)
    assert rooms() == {
        "MemAvailable": 800 * MIB,
        "slice/memory.max": 403 * MIB,  # file cache gives way
        "unit/memory.max": 500 * MIB,
        "unit/memory.high": 400 * MIB,
    }
    assert available_memory() == 400 * MIB


def test_version_1_and_no_limit(system: FakeSystem) -> None:
    root = system.mount("cgroup", "rw,memory", point="memory")
    system.mount("cgroup", "rw,cpu,cpuacct", point="cpu")
    system.member("4:memory:/docker/box")
    system.member("3:cpu,cpuacct:/")
    write(root, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    write(root / "docker", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    write(root / "docker/box", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=90 * MIB,
          memory__stat=f"inactive_file 0\ntotal_inactive_file {10 * MIB}\ntotal_active_file {20 * MIB}")
    assert rooms() == {"MemAvailable": 800 * MIB, "box/memory.limit_in_bytes": 240 * MIB}


def test_both_versions_side_by_side(system: FakeSystem) -> None:
    system.mount("cgroup2", "rw", point="cgroup/unified")
    root = system.mount("cgroup", "rw,memory", point="cgroup/memory")
    system.member("4:memory:/a")
    system.member("0::/a")
    write(root / "a", memory__limit_in_bytes=100 * MIB, memory__usage_in_bytes=0)
    assert available_memory() == 100 * MIB


@pytest.mark.parametrize("kind", ["part", "outside"])
def test_a_container_sees_its_part_of_the_hierarchy(system: FakeSystem, kind: str) -> None:
    # Mounted is /docker/box alone; the process's path is told from the top, or leads out of what can be seen.
    root = system.mount("cgroup2", "rw", root="/docker/box", point="my cgroup")
    system.member("0::/docker/box/inner" if kind == "part" else "0::/../other")
    write(root, memory__max=200 * MIB, memory__current=0)
    write(root / "inner", memory__max=150 * MIB, memory__current=0)
    assert available_memory() == (150 if kind == "part" else 200) * MIB


def test_more_used_than_allowed_is_no_room(system: FakeSystem) -> None:
    root = system.mount("cgroup2", "rw")
    system.member("0::/")
    write(root, memory__max=100 * MIB, memory__current=150 * MIB)
    assert available_memory() == 0


def test_what_the_kernel_would_kill_for_is_refused(system: FakeSystem) -> None:
    system.member("0::/run")
    top = system.mount("cgroup2", "rw")
    write(top / "run", memory__max=500 * MIB, memory__high=200 * MIB, memory__current=300 * MIB)
    require_memory(184 * MIB)
    with pytest.raises(CapacityError, match=r"run/memory.max leaves 200.0 MiB, the run needs 185.0 MiB more at once and 16.0 MiB to spare; use a"):
        require_memory(185 * MIB)
    write(top / "run", memory__max="max")
    require_memory(900 * MIB)


def test_rlimits_count_addresses(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    given_limits = {resource.RLIMIT_AS: 300 * MIB, resource.RLIMIT_DATA: 250 * MIB}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (given_limits[kind], -1))
    assert rooms() == {"MemAvailable": 800 * MIB, "RLIMIT_AS": 200 * MIB, "RLIMIT_DATA": 200 * MIB}
    tightest = tightest_limit(150 * MIB)
    assert tightest is not None and (tightest.name, tightest.room(150 * MIB)) == ("RLIMIT_AS", 50 * MIB)


def test_the_limits_of_this_process_are_those_it_was_started_with() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n" + (
        "from sparseflow.limits import memory_limits\n"
        "print(*[(limit.limit_bytes, limit.used_bytes) for limit in memory_limits() if limit.name == 'RLIMIT_DATA'])")
    said = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout
    limit, used = eval(said)
    assert limit == GIB and 0 < used < GIB


# --- processors ---


def test_the_smallest_quota_counts(system: FakeSystem) -> None:
    root = system.mount("cgroup2", "rw")
    system.member("0::/a/b")
    write(root / "a", cpu__max="250000 100000")
    write(root / "a/b", cpu__max="max 100000")
    assert processors() == Processors(4, 2.5) and processors().usable == 2
    write(root / "a/b", cpu__max="50000 100000")
    assert processors() == Processors(4, 0.5) and processors().usable == 1


def test_quota_of_version_1(system: FakeSystem) -> None:
    root = system.mount("cgroup", "rw,cpu,cpuacct")
    system.member("1:cpuacct,cpu:/x")
    write(root / "x", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert processors() == Processors(4, None)
    write(root / "x", cpu__cfs_quota_us=800000, cpu__cfs_period_us=100000)
    assert processors() == Processors(4, 8.0) and processors().usable == 4


def test_this_machine_is_told() -> None:
    assert processors().affinity == len(os.sched_getaffinity(0))
    assert 0 < (available_memory() or 0) < (total_memory() or 0)


# --- what follows for the cache ---


def test_the_recommended_cache() -> None:
    available = 20 * GIB
    assert spare_memory(available) == GIB and spare_memory(100 * MIB) == 64 * MIB
    assert recommended_cache(available, 2 * GIB, 100 * GIB) == 17 * GIB
    assert recommended_cache(available, 2 * GIB, 3 * GIB) == 3 * GIB
    assert recommended_cache(available, 19 * GIB, 3 * GIB) is None
    assert recommended_cache(available, 19 * GIB - 5 * MIB, 5 * MIB) == 5 * MIB  # less, but all


@given(available=st.integers(0, 2**40), rest=st.integers(0, 2**36), experts=st.integers(1, 2**40))
def test_what_is_recommended_fits_and_is_of_use(available: int, rest: int, experts: int) -> None:
    cache = recommended_cache(available, rest, experts)
    if cache is None:
        assert available - rest - spare_memory(available) < min(LEAST_CACHE, experts)
    else:
        assert min(LEAST_CACHE, experts) <= cache <= experts
        assert cache + rest + spare_memory(available) <= available
