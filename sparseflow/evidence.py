"""What a run can show for itself: speed, memory, the cache, and the bytes that the operating system says were read."""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from sparseflow.sizes import format_bytes

_PROCESS = Path("/proc/self")


def disk_bytes_read() -> int | None:
    """Bytes that the disk has moved for this process so far, page cache hits and children not included.

    None where the kernel or a sandbox does not tell. The difference of two calls is what was read between them, by all
    threads, readahead included. It takes a microsecond or two: getrusage(2) tells the read_bytes of /proc/self/io, in blocks of
    512 bytes, without a text to be written and read. Linux has both or neither, but without it getrusage says 0.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512 if _tells_disk_bytes(_PROCESS) else None


@cache
def _tells_disk_bytes(process: Path) -> bool:
    return _field(process / "io", "read_bytes") is not None


def peak_rss_bytes(pid: int | None = None) -> int | None:
    """The largest resident set so far (VmHWM) of this process, or of another; None where the system does not tell."""
    return _kibibytes(_PROCESS if pid is None else _PROCESS.parent / str(pid), "VmHWM")


def rss_bytes() -> int | None:
    """The resident set of this process now (VmRSS); None where the system does not tell."""
    return _kibibytes(_PROCESS, "VmRSS")


def _kibibytes(process: Path, name: str) -> int | None:
    count = _field(process / "status", name)
    return None if count is None else count * 1024


def _field(path: Path, name: str) -> int | None:
    """The number after `name:` in one of the kernel's text files."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return None


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """What one generation did. Counts are of this run alone; sizes are in bytes, times in seconds.

    Attributes
        prompt_tokens: tokens fed before the first new one; those that a session knew already are not counted.
        new_tokens: tokens generated, the last one (end of text) included.
        ttft_seconds: from the start of the run to the first new token; decode_seconds: from there to the last.
        peak_rss_bytes: the largest resident set of the process up to the end of the run; None if unknown.
        cache_slots, cache_bytes: the budget for experts, in experts and in bytes.
        requests, hits, evictions, bytes_asked: of the lease table; bytes_asked is requests times the stride.
        bytes_read: what the disk moved, by the operating system; None if unknown.
        strict, threads, isa: how it ran.
        replayed: label of the recorded routes it followed; None when the routers chose.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_seconds: float
    decode_seconds: float
    peak_rss_bytes: int | None
    cache_slots: int
    cache_bytes: int
    requests: int
    hits: int
    evictions: int
    bytes_asked: int
    bytes_read: int | None
    strict: bool
    threads: int
    isa: str
    replayed: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decode: the tokens after the first, over decode_seconds. None for fewer than two tokens."""
        if self.new_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.new_tokens - 1) / self.decode_seconds

    @property
    def misses(self) -> int:
        """requests - hits."""
        return self.requests - self.hits

    @property
    def hit_rate(self) -> float | None:
        """hits / requests; None when nothing was asked."""
        return self.hits / self.requests if self.requests else None

    def line(self) -> str:
        """One line for people, in binary units."""
        speed = "n/a" if self.tokens_per_second is None else f"{self.tokens_per_second:.2f}"
        rate = "n/a" if self.hit_rate is None else f"{100 * self.hit_rate:.1f} %"
        return (
            f"{self.prompt_tokens} + {self.new_tokens} tokens, {speed} tok/s, first token after {self.ttft_seconds:.2f} s"
            f" | peak RSS {format_bytes(self.peak_rss_bytes)}"
            f" | cache {self.cache_slots} experts, {format_bytes(self.cache_bytes)}{', strict' if self.strict else ''},"
            f" hit rate {rate}"
            f" | asked {format_bytes(self.bytes_asked)}, read {format_bytes(self.bytes_read)} from disk"
            f" | {self.threads} thread{'' if self.threads == 1 else 's'}, {self.isa}"
            + ("" if self.replayed is None else f" | routes replayed from {self.replayed}")
        )

    def to_json(self) -> dict[str, int | float | bool | str | None]:
        """All attributes and the numbers derived from them, by name; None where the system did not tell."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "tokens_per_second": self.tokens_per_second,
            "misses": self.misses,
            "hit_rate": self.hit_rate,
        }
