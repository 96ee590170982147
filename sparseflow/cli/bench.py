"""The `sf-bench` command, and `sf-bench MODEL`: measure a model, several times over, each run in a process of its own."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sparseflow.bench_file import RESULTS_FILE, check_writable, write_results
from sparseflow.bench_matrix import NEW_TOKENS, PUBLISHED_CACHES, QUICK_TOKENS, REPEATS, STATES, Entry, Matrix, quick_caches, read_matrix
from sparseflow.bench_peers import make_peer
from sparseflow.bench_plan import PROMPT_TOKENS, plan_cells
from sparseflow.benchmark import Benchmark
from sparseflow.cli.bench_table import as_text
from sparseflow.cli.compare import compare_command
from sparseflow.cli.options import EXIT_STATUSES, DefaultCommandGroup, report_error
from sparseflow.cli.perplexity import perplexity
from sparseflow.cli.progress import ProgressLine
from sparseflow.cli.quality import quality
from sparseflow.errors import CapacityError, OptionError
from sparseflow.footprint import Footprint
from sparseflow.kernels import isa
from sparseflow.kernels.threads import check_threads
from sparseflow.model import model_folder
from sparseflow.packfile import Manifest, read_manifest


@click.group(cls=DefaultCommandGroup, epilog=EXIT_STATUSES)
def main() -> None:
    """Measure a packed model. MODEL is a folder made by sf-pack, or "demo".

    The command run may be left out: "sf-bench MODEL ..." is "sf-bench run MODEL ...". A folder that is called as a command is
    given as ./NAME.

    \b
    Examples:
      sf-bench demo --quick
      sf-bench run --help
      sf-bench compare before/results.json after/results.json
      sf-bench quality demo --questions bench/quality_public.jsonl
      sf-bench perplexity demo --text story.txt
    """


main.add_command(compare_command)
main.add_command(quality)
main.add_command(perplexity)


@main.command(epilog=EXIT_STATUSES)
@click.argument("model")
@click.option("--matrix", "matrix_file", metavar="FILE", help="Measure the cells that a JSON file lists; see bench/README.md.")
@click.option("--quick", is_flag=True, help=f"A small matrix: two caches, {QUICK_TOKENS} tokens; the demo takes under a minute.")
@click.option("--cache", "caches", multiple=True, metavar="SIZE",
              help="Memory for routed experts, as for 'sparseflow run'; give it several times to compare."
              f"  [default: {', '.join(PUBLISHED_CACHES)}, each warm, and cold and strict]")
@click.option("--cold", is_flag=True, help="Drop the model from the page cache before each run.")
@click.option("--strict", is_flag=True, help="Also keep evicted experts out of the page cache.")
@click.option("--replay", metavar="FILE.npz:NAME", help="Follow recorded routes instead of the model's own.")
@click.option("--peer", "peers", multiple=True, metavar="NAME=WHERE",
              help="Also measure another engine on the same weights: llama.cpp=LLAMA-BENCH, or transformers=CHECKPOINT"
              " (for the demo 'transformers' alone), which leaves its layers on the disk. Needs the extra [peers].")
@click.option("--prompt-tokens", type=click.IntRange(min=1), metavar="N",
              help=f"Length of the prompt.  [default: {PROMPT_TOKENS}, or that of the replay]")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help=f"Tokens to generate.  [default: {NEW_TOKENS}]")
@click.option("--repeats", type=click.IntRange(min=1), metavar="N", help=f"Measured runs of each cell.  [default: {REPEATS}]")
@click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores this process may use]")
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help=f"Write DIR/{RESULTS_FILE}, anew after each run.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
def run(model: str, matrix_file: str | None, quick: bool, caches: tuple[str, ...], cold: bool, strict: bool, replay: str | None,
        peers: tuple[str, ...], prompt_tokens: int | None, tokens: int | None, repeats: int | None, threads: int | None,
        out: str | None, as_json: bool) -> None:
    """Measure MODEL: time to first token, tokens per second, memory, cache hits, bytes read from the disk, and how close all that
    comes to what this machine's memory and disk allow.

    A cell is one setting. Each cell runs --repeats times, in turn with the others, each time in a fresh process. Cold cells start
    with nothing of the model in the page cache; warm ones after a run that is not measured. With --cache all cells are warm, with
    --cold all are cold; without either, each default cache is measured both ways, cold ones strictly. The table shows medians, and the range where it
    matters. Sampling is greedy. 'sf-bench compare A.json B.json' says which differences of two results exceed the noise.

    \b
    Examples:
      sf-bench demo --quick
      sf-bench qwen-packed --out results
      sf-bench qwen-packed --cache 1GiB --cache 4GiB --strict --repeats 3
      sf-bench synthetic --cache 4GiB --strict --replay qwen36_routes.npz:core_w8a8
      sf-bench qwen-packed --matrix matrix.json --out results
      sf-bench demo --quick --peer transformers --peer llama.cpp=build/bin/llama-bench
    """
    manifest = read_manifest(model_folder(model))
    isa.active()  # an unusable SPARSEFLOW_ISA is told at once
    if out is not None:
        check_writable(out)
    cell_options = {"--quick": quick, "--cache": caches, "--cold": cold, "--strict": strict, "--replay": replay,
                    "--peer": peers, "--prompt-tokens": prompt_tokens, "--tokens": tokens}
    if matrix_file is not None:
        for name, value in cell_options.items():
            if value:
                raise OptionError(f"{name} does not go with --matrix: say it in {matrix_file}")
        matrix = read_matrix(matrix_file)
    else:
        matrix = matrix_of_options(manifest, quick, caches, cold, strict, replay, peers, prompt_tokens, tokens)
    threads = check_threads(matrix.threads if threads is None else threads)
    cells = plan_cells(manifest, matrix.entries)
    ready = {entry.peer: make_peer(entry.peer, manifest, model == "demo") for entry in matrix.entries if entry.peer is not None}
    benchmark = Benchmark(manifest, cells, repeats or matrix.repeats, threads, ready)
    measure(benchmark, None if out is None else Path(out), as_json)


def matrix_of_options(manifest: Manifest, quick: bool, caches: tuple[str, ...], cold: bool, strict: bool, replay: str | None,
                      peers: tuple[str, ...], prompt_tokens: int | None, tokens: int | None) -> Matrix:
    """The matrix that the options stand for. Raises OptionError for those that do not go together."""
    if quick and caches:
        raise OptionError("--quick does not go with --cache: it chooses the caches")
    if replay is not None and prompt_tokens is not None:
        raise OptionError("--prompt-tokens does not go with --replay: the recorded prompt has its own length")
    states: tuple[str, ...] = ("cold",) if cold else ("warm",) if caches else STATES
    both = len(states) > 1
    if quick:
        footprint = Footprint.of(manifest)
        caches = quick_caches(footprint.all_experts_bytes, footprint.smallest_cache_bytes)
    new_tokens = tokens or (QUICK_TOKENS if quick else NEW_TOKENS)
    entry = Entry("the options", caches or PUBLISHED_CACHES, states, strict, None, prompt_tokens, new_tokens, replay)
    # What a cold cell evicts and asks for again is to come from the disk too, or it is cold only at its begin.
    own = [replace(entry, states=(state,), strict=strict or (both and state == "cold")) for state in states]
    return Matrix((*own, *(replace(entry, caches=(), strict=False, peer=peer) for peer in peers)))


def measure(benchmark: Benchmark, out: Path | None, as_json: bool) -> None:
    """Runs it, and shows and writes what was measured, which may not be all. Raises what kept runs from being measured."""
    progress = ProgressLine(sys.stderr)

    def save(record: dict[str, Any]) -> None:
        if out is not None:
            write_results(record, out)

    # Being told to end leaves no more behind than Ctrl-C does: an export for a peer can be as large as the model.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        record = benchmark.run(progress, save)
    except KeyboardInterrupt:
        progress.finish()
        if benchmark.measured:
            show(benchmark.record(), as_json)
            report_error("stopped before all was measured" + ("" if out is None else f"; {out / RESULTS_FILE} holds what was"))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        progress.finish()
    show(record, as_json)
    if benchmark.failures:
        raise benchmark.failures[0]
    if not benchmark.measured:
        raise CapacityError(f"nothing was measured: {record['cells'][0]['name']} {record['cells'][0]['not_run']}")


def show(record: dict[str, Any], as_json: bool) -> None:
    click.echo(json.dumps(record, indent=2) if as_json else as_text(record))
