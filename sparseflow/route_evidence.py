"""What a trace shows: who was asked for, what was in memory, what the disk moved, and what another cache would have held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.route_simulation import Requests, belady, lru
from sparseflow.trace import RouteTrace

Progress = Callable[[str], None]

SIMULATED_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Sizes of the simulated caches beside the trace's own, as shares of all experts that the route asked for."""


@dataclass(frozen=True, slots=True)
class Leases:
    """What each layer of each forward leased: its distinct experts, once.

    Attributes
        forward, layer, expert: int64 [n], in the order in which they were asked for.
        hit: bool [n], whether it was in memory.
        token: int64 [n], the first token of the forward that chose it.
    """

    forward: NDArray[np.int64]
    layer: NDArray[np.int64]
    expert: NDArray[np.int64]
    hit: NDArray[np.bool_]
    token: NDArray[np.int64]

    @classmethod
    def of(cls, trace: RouteTrace) -> Leases:
        """The leases of a trace."""
        ids = trace.expert_ids.astype(np.int64)
        tokens, layers, top_k = ids.shape
        row = trace.forward_of_token.astype(np.int64)[:, None] * layers + np.arange(layers)
        key = (row[:, :, None] * trace.num_experts + ids).reshape(-1)
        asked, first = np.unique(key, return_index=True)
        return cls(
            forward=asked // (layers * trace.num_experts),
            layer=asked // trace.num_experts % layers,
            expert=asked % trace.num_experts,
            hit=trace.hit.reshape(-1)[first],
            token=first // (layers * top_k),
        )


def describe_route(trace: RouteTrace, *, top: int = 10, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Everything `sparseflow route` shows, ready for JSON: counts, sizes in bytes, rates from 0 to 1 (None where nothing counts).

    top: how many of the most used experts to tell; progress: told what is being done.

    Requests are leases: each distinct expert of a forward's layer once. `decode` counts forwards of one token; the simulated
    caches start empty and are scored on these too, or on all forwards where the trace has no other.
    """
    leases = Leases.of(trace)
    counts = trace.forward_tokens
    alone = counts == 1
    decode = alone[leases.forward]
    used = np.unique(leases.layer * trace.num_experts + leases.expert)
    return {
        "layers": trace.num_layers,
        "experts_per_layer": trace.num_experts,
        "experts_per_token": trace.top_k,
        "expert_bytes": trace.expert_bytes,
        "cache_slots": trace.slots,
        "replayed": trace.replayed,
        "forwards": trace.forwards,
        "tokens": trace.tokens,
        "decode_tokens": int(alone.sum()),
        "seconds": float(trace.seconds.sum(dtype=np.float64)),
        "wait_seconds": float(trace.wait_seconds.sum(dtype=np.float64)),
        "active_experts": len(used),
        "all_experts": trace.num_layers * trace.num_experts,
        "requests": len(leases.hit),
        "hits": int(leases.hit.sum()),
        "misses": int((~leases.hit).sum()),
        "hit_rate": _share(leases.hit),
        "decode_requests": int(decode.sum()),
        "decode_hit_rate": _share(leases.hit[decode]),
        "bytes_asked": trace.bytes_asked,
        "bytes_missed": int((~leases.hit).sum()) * trace.expert_bytes,
        "bytes_read": trace.bytes_read,
        "by_layer": _by_layer(trace, leases),
        "reuse": _reuse(trace)[0],
        "most_used": _most_used(trace, top),
        "caches": simulate(trace, progress),
    }


def simulate(trace: RouteTrace, progress: Progress = lambda what: None) -> list[dict[str, Any]]:
    """What caches of several sizes would have scored on this route: slots, bytes, and the hit rates of `lru` and `belady`. One row is
    the trace's own cache, and its `measured` rate; of the others that is None."""
    leading = int(np.argmax(trace.forward_tokens == 1)) if (trace.forward_tokens == 1).any() else 0
    requests = Requests.of(trace.expert_ids, trace.forward_tokens.tolist(), leading)
    active = len(set(requests.experts))
    sizes = {max(trace.top_k, round(active * share)) for share in SIMULATED_SHARES} if active else set()
    forwards = Leases.of(trace)
    measured = _share(forwards.hit[forwards.forward >= leading])
    rows = []
    for slots in sorted(sizes | {trace.slots}):
        progress(f"simulating a cache of {slots} experts")
        rows.append({
            "slots": slots,
            "bytes": slots * trace.expert_bytes,
            "lru": lru(requests, slots),
            "belady": belady(requests, slots),
            "measured": measured if slots == trace.slots else None,
        })
    return rows


def _by_layer(trace: RouteTrace, leases: Leases) -> list[dict[str, Any]]:
    reuse = _reuse(trace)[1]
    rows = []
    for layer in range(trace.num_layers):
        hit = leases.hit[leases.layer == layer]
        rows.append({
            "layer": layer,
            "active_experts": len(np.unique(trace.expert_ids[:, layer])),
            "requests": len(hit),
            "hits": int(hit.sum()),
            "hit_rate": _share(hit),
            "reuse": reuse[layer],
            "wait_seconds": float(trace.wait_seconds[:, layer].sum(dtype=np.float64)),
        })
    return rows


def _reuse(trace: RouteTrace) -> tuple[float | None, list[float | None]]:
    """Which share of a token's experts the token before chose too: over all layers, and of each."""
    ids = trace.expert_ids
    if len(ids) < 2:
        return None, [None] * trace.num_layers
    again = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=-1)  # [tokens - 1, layers, top_k]
    return float(again.mean()), [float(share) for share in again.mean(axis=(0, 2))]


def _most_used(trace: RouteTrace, top: int) -> list[dict[str, Any]]:
    """Experts that most tokens chose; of equals, the lower layer and number first."""
    ids = trace.expert_ids.astype(np.int64) + np.arange(trace.num_layers)[:, None] * trace.num_experts
    uses = np.bincount(ids.reshape(-1), minlength=trace.num_layers * trace.num_experts)
    order = np.argsort(-uses, kind="stable")[:top]
    return [
        {"layer": int(key) // trace.num_experts, "expert": int(key) % trace.num_experts, "tokens": int(uses[key]),
         "share": int(uses[key]) / trace.tokens}
        for key in order
        if uses[key]
    ]


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None
