"""The `sf-bench` command, and `sf-bench MODEL`: measure a model, several times over, each run in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from sparseflow.bench_prompt import bench_prompt
from sparseflow.benchmark import Benchmark, Workload, plan_cells
from sparseflow.cli.options import EXIT_STATUSES, DefaultCommandGroup
from sparseflow.cli.perplexity import perplexity
from sparseflow.cli.quality import quality
from sparseflow.cli.table import table
from sparseflow.errors import CapacityError, OptionError, StorageError
from sparseflow.footprint import Footprint
from sparseflow.kernels import isa
from sparseflow.kernels.threads import check_threads
from sparseflow.model import model_folder
from sparseflow.packfile import Manifest, read_manifest
from sparseflow.replay import RouteReplay
from sparseflow.sizes import format_bytes

RESULTS_FILE = "results.json"
PROMPT_TOKENS = 41

_QUIET_SECONDS = 2.0
_TERMINAL_SECONDS = 0.2
_GIGA = 1e9


@click.group(cls=DefaultCommandGroup, epilog=EXIT_STATUSES)
def main() -> None:
    """Measure a packed model. MODEL is a folder made by sf-pack, or "demo".

    The command run may be left out: "sf-bench MODEL ..." is "sf-bench run MODEL ...". A folder that is called as a command is
    given as ./NAME.

    \b
    Examples:
      sf-bench demo --cache 1MiB --cache resident --repeats 2
      sf-bench run --help
      sf-bench quality demo --questions bench/quality_public.jsonl
      sf-bench perplexity demo --text story.txt
    """


main.add_command(quality)
main.add_command(perplexity)


@main.command(epilog=EXIT_STATUSES)
@click.argument("model")
@click.option("--cache", "caches", multiple=True, default=["auto"], show_default=True, metavar="SIZE",
              help="Memory for routed experts, as for 'sparseflow run'; give it several times to compare.")
@click.option("--cold", is_flag=True, help="Drop the model from the page cache before each run.")
@click.option("--strict", is_flag=True, help="Also keep evicted experts out of the page cache.")
@click.option("--replay", metavar="FILE.npz:NAME", help="Follow recorded routes instead of the model's own.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), metavar="N",
              help=f"Length of the prompt.  [default: {PROMPT_TOKENS}, or that of the replay]")
@click.option("--tokens", type=click.IntRange(min=2), default=32, show_default=True, metavar="N", help="Tokens to generate.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="Runs of each cache.")
@click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores this process may use]")
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help=f"Write DIR/{RESULTS_FILE}.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
def run(model: str, caches: tuple[str, ...], cold: bool, strict: bool, replay: str | None, prompt_tokens: int | None, tokens: int,
        repeats: int, threads: int | None, out: str | None, as_json: bool) -> None:
    """Measure MODEL: time to first token, tokens per second, memory, cache hits, bytes read from the disk, and how close all that
    comes to what this machine's memory and disk allow.

    Each cache size is run once to warm up, and then --repeats times, in turn with the others, each time in a fresh process.
    With --cold there is no warming up: the page cache is made to forget the model before each run. The table shows medians, and
    the range where it matters. Sampling is greedy.

    \b
    Examples:
      sf-bench demo --cache 1MiB --cache resident --repeats 2
      sf-bench qwen-packed --cache 1GiB --cache 4GiB --strict --out results
      sf-bench synthetic --cache 4GiB --strict --replay qwen36_routes.npz:core_w8a8
    """
    manifest = read_manifest(model_folder(model))
    isa.active()  # an unusable SPARSEFLOW_ISA is told at once
    if out is not None:
        check_writable(out)
    workload = plan_workload(manifest, replay, prompt_tokens, tokens, check_threads(threads))
    context = len(workload.prompt_ids) + tokens
    benchmark = Benchmark(
        manifest, plan_cells(Footprint.of(manifest), caches, context, cold=cold, strict=strict), workload, repeats)
    progress = ProgressLine(sys.stderr)
    try:
        results = benchmark.run(progress)
    finally:
        progress.finish()
    if out is not None:
        write_results(results, Path(out))
    click.echo(json.dumps(results, indent=2) if as_json else as_text(results))
    if benchmark.failures:
        raise benchmark.failures[0]
    if not any(cell.get("ids") for cell in results["cells"]):
        raise CapacityError(f"nothing was measured: {results['cells'][0]['name']} {results['cells'][0]['not_run']}")


def plan_workload(manifest: Manifest, replay: str | None, prompt_tokens: int | None, tokens: int, threads: int) -> Workload:
    """What each run does. Raises OptionError when the replay is not for this model, or too short, or the context is."""
    routes = None if replay is None else RouteReplay.load(replay)
    if routes is not None:
        if prompt_tokens is not None:
            raise OptionError(f"--prompt-tokens does not go with --replay: the recorded prompt has {routes.n_prefill} tokens")
        routes.check(manifest.geometry)
        prompt_tokens = routes.n_prefill
        if routes.n_prefill + tokens - 1 > routes.tokens:  # the last token is not fed
            raise OptionError(
                f"--tokens {tokens}: replay {routes.label} is over after {routes.tokens - routes.n_prefill + 1} new tokens")
    length = prompt_tokens or PROMPT_TOKENS
    limit = manifest.geometry.max_position_embeddings
    if length + tokens > limit:
        raise OptionError(f"a prompt of {length} and {tokens} new tokens do not fit in the model's context of {limit}")
    ids, prompt = bench_prompt(manifest, length)
    return Workload(ids, prompt, tokens, threads, replay, None if routes is None else routes.label)


# --- what is shown ---


class ProgressLine:
    """Says what is being measured. On a terminal one line is rewritten, with the time it has taken; elsewhere each new message
    is a line, once two seconds have gone by."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.clock = clock
        self.terminal = stream.isatty()
        self.begun = clock()
        self.text = ""
        self.since = self.begun
        self.due = 0.0

    def __call__(self, text: str) -> None:
        """`text` is what is being done now."""
        now = self.clock()
        new = text != self.text
        if new:
            self.since = now
        if self.terminal and (new or now >= self.due):
            self.due = now + _TERMINAL_SECONDS
            self.stream.write(f"\r{text}, {now - self.since:.0f} s\x1b[K")
        elif not self.terminal and new and now - self.begun >= _QUIET_SECONDS:
            self.stream.write(f"{text}\n")
        self.stream.flush()
        self.text = text

    def finish(self) -> None:
        """Take the line away from the terminal."""
        if self.terminal and self.text:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def as_text(results: dict[str, Any]) -> str:
    """The record as a Markdown table with what is needed to read it."""
    model, workload, speeds = results["model"], results["workload"], results["bandwidths"]
    routes = "" if workload["replayed"] is None else f"; routes replayed from {workload['replayed']}"
    disk = speeds["disk_bytes_per_second"]
    lines = [
        f"{model['folder']}: {model['num_hidden_layers']} layers, experts {model['expert_type']}, dense core {model['dense_type']}",
        f"{workload['prompt_tokens']} prompt tokens ({workload['prompt']}), {workload['new_tokens']} new; {workload['threads']} threads, "
        f"{results['machine']['isa']}; medians of {workload['repeats']}{routes}",
        f"memory {speeds['memory_bytes_per_second'] / _GIGA:.1f} GB/s, "
        + ("disk not measured" if disk is None else f"disk {disk / _GIGA:.2f} GB/s"),
        "",
        *table([_HEADINGS, *(table_row(cell, workload["new_tokens"] - 1, model["expert_bytes"]) for cell in results["cells"])]),
    ]
    notes = []
    for cell in results["cells"]:
        if cell["not_run"] is not None:
            notes.append(f"{cell['name']}: {'stopped' if cell.get('ids') else 'not run'}, {cell['not_run']}")
        if not all(cell.get("tokens_match", [])):
            notes.append(f"{cell['name']}: its tokens differ from those of {cell['tokens_match_with']}")
    if speeds["disk_error"] is not None:
        notes.append(f"disk measured {len(speeds['disk'])} times of 2: {speeds['disk_error']}")
    return "\n".join([*lines, *([""] if notes else []), *notes])


