"""`sparseflow report`: one HTML page from traces and benchmark results."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from sparseflow.cli.progress import ProgressLine
from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand
from sparseflow.errors import OptionError, StorageError
from sparseflow.report.bench_charts import readme_picture
from sparseflow.report.page import NamedTrace, render
from sparseflow.report.results import BenchmarkResults, load_results
from sparseflow.trace import RouteTrace


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--out", required=True, type=click.Path(dir_okay=False), metavar="FILE", help="Where to write the page.")
@click.option("--picture", type=click.Path(dir_okay=False), metavar="FILE.svg",
              help="Also write speed over memory of the first benchmark as a picture.")
def report(files: tuple[str, ...], out: str, picture: str | None) -> None:
    """Make one HTML page from every FILE: traces (.npz) that run or chat saved, and results.json of sf-bench.

    The page holds everything it needs and asks for nothing from the network. It shows throughput and memory of every cell of a
    benchmark, whether their tokens agree, and of a trace every token and layer: hits, misses, reads, and where the time went.

    \b
    Examples:
      sparseflow report results/results.json routes.npz --out report.html
      sparseflow report results/results.json --out report.html --picture memory-speed.svg
    """
    results: list[BenchmarkResults] = []
    traces: list[NamedTrace] = []
    for file in files:
        if file.endswith(".npz"):
            traces.append(NamedTrace(os.path.basename(file), RouteTrace.load(file)))
        else:
            results.append(load_results(file))
    if picture is not None and not results:
        raise OptionError(f"--picture {picture}: draws a benchmark, and no FILE is one; add the results.json of sf-bench")
    progress = ProgressLine(sys.stderr)
    try:
        page = render(results, traces, progress)
    finally:
        progress.finish()
    write(Path(out), page)
    if picture is not None:
        write(Path(picture), readme_picture(results[0]))


def write(path: Path, content: str) -> None:
    """Writes a file whole or not at all. Raises StorageError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
