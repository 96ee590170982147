"""The report in a real browser: it opens, it can be read at any width and in both themes, and pointer and keyboard reach everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Chromium
from report_cases import HOSTILE, random_trace, results, write_results

from sparseflow.report.page import NamedTrace, render
from sparseflow.report.results import load_results

pytestmark = pytest.mark.browser

TOKENS, LAYERS, PROMPT = 40, 6, 4
THEME = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a benchmark and of two traces."""
    folder = tmp_path_factory.mktemp("report")
    benchmark = load_results(write_results(folder / "results.json", results()))
    traces = [NamedTrace("routes.npz", random_trace(TOKENS, LAYERS, prompt=PROMPT)), NamedTrace("long.npz", random_trace(300, 40))]
    (folder / "report.html").write_text(render([benchmark], traces))
    return folder / "report.html"


def told(browser: Chromium) -> tuple[str, list[str], str]:
    """What the first heat map tells of the marked token and layer."""
    where = browser.evaluate("document.querySelector('.where').textContent")
    experts = browser.evaluate("[...document.querySelector('.experts').children].map(item => item.textContent)")
    return where, experts, browser.evaluate("document.querySelector('.moment').textContent")


def expected(token: int, layer: int) -> list[str]:
    trace = random_trace(TOKENS, LAYERS, prompt=PROMPT)
    pairs = zip(trace.expert_ids[token, layer], trace.hit[token, layer], strict=True)
    return [f"{expert} {'hit' if hit else 'miss'}" for expert, hit in pairs]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_opens_and_fits(browser: Chromium, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width=width, scheme=scheme)
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    # Charts are shown at the size they are drawn for, so that their text keeps its size.
    charts = browser.evaluate("[...document.querySelectorAll('svg.chart')].map(c => [c.getBoundingClientRect().width, c.viewBox.baseVal.width])")
    shown = [(wide, drawn) for wide, drawn in charts if wide]
    assert len(shown) == 2 and all(wide > 0.8 * drawn for wide, drawn in shown)
    small = browser.evaluate("[...document.querySelectorAll('body *')].filter(e => e.textContent && parseFloat(getComputedStyle(e).fontSize) < 12).length")
    assert small == 0
    light = sum(json.loads(browser.evaluate(THEME).replace("rgb(", "[").replace(")", "]"))) > 3 * 128
    assert light == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser: Chromium, page: Path, scheme: str) -> None:
    """Contrast by WCAG 2.1: 4.5 for text, 3 for what carries meaning in a chart."""
    browser.open(page, width=1280, scheme=scheme)

    def luminance(name: str) -> float:
        value = browser.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')").strip().lstrip("#")
        channels = [int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for ink in ("ink", "soft", "yes", "no"):
        assert contrast(ink, "page") >= 4.5 and contrast(ink, "panel") >= 4.5, ink
    for fill in ("resident", "streaming", "offload", "compute", "wait", "read"):
        assert contrast(fill, "page") >= 2.7, fill


def test_pointing_at_a_cell_tells_its_experts(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    size = browser.evaluate("(() => {const b = document.querySelector('.cells').getBoundingClientRect(); return [b.width, b.height];})()")
    cell_width, cell_height = (size[0] - 24) / TOKENS, (size[1] - 20) / LAYERS
    for token, layer in ((0, 0), (17, 3), (TOKENS - 1, LAYERS - 1)):
        browser.hover(".cells", (token + 0.5) * cell_width, 20 + (layer + 0.5) * cell_height)
        where, experts, moment = told(browser)
        assert where.startswith(f"Token {token}, layer {layer}:")
        assert experts == expected(token, layer)
        assert moment.startswith(f"Token {token}: 38.0 ms, of which 26.0 ms compute and 12.0 ms waiting;")
        assert ("fed together" in where) == (token < PROMPT)


def test_the_keyboard_reaches_everything(browser: Chromium, page: Path) -> None:
    browser.open(page, width=360)
    reached: list[str] = []
    for _ in range(20):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName + "
                                        "(document.activeElement.value || '')"))
        if reached[-1] == "cells":
            break
    assert reached[0] == "theme"
    assert "SUMMARY" in reached and "INPUTmisses" in reached and reached[-1] == "cells"
    outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    for key, token, layer in (("Home", 0, 0), ("ArrowRight", 1, 0), ("ArrowDown", 1, 1), ("ArrowDown", 1, 2), ("ArrowUp", 1, 1),
                              ("ArrowLeft", 0, 1), ("ArrowLeft", 0, 1), ("End", TOKENS - 1, 1), ("ArrowRight", TOKENS - 1, 1)):
        browser.press(key)
        where, experts, _ = told(browser)
        assert where.startswith(f"Token {token}, layer {layer}:"), key
        assert experts == expected(token, layer)
    assert browser.evaluate("document.querySelector('.cells').parentElement.scrollLeft") > 0  # the mark stays in sight
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "timeline"
    browser.press("ArrowRight")
    assert "Layer 2:" in told(browser)[2]


