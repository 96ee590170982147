"""The record of a benchmark as text: a Markdown table, and the notes without which it would mislead."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sparseflow.cli.table import table
from sparseflow.sizes import format_bytes

_GIGA = 1e9
_DRIFT = 0.15


def as_text(record: dict[str, Any]) -> str:
    """The record as a Markdown table with what is needed to read it."""
    model, speeds, cells = record["model"], record["bandwidths"], record["cells"]
    disk = speeds["disk_bytes_per_second"]
    workloads = list(dict.fromkeys(_workload(cell) for cell in cells))
    lines = [
        f"{model['folder']}: {model['num_hidden_layers']} layers, experts {model['expert_type']}, dense core {model['dense_type']}",
        f"{'; '.join(workloads)}; {record['threads']} threads, {record['machine']['isa']}; medians of {record['repeats']}",
        f"memory {speeds['memory_bytes_per_second'] / _GIGA:.1f} GB/s, "
        + ("disk not measured" if disk is None else f"disk {disk / _GIGA:.2f} GB/s"),
        "",
        *table([_HEADINGS, *(table_row(cell, model["expert_bytes"]) for cell in cells)]),
    ]
    notes = [note for cell in cells for note in _notes(cell)] + _drift(speeds)
    if speeds["disk_error"] is not None:
        notes.append(f"disk measured {len(speeds['disk'])} times of 2: {speeds['disk_error']}")
    if not record["complete"]:
        notes.append("incomplete: stopped before all was measured")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _workload(cell: dict[str, Any]) -> str:
    routes = "" if cell["replayed"] is None else f", routes replayed from {cell['replayed']}"
    return f"{cell['prompt_tokens']} prompt tokens ({cell['prompt']}), {cell['new_tokens']} new{routes}"


def _notes(cell: dict[str, Any]) -> list[str]:
    notes = []
    if cell["not_run"] is not None:
        notes.append(f"{cell['name']}: {'stopped' if cell.get('ids') else 'not run'}, {cell['not_run']}")
    if False in cell.get("tokens_match", []):
        notes.append(f"{cell['name']}: its tokens differ from those of {cell['tokens_match_with']}")
    if cell["state"] == "cold" and False in cell.get("read_all_admitted", []):
        short = cell["read_all_admitted"].count(False)
        why = "something below the page cache" if cell["strict"] else "the page cache, which kept evicted experts (see --strict),"
        notes.append(
            f"{cell['name']}: in {short} of {len(cell['read_all_admitted'])} repeats the disk moved less than was admitted:"
            f" {why} served the rest"
        )
    return notes


def _drift(speeds: dict[str, Any]) -> list[str]:
    """A note for each bandwidth that was not the same before and after."""
    return [
        f"the {name}'s bandwidth changed by {100 * change:+.0f} % while this was measured: something else is running, or did"
        for name, change in speeds["drift"].items()
        if change is not None and abs(change) > _DRIFT
    ]


_HEADINGS = ("cell", "load s", "first token s", "tok/s", "p50 ms", "p95 ms", "peak RSS", "hits", "missed/token", "read/token",
             "page cache", "bound tok/s", "reached")


def table_row(cell: dict[str, Any], expert_bytes: int) -> tuple[str, ...]:
    """One cell: medians over its runs. Hits, missed, read and bounds are those of decode; page cache is of the whole run."""
    if not cell.get("ids"):
        return (cell["name"], *["-"] * (len(_HEADINGS) - 1))
    return (
        cell["name"],
        middle(cell["load_s"], "{:.2f}"),
        spread(cell["ttft_s"], "{:.2f}"),
        spread(cell["decode_tok_s"], "{:.2f}"),
        middle(cell["token_p50_s"], "{:.0f}", 1000),
        middle(cell["token_p95_s"], "{:.0f}", 1000),
        middle_bytes(cell["peak_rss_bytes"]),
        *(["n/a"] * 6 if None in cell["phases"] else _leases(cell, expert_bytes)),
    )


def _leases(cell: dict[str, Any], expert_bytes: int) -> tuple[str, ...]:
    """The columns that only an engine with a lease table has."""
    steps = cell["new_tokens"] - 1
    decode = [phases["decode"] for phases in cell["phases"]]
    bounds = [
        None if disk is None else 1 / max(memory, disk)
        for memory, disk in zip(cell["token_memory_bound_s"], cell["token_disk_bound_s"], strict=True)
    ]
    return (
        middle([phase["hits"] / phase["requests"] for phase in decode], "{:.1f} %", 100),
        middle_bytes([phase["misses"] * expert_bytes / steps for phase in decode]),
        middle_bytes([None if phase["physical_bytes"] is None else phase["physical_bytes"] / steps for phase in decode]),
        middle(shares(cell), "{:.0f} %", 100),
        middle(bounds, "{:.2f}"),
        middle(cell["bound_fraction"], "{:.0f} %", 100),
    )


def shares(cell: dict[str, Any]) -> list[float | None]:
    """How much of the admitted bytes came from the page cache in each run."""
    return [
        None if served is None or not admitted else served / admitted
        for served, admitted in zip(cell["page_cache_bytes"], cell["admitted_bytes"], strict=True)
    ]


def middle(values: Sequence[float | None], form: str, factor: float = 1) -> str:
    """The median, times a factor; n/a when the system or the engine did not tell a value."""
    known = [value for value in values if value is not None]
    return form.format(factor * statistics.median(known)) if len(known) == len(values) else "n/a"


def middle_bytes(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return format_bytes(round(statistics.median(known)) if len(known) == len(values) else None)


def spread(values: Sequence[float], form: str) -> str:
    """Median and range."""
    return f"{middle(values, form)} ({form.format(min(values))}–{form.format(max(values))})"
