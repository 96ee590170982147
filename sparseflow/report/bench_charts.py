"""The charts of a benchmark: throughput of every cell, and speed against memory. Each is drawn to a given width in pixels."""

from __future__ import annotations

from sparseflow.report.charts import TEXT, Scale, axis_x, axis_y, line, mark, nice_ticks, rectangle, size, svg, text, three_digits
from sparseflow.report.results import MODES, STATES, BenchmarkResults, Cell, Spread
from sparseflow.sizes import format_bytes

_GIB = 2**30
_SHAPES = {"resident": "square", "streaming": "circle", "offload": "diamond"}
_ROW = 44
_PICTURE_WIDTH = 720

PICTURE_STYLE = (
    "svg{--page:#fff;--ink:#1c2430;--soft:#5b6675;--rule:#dfe4ea;--resident:#7a4fb5;--streaming:#1f6fb2;--offload:#b3541e;"
    "background:var(--page);font-family:system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{--page:#12171f;--ink:#e8ecf1;--soft:#a3aebb;--rule:#2d3641;--resident:#b897ea;"
    "--streaming:#63b0ee;--offload:#ee9a62}}"
    ".label{fill:var(--ink)}.tick{fill:var(--soft)}.heading{fill:var(--ink);font-weight:600;font-size:15px}"
    ".grid{stroke:var(--rule)}.axis{stroke:var(--soft)}.path{stroke-width:1.5;opacity:.7}.path.cold{stroke-dasharray:5 4}.spread{stroke-width:1.5}"
    + "".join(
        f".{mode}{{fill:var(--{mode});stroke:var(--{mode})}}.{mode}.hollow{{fill:var(--page);stroke-width:2}}.{mode}.path{{fill:none}}"
        for mode in MODES
    )
)
"""Colours of a picture on its own, light or dark as the reader's system is."""


def throughput_chart(results: BenchmarkResults, width: float) -> str:
    """Decode speed of every cell: a bar up to the median, a line from the slowest repeat to the fastest, a dot for each."""
    speeds = [(cell, cell.spread("decode_tok_s")) for cell in results.cells]
    ticks = nice_ticks(max((speed.high for _, speed in speeds if speed), default=1.0), 4 if width < 500 else 8)
    scale = Scale(ticks[-1], 6, width - 16)
    bottom = _ROW * len(speeds) + 4
    parts = axis_x(scale, ticks, 0, bottom, "tokens per second in decode")
    for index, (cell, speed) in enumerate(speeds):
        top = index * _ROW
        value = _range(speed) if speed else "not run"
        parts.append(text(10, top + 16, cell.name))
        parts.append(text(width - 16, top + 16, value, "label", "end"))
        if speed:
            middle = top + 30
            parts.append(rectangle(scale(0), middle - 6, scale(speed.median) - scale(0), 12, f"bar {cell.mode} {cell.state}"))
            parts.append(line(scale(speed.low), middle, scale(speed.high), middle, "whisker"))
            parts += [f'<circle class="repeat" cx="{scale(repeat):.1f}" cy="{middle}" r="2.5"/>' for repeat in speed.values]
    return svg(width, bottom + 3 * TEXT + 4, parts, f"Decode speed of {len(speeds)} cells of {results.model}, in tokens per second")


