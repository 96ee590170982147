"""Benchmark results and traces to make reports of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from route_traces import route_trace

from sparseflow.bench_results import SCHEMA, SCHEMA_VERSION
from sparseflow.trace import RouteTrace

GIB = 2**30
HOSTILE = '"><script>document.title="ran"</script><img src=x onerror=document.title="ran">'


def cell(name: str, mode: str, state: str, cache: int | None, speeds: list[float], memory: float, **changes: Any) -> dict[str, Any]:
    """One cell with as many repeats as speeds."""
    n = len(speeds)
    measured = {
        "ttft_s": [1.5] * n, "decode_tok_s": speeds, "token_p50_s": [1 / speed for speed in speeds], "token_p95_s": [0.5] * n,
        "peak_rss_bytes": [int(memory * GIB)] * n, "logical_requests": [1000] * n, "hits": [700] * n, "misses": [300] * n,
        "evictions": [200] * n, "admitted_bytes": [GIB] * n, "physical_bytes": [GIB] * n, "bound_fraction": [0.5] * n,
        "tokens_match": [True] * n,
    }
    return {"name": name, "mode": mode, "state": state, "cache_bytes": cache, "not_run": None,
            "prompt_tokens": 41, "new_tokens": 32, "replayed": None, "tokens_match_with": "resident warm"} | (measured if n else {}) | changes


def results(model: str = "demo", **changes: Any) -> dict[str, Any]:
    """A whole record with cells of every kind."""
    cells = [
        cell("resident warm", "resident", "warm", 32 * GIB, [10.1, 10.5, 9.9], 35.0),
        cell("256MiB warm", "streaming", "warm", GIB // 4, [1.5, 1.6], 2.3),
        cell("4GiB warm", "streaming", "warm", 4 * GIB, [4.1, 4.4], 6.1),
        cell("4GiB cold", "streaming", "cold", 4 * GIB, [2.5, 2.6], 6.1, tokens_match=[True, False]),
        cell("transformers", "offload", "warm", None, [0.2], 20.0, logical_requests=[None], hits=[None], bound_fraction=[None]),
        cell("8GiB warm", "streaming", "warm", 8 * GIB, [], 0, not_run="needs 12.0 GiB of memory, 8.0 GiB are available"),
    ]
    return {
        "schema": SCHEMA, "schema_version": SCHEMA_VERSION,
        "machine": {"processor": "A processor", "processors": 2, "isa": "avx2"},
        "versions": {"sparseflow": "0.1.0", "revision": None},
        "bandwidths": {"memory_bytes_per_second": 30e9, "disk_bytes_per_second": None},
        "model": {"folder": model},
        "threads": 2,
        "cells": cells,
    } | changes


def write_results(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def random_trace(tokens: int, layers: int = 6, experts: int = 12, top_k: int = 3, prompt: int = 4) -> RouteTrace:
    """A prompt, then single tokens. Layer l asks a millisecond after its begin; the last arrival is 2 later, the end 3 after that."""
    rng = np.random.default_rng(0)
    forwards, hit = [], []
    for count in [prompt, *[1] * (tokens - prompt)]:
        ids = np.sort(np.argsort(rng.random((count, layers, experts)), axis=-1)[..., :top_k], axis=-1)
        inside = rng.random((layers, experts)) < 0.6
        forwards.append(ids)
        hit.append(inside[np.arange(layers)[:, None], ids])
    trace = route_trace(forwards, hit, num_experts=experts, expert_bytes=28672, slots=20, wait_seconds=0.002,
                        bytes_read=[1000 * forward for forward in range(len(forwards))])
    begin = np.arange(layers) * 0.006
    for name, offset in (("asked_at", 0.001), ("arrived_at", 0.003), ("ended_at", 0.006)):
        trace._array(name)[:] = begin + offset
    trace._array("seconds")[:] = layers * 0.006 + 0.002
    return trace
