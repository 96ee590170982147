"""How much memory there is, and how much of it the expert cache should take."""

from __future__ import annotations

from pathlib import Path

from sparseflow.errors import CapacityError
from sparseflow.sizes import format_bytes

_SYSTEM = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

INTERPRETER_BYTES = 150 << 20
"""Python, numpy, the tokenizer and the activations of a prefill chunk: what a run needs besides weights, cache and state."""


def available_memory() -> int:
    """Bytes this process may still take: the smallest of MemAvailable and what its cgroups leave (v1 and v2)."""
    found = [_kibibytes(_SYSTEM / "meminfo", "MemAvailable")]
    found += _cgroup_rooms()
    return min(room for room in found if room is not None)


def total_memory() -> int | None:
    """Bytes of memory of the machine."""
    return _kibibytes(_SYSTEM / "meminfo", "MemTotal")


def cache_for(available: int, resident: int, all_experts: int, smallest: int) -> int:
    """Bytes of cache for `available` bytes of memory when `resident` bytes are needed for all else.

    At most all experts. Raises CapacityError when not even the smallest cache fits.
    """
    room = available - resident - INTERPRETER_BYTES
    if room < smallest:
        raise CapacityError(
            f"the model needs {format_bytes(resident + INTERPRETER_BYTES + smallest)} at least, "
            f"{format_bytes(available)} are available: close other programs, or give --cache SIZE to try nevertheless"
        )
    return min(room, all_experts)


def _cgroup_rooms() -> list[int | None]:
    """What each memory cgroup of this process leaves, its ancestors' included. File cache counts as free: it can go."""
    rooms: list[int | None] = []
    try:
        lines = (_SYSTEM / "self/cgroup").read_text().splitlines()
    except OSError:
        return rooms
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for level in [group, *group.parents]:
            if level != root and root not in level.parents:
                break
            rooms.append(_room(level, *names))
    return rooms


def _room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit, usage = int((group / limit_name).read_text()), int((group / usage_name).read_text())
    except (OSError, ValueError):  # no such level, or "max"
        return None
    cache = 0
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == cache_name:
                cache = int(count)
    except (OSError, ValueError):
        pass
    return max(0, limit - usage + cache)


def _kibibytes(path: Path, name: str) -> int | None:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None
