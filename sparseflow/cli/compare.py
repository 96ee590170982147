"""`sf-bench compare`: which differences of two results exceed the noise."""

from __future__ import annotations

import click

from sparseflow.bench_compare import LEVEL, QUANTITIES, Comparison, Difference, compare
from sparseflow.bench_file import read_results
from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand
from sparseflow.cli.table import table
from sparseflow.sizes import format_bytes

DIFFERENT = 10
UNKNOWN = 11

_STATUSES = f"""{EXIT_STATUSES}
  {DIFFERENT}  a difference exceeds the noise    {UNKNOWN}  the repeats are too few to tell, or no cell is in both"""
_GIGA = 1e9


@click.command("compare", cls=SparseFlowCommand, epilog=_STATUSES)
@click.argument("first", metavar="A.json")
@click.argument("second", metavar="B.json")
def compare_command(first: str, second: str) -> int:
    """Say for each cell that both results have which differences exceed the noise.

    A difference exceeds it when the exact two-sided rank-sum test over the repeats calls it rarer than 5 % by chance. That takes
    four repeats in both, or three and five; with fewer nothing can be told, and that is said. Ranges that overlap can differ all
    the same, and every twentieth comparison of equal things differs by chance.

    \b
    Example:
      sf-bench compare before/results.json after/results.json
    """
    records = [read_results(path) for path in (first, second)]
    comparison = compare(*records)
    click.echo("\n".join(as_text(comparison)))
    for what in ("memory", "disk"):
        speeds = [record["bandwidths"][f"{what}_bytes_per_second"] for record in records]
        if None not in speeds:
            click.echo(f"{what}: {speeds[0] / _GIGA:.2f} GB/s in A, {speeds[1] / _GIGA:.2f} GB/s in B ({speeds[1] / speeds[0] - 1:+.0%})")
    for name, record in zip("AB", records, strict=True):
        if not record["complete"]:
            click.echo(f"{name} is incomplete: it was stopped before all was measured")
    told = [difference for difference in comparison.differences if difference.p is not None]
    return DIFFERENT if any(difference.exceeds_noise for difference in told) else 0 if told else UNKNOWN


def as_text(comparison: Comparison) -> list[str]:
    """A Markdown table of what differs, and what was not compared, or not told apart."""
    differing = [difference for difference in comparison.differences if difference.exceeds_noise]
    rows = [("cell", "quantity", "A", "B", "change", "p")] + [_row(difference) for difference in differing]
    unclear = list(dict.fromkeys(difference.cell for difference in comparison.differences if difference.p is None))
    told = sum(difference.p is not None for difference in comparison.differences)
    lines = [*table(rows), ""] if differing else []
    lines.append(f"{len(differing)} of {told} comparisons exceed the noise (p ≤ {LEVEL}); by chance it would be about {LEVEL * told:.0f}")
    lines += [f"{name}: too few repeats to tell" for name in unclear]
    return lines + [f"not compared, {reason}" for reason in comparison.apart]


def _row(difference: Difference) -> tuple[str, ...]:
    assert difference.p is not None and difference.quantity in QUANTITIES
    values = [_shown(difference.quantity, value) for value in (difference.first, difference.second)]
    change = "n/a" if difference.change is None else f"{difference.change:+.1%}"
    return (difference.cell, difference.quantity, *values, change, f"{difference.p:.3f}")


def _shown(quantity: str, value: float) -> str:
    if quantity.endswith("_bytes"):
        return format_bytes(round(value))
    return f"{value:.4g}" if quantity.endswith("_s") else f"{value:.0f}"
