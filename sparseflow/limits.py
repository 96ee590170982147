"""What the system lets this process have: memory and processors, as /proc, the cgroups and getrlimit tell it.

A cgroup's limit holds for all its descendants, so all ancestors of this process's group are asked, up to where the hierarchy is
mounted; above that a container cannot look. Where they are comes from /proc/self/mountinfo, so version 1, version 2 and both side
by side work. Documented in cgroups(7), proc(5), getrlimit(2) and the kernel's cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_UNLIMITED = 1 << 62  # version 1 has no word for it, only the largest number of whole pages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on the memory of this process, in bytes.

    Attributes
        name: "MemAvailable", a cgroup's file, or "RLIMIT_AS" or "RLIMIT_DATA".
        limit_bytes: the bound. used_bytes: what counts towards it now; a cgroup's file cache does not, since it gives way.
        maps: whether mapped files count too, read or not (RLIMIT_AS).
    """

    name: str
    limit_bytes: int
    used_bytes: int = 0
    maps: bool = False

    def room(self, mapped: int = 0) -> int:
        """Bytes that may still be taken, when files of `mapped` bytes are mapped besides."""
        return max(0, self.limit_bytes - self.used_bytes - (mapped if self.maps else 0))


@dataclass(frozen=True, slots=True)
class Processors:
    """affinity: processors this process may run on; quota: their worth of time its cgroups grant, None without a limit."""

    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads that can really run at once, at least 1: a part of a processor is none."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.floor(self.quota)))


def memory_limits() -> list[MemoryLimit]:
    """All bounds on this process's memory that the system tells; empty when it tells none."""
    found: list[MemoryLimit] = []
    available = meminfo("MemAvailable")
    if available is not None:
        found.append(MemoryLimit("MemAvailable", available))
    for folder, version in _groups("memory"):
        found += _group_limits(folder, version)
    for name, kind, field in (("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"), ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(MemoryLimit(name, limit, _kibibytes(_PROC / "self/status", field) or 0, maps=name == "RLIMIT_AS"))
    return found


def processors() -> Processors:
    """The processors of this process: by affinity, and by the smallest quota of its cgroups."""
    quotas = [quota for folder, version in _groups("cpu") if (quota := _quota(folder, version)) is not None]
    return Processors(len(os.sched_getaffinity(0)), min(quotas, default=None))


def meminfo(name: str) -> int | None:
    """A line of /proc/meminfo in bytes; None where the system does not tell."""
    return _kibibytes(_PROC / "meminfo", name)


# --- cgroups ---


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's cgroup and its ancestors that may have a say in `controller`, with their version."""
    mounts = [_mount(line) for line in _lines(_PROC / "self/mountinfo")]
    for line in _lines(_PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        for kind, options, root, point in mounts:
            if (version == 2 and kind == "cgroup2") or (version == 1 and kind == "cgroup" and controller in options):
                yield from ((folder, version) for folder in _upwards(point, _below(root, path)))
                break


def _mount(line: str) -> tuple[str, list[str], str, Path]:
    """File system type, its options, the folder of it that is mounted, and where."""
    mounted, _, system = line.partition(" - ")
    root, point = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), name) for name in mounted.split()[3:5])
    kind, _, options = system.split(" ", 2)
    return kind, options.split(","), root, Path(point)


def _below(root: str, path: str) -> str:
    """`path` as seen from `root`, both from the top of the hierarchy; root itself for a group outside of it."""
    inside = path.removeprefix(root.rstrip("/"))
    return inside.strip("/") if inside.startswith("/") and ".." not in inside.split("/") else ""


def _upwards(point: Path, inside: str) -> Iterator[Path]:
    folder = point / inside
    while folder != point:
        yield folder
        folder = folder.parent
    yield point


def _group_limits(folder: Path, version: int) -> list[MemoryLimit]:
    limits: tuple[str, ...]
    if version == 2:
        # Beyond memory.high a group is not killed but slowed down until it is of no use.
        limits, usage, cache = ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
    else:
        limits, usage, cache = ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    used = _number(folder / usage)
    if used is None:
        return []
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    used = max(0, used - sum(int(statistics.get(name, 0)) for name in cache))
    found = [(folder / name, _number(folder / name)) for name in limits]
    return [MemoryLimit(str(path), limit, used) for path, limit in found if limit is not None and limit < _UNLIMITED]


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        words = " ".join(_lines(folder / "cpu.max")).split()
        return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


# --- the kernel's text files ---


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number a file holds; None without one, as for "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _kibibytes(path: Path, name: str) -> int | None:
    for line in _lines(path):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
