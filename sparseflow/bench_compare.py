"""Two results of the same cells: which differences exceed the noise.

The rule: the exact two-sided rank-sum test over the repeats of a cell, at 5 %. Of all ways to deal the measured values to the two
files, it counts those that part the ranks at least as far as they are; equal values share their middle rank. It assumes nothing
of how the values are spread, and one wild repeat cannot decide it. With too few repeats no order of the values is rarer than 5 %:
then nothing can be told, which is said rather than "the same". Three against three is too few, four against four or three against
five is enough.

Every twentieth comparison of equal things exceeds the noise by chance. And the test knows the noise within a file only: between
two hours a machine may change more than that, which the bandwidths of the two files show.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

LEVEL = 0.05
QUANTITIES = (
    "load_s", "ttft_s", "decode_tok_s", "token_p50_s", "token_p95_s", "peak_rss_bytes", "logical_requests", "misses", "physical_bytes",
)  # fmt: skip
_SAME_WORK = ("engine", "mode", "state", "strict", "cache_bytes", "prompt", "prompt_tokens", "new_tokens", "replayed")
_MOST_DEALS = 200_000


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of one cell in both files.

    Attributes
        cell, quantity: which.
        first, second: the medians.
        p: how often chance alone parts the ranks so far; None when the repeats are too few to tell anything.
    """

    cell: str
    quantity: str
    first: float
    second: float
    p: float | None

    @property
    def exceeds_noise(self) -> bool:
        return self.p is not None and self.p <= LEVEL

    @property
    def change(self) -> float | None:
        """(second - first) / first; None where first is 0."""
        return (self.second - self.first) / self.first if self.first else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences, in the order of the first file's cells; apart: why cells of either file were not compared."""

    differences: list[Difference]
    apart: list[str]


def compare(first: dict[str, Any], second: dict[str, Any]) -> Comparison:
    """Compares two records (schema of sparseflow.bench_results) cell by cell, by name. Cells that did other work are left apart."""
    others = {cell["name"]: cell for cell in second["cells"]}
    differences: list[Difference] = []
    apart: list[str] = []
    for cell in first["cells"]:
        other = others.pop(cell["name"], None)
        reason = _incomparable(cell, other)
        if other is None or reason is not None:
            apart.append(f"{cell['name']}: {reason}")
            continue
        for quantity in QUANTITIES:
            ours, theirs = cell[quantity], other[quantity]
            if None not in [*ours, *theirs]:
                medians = statistics.median(ours), statistics.median(theirs)
                differences.append(Difference(cell["name"], quantity, *medians, rank_test(ours, theirs)))
    apart += [f"{name}: only in the second file" for name in others]
    return Comparison(differences, apart)


def _incomparable(cell: dict[str, Any], other: dict[str, Any] | None) -> str | None:
    if other is None:
        return "only in the first file"
    for which, side in (("first", cell), ("second", other)):
        if not side.get("ttft_s"):
            return f"not measured in the {which} file"
    differing = [name for name in _SAME_WORK if cell[name] != other[name]]
    return f"{differing[0]} is {cell[differing[0]]} and {other[differing[0]]}" if differing else None


def rank_test(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The exact two-sided p of the rank-sum test; None when even the rarest order is not rarer than LEVEL.

    Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bulletin 1 (1945), conditioned on the ties. Samples with more
    than 200,000 deals are thinned to their first values, which loses power but not validity.
    """
    while comb(len(first) + len(second), len(first)) > _MOST_DEALS:
        if len(first) >= len(second):
            first = first[:-1]
        else:
            second = second[:-1]
    deals = comb(len(first) + len(second), len(first))
    if 2 / deals > LEVEL:
        return None
    ranks = middle_ranks([*first, *second])
    middle = sum(ranks) * len(first) / len(ranks)
    apart = abs(sum(ranks[: len(first)]) - middle)
    as_far = sum(abs(sum(hand) - middle) >= apart - 1e-9 for hand in combinations(ranks, len(first)))
    return as_far / deals


def middle_ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values get the mean of theirs."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered, start=1)))}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]
