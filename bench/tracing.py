"""What recording a trace costs: decode with and without one, by turns, in one process.

    python bench/tracing.py demo [MODEL...] [--cache 1MiB] [--rounds 60] [--tokens 64] [--json tracing.json]

Two sessions read the same prompt, one that keeps a trace and one that does not. In every round both are forked, and the forks are
fed the same tokens, one to each by turns; who goes first changes from token to token, so that a drift of the machine and what the
other left in the cache meet both alike, and who is forked first changes from round to round, so that neither always has the memory
that lies better. A round gives one ratio: the time with a trace over the time without. Shown are the median of the
ratios less one, the range that holds it with 95 % confidence (2,000 bootstrap samples), and the middle half of the rounds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import sparseflow
from sparseflow.bench_prompt import bench_prompt
from sparseflow.cli.progress import ProgressLine
from sparseflow.cli.table import table
from sparseflow.cli.options import SparseFlowCommand, open_model
from sparseflow.packfile import read_manifest
from sparseflow.session import Session

PROMPT_TOKENS = 16
BOOTSTRAP_SAMPLES = 2000


def decode_seconds(bases: tuple[Session, Session], ids: list[int], first: int) -> tuple[float, float]:
    """How long a fork of each session takes for some tokens, fed by turns; `first` (0 or 1) is forked first and has the first turn."""
    seconds = [0.0, 0.0]
    with bases[first].fork() as one, bases[1 - first].fork() as other:
        forks = (one, other) if first == 0 else (other, one)
        for number, token in enumerate(ids):
            for which in (0, 1) if (number + first) % 2 == 0 else (1, 0):
                started = time.perf_counter()
                forks[which].forward([token], last_only=True)
                seconds[which] += time.perf_counter() - started
    return seconds[0], seconds[1]


def measure(model: sparseflow.Model, rounds: int, tokens: int, progress: ProgressLine) -> NDArray[np.float64]:
    """Seconds of decode, float64 [rounds, 2]: without a trace, and with one. One round before them warms up."""
    ids, _ = bench_prompt(read_manifest(model.folder), PROMPT_TOKENS + tokens)
    prompt, rest = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
    seconds = np.empty((rounds + 1, 2))
    with model.session(trace=False) as plain, model.session(trace=True) as traced:
        for session in (plain, traced):
            session.forward(prompt, last_only=True)
        for number in range(rounds + 1):
            progress(f"{model.folder.name}, cache of {model.leases.slots} experts: {rounds} rounds")
            seconds[number] = decode_seconds((plain, traced), rest, number % 2)
    return seconds[1:]


def summary(seconds: NDArray[np.float64], tokens: int) -> dict[str, Any]:
    """The figures of the module's text; overheads are fractions of the time without a trace."""
    overhead = seconds[:, 1] / seconds[:, 0] - 1
    draws = np.random.default_rng(0).integers(len(overhead), size=(BOOTSTRAP_SAMPLES, len(overhead)))
    return {
        "token_ms": float(np.median(seconds[:, 0])) / tokens * 1000,
        "overhead": float(np.median(overhead)),
        "overhead_95": np.percentile(np.median(overhead[draws], axis=1), (2.5, 97.5)).tolist(),
        "overhead_middle_half": np.percentile(overhead, (25, 75)).tolist(),
    }


@click.command(cls=SparseFlowCommand)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--cache", "caches", multiple=True, default=["resident"], show_default=True, metavar="SIZE",
              help="Memory for routed experts; may be given several times.")
@click.option("--rounds", type=click.IntRange(min=2), default=60, show_default=True, help="Pairs to measure.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens to decode in each.")
@click.option("--strict", is_flag=True, help="Read experts past the page cache.")
@click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores this process may use]")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), metavar="FILE", help="Also write every time as JSON.")
def main(
    models: tuple[str, ...], caches: tuple[str, ...], rounds: int, tokens: int, strict: bool, threads: int | None,
    json_file: str | None,
) -> None:
    """What recording a trace costs on decode, for each MODEL and cache size."""
    progress = ProgressLine(sys.stderr)
    rows = [("model", "cache", "ms/token", "overhead", "95 % of the median", "middle half")]
    record: list[dict[str, Any]] = []
    for name in models:
        for cache in caches:
            with open_model(
                name, cache=cache, threads=threads, strict=strict, context=PROMPT_TOKENS + tokens, force=False, check_finite=False
            ) as model:
                seconds = measure(model, rounds, tokens, progress)
                folder, slots = model.folder.name, model.leases.slots
            figures = summary(seconds, tokens)
            median, half = ([f"{100 * end:+.2f}" for end in figures[key]] for key in ("overhead_95", "overhead_middle_half"))
            rows.append((folder, cache, f"{figures['token_ms']:.2f}", f"{100 * figures['overhead']:+.2f} %",
                         f"{' to '.join(median)} %", f"{' to '.join(half)} %"))
            record.append({"model": folder, "cache": cache, "strict": strict, "slots": slots, "rounds": rounds, "tokens": tokens, **figures,
                           "seconds_without": seconds[:, 0].tolist(), "seconds_with": seconds[:, 1].tolist()})
    progress.finish()
    click.echo("\n".join(table(rows)))
    if json_file is not None:
        Path(json_file).write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
