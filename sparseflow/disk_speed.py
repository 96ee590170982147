"""How fast the disk delivers experts that no cache holds, measured on the very file: what is missed cannot arrive faster.

The extents are whole experts drawn at random, each read once. Before every pass the page cache is made to forget its extents,
and mincore has to confirm it. Two ways of reading take turns: O_DIRECT preads from several threads, which ask the disk for as
much as it can give and leave the page cache out of it, and the way of PackedStore, which keeps some experts on their way while
it waits for the first.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow import page_cache
from sparseflow.errors import StorageError
from sparseflow.packfile import EXPERTS_FILE, HEADER_BYTES, Manifest
from sparseflow.sizes import format_bytes
from sparseflow.store import PackedStore

PASSES = 3
PASS_BYTES = 512 << 20
PASS_SECONDS = 3.0
DIRECT_THREADS = 4
EXPERTS_AHEAD = 16
_LARGEST_FOLIO = 2 << 20
_TOLERATED = 0.01

Extent = tuple[int, int]
"""Layer and expert."""

_Way = Callable[[PackedStore, Sequence[Extent], float], int]
"""Reads extents until a deadline of perf_counter; how many they were."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Cold throughput on random experts, in bytes per second.

    Attributes
        extent_bytes: one expert.
        direct, admitted: each pass with O_DIRECT (empty where the file system refuses it), and by the store's admission.
    """

    extent_bytes: int
    direct: tuple[float, ...]
    admitted: tuple[float, ...]

    @property
    def bytes_per_second(self) -> float:
        """The disk: the faster of the two ways, by its middle pass."""
        return max(statistics.median(passes) for passes in (self.direct, self.admitted) if passes)

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return lists | {"bytes_per_second": self.bytes_per_second}


def measure_disk(
    manifest: Manifest, *, passes: int = PASSES, pass_bytes: int = PASS_BYTES, pass_seconds: float = PASS_SECONDS
) -> DiskSpeed:
    """Reads some of a packed model's experts from the disk, both ways, `passes` times each.

    A pass ends after `pass_bytes` or `pass_seconds`. Raises StorageError when the page cache cannot be made to forget the
    experts, as while another process has them mapped or on a file system that lives in memory, or when the disk fails.
    """
    path = manifest.folder / EXPERTS_FILE
    direct: list[float] = []
    admitted: list[float] = []
    ways: tuple[tuple[_Way, list[float]], ...] = ((_read_direct, direct), (_admit, admitted))
    with PackedStore(path) as store:
        every = [(layer, expert) for layer in range(store.num_layers) for expert in range(store.num_experts)]
        count = max(min(pass_bytes // store.stride, len(every)), 1)
        for _ in range(passes):
            for read, speeds in ways:
                extents = random.sample(every, count)
                _forget(store, extents)
                begun = time.perf_counter()
                done = read(store, extents, begun + pass_seconds)
                if done:
                    speeds.append(done * store.stride / (time.perf_counter() - begun))
    return DiskSpeed(store.stride, tuple(direct), tuple(admitted))


def measure_direct(manifest: Manifest) -> float | None:
    """Bytes per second of one pass past the page cache, which leaves what that holds alone; None where the file system refuses.

    Short enough to be repeated beside every run of a benchmark: a disk may be much slower now than it was a minute ago.
    """
    with PackedStore(manifest.folder / EXPERTS_FILE) as store:
        every = [(layer, expert) for layer in range(store.num_layers) for expert in range(store.num_experts)]
        extents = random.sample(every, max(min(PASS_BYTES // store.stride, len(every)), 1))
        begun = time.perf_counter()
        done = _read_direct(store, extents, begun + PASS_SECONDS)
        return done * store.stride / (time.perf_counter() - begun) if done else None


def _offset(store: PackedStore, extent: Extent) -> int:
    layer, expert = extent
    return HEADER_BYTES + (layer * store.num_experts + expert) * store.stride


def _forget(store: PackedStore, extents: Sequence[Extent]) -> None:
    """Makes the page cache forget the extents, and their surroundings: a folio that reaches into an extent goes only as a whole."""
    ranges = []
    for extent in extents:
        begin = max(_offset(store, extent) - _LARGEST_FOLIO, 0)
        ranges.append((begin, _offset(store, extent) + store.stride + _LARGEST_FOLIO - begin))
    page_cache.drop(store.path, ranges)
    left = sum(store.resident_pages(*extent)[0] for extent in extents) * mmap.PAGESIZE
    if left > _TOLERATED * len(extents) * store.stride:
        raise StorageError(
            f"{store.path}: {format_bytes(left)} of {format_bytes(len(extents) * store.stride)} stay in the page cache, so the disk"
            " cannot be measured: another process uses the file, it is not yours, or its file system lives in memory"
        )


def _admit(store: PackedStore, extents: Sequence[Extent], deadline: float) -> int:
    """Reads as a lease does; how many experts were read."""
    asked: deque[Extent] = deque()
    rest = iter(extents)
    done = 0
    while True:
        while len(asked) < EXPERTS_AHEAD and time.perf_counter() < deadline and (extent := next(rest, None)) is not None:
            store.will_need(*extent)
            asked.append(extent)
        if not asked:
            return done
        extent = asked.popleft()
        store.admit(*extent)
        store.evict(*extent)
        done += 1


def _read_direct(store: PackedStore, extents: Sequence[Extent], deadline: float) -> int:
    """Reads past the page cache; how many experts were read, 0 where the file system does not allow it."""
    try:
        descriptor = os.open(store.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        return _refused(store, error)

    def share(number: int) -> int:
        buffer = mmap.mmap(-1, store.stride)  # O_DIRECT wants a page's alignment
        done = 0
        for extent in extents[number::DIRECT_THREADS]:
            if time.perf_counter() >= deadline:
                break
            if os.preadv(descriptor, [buffer], _offset(store, extent)) != store.stride:
                raise StorageError(f"{store.path}: layer {extent[0]}, expert {extent[1]}: ends early; pack the model again")
            done += 1
        return done

    try:
        with ThreadPoolExecutor(DIRECT_THREADS) as threads:
            return sum(threads.map(share, range(DIRECT_THREADS)))
    except OSError as error:
        return _refused(store, error)
    finally:
        os.close(descriptor)


def _refused(store: PackedStore, error: OSError) -> int:
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return 0
    raise StorageError(f"{store.path}: cannot be read: {error.strerror}") from error
