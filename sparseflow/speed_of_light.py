"""The speed of light of a run: how fast its bytes could come from memory and from the disk, if nothing else took time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparseflow.disk_speed import DiskSpeed, measure_direct, measure_disk
from sparseflow.errors import StorageError
from sparseflow.memory_speed import MemorySpeed, measure_memory
from sparseflow.packfile import Manifest


_BRIEF_PASSES = 5


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time that some bytes can take.

    Attributes
        memory_s: all bytes touched, over the memory's bandwidth.
        disk_s: those that the disk had to deliver, over its throughput; 0 when there were none, None when it is unknown.
    """

    memory_s: float
    disk_s: float | None

    @property
    def overlapped_s(self) -> float | None:
        """If the disk reads while the processor computes: the longer of the two."""
        return None if self.disk_s is None else max(self.memory_s, self.disk_s)

    @property
    def sum_s(self) -> float | None:
        """If each waits for the other."""
        return None if self.disk_s is None else self.memory_s + self.disk_s


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidths at one time, in bytes per second; disk is None where it cannot be measured."""

    memory: float
    disk: float | None

    @classmethod
    def measure(cls, manifest: Manifest, threads: int) -> Rates:
        """A short look, in about a second, that leaves the page cache as it is."""
        return cls(measure_memory(threads, passes=_BRIEF_PASSES).best, measure_direct(manifest))

    def faster(self, other: Rates) -> Rates:
        """The better of each."""
        return Rates(max(self.memory, other.memory), max(self.disk or 0.0, other.disk or 0.0) or None)

    def bound(self, touched_bytes: float, disk_bytes: float) -> Bound:
        """For so many bytes of weights touched, of which the disk had to deliver some."""
        disk_s = 0.0 if disk_bytes == 0 else None if self.disk is None else disk_bytes / self.disk
        return Bound(touched_bytes / self.memory, disk_s)


@dataclass(frozen=True, slots=True)
class SpeedOfLight:
    """Bandwidths of one machine, with one number of threads and one model's file.

    Attributes
        memory, disk: one measurement each time that they were measured; disk is empty where that cannot be done.
        disk_error: why not.
    """

    memory: tuple[MemorySpeed, ...]
    disk: tuple[DiskSpeed, ...]
    disk_error: str | None = None

    @classmethod
    def measure(cls, manifest: Manifest, threads: int) -> SpeedOfLight:
        """Measures both, in a few seconds. The experts that are read for it end up in the page cache."""
        memory = measure_memory(threads)
        try:
            return cls((memory,), (measure_disk(manifest),))
        except StorageError as error:
            return cls((memory,), (), str(error))

    def __add__(self, later: SpeedOfLight) -> SpeedOfLight:
        return SpeedOfLight(self.memory + later.memory, self.disk + later.disk, self.disk_error or later.disk_error)

    @property
    def memory_bytes_per_second(self) -> float:
        """The best pass of all."""
        return max(speed.best for speed in self.memory)

    @property
    def disk_bytes_per_second(self) -> float | None:
        """The best measurement; None without any."""
        return max((speed.bytes_per_second for speed in self.disk), default=None)

    def to_json(self) -> dict[str, Any]:
        """All measurements, the two figures that bounds are made of, and how much later ones differ from the first, as a share."""
        return {
            "memory_bytes_per_second": self.memory_bytes_per_second,
            "disk_bytes_per_second": self.disk_bytes_per_second,
            "memory": [speed.to_json() for speed in self.memory],
            "disk": [speed.to_json() for speed in self.disk],
            "disk_error": self.disk_error,
            "drift": {
                "memory": _change([speed.best for speed in self.memory]),
                "disk": _change([speed.bytes_per_second for speed in self.disk]),
            },
        }


def _change(speeds: Sequence[float]) -> float | None:
    return speeds[-1] / speeds[0] - 1 if len(speeds) > 1 else None
