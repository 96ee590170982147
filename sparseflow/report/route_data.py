"""A trace as the page's script needs it: small arrays of numbers, written as base64 in little-endian order."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.route_evidence import Leases
from sparseflow.trace import RouteTrace

MOST_TOKENS = 2048
"""Tokens that a page shows of a trace, the first ones: more would make it heavy."""


def route_data(trace: RouteTrace) -> dict[str, Any]:
    """Of the first MOST_TOKENS tokens: `choices` uint16 [tokens, layers, top_k], the expert id and, added to it, 32768 for a hit;
    `disk` float32 [tokens, layers], bytes; `forward` uint32 [tokens]; of their forwards, float32 [forwards, layers] in seconds
    `asked`, `arrived`, `ended`, `wait`, `missed` (experts), `read` (bytes, -1 where not counted), and `seconds` [forwards]."""
    tokens = min(trace.tokens, MOST_TOKENS)
    forward = trace.forward_of_token[:tokens]
    forwards = int(forward[-1]) + 1 if tokens else 0
    choices = trace.expert_ids[:tokens].astype(np.uint16) | (trace.hit[:tokens].astype(np.uint16) << 15)
    leases = Leases.of(trace)
    missed = np.zeros((trace.forwards, trace.num_layers), np.int64)
    np.add.at(missed, (leases.forward[~leases.hit], leases.layer[~leases.hit]), 1)
    by_forward: dict[str, NDArray[Any]] = {"asked": trace.asked_at, "arrived": trace.arrived_at, "ended": trace.ended_at,
                                           "wait": trace.wait_seconds, "missed": missed, "read": trace.bytes_read_by_layer}
    return {
        "tokens": tokens,
        "all_tokens": trace.tokens,
        "layers": trace.num_layers,
        "top_k": trace.top_k,
        "expert_bytes": trace.expert_bytes,
        "forward_tokens": trace.forward_tokens[:forwards].tolist(),
        "choices": _base64(choices, "<u2"),
        "disk": _base64(disk_bytes(trace, leases, missed)[:tokens], "<f4"),
        "forward": _base64(forward, "<u4"),
        "seconds": _base64(trace.seconds[:forwards], "<f4"),
        "total_read": trace.bytes_read_by_forward[:forwards].tolist(),
        **{name: _base64(values[:forwards], "<f4") for name, values in by_forward.items()},
    }


def disk_bytes(trace: RouteTrace, leases: Leases, missed: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bytes from the disk for each token and layer, float64 [tokens, layers].

    What was counted over several layers, and for a prompt's tokens together, is shared out by the experts missed: to the token that
    chose each first. Bytes that the system did not tell, and those of a count over layers without a miss, are left out.
    """
    read = trace.bytes_read_by_layer
    each = np.zeros(missed.shape)  # bytes of a missed expert
    for index in range(len(read)):
        begin = 0
        for layer in np.flatnonzero(read[index] >= 0):
            group = slice(begin, int(layer) + 1)
            each[index, group] = read[index, layer] / max(int(missed[index, group].sum()), 1)
            begin = int(layer) + 1
        rest = trace.bytes_read_by_forward[index] - read[index][read[index] >= 0].sum()
        if rest > 0 and missed[index, begin:].any():
            each[index, begin:] = rest / missed[index, begin:].sum()
    disk = np.zeros((trace.tokens, trace.num_layers))
    miss = ~leases.hit
    np.add.at(disk, (leases.token[miss], leases.layer[miss]), each[leases.forward[miss], leases.layer[miss]])
    return disk


def _base64(values: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, kind).tobytes()).decode()
