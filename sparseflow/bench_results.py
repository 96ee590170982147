"""From what the runs of a cell measured to the fields of results.json. bench/README.md describes each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.footprint import Footprint
from sparseflow.speed_of_light import Bound, Rates

SCHEMA = "sparseflow-bench"
SCHEMA_VERSION = 2

Measured = Mapping[str, Any]
"""What sparseflow.bench_cell measured in one run, what the page cache held before and after, and the `Rates` beside it."""

_PHASES = ("load", "prefill", "decode")
_CACHED = ("cached_before_bytes", "cached_after_bytes", "experts_cached_before_bytes", "experts_cached_after_bytes")
MEASURED_FIELDS = (
    "load_s", "ttft_s", "decode_tok_s", "token_p50_s", "token_p95_s", "peak_rss_bytes", "logical_requests", "hits", "misses",
    "evictions", "admitted_bytes", "physical_bytes", "page_cache_bytes", "read_all_admitted", *_CACHED, "memory_bytes_per_second",
    "disk_bytes_per_second", "token_memory_bound_s", "token_disk_bound_s", "bound_fraction", "sum_bound_fraction",
    "ttft_bound_fraction", "tokens_match", "token_s", "ids", "phases",
)  # fmt: skip
_FOLDERS = re.compile(r"(?<![^\s'\"(=])/(?:[^\s/:'\"]+/)+")


def measured_fields(
    runs: Sequence[Measured], footprint: Footprint, reference_ids: Sequence[int] | None
) -> dict[str, list[Any]]:
    """The measured fields of one cell, each a list with one value per run.

    reference_ids: what the generated ids are compared with. What another engine does not tell is None.
    """
    values = [_fields(run, footprint, reference_ids) if "decode" in run else _peer_fields(run, reference_ids) for run in runs]
    return {name: [value[name] for value in values] for name in (values[0] if values else ())}


def _fields(
    run: Measured, footprint: Footprint, reference_ids: Sequence[int] | None
) -> dict[str, Any]:
    prefill, decode = run["prefill"], run["decode"]
    steps, decode_s = len(run["token_s"]), sum(run["token_s"])
    rates = _rates(run, decode_s)
    bound = _bound(rates, footprint.bytes_per_token * steps, decode, footprint)
    admitted, read = (_sum([run[phase][name] for phase in _PHASES]) for name in ("admitted_bytes", "physical_bytes"))
    first_bound = _bound(rates, footprint.dense_bytes + prefill["requests"] * footprint.expert_bytes, prefill, footprint)
    return {
        "load_s": run["load_s"],
        "ttft_s": run["ttft_s"],
        "decode_tok_s": steps / decode_s,
        "token_p50_s": float(np.percentile(run["token_s"], 50)),
        "token_p95_s": float(np.percentile(run["token_s"], 95)),
        "peak_rss_bytes": run["peak_rss_bytes"],
        "logical_requests": prefill["requests"] + decode["requests"],
        "hits": prefill["hits"] + decode["hits"],
        "misses": prefill["misses"] + decode["misses"],
        "evictions": prefill["evictions"] + decode["evictions"],
        "admitted_bytes": admitted,
        "physical_bytes": read,
        "page_cache_bytes": _sum([_from_page_cache(run[phase]) for phase in _PHASES]),
        "read_all_admitted": None if admitted is None or read is None else read >= admitted,
        **{name: run[name] for name in _CACHED},
        "memory_bytes_per_second": rates.memory,
        "disk_bytes_per_second": rates.disk,
        "token_memory_bound_s": bound.memory_s / steps,
        "token_disk_bound_s": None if bound.disk_s is None else bound.disk_s / steps,
        "bound_fraction": _fraction(bound.overlapped_s, decode_s),
        "sum_bound_fraction": _fraction(bound.sum_s, decode_s),
        "ttft_bound_fraction": _fraction(first_bound.overlapped_s, run["ttft_s"]),
        "tokens_match": _match(run, reference_ids),
        "token_s": run["token_s"],
        "ids": run["ids"],
        "phases": {phase: run[phase] for phase in _PHASES},
    }


def _peer_fields(run: Measured, reference_ids: Sequence[int] | None) -> dict[str, Any]:
    """The same fields of another engine's run: it has no leases, and what its bound would be is not known."""
    seconds = run["token_s"]
    return dict.fromkeys(MEASURED_FIELDS) | {
        **{name: run[name] for name in ("load_s", "ttft_s", "decode_tok_s", "peak_rss_bytes", "physical_bytes", "token_s", "ids")},
        "token_p50_s": None if seconds is None else float(np.percentile(seconds, 50)),
        "token_p95_s": None if seconds is None else float(np.percentile(seconds, 95)),
        **{name: run[name] for name in _CACHED},
        "tokens_match": _match(run, reference_ids),
    }


def _match(run: Measured, reference_ids: Sequence[int] | None) -> bool | None:
    return None if reference_ids is None or run["ids"] is None else run["ids"] == reference_ids


def _rates(run: Measured, decode_s: float) -> Rates:
    """The rates beside a run, or what the disk gave during it where that was more: a disk that is shared is not always as slow."""
    rates: Rates = run["rates"]
    gave = [
        run[phase]["physical_bytes"] / seconds
        for phase, seconds in (("prefill", run["ttft_s"]), ("decode", decode_s))
        if run[phase]["physical_bytes"] is not None
    ]
    return rates if rates.disk is None else Rates(rates.memory, max(rates.disk, *gave))


def _bound(rates: Rates, touched: int, phase: Mapping[str, Any], footprint: Footprint) -> Bound:
    """The bound of a phase. The disk had to deliver what was missed, unless the page cache served some of it; what it read
    beyond that was not needed."""
    missed, read = phase["misses"] * footprint.expert_bytes, phase["physical_bytes"]
    return rates.bound(touched, missed if read is None else min(missed, read))


def _from_page_cache(phase: Mapping[str, Any]) -> int | None:
    """What of the admitted bytes the page cache served in a phase, at least: the disk may have read other things as well."""
    read = phase["physical_bytes"]
    return None if read is None else max(0, phase["admitted_bytes"] - read)


def without_folders(text: str, folder: Path) -> str:
    """A message without `folder` and those of other absolute paths: where a file lies concerns nobody who reads the results."""
    return _FOLDERS.sub("", text.replace(f"{folder}/", ""))


def _fraction(bound_s: float | None, seconds: float) -> float | None:
    return None if bound_s is None else bound_s / seconds


def _sum(counts: Sequence[int | None]) -> int | None:
    """None when any of them is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