def memory_speed_chart(results: BenchmarkResults, width: float, *, picture: bool = False) -> str:
    """Decode speed over the peak resident set, medians, with the ranges of the repeats; lines join the streaming cells of one state.

    picture: with a heading and colours of its own, to stand outside of the report.
    """
    points = [(cell, memory, speed) for cell in results.cells
              if (memory := cell.spread("peak_rss_bytes")) and (speed := cell.spread("decode_tok_s"))]
    above = 78 if picture else 24
    height = above + min(300.0, 0.7 * width)
    ticks_x = nice_ticks(max((memory.high / _GIB for _, memory, _ in points), default=1.0), 4 if width < 500 else 8)
    ticks_y = nice_ticks(max((speed.high for _, _, speed in points), default=1.0), 5)
    x, y = Scale(ticks_x[-1], 44, width - 16), Scale(ticks_y[-1], height, above)
    parts = axis_y(y, ticks_y, x.begin, x.end, "tokens per second in decode")
    parts += axis_x(x, ticks_x, above, height, "peak memory of the process, GiB")
    for state in STATES:
        joined = sorted((memory.median / _GIB, speed.median) for cell, memory, speed in points
                        if (cell.mode, cell.state) == ("streaming", state))
        if len(joined) > 1:
            path = " ".join(f"{x(memory):.1f},{y(speed):.1f}" for memory, speed in joined)
            parts.append(f'<polyline class="path streaming {state}" points="{path}"/>')
    for cell, memory, speed in points:
        across, up = x(memory.median / _GIB), y(speed.median)
        parts.append(line(across, y(speed.low), across, y(speed.high), f"spread {cell.mode}"))
        parts.append(line(x(memory.low / _GIB), up, x(memory.high / _GIB), up, f"spread {cell.mode}"))
        told = f"{cell.name}: {_range(speed)} tok/s with {format_bytes(int(memory.median))}"
        parts.append(mark(across, up, _SHAPES[cell.mode], cell.mode + (" hollow" if cell.state == "cold" else ""), told))
    parts += _point_labels(points, x, y)
    title = f"Speed over memory of {len(points)} cells of {results.model}"
    if not picture:
        return svg(width, height + 3 * TEXT + 4, parts, title)
    parts.append(text(4, 20, f"{results.model}: speed for memory", "heading"))
    parts.append(text(4, 40, f"{results.machine}; {results.workload}", "tick"))
    return svg(width, height + 3 * TEXT + 28, [*parts, *_legend(points, height + 3 * TEXT + 16)], title, PICTURE_STYLE)


def readme_picture(results: BenchmarkResults) -> str:
    """The memory-speed curve as a file of its own."""
    return memory_speed_chart(results, _PICTURE_WIDTH, picture=True) + "\n"


def _point_labels(points: list[tuple[Cell, Spread, Spread]], x: Scale, y: Scale) -> list[str]:
    """The cache size, or the name, beside each point; left out where another label stands already."""
    taken: list[tuple[float, float, float, float]] = [(x(memory.median / _GIB) - 6, y(speed.median) - 6, x(memory.median / _GIB) + 6,
                                                       y(speed.median) + 6) for _, memory, speed in points]
    parts = []
    for cell, memory, speed in points:
        named = size(cell.cache_bytes) if cell.mode == "streaming" and cell.cache_bytes is not None else cell.name
        across, up, wide = x(memory.median / _GIB), y(speed.median), 0.56 * TEXT * len(named)
        for left, base in ((across + 9, up + 15), (across + 9, up - 8), (across - 9 - wide, up - 8), (across - 9 - wide, up + 15)):
            box = (left, base - TEXT, left + wide, base + 2)
            inside = box[0] > x.begin and box[2] < x.end + 14 and box[3] < y.begin
            if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
                taken.append(box)
                parts.append(text(left, base, named))
                break
    return parts


def _legend(points: list[tuple[Cell, Spread, Spread]], base: float) -> list[str]:
    parts, left = [], 10.0
    present = {(cell.mode, cell.state) for cell, _, _ in points}
    for mode, state in ((mode, state) for mode in MODES for state in STATES if (mode, state) in present):
        named = f"{mode}, {state}"
        parts.append(mark(left, base - 4, _SHAPES[mode], mode + (" hollow" if state == "cold" else ""), named))
        parts.append(text(left + 12, base, named))
        left += 36 + 0.56 * TEXT * len(named)
    return parts


def _range(spread: Spread) -> str:
    """Median, and the range where there is more than one value."""
    if len(spread.values) == 1:
        return three_digits(spread.median)
    return f"{three_digits(spread.median)} ({three_digits(spread.low)}–{three_digits(spread.high)})"
