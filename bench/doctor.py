"""How well `sparseflow doctor` predicts the peak memory of a run.

    python bench/doctor.py MODEL --cache 1GiB --cache 4GiB [--prompt-tokens N] [--tokens N] [--json doctor.json]

For each cache, doctor is asked in a process of its own, then the run is made in another, with the context that doctor was told. A
model with a tokenizer is run by `sparseflow run`, which loads it too; one without gets random ids from the process that sf-bench
starts. Both have the kernel tell the peak of their resident set (VmHWM). Predicted is what doctor calls `peak_bytes`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from sparseflow.bench_cell import Run
from sparseflow.bench_process import run_in_process
from sparseflow.cli.table import table
from sparseflow.cli.options import SparseFlowCommand
from sparseflow.errors import SparseFlowError
from sparseflow.kernels.threads import default_threads
from sparseflow.machine import describe_machine, describe_versions
from sparseflow.model import model_folder
from sparseflow.packfile import read_manifest
from sparseflow.sizes import format_bytes
from sparseflow.tokenizer import TOKENIZER_FILE

PROGRAM = (sys.executable, "-P", "-c", "from sparseflow.cli.main import main; main(prog_name='sparseflow')")


def sparseflow(*arguments: str) -> dict[str, Any]:
    """Runs a command with --json. Raises SparseFlowError with its last line when it says nothing else."""
    done = subprocess.run([*PROGRAM, *arguments, "--json"], capture_output=True, text=True)
    if not done.stdout:
        raise SparseFlowError(f"sparseflow {' '.join(arguments)}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def predicted(folder: Path, cache: str, context: int) -> int:
    """The peak that doctor predicts, in bytes."""
    peak: int = sparseflow("doctor", str(folder), "--cache", cache, "--context", str(context))["memory"]["peak_bytes"]
    return peak


def measured(folder: Path, cache: str, prompt_tokens: int, new_tokens: int) -> int:
    """The peak of a run, in bytes."""
    if (folder / TOKENIZER_FILE).is_file():
        prompt = " fox" * prompt_tokens  # at least a token each
        context = ["--context", str(2 * prompt_tokens + new_tokens)]
        run = sparseflow("run", str(folder), prompt, "--cache", cache, "--max-new-tokens", str(new_tokens), *context)
        peak: int = run["evidence"]["peak_rss_bytes"]
        return peak
    vocabulary = read_manifest(folder).geometry.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, prompt_tokens).tolist()
    run = run_in_process(Run(str(folder), cache, default_threads(), False, ids, new_tokens), lambda: None)
    peak = run["peak_rss_bytes"]
    return peak


@click.command(cls=SparseFlowCommand)
@click.argument("model")
@click.option("--cache", "caches", multiple=True, required=True, metavar="SIZE", help="May be given several times.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N", help="Length of the prompt.")
@click.option("--tokens", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Tokens to generate.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write the figures.")
def main(model: str, caches: tuple[str, ...], prompt_tokens: int, tokens: int, json_file: Path | None) -> None:
    """Compare doctor's predicted peak memory of MODEL with the measured one, for each --cache."""
    folder = model_folder(model)
    cells = []
    for cache in caches:
        click.echo(f"{model}, cache {cache}", err=True)
        expected = predicted(folder, cache, prompt_tokens + tokens)
        peak = measured(folder, cache, prompt_tokens, tokens)
        cells.append({"cache": cache, "predicted_bytes": expected, "measured_bytes": peak, "error": expected / peak - 1})
    rows = [(cell["cache"], format_bytes(cell["predicted_bytes"]), format_bytes(cell["measured_bytes"]), f"{cell['error']:+.1%}")
            for cell in cells]
    click.echo("\n".join(table([("cache", "predicted", "measured peak RSS", "error"), *rows])))
    if json_file is not None:
        results = {
            "schema": "sparseflow-doctor-prediction", "schema_version": 1, "machine": describe_machine(), "versions": describe_versions(),
            "model": folder.resolve().name, "prompt_tokens": prompt_tokens, "new_tokens": tokens, "cells": cells,
        }
        json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
