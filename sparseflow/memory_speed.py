"""How fast this machine's memory can be read, measured: a token cannot be computed faster than its weights can be read."""

from __future__ import annotations

import mmap
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.kernels.bandwidth import read_once
from sparseflow.memory import available_memory
from sparseflow.sizes import parse_size

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

PASSES = 9
_SMALLEST_BUFFER = 512 << 20
_UNKNOWN_CACHE = 64 << 20
_UNIT = 2 << 20  # a huge page


@dataclass(frozen=True, slots=True)
class MemorySpeed:
    """Read bandwidth of memory, in bytes per second.

    Attributes
        threads, buffer_bytes: how it was measured; last_level_cache_bytes: what the buffer has to exceed, None if unknown.
        passes: the bandwidth of each pass over the buffer.
    """

    threads: int
    buffer_bytes: int
    last_level_cache_bytes: int | None
    passes: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest pass: the bound, since nothing but other programs makes a pass slower."""
        return max(self.passes)

    @property
    def median(self) -> float:
        """The middle pass; far from the best, the machine was busy with something else."""
        return statistics.median(self.passes)

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        return asdict(self) | {"passes": list(self.passes), "best": self.best, "median": self.median}


def measure_memory(threads: int, *, buffer_bytes: int | None = None, passes: int = PASSES) -> MemorySpeed:
    """Reads a buffer of anonymous memory several times over, in huge pages where the system has them.

    buffer_bytes: None for several times the last level cache, as far as the available memory allows.
    """
    cache = last_level_cache_bytes()
    available = available_memory()
    size = buffer_bytes or buffer_size(cache, 2 * _SMALLEST_BUFFER if available is None else available)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    buffer = np.frombuffer(memory, np.uint8)
    buffer.fill(1)  # pages that nobody wrote are all the same page of zeros
    return MemorySpeed(threads, size, cache, tuple(size / read_once(buffer, threads)[0] for _ in range(passes)))


def buffer_size(cache: int | None, available: int) -> int:
    """Bytes to read: 4 times the last level cache but at most an eighth of the available memory, and 512 MiB or more unless
    that would be half of it."""
    wanted = max(min(4 * (cache or _UNKNOWN_CACHE), available // 8), _SMALLEST_BUFFER)
    return max(min(wanted, available // 2) // _UNIT, 1) * _UNIT


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first processor, as sysfs tells it; None if it does not."""
    sizes = []
    for entry in _CACHES.glob("index*/size"):
        try:
            sizes.append(parse_size(entry.read_text()))
        except (OSError, ValueError):
            continue
    return max(sizes, default=None)
