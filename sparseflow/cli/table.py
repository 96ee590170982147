"""Tables that read well as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, the first row its headings; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = [f"{'-' * width}" if column == 0 else f"{'-' * (width - 1)}:" for column, width in enumerate(widths)]
    aligned = [
        [row[0].ljust(widths[0]), *(value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True))] for row in rows
    ]
    return [f"| {' | '.join(row)} |" for row in (aligned[0], rule, *aligned[1:])]
