"""What a decode step spends outside the kernels: Python, the lease table, noting kernels down.

    python bench/overhead.py MODEL [--cache resident] [--tokens 60] [--threads 2] [--json FILE]

Every Step of a forward is timed where it runs its kernels; the rest of the forward is overhead, the wait for the disk included, so
take a cache that holds everything, or read `waited` too. With --profile the functions that take most of it are listed, from a second
run under cProfile, whose own cost makes them look slower than they are.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click

import sparseflow
from sparseflow import decoder
from sparseflow.cli.options import SparseFlowCommand
from sparseflow.cli.table import table
from sparseflow.kernels.threads import Step, check_threads

WARM_UP = 5


class TimedStep:
    """A Step that adds up how long its kernels run."""

    seconds = 0.0
    runs = 0

    def __init__(self, threads: int) -> None:
        self.step = Step(threads)

    def __enter__(self) -> TimedStep:
        self.step.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        started = time.perf_counter()
        self.step.__exit__(*exception)
        self._add(started)

    def run(self) -> None:
        started = time.perf_counter()
        self.step.run()
        self._add(started)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)  # noting kernels down is overhead

    def _add(self, started: float) -> None:
        TimedStep.seconds += time.perf_counter() - started
        TimedStep.runs += 1


def measure(session: sparseflow.Session, tokens: int) -> list[dict[str, float]]:
    """Each decode step's seconds, and of them those in kernels."""
    steps = []
    for token in range(WARM_UP + tokens):
        TimedStep.seconds, TimedStep.runs = 0.0, 0
        started = time.perf_counter()
        session.forward([token + 1], last_only=True)
        seconds = time.perf_counter() - started
        steps.append({"seconds": seconds, "kernels": TimedStep.seconds, "regions": TimedStep.runs})
    return steps[WARM_UP:]


@click.command(cls=SparseFlowCommand)
@click.argument("model")
@click.option("--cache", default="resident", show_default=True, help="Memory for routed experts.")
@click.option("--tokens", type=click.IntRange(1), default=60, show_default=True, help="Decode steps to time.")
@click.option("--threads", type=int, help="Compute threads.  [default: the cores this process may use]")
@click.option("--profile", is_flag=True, help="Also list the functions that take most of it.")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures.")
def main(model: str, cache: str, tokens: int, threads: int | None, profile: bool, json_file: str | None) -> None:
    """Measure what a decode step of MODEL spends outside the kernels."""
    decoder.Step = TimedStep  # type: ignore[misc, assignment]
    with sparseflow.load(model, cache=cache, threads=check_threads(threads), context=2 * tokens + 64) as opened:
        session = opened.session(trace=False)
        session.forward(range(1, 26), last_only=True)
        steps = measure(session, tokens)
        shares = [1 - step["kernels"] / step["seconds"] for step in steps]
        outside = [1000 * (step["seconds"] - step["kernels"]) for step in steps]
        quarters = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
        rows = [
            ("layers", "step ms", "outside kernels ms", "share", "middle half", "parallel regions"),
            (
                str(opened.geometry.num_hidden_layers),
                f"{1000 * statistics.median(step['seconds'] for step in steps):.1f}",
                f"{statistics.median(outside):.2f}",
                f"{statistics.median(shares):.1%}",
                f"{quarters[0]:.1%} to {quarters[2]:.1%}",
                f"{steps[0]['regions']:.0f}",
            ),
        ]
        click.echo("\n".join(table(rows)))
        if profile:
            profiler = cProfile.Profile()
            profiler.enable()
            measure(session, tokens)
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(20)
    if json_file is not None:
        record = {"layers": opened.geometry.num_hidden_layers, "cache": cache, "threads": opened.threads, "steps": steps}
        Path(json_file).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
