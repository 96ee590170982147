"""How much memory there is, and how much of it the expert cache should take."""

from __future__ import annotations

from sparseflow.errors import CapacityError
from sparseflow.limits import MemoryLimit, meminfo, memory_limits
from sparseflow.sizes import format_bytes

LEAST_CACHE = 256 << 20
"""The smallest cache to recommend for a model with more experts than that: with less, decode finds next to nothing in memory."""

_LEAST_SPARE = 64 << 20
_SPARE_SHARE = 20
_LEAST_LEFT = 16 << 20
_LETHAL = ("/memory.max", "/memory.limit_in_bytes")


def tightest_limit(mapped: int = 0) -> MemoryLimit | None:
    """The limit that leaves the least room to a process that maps files of `mapped` bytes; None when the system tells none."""
    return min(memory_limits(), key=lambda limit: limit.room(mapped), default=None)


def available_memory() -> int | None:
    """Bytes this process may still take: the least of MemAvailable, what its cgroups leave (v1 and v2), and its RLIMITs.

    None when the system does not tell.
    """
    limit = tightest_limit()
    return None if limit is None else limit.room()


def total_memory() -> int | None:
    """Bytes of memory of the machine."""
    return meminfo("MemTotal")


def require_memory(needed: int) -> None:
    """Raises CapacityError when a cgroup would kill this process rather than give it `needed` bytes more, and a little besides.

    RLIMITs are errors by themselves, and memory.high only slows down.
    """
    for limit in memory_limits():
        if limit.name.endswith(_LETHAL) and limit.room() < needed + _LEAST_LEFT:
            raise CapacityError(
                f"stopped before the system does it: {limit.name} leaves {format_bytes(limit.room())}, the run needs {format_bytes(needed)}"
                f" more at once and {format_bytes(_LEAST_LEFT)} to spare; use a smaller --cache or --context"
            )


def spare_memory(available: int) -> int:
    """Of `available` bytes, those to leave alone: for page tables, a second session, and everyone else."""
    return max(available // _SPARE_SHARE, _LEAST_SPARE)


def recommended_cache(available: int, rest: int, all_experts: int) -> int | None:
    """Bytes of cache to take of `available` bytes when a run needs `rest` bytes for all else: all experts, or as many as fit
    beside some spare memory. None when that is below LEAST_CACHE and not all of them."""
    room = available - spare_memory(available) - rest
    return min(room, all_experts) if room >= min(LEAST_CACHE, all_experts) else None
