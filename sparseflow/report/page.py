"""The page itself: one HTML file with its style, script and data inside, which asks for nothing from outside."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

import sparseflow.report
from sparseflow.report.bench_charts import memory_speed_chart, throughput_chart
from sparseflow.report.charts import number
from sparseflow.report.results import MODES, STATES, BenchmarkResults, Cell
from sparseflow.report.route_data import route_data
from sparseflow.route_evidence import Progress, describe_route
from sparseflow.sizes import format_bytes
from sparseflow.trace import RouteTrace

WIDE, NARROW = 880, 312
"""Widths in pixels that every chart is drawn to; the page shows the one that fits."""


@dataclass(frozen=True, slots=True)
class NamedTrace:
    """A trace and the name of its file."""

    source: str
    trace: RouteTrace


def render(results: list[BenchmarkResults], traces: list[NamedTrace], progress: Progress = lambda what: None) -> str:
    """The page of some benchmarks and traces, at least one of either. All names in it are escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bytes=format_bytes, percent=_percent, number=number)
    return environment.from_string(_file("page.html")).render(
        style=_file("page.css"),
        script=_file("page.js"),
        benchmarks=[_benchmark(benchmark) for benchmark in results],
        traces=[
            {"source": named.source, "route": describe_route(named.trace, progress=progress), "data": route_data(named.trace)}
            for named in traces
        ],
    )


def _benchmark(results: BenchmarkResults) -> dict[str, Any]:
    return {
        "results": results,
        "throughput": [(kind, throughput_chart(results, width)) for kind, width in (("wide", WIDE), ("narrow", NARROW))],
        "memory_speed": [(kind, memory_speed_chart(results, width)) for kind, width in (("wide", WIDE), ("narrow", NARROW))],
        "kinds": [(mode, state) for mode in MODES for state in STATES
                  if any((cell.mode, cell.state) == (mode, state) for cell in results.cells)],
        "rows": [_row(cell) for cell in results.cells],
    }


def _row(cell: Cell) -> dict[str, str]:
    """One line of the table of all figures: medians."""
    def middle(name: str, form: str, factor: float = 1.0) -> str:
        spread = cell.spread(name)
        return "–" if spread is None else form.format(spread.median * factor)

    def size(name: str) -> str:
        spread = cell.spread(name)
        return "–" if spread is None else format_bytes(int(spread.median))

    requests, hits = cell.spread("logical_requests"), cell.spread("hits")
    return {
        "first token": middle("ttft_s", "{:.2f} s"),
        "tok/s": middle("decode_tok_s", "{:.2f}"),
        "p50": middle("token_p50_s", "{:.0f} ms", 1000),
        "p95": middle("token_p95_s", "{:.0f} ms", 1000),
        "peak memory": size("peak_rss_bytes"),
        "hits": "–" if requests is None or hits is None or not requests.median else f"{100 * hits.median / requests.median:.1f} %",
        "admitted": size("admitted_bytes"),
        "from disk": size("physical_bytes"),
        "of the bound": middle("bound_fraction", "{:.0f} %", 100),
    }


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


def _file(name: str) -> str:
    return files(sparseflow.report).joinpath(name).read_text(encoding="utf-8")
