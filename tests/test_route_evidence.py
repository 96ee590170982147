"""What `sparseflow route` tells of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from route_traces import route_trace

import sparseflow
from sparseflow.cli.main import main
from sparseflow.route_evidence import Leases, describe_route
from sparseflow.trace import RouteTrace


def traced(forwards: list[list[list[list[int]]]], missed: set[tuple[int, int, int]], slots: int = 4, read: int = 0) -> RouteTrace:
    """A trace of expert ids [tokens][layers][top_k] for each forward; missed: forward, layer, expert."""
    ids = [np.array(chosen) for chosen in forwards]
    hit = [np.ones(chosen.shape, np.bool_) for chosen in ids]
    for number, layer, expert in missed:
        hit[number][:, layer][ids[number][:, layer] == expert] = False
    return route_trace(ids, hit, num_experts=8, expert_bytes=100, slots=slots, bytes_read=[read] * len(ids), wait_seconds=0.5)


@pytest.fixture
def trace() -> RouteTrace:
    """A prompt of two tokens, then two tokens alone; two layers, two of eight experts."""
    forwards = [[[[0, 1], [4, 5]], [[1, 2], [4, 6]]], [[[1, 2], [4, 7]]], [[[2, 3], [4, 7]]]]
    missed = {(0, layer, expert) for layer in (0, 1) for expert in range(8)} | {(1, 1, 7), (2, 0, 3)}
    return traced(forwards, missed, slots=6, read=50)


def test_totals_by_hand(trace: RouteTrace) -> None:
    d = describe_route(trace)
    assert (d["forwards"], d["tokens"], d["decode_tokens"]) == (3, 4, 2)
    assert (d["active_experts"], d["all_experts"]) == (4 + 4, 16)
    assert (d["requests"], d["hits"], d["misses"]) == (6 + 4 + 4, 6, 8)  # the prompt shares experts 1 and 4
    assert (d["decode_requests"], d["decode_hit_rate"]) == (8, 0.75)
    assert (d["bytes_asked"], d["bytes_missed"], d["bytes_read"]) == (1400, 800, 150)
    assert d["wait_seconds"] == 3.0
    assert [layer["hit_rate"] for layer in d["by_layer"]] == [3 / 7, 3 / 7]
    assert [layer["active_experts"] for layer in d["by_layer"]] == [4, 4]
    assert d["reuse"] == (1 + 2 + 1 + 1 + 1 + 2) / 12
    assert [layer["reuse"] for layer in d["by_layer"]] == [(1 + 2 + 1) / 6, (1 + 1 + 2) / 6]
    assert d["most_used"][0] == {"layer": 1, "expert": 4, "tokens": 4, "share": 1.0}
    assert [use["tokens"] for use in d["most_used"]] == [4, 3, 3, 2, 1, 1, 1, 1]
    assert len(describe_route(trace, top=3)["most_used"]) == 3
    json.dumps(d)


def test_other_caches(trace: RouteTrace) -> None:
    caches = describe_route(trace)["caches"]
    assert [cache["slots"] for cache in caches] == sorted({2, 4, 6, 8})
    assert [cache["measured"] for cache in caches] == [None, None, 0.75, None]
    assert caches[-1]["lru"] == caches[-1]["belady"] == 6 / 8  # nothing but 7 and 3 is new to it
    assert all(cache["lru"] <= cache["belady"] for cache in caches)


def test_leases_name_the_token_that_asked_first(trace: RouteTrace) -> None:
    leases = Leases.of(trace)
    assert list(zip(leases.forward, leases.layer, leases.expert, leases.token, strict=True))[:6] == [
        (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 1), (0, 1, 4, 0), (0, 1, 5, 0), (0, 1, 6, 1)]
    assert leases.token[6:].tolist() == [2] * 4 + [3] * 4


def test_a_trace_of_nothing_and_of_a_prompt_alone() -> None:
    d = describe_route(RouteTrace(2, 8, 2, expert_bytes=100, slots=4))
    assert (d["requests"], d["hit_rate"], d["reuse"], d["most_used"]) == (0, None, None, [])
    assert d["caches"] == [{"slots": 4, "bytes": 400, "lru": None, "belady": None, "measured": None}]
    d = describe_route(traced([[[[0, 1], [2, 3]], [[0, 1], [2, 3]]]], set()))
    assert (d["decode_hit_rate"], d["hit_rate"]) == (None, 1.0)
    assert [cache["lru"] for cache in d["caches"]] == [0.0] * len(d["caches"])  # without single tokens, the prompt counts


# --- the command ---


def route(*args: str) -> Result:
    return CliRunner().invoke(main, ["route", *args], prog_name="sparseflow")


def test_the_trace_of_a_run(packed_demo: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "routes.npz")
    with sparseflow.load(packed_demo, cache="1MiB", threads=1) as model:
        generation = model.generate("The red fox", max_new_tokens=6)
        list(generation)
        generation.session.trace.save(file)
        evidence = model.evidence(generation)
    described = json.loads(route(file, "--json").stdout)
    assert described["tokens"] == 3 + 5 and described["decode_tokens"] == 5
    assert (described["requests"], described["hits"]) == (evidence.requests, evidence.hits)
    assert described["bytes_asked"] == evidence.bytes_asked and described["bytes_read"] == evidence.bytes_read
    assert described["cache_slots"] == 36
    trace = RouteTrace.load(file)
    assert (trace.asked_at <= trace.arrived_at).all() and (trace.arrived_at <= trace.ended_at).all()
    assert (trace.asked_at[:, 1:] >= trace.ended_at[:, :-1]).all() and (trace.ended_at[:, -1] <= trace.seconds).all()
    result = route(file, "--top", "3")
    assert result.exit_code == 0
    for part in ("8 in ", "of them 5 of a single token", "of 192", "Belady", "36 experts", "most used experts"):
        assert part in result.stdout, part


def test_a_session_without_a_trace_answers_the_same(packed_demo: Path) -> None:
    with sparseflow.load(packed_demo, cache="1MiB", threads=1) as model:
        on, off = (model.generate("The red fox", max_new_tokens=6, trace=trace) for trace in (True, False))
        assert "".join(on) == "".join(off)
        assert off.session.trace is None and on.session.trace.tokens == 8


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"{}"])
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    result = route(str(tmp_path / "x.npz"))
    assert result.exit_code == 2 and "not a trace" in result.stderr and result.stderr.count("\n") == 1
    assert route(str(tmp_path / "absent.npz")).exit_code == 6
