"""The drawing of charts as SVG text: scales, axes, marks. Colours are classes, which the page or a picture's own style gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

TEXT = 12.0
"""Font size of a chart, in the units of its view box, which are pixels unless it is scaled."""


def nice_ticks(high: float, count: int) -> list[float]:
    """Round numbers from 0 up to at least `high`, about `count` steps of 1, 2 or 5 times a power of ten."""
    if high <= 0 or not math.isfinite(high):
        return [0.0, 1.0]
    rough = high / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(high / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Three significant digits without an exponent, no more than the number has."""
    written = three_digits(value)
    return written.rstrip("0").rstrip(".") if "." in written else written


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: 1.40, 23.5, 812, 12345."""
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value)) + 1e-12))
    return f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes in few letters, for a label: 0.25 GiB, 1 GiB, 512 MiB."""
    power = next((power for power in (3, 2, 1) if count >= 0.24 * 1024**power), 0)
    return f"{number(round(count / 1024**power, 2))} {('B', 'KiB', 'MiB', 'GiB')[power]}"


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale: 0 is drawn at `begin`, `high` at `end`."""

    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * value / self.high


def text(x: float, y: float, content: str, kind: str = "label", anchor: str = "start") -> str:
    """A line of text; y is its base line."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle with slightly rounded corners."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" rx="2"/>'


def mark(x: float, y: float, shape: str, kind: str, title: str) -> str:
    """A point: "circle", "square" or "diamond", with what a pointer resting on it is told."""
    if shape == "circle":
        body = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"'
    else:
        turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
        body = f'<rect class="{kind}" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"{turned}'
    return f"{body}><title>{escape(title)}</title></{'circle' if shape == 'circle' else 'rect'}>"


def axis_x(scale: Scale, ticks: list[float], top: float, bottom: float, title: str) -> list[str]:
    """Vertical grid lines with their numbers below, and the axis' title under them."""
    parts = []
    for tick in ticks:
        parts.append(line(scale(tick), top, scale(tick), bottom, "grid" if tick else "axis"))
        parts.append(text(scale(tick), bottom + TEXT + 4, number(tick), "tick", "middle"))
    parts.append(text(scale.end, bottom + 2 * TEXT + 10, title, "tick", "end"))
    return parts


def axis_y(scale: Scale, ticks: list[float], left: float, right: float, title: str) -> list[str]:
    """Horizontal grid lines with their numbers to the left, and the axis' title above them."""
    parts = []
    for tick in ticks:
        parts.append(line(left, scale(tick), right, scale(tick), "grid" if tick else "axis"))
        parts.append(text(left - 6, scale(tick) + TEXT / 3, number(tick), "tick", "end"))
    parts.append(text(4, scale.end - 14, title, "tick"))
    return parts


def svg(width: float, height: float, parts: list[str], title: str, style: str = "") -> str:
    """The picture. title: what it shows, for those who do not see it. style: CSS, where no page gives any."""
    inner = f"<style>{style}</style>" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}" font-size="{TEXT:.0f}"><title>{escape(title)}</title>{inner}{"".join(parts)}</svg>'
    )
