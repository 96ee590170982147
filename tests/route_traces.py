"""Traces with given contents, without a model or a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparseflow.trace import RouteTrace


def route_trace(
    forwards: Sequence[NDArray[np.integer]],
    hit: Sequence[NDArray[np.bool_]],
    *,
    num_experts: int,
    expert_bytes: int,
    slots: int,
    bytes_read: Sequence[int],
    wait_seconds: float = 0.0,
) -> RouteTrace:
    """Expert ids and flags [tokens, layers, top_k] of each forward, and what the disk moved in it. Nothing takes time but the waiting."""
    layers = forwards[0].shape[1]
    by_layer = (len(forwards), layers)
    distinct = [[len(np.unique(ids[:, layer])) for layer in range(layers)] for ids in forwards]
    return RouteTrace.from_arrays({
        "num_experts": np.int64(num_experts),
        "expert_bytes": np.int64(expert_bytes),
        "slots": np.int64(slots),
        "replayed": np.array([], np.str_),
        "expert_ids": np.concatenate(forwards).astype(np.int16),
        "hit": np.concatenate(hit),
        "forward_tokens": np.array([len(ids) for ids in forwards], np.int64),
        "seconds": np.zeros(len(forwards), np.float32),
        "bytes_read": np.array(bytes_read, np.int64),
        "bytes_asked": np.array(distinct, np.int64) * expert_bytes,
        "wait_seconds": np.full(by_layer, wait_seconds, np.float32),
        "layer_read": np.full(by_layer, -1, np.int64),
        **{name: np.zeros(by_layer, np.float32) for name in ("asked_at", "arrived_at", "ended_at")},
    })  # fmt: skip
