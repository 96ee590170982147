"""`sparseflow route`: what a saved trace shows."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from sparseflow.cli.progress import ProgressLine
from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand
from sparseflow.route_evidence import describe_route
from sparseflow.sizes import format_bytes
from sparseflow.trace import RouteTrace

_BAR = 24


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("file", metavar="FILE")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, metavar="N", help="Tell the N most used experts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of text.")
def route(file: str, top: int, as_json: bool) -> None:
    """Show what is in FILE, a trace that run or chat saved with --trace.

    A request is one expert that a layer asked for in a forward; a prompt's tokens share theirs. Reuse is the share of a token's
    experts that the token before chose too. At the end: what caches of other sizes would have scored on this very route, starting
    empty, with the least recently used expert given up (LRU), and with the best choice that knows the future (Belady).

    \b
    Examples:
      sparseflow run demo "The red fox" --cache 1MiB --trace routes.npz
      sparseflow route routes.npz
      sparseflow route routes.npz --json
    """
    progress = ProgressLine(sys.stderr)
    try:
        described = describe_route(RouteTrace.load(file), top=top, progress=progress)
    finally:
        progress.finish()
    click.echo(json.dumps(described, indent=2) if as_json else as_text(described))


def as_text(described: dict[str, Any]) -> str:
    """The evidence for people."""
    d = described
    lines = [
        f"{d['layers']} layers of {d['experts_per_layer']} experts, {d['experts_per_token']} a token, {format_bytes(d['expert_bytes'])} each"
        + ("" if d["replayed"] is None else f"; routes replayed from {d['replayed']}"),
        "",
        _row("forwards", f"{d['forwards']}, of them {d['decode_tokens']} of a single token"),
        _row("tokens", f"{d['tokens']} in {d['seconds']:.2f} s, of which {d['wait_seconds']:.2f} s waiting for experts"),
        _row("active experts", f"{d['active_experts']} of {d['all_experts']}"),
        _row("requests", f"{d['requests']}: {d['hits']} hits, {d['misses']} misses"),
        _row("hit rate", f"{_percent(d['hit_rate'])}; of single tokens {_percent(d['decode_hit_rate'])}"),
        _row("reuse", f"{_percent(d['reuse'])} of a token's experts are also the previous token's"),
        _row("bytes", f"{format_bytes(d['bytes_asked'])} asked, {format_bytes(d['bytes_missed'])} missed,"
                      f" {format_bytes(d['bytes_read'])} read from the disk"),
        _row("cache", f"{d['cache_slots']} experts, {format_bytes(d['cache_slots'] * d['expert_bytes'])}"),
        "",
        f"{'layer':>7}{'hit rate':>10}  {'':<{_BAR}}{'reuse':>8}{'active':>8}{'wait':>11}",
    ]
    for layer in d["by_layer"]:
        bar = "#" * round(_BAR * (layer["hit_rate"] or 0))
        lines.append(f"{layer['layer']:>7}{_percent(layer['hit_rate']):>10}  {bar:<{_BAR}}{_percent(layer['reuse']):>8}"
                     f"{layer['active_experts']:>8}{1000 * layer['wait_seconds']:>8.1f} ms")
    if d["most_used"]:
        lines += ["", "most used experts"]
        lines += [f"{'layer':>7} {use['layer']:<4} expert {use['expert']:<6} {use['tokens']} of {d['tokens']} tokens"
                  f" ({_percent(use['share'])})" for use in d["most_used"]]
    if d["caches"]:
        lines += ["", "what another cache would have hit", f"{'experts':>9}{'size':>12}{'LRU':>9}{'Belady':>9}{'measured':>10}"]
        lines += [f"{cache['slots']:>9}{format_bytes(cache['bytes']):>12}{_percent(cache['lru']):>9}{_percent(cache['belady']):>9}"
                  + (f"{_percent(cache['measured']):>10}" if cache["measured"] is not None else "") for cache in d["caches"]]
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    return f"  {name:<16}{value}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"