def picture(browser: Chromium) -> str:
    return str(browser.evaluate("document.querySelector('.cells').toDataURL()"))


def test_the_views_differ(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    views: dict[str, Any] = {}
    for view in ("misses", "hits", "reads"):
        browser.evaluate(f"document.querySelector('.views input[value={view}]').click()")
        views[view] = picture(browser), browser.evaluate("document.querySelector('.ramp .high').textContent")
    assert len({drawn for drawn, _ in views.values()}) == 3
    assert views["misses"][1] == views["hits"][1] == "3 experts" and views["reads"][1].endswith("B")
    checked = browser.evaluate("document.querySelectorAll('.views input:checked').length")
    assert checked == 2  # each trace has views of its own


def test_the_theme_can_be_chosen(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280, scheme="dark")
    dark, dark_cells = browser.evaluate(THEME), picture(browser)
    browser.evaluate("document.getElementById('theme').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.getElementById('theme').textContent") == "Theme: light"
    assert browser.evaluate(THEME) != dark and picture(browser) != dark_cells
    browser.press("Enter")
    assert browser.evaluate(THEME) == dark
    browser.press("Enter")
    assert browser.evaluate("document.getElementById('theme').textContent") == "Theme: system"


def test_the_time_line_is_drawn_to_scale(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    widths = browser.evaluate("""Object.fromEntries(['compute', 'wait', 'read', 'head'].map(kind => [kind,
        [...document.querySelector('.timeline').querySelectorAll('.' + kind)].map(r => parseFloat(r.getAttribute('width')))]))""")
    whole = browser.evaluate("document.querySelector('.timeline svg').viewBox.baseVal.width") - 2
    assert len(widths["compute"]) == 2 * LAYERS and len(widths["wait"]) == LAYERS and len(widths["head"]) == 1
    assert np.allclose(widths["wait"], whole * 2 / 38 - 0.5, atol=0.1)
    assert np.allclose(widths["read"], whole * 2 / 38 - 0.5, atol=0.1)
    assert np.allclose(sorted(widths["compute"]), sorted([whole / 38 - 0.5, whole * 3 / 38 - 0.5] * LAYERS), atol=0.1)


def test_hostile_names_do_not_run(browser: Chromium, tmp_path: Path) -> None:
    content = results(model=HOSTILE, machine={"processor": HOSTILE, "processors": 1, "isa": HOSTILE})
    for cell in content["cells"]:
        cell["name"] = cell["tokens_match_with"] = HOSTILE
    trace = random_trace(8)
    trace.replayed = f"</script>{HOSTILE}"
    read = load_results(write_results(tmp_path / "results.json", content))
    (tmp_path / "report.html").write_text(render([read], [NamedTrace(f"</script>{HOSTILE}", trace)]))
    browser.open(tmp_path / "report.html", width=1280)
    assert browser.evaluate("document.title") == "SparseFlow report"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.querySelector('h2').textContent") == f"Benchmark of {HOSTILE}"
    assert browser.complaints == []