_HEADINGS = ("cell", "load s", "first token s", "tok/s", "p50 ms", "p95 ms", "peak RSS", "hits", "missed/token", "read/token",
             "bound tok/s", "reached")


def table_row(cell: dict[str, Any], steps: int, expert_bytes: int) -> tuple[str, ...]:
    """One cell: medians over its runs. Hits, bytes and bounds are those of decode."""
    if not cell.get("ids"):
        return (cell["name"], *["-"] * (len(_HEADINGS) - 1))
    decode = [phases["decode"] for phases in cell["phases"]]
    bounds = [
        None if disk is None else 1 / max(memory, disk)
        for memory, disk in zip(cell["token_memory_bound_s"], cell["token_disk_bound_s"], strict=True)
    ]
    return (
        cell["name"],
        middle(cell["load_s"], "{:.2f}"),
        spread(cell["ttft_s"], "{:.2f}"),
        spread(cell["decode_tok_s"], "{:.2f}"),
        middle([1000 * seconds for seconds in cell["token_p50_s"]], "{:.0f}"),
        middle([1000 * seconds for seconds in cell["token_p95_s"]], "{:.0f}"),
        middle_bytes(cell["peak_rss_bytes"]),
        middle([100 * phase["hits"] / phase["requests"] for phase in decode], "{:.1f} %"),
        middle_bytes([phase["misses"] * expert_bytes / steps for phase in decode]),
        middle_bytes([None if phase["physical_bytes"] is None else phase["physical_bytes"] / steps for phase in decode]),
        middle(bounds, "{:.2f}"),
        middle([None if fraction is None else 100 * fraction for fraction in cell["bound_fraction"]], "{:.0f} %"),
    )


def middle(values: Sequence[float | None], form: str) -> str:
    """The median; n/a when the system did not tell a value."""
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if len(known) == len(values) else "n/a"


def middle_bytes(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return format_bytes(round(statistics.median(known)) if len(known) == len(values) else None)


def spread(values: Sequence[float], form: str) -> str:
    """Median and range."""
    return f"{middle(values, form)} ({form.format(min(values))}–{form.format(max(values))})"


# --- the file ---


def check_writable(folder: str) -> None:
    """OptionError when DIR cannot be written; told before an hour of measuring rather than after."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OptionError(f"--out {folder}: {existing} is no folder that can be written to")


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Writes DIR/results.json whole or not at all. Raises StorageError."""
    path = folder / RESULTS_FILE
    partial = folder / f"{RESULTS_FILE}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(results, indent=2) + "\n")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: the results cannot be written: {error.strerror or error}") from error
