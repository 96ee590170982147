"""How often decode finds its experts in memory: the shipped policy against least-recently-used and against the best there is.

    python bench/policy.py ROUTES.npz [--json policy.json]

Recorded routes are replayed for several cache sizes, without a model. Each text starts with an empty cache: its prompt is one
forward, which asks for the experts of all its tokens layer by layer and is not counted; then come single tokens, which are.
Nothing is timed, so the figures are the same on every machine.

    lru      the expert that was not used for longest goes first, over all layers
    shipped  the LeaseTable as it is, over a file whose experts are one page each
    belady   knows the future: the expert whose next use is furthest off goes first, or is not kept in the first place
             (Belady 1966, with bypass). No policy can do better.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from sparseflow.cli.table import table
from sparseflow.cli.options import SparseFlowCommand
from sparseflow.leases import LeaseTable
from sparseflow.packfile import HEADER_BYTES, KIND_EXPERTS, Header
from sparseflow.replay import RouteReplay
from sparseflow.route_simulation import Requests, belady, lru
from sparseflow.sizes import format_bytes
from sparseflow.store import PackedStore

MIB = 1 << 20
EXPERT_BYTES = 3 * MIB
"""What a slot takes: an expert of Qwen3.6-35B-A3B without its scales, as the published figures count it."""
CACHES = tuple(size * MIB for size in (256, 512, 1024, 2048, 4096, 8192))
PAGE = 4096


def requests_of(routes: RouteReplay) -> Requests:
    """What a text asks for; its prompt does not count."""
    return Requests.of(routes.ids, [routes.n_prefill, *[1] * (routes.tokens - routes.n_prefill)], uncounted=1)


def simulated(policy: Callable[[Requests, int], float | None]) -> Callable[[RouteReplay, int], float | None]:
    """A policy of sparseflow.route_simulation, asked for the decode hit rate of a text."""
    return lambda routes, slots: policy(requests_of(routes), slots)


def shipped(routes: RouteReplay, slots: int) -> float:
    """Decode hit rate of the table that sparseflow.load makes, asked as the decoder asks."""
    num_experts = int(routes.ids.max()) + 1
    hits = requests = 0
    with tempfile.TemporaryDirectory() as folder, PackedStore(write_experts(folder, routes.num_layers, num_experts)) as store:
        cache = LeaseTable(store, slots)
        ranges = [(0, routes.n_prefill), *((token, token + 1) for token in range(routes.n_prefill, routes.tokens))]
        for begin, end in ranges:
            for layer in range(routes.num_layers):
                ids, weights = ascending(routes, begin, end, layer)
                cache.observe(layer, ids, weights)
                distinct = np.unique(ids)
                for first in range(0, len(distinct), slots):
                    with cache.acquire(layer, distinct[first : first + slots]) as lease:
                        lease.wait()
                        if begin > 0:
                            hits += int(lease.hit.sum())
                            requests += len(lease)
    return hits / requests


def ascending(routes: RouteReplay, begin: int, end: int, layer: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Some tokens' experts in a layer as the router gives them: ids [tokens, top_k], ascending, and weights. Where the order was
    recorded, the weights fall in that order; else they are equal."""
    given = routes.ids[begin:end, layer]
    order = np.argsort(given, axis=-1)
    weights = np.ones(given.shape, np.float32)
    if routes.ranked:
        weights /= 1 + order
    return np.take_along_axis(given, order, axis=-1), weights


def write_experts(folder: str, num_layers: int, num_experts: int) -> Path:
    """A file of experts of one page each, of which nothing but their place matters."""
    path = Path(folder) / "experts.sfx"
    count = num_layers * num_experts
    header = Header(
        kind=KIND_EXPERTS,
        weight_bits=8,
        num_layers=num_layers,
        num_experts=num_experts,
        hidden_size=32,
        intermediate_size=32,
        stride=PAGE,
        slice_bytes=PAGE,
        file_bytes=HEADER_BYTES + count * PAGE,
    )
    with open(path, "wb") as file:
        file.write(header.pack())
        file.truncate(HEADER_BYTES + count * PAGE)
    return path


POLICIES: dict[str, Callable[[RouteReplay, int], float | None]] = {
    "lru": simulated(lru), "shipped": shipped, "belady": simulated(belady)}


@click.command(cls=SparseFlowCommand)
@click.argument("routes")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), metavar="FILE", help="Write the hit rates as JSON.")
def main(routes: str, json_file: str | None) -> None:
    """Decode hit rates on every text of ROUTES, an .npz file of recorded routes, as percentages."""
    replays = {name: RouteReplay.load(f"{routes}:{name}") for name in RouteReplay.names(routes)}
    rates: dict[str, dict[str, list[float]]] = {}
    for name, replay in replays.items():
        rates[name] = {}
        for policy, simulate in POLICIES.items():
            rates[name][policy] = [simulate(replay, cache // EXPERT_BYTES) for cache in CACHES]
            if sys.stderr.isatty():
                click.echo(f"\r{name}: {policy}\x1b[K", nl=False, err=True)
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    rates["mean"] = {policy: np.mean([rates[name][policy] for name in replays], axis=0).tolist() for policy in POLICIES}
    rows = [("text", "policy", *(format_bytes(cache) for cache in CACHES))]
    for name, of_policy in rates.items():
        rows += [(name, policy, *(f"{100 * rate:.1f}" for rate in of_rate)) for policy, of_rate in of_policy.items()]
    click.echo("\n".join(table(rows)))
    if json_file is not None:
        record = {"routes": routes, "cache_bytes": CACHES, "slots": [cache // EXPERT_BYTES for cache in CACHES], "hit_rates": rates}
        Path(json_file).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
