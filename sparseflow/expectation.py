"""How fast decode may be expected to run, from bandwidths and sizes alone, as a range that is honest about what it cannot know.

A token reads the dense core and its experts from memory, and the experts it misses from the disk. How many it misses depends on
the text, so the range spans two kinds of routes:

    fast    as local as recorded routes of Qwen3.6-35B-A3B, and the disk reads while the processor computes
    slow    every expert as likely as any other, the disk and the processor wait for each other, and each reaches a part of its
            bandwidth

At either end each layer also costs a little time that depends on no bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.footprint import Footprint

RECORDED_HITS = ((0.0, 0.0), (0.0082, 0.158), (0.0328, 0.42), (0.131, 0.71), (0.262, 0.88), (1.0, 1.0))
"""Share of all experts that the cache holds, and of a token's experts found there: decode of a recorded English text with caches of
256 MiB, 1, 4 and 8 GiB."""

# Runs of all 40 layers with caches from 256 MiB to 4 GiB reached 0.74 to 0.83 of the two one after the other; a busy machine, less.
_REACHED = 0.6
_FAST_LAYER_SECONDS, _SLOW_LAYER_SECONDS = 2e-4, 1e-3


@dataclass(frozen=True, slots=True)
class Expectation:
    """Tokens per second of decode, from `slow` to `fast`, and the share of a token's experts found in the cache at either end.

    Attributes
        memory_s, disk_s: seconds that a token's weights take from memory, and all its experts from the disk.
    """

    slow: float
    fast: float
    slow_hits: float
    fast_hits: float
    memory_s: float
    disk_s: float

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        return asdict(self)


def expect(footprint: Footprint, slots: int, layers: int, memory_speed: float, disk_speed: float) -> Expectation:
    """The range for a cache of `slots` experts; speeds in bytes per second."""
    share = slots / footprint.num_experts
    local = recorded_hits(share)
    memory_s = footprint.bytes_per_token / memory_speed
    disk_s = footprint.experts_bytes_per_token / disk_speed
    slow_s = (memory_s + (1 - share) * disk_s) / _REACHED + layers * _SLOW_LAYER_SECONDS
    fast_s = max(memory_s, (1 - local) * disk_s) + layers * _FAST_LAYER_SECONDS
    return Expectation(1 / slow_s, 1 / fast_s, share, local, memory_s, disk_s)


def recorded_hits(share: float) -> float:
    """RECORDED_HITS for any share from 0 to 1: straight lines over its logarithm between them, through the origin before."""
    before, after = next((a, b) for a, b in zip(RECORDED_HITS, RECORDED_HITS[1:]) if share <= b[0])
    if before[0] == 0:
        return after[1] * share / after[0]
    along = math.log(share / before[0]) / math.log(after[0] / before[0])
    return before[1] + along * (after[1] - before[1])
