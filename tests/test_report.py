"""The report: what is read, what is drawn, and that no name can break out of the page. The page itself is tried in a browser."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from report_cases import GIB, HOSTILE, cell, random_trace, results, write_results
from route_traces import route_trace

from sparseflow.cli.main import main
from sparseflow.errors import OptionError, StorageError
from sparseflow.report.bench_charts import memory_speed_chart, readme_picture, throughput_chart
from sparseflow.report.charts import nice_ticks, number, size, three_digits
from sparseflow.report.results import BenchmarkResults, load_results
from sparseflow.report.route_data import disk_bytes, route_data
from sparseflow.route_evidence import Leases

SVG = "{http://www.w3.org/2000/svg}"
PUBLISHED = sorted((Path(__file__).parent.parent / "bench" / "results").glob("streaming_*.json"))


def loaded(tmp_path: Path, **changes: Any) -> BenchmarkResults:
    return load_results(write_results(tmp_path / "results.json", results(**changes)))


def report(*args: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, args)], prog_name="sparseflow")


# --- numbers and scales ---


@given(st.floats(1e-6, 1e12), st.integers(2, 10))
def test_ticks_are_round_and_reach_over_everything(high: float, count: int) -> None:
    ticks = nice_ticks(high, count)
    assert ticks[0] == 0 and ticks[-1] >= high * (1 - 1e-6)
    assert len(ticks) <= count + 2
    assert float(f"{ticks[1]:.0e}") == pytest.approx(ticks[1])


def test_ticks_of_nothing() -> None:
    assert nice_ticks(0.0, 4) == [0.0, 1.0]


def test_numbers() -> None:
    assert [number(value) for value in (0, 0.5, 1.0, 2.5, 12.0, 1234.5, 0.00123)] == ["0", "0.5", "1", "2.5", "12", "1234", "0.00123"]
    assert [three_digits(value) for value in (0, 1.4, 0.5, 99.91, 812.3)] == ["0.00", "1.40", "0.500", "99.9", "812"]
    assert [size(count) for count in (GIB // 4, GIB - 30_000, 4 * GIB, 1 << 20, 1_032_192, 100)] == [
        "0.25 GiB", "1 GiB", "4 GiB", "1 MiB", "0.98 MiB", "100 B"]


# --- reading results ---


def test_results_are_read(tmp_path: Path) -> None:
    read = loaded(tmp_path)
    assert (read.source, read.model, read.bandwidths) == ("results.json", "demo", {"memory": 30e9})
    assert [(c.mode, c.state) for c in read.cells][:2] == [("resident", "warm"), ("streaming", "warm")]
    speed = read.cells[0].spread("decode_tok_s")
    assert speed is not None and (speed.low, speed.median, speed.high) == (9.9, 10.1, 10.5)
    assert read.cells[4].spread("hits") is None and read.cells[4].cache_bytes is None
    assert read.cells[5].not_run is not None and read.cells[5].measured == {}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_the_published_results_are_read(path: Path) -> None:
    assert load_results(path).cells


@pytest.mark.parametrize(("content", "message"), [
    ("", "neither a trace"),
    ("not json", "neither a trace"),
    ("[" * 100_000, "neither a trace"),
    ("[]", "not of sf-bench"),
    ('{"schema": "other"}', "not of sf-bench"),
    (json.dumps(results(schema_version=0)), "version 0"),
    (json.dumps(results(schema_version=None)), "version None"),
    (json.dumps(results(cells=None)), "damaged"),
    (json.dumps(results(cells=[{}])), "damaged"),
    (json.dumps(results(cells=[cell("x", "elsewhere", "warm", 1, [1.0], 1)])), "damaged"),
    (json.dumps(results(machine=None)), "damaged"),
    (json.dumps(results(bandwidths={})), "damaged"),
    *[(json.dumps(results(bandwidths={"memory_bytes_per_second": speed, "disk_bytes_per_second": None})), "damaged")
      for speed in (float("inf"), float("nan"), 0, -1, "fast")],
])
def test_what_are_no_results(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=message):
        load_results(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        load_results(tmp_path / "absent.json")


# --- charts ---


@pytest.mark.parametrize("width", [312, 880])
def test_throughput_is_drawn_to_scale(tmp_path: Path, width: int) -> None:
    read = loaded(tmp_path)
    root = ElementTree.fromstring(throughput_chart(read, width))
    bars = [float(bar.get("width", "")) for bar in root.iter(f"{SVG}rect")]
    medians = [spread.median for c in read.cells if (spread := c.spread("decode_tok_s"))]
    assert np.allclose(np.array(bars) / bars[0], np.array(medians) / medians[0], atol=0.01)
    assert len([dot for dot in root.iter(f"{SVG}circle")]) == 10
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "10.1 (9.90–10.5)" in words and "not run" in words
    assert all(0 <= float(text.get("x", "")) <= width for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("width", [312, 880])
def test_speed_over_memory_is_drawn_to_scale(tmp_path: Path, width: int) -> None:
    root = ElementTree.fromstring(memory_speed_chart(loaded(tmp_path), width))
    points = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in root.iter(f"{SVG}circle")]
    (x1, y1), (x2, y2), (x3, y3) = points  # 2.3, 6.1 and 6.1 GiB; 1.55, 4.25 and 2.55 tok/s
    assert x1 < x2 == x3 and y2 < y3 < y1
    assert (y1 - y2) / (y1 - y3) == pytest.approx((4.25 - 1.55) / (2.55 - 1.55), abs=0.03)
    assert "0.25 GiB" in [text.text for text in root.iter(f"{SVG}text")]


def test_charts_of_nothing(tmp_path: Path) -> None:
    read = loaded(tmp_path, cells=[cell("a", "streaming", "warm", GIB, [], 0, not_run="no memory")])
    for chart in (throughput_chart(read, 312), memory_speed_chart(read, 312), readme_picture(read)):
        ElementTree.fromstring(chart)


def test_the_picture_stands_alone(tmp_path: Path) -> None:
    root = ElementTree.fromstring(readme_picture(loaded(tmp_path, model=HOSTILE)))
    style = root.find(f"{SVG}style")
    assert style is not None and style.text is not None and "prefers-color-scheme:dark" in style.text
    assert not list(root.iter(f"{SVG}script"))
    assert any("offload, warm" == text.text for text in root.iter(f"{SVG}text"))


# --- the data of a trace ---


def test_bytes_of_the_disk_are_shared_out_by_misses() -> None:
    ids = np.array([[[0, 1]] * 3, [[1, 2]] * 3])
    hit = np.array([[[False, False], [True, True], [True, True]], [[False, True], [True, True], [True, False]]])
    trace = route_trace([ids], [hit], num_experts=8, expert_bytes=100, slots=4, bytes_read=[90])
    missed = np.array([[2, 0, 1]])
    trace._array("layer_read")[:] = [[-1, 60, -1]]
    assert disk_bytes(trace, Leases.of(trace), missed).tolist() == [[60, 0, 0], [0, 0, 30]]
    trace._array("layer_read")[:] = -1
    assert disk_bytes(trace, Leases.of(trace), missed).tolist() == [[60, 0, 0], [0, 0, 30]]
    trace._array("bytes_read")[:] = -1
    assert disk_bytes(trace, Leases.of(trace), missed).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_long_trace_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.report.route_data.MOST_TOKENS", 10)
    data = route_data(random_trace(30))
    assert (data["tokens"], data["all_tokens"], len(data["forward_tokens"])) == (10, 30, 7)
    json.dumps(data)


# --- the command ---


def test_one_page_of_everything(tmp_path: Path) -> None:
    random_trace(12).save(tmp_path / "routes.npz")
    bench = write_results(tmp_path / "results.json", results())
    result = report(bench, tmp_path / "routes.npz", "--out", tmp_path / "report.html", "--picture", tmp_path / "p.svg")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert not re.search(r"""(src|href|@import|url\()\s*=?\s*["']?(https?:)?//""", page)
    assert "needs 12.0 GiB of memory" in page and "1 of 2 runs" in page and "3 of 3 runs" in page
    assert (tmp_path / "p.svg").read_text() == readme_picture(load_results(bench))
    assert {entry.name for entry in tmp_path.iterdir()} == {"routes.npz", "results.json", "report.html", "p.svg"}


def test_a_page_of_results_without_cells(tmp_path: Path) -> None:
    bench = write_results(tmp_path / "results.json", results(cells=[]))
    assert report(bench, "--out", tmp_path / "report.html").exit_code == 0
    assert "All figures" in (tmp_path / "report.html").read_text()


def test_names_are_escaped(tmp_path: Path) -> None:
    content = results(model=HOSTILE, machine={"processor": HOSTILE, "processors": 1, "isa": HOSTILE})
    content["cells"][0]["name"] = content["cells"][5]["not_run"] = HOSTILE
    trace = random_trace(6)
    trace.replayed = HOSTILE
    named = tmp_path / "<script>alert(1)<:script>.npz"
    trace.save(named)
    assert report(write_results(tmp_path / "<b>.json", content), named, "--out", tmp_path / "r.html").exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert HOSTILE not in page and "<script>alert" not in page and "<b>" not in page and "<img" not in page
    assert page.count("<script") == 2 and page.count("</script>") == 2


def test_refusals(tmp_path: Path) -> None:
    random_trace(6).save(tmp_path / "routes.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK")
    for args, status, message in (
        ([], 2, "Missing argument"),
        ([tmp_path / "routes.npz"], 2, "Missing option '--out'"),
        ([tmp_path / "bad.npz", "--out", tmp_path / "r.html"], 2, "not a trace"),
        ([tmp_path / "absent", "--out", tmp_path / "r.html"], 6, "absent"),
        ([tmp_path / "routes.npz", "--out", tmp_path / "no" / "r.html"], 6, "cannot be written"),
        ([tmp_path / "routes.npz", "--out", tmp_path / "r.html", "--picture", tmp_path / "p.svg"], 2, "--picture"),
    ):
        result = report(*args)
        assert result.exit_code == status and message in result.stderr and result.stderr.count("\n") == 1, args
    assert {entry.name for entry in tmp_path.iterdir()} == {"routes.npz", "bad.npz"}
