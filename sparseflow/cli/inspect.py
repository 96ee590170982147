"""`sparseflow inspect`: what a packed model is, what it takes, what one token costs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand, check_early, engine_options, sampling_options
from sparseflow.errors import CapacityError
from sparseflow.footprint import Footprint, planned_context
from sparseflow.kernels import isa
from sparseflow.kernels.threads import check_threads
from sparseflow.model import check_context, model_folder
from sparseflow.packfile import Manifest, read_manifest
from sparseflow.sampling import SamplingOptions
from sparseflow.sizes import format_bytes

_CACHE_SIZES = 8


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("model")
@sampling_options
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of text.")
def inspect(model: str, max_new_tokens: int, stop: tuple[str, ...], cache: str, threads: int | None, strict: bool, context: int | None,
            check_finite: bool, as_json: bool, **sampling: Any) -> None:
    """Tell the geometry of MODEL, the sizes of its parts, and what one token costs in bytes. No weights are read.

    With the options of a run it also tells what that run would hold in memory and how it would sample.

    \b
    Examples:
      sparseflow inspect demo
      sparseflow inspect qwen-packed --cache 4GiB --context 8192
      sparseflow inspect qwen-packed --json
    """
    check_early(sampling, stop, None)
    manifest = read_manifest(model_folder(model))
    planned = planned_context(context, manifest.geometry.max_position_embeddings)
    described = describe(manifest, cache, check_context(context, manifest.geometry), planned, check_threads(threads), strict)
    described["run"]["check_finite"] = check_finite
    described["run"]["sampling"] = {
        "max_new_tokens": max_new_tokens, "stop": stop, **asdict(SamplingOptions().replace(**sampling))}
    click.echo(json.dumps(described, indent=2) if as_json else as_text(described))


def describe(manifest: Manifest, cache: str, context: int, planned: int, threads: int, strict: bool) -> dict[str, Any]:
    """Everything the command knows, by name; sizes in bytes. planned: tokens that a cache of "auto" leaves room for."""
    footprint = Footprint.of(manifest)
    problem = None
    try:
        slots = footprint.cache_slots(cache, planned)
    except CapacityError as error:
        if cache != "auto":
            raise
        # This command is there to say what a run needs, above all where there is too little.
        slots, problem = footprint.smallest_cache_slots, str(error)
    cache_bytes = slots * footprint.expert_bytes
    return {
        "folder": str(manifest.folder),
        "format_version": manifest.raw["format_version"],
        "geometry": manifest.geometry.to_json(),
        "footprint": footprint.to_json(),
        "cache_sizes": [cache_row(footprint, size) for size in cache_sizes(footprint)],
        "run": {
            "cache": cache_row(footprint, cache_bytes),
            "context": context,
            "session_bytes": footprint.state_bytes + context * footprint.kv_bytes_per_token,
            "memory_bytes": footprint.memory_bytes(slots, context),
            "threads": threads,
            "strict": strict,
            "isa": isa.active(),
            "problem": problem,
        },
    }


def cache_sizes(footprint: Footprint) -> list[int]:
    """The largest powers of two that are caches of this model, and all its experts."""
    powers = [1 << power for power in range(20, 50)]
    useful = [size for size in powers if footprint.smallest_cache_bytes <= size < footprint.all_experts_bytes]
    return [*useful[-_CACHE_SIZES:], footprint.all_experts_bytes]


def cache_row(footprint: Footprint, size: int) -> dict[str, Any]:
    """One cache: its bytes, the experts it holds, their share of all."""
    slots = footprint.slots(size)
    return {"bytes": size, "slots": slots, "share": slots / footprint.num_experts}


def as_text(described: dict[str, Any]) -> str:
    """The same for people."""
    geometry, footprint, run = described["geometry"], described["footprint"], described["run"]
    kinds = Counter(geometry["layer_types"])
    lines = [
        described["folder"],
        "",
        "geometry",
        row("layers", f"{geometry['num_hidden_layers']}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())),
        row("hidden size", geometry["hidden_size"]),
        row("routed experts", f"{geometry['num_experts']} a layer, {geometry['num_experts_per_tok']} a token, width "
                              f"{geometry['moe_intermediate_size']}; shared expert {geometry['shared_expert_intermediate_size']}"),
        row("attention", f"{geometry['num_attention_heads']} query and {geometry['num_key_value_heads']} key/value heads of "
                         f"{geometry['head_dim']}"),
        row("linear attention", f"{geometry['linear_num_key_heads']} heads of {geometry['linear_key_head_dim']} and "
                                f"{geometry['linear_num_value_heads']} of {geometry['linear_value_head_dim']}"),
        row("vocabulary", geometry["vocab_size"]),
        row("context", geometry["max_position_embeddings"]),
        "",
        "sizes",
        row("experts", f"{format_bytes(footprint['experts_file_bytes'])} {footprint['expert_type']}, {footprint['num_experts']} of "
                       f"{format_bytes(footprint['expert_bytes'])}"),
        row("dense core", f"{format_bytes(footprint['dense_bytes'])} {footprint['dense_type']}, resident"),
        row("embedding", f"{format_bytes(footprint['embed_file_bytes'])}, read by row"),
        "",
        "one token",
        row("dense core read", format_bytes(footprint["dense_bytes"])),
        row("experts asked", f"{footprint['experts_per_token']} of {format_bytes(footprint['expert_bytes'])} = "
                             f"{format_bytes(footprint['experts_bytes_per_token'])}"),
        row("together", format_bytes(footprint["bytes_per_token"])),
        row("added to the session", f"{format_bytes(footprint['kv_bytes_per_token'])} of keys and values"),
        "",
        "cache sizes",
        *(row(format_bytes(size["bytes"]), cache_text(size)) for size in described["cache_sizes"]),
        row("smallest", f"{footprint['smallest_cache_bytes']} bytes, {footprint['smallest_cache_slots']} experts"),
        "",
        "a run with these options",
        row("cache", f"{format_bytes(run['cache']['bytes'])}, {cache_text(run['cache'])}{', strict' if run['strict'] else ''}"),
        row("session", f"{format_bytes(run['session_bytes'])} with a full context of {run['context']}"),
        row("memory", f"{format_bytes(run['memory_bytes'])} and the interpreter"),
        row("compute", f"{run['threads']} thread{'' if run['threads'] == 1 else 's'}, {run['isa']}"),
    ]
    if run["sampling"]["temperature"] == 0:
        lines.append(row("sampling", f"greedy, up to {run['sampling']['max_new_tokens']} tokens (chat: the generation config)"))
    else:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_new_tokens")
        lines.append(row("sampling", ", ".join(f"{name} {run['sampling'][name]}" for name in names)))
    if run["problem"] is not None:
        lines.append(row("but", run["problem"]))
    return "\n".join(lines)


def cache_text(size: dict[str, Any]) -> str:
    return f"{size['slots']} experts, {size['share']:.0%} of all"


def row(name: str, value: object) -> str:
    return f"  {name:<22}{value}"
