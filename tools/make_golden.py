#!/usr/bin/env python3
"""Make the golden logits of tests/golden/ with transformers in float32 (needs torch and transformers: the extra [oracle]).

For every random geometry of tests/geometries.py and for the demo: the prompt as one chunk, then 40 greedy tokens one by one
through the cache. What is stored is refused unless it is trustworthy: the cached pass must agree with one pass over all
tokens without a cache and with the float64 reference of tests/reference, and no decision in it (a router's selection, a
greedy token) may hang on a difference that float32 could undo.

A golden file holds
    ids [n] int32        the prompt, then the greedy tokens       prompt   number of prompt tokens
    columns [m] int32    the columns of the logits that are kept  logits   [n, m] float32
    best [n] int32       the greedy token after each position     lead     [n] float32, its distance to the runner-up
    scale                largest |logit| of all columns           digest   SHA-256 of the weights, random_checkpoint.digest
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "oracle")]

import random_checkpoint  # noqa: E402
import torch  # noqa: E402
import transformers_model  # noqa: E402
from geometries import CASES  # noqa: E402
from reference.checkpoint import CheckpointTensors, read_safetensors  # noqa: E402
from reference.decoder import Reference  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

DEMO = ROOT / "sparseflow" / "demo"
DEMO_PROMPT = "The red fox lived near the river. One morning"
STEPS = 40
COLUMNS = 160

CACHE_AGREES = 2e-5  # of scale: cached against uncached, and float32 against float64
CLEAR_LEAD = 4e-4  # of scale: twice what the parity test allows a logit to move
CLEAR_GAP = 1e-4  # relative, of a router's probabilities at its boundary: far above float32's error


class Subject(NamedTuple):
    """A checkpoint folder with its weights and prompt."""

    name: str
    folder: Path
    config: dict[str, Any]
    weights: random_checkpoint.Weights
    prompt: NDArray[np.int64]


def subjects(names: tuple[str, ...], folder: Path) -> Iterator[Subject]:
    """The random cases (written under `folder`) and the demo; all of them if no names are given."""
    for case in CASES:
        if not names or case.name in names:
            weights = random_checkpoint.random_weights(case)
            source = random_checkpoint.write_checkpoint(folder / case.name, case.config, weights)
            yield Subject(case.name, source, case.config, weights, random_checkpoint.random_prompt(case))
    if not names or "demo" in names:
        ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(DEMO_PROMPT).ids
        config = json.loads((DEMO / "config.json").read_text())
        yield Subject("demo", DEMO, config, read_safetensors(DEMO / "model.safetensors"), np.array(ids))


def kept_columns(vocab: int) -> NDArray[np.int32]:
    """Both ends of the vocabulary, where tiles are partial, and an even choice between."""
    if vocab <= COLUMNS:
        return np.arange(vocab, dtype=np.int32)
    ends = np.concatenate([np.arange(16), np.arange(vocab - 17, vocab)])
    return np.union1d(ends, np.linspace(16, vocab - 18, COLUMNS - len(ends)).astype(int)).astype(np.int32)


def make(subject: Subject) -> tuple[dict[str, Any], str]:
    """The arrays of a golden file, and a line that says how good they are. Raises ClickException if they are not."""
    model = transformers_model.load(subject.folder)
    run = transformers_model.greedy(model, subject.prompt, STEPS)
    scale = np.abs(run.logits).max()
    uncached = np.abs(run.logits - transformers_model.whole(model, run.ids)).max() / scale
    reference, rounding = Reference(CheckpointTensors(subject.config, subject.weights)).forward(run.ids)
    exact = np.abs(run.logits - reference).max() / scale
    ranked = np.sort(run.logits, axis=1)
    lead = ranked[:, -1] - ranked[:, -2]
    gap = rounding.gap.min()
    verdict = (
        f"{subject.name:14} {len(run.ids):4} tokens, against no cache {uncached:.1e}, against float64 {exact:.1e}, "
        f"smallest lead {lead.min() / scale:.1e}, smallest router gap {gap:.1e}"
    )
    if max(uncached, exact) > CACHE_AGREES or lead.min() < CLEAR_LEAD * scale or gap < CLEAR_GAP:
        raise click.ClickException(f"{verdict}: not fit for a golden, choose another seed or prompt")
    columns = kept_columns(run.logits.shape[1])
    arrays = {
        "ids": run.ids.astype(np.int32),
        "prompt": np.int32(len(subject.prompt)),
        "columns": columns,
        "logits": run.logits[:, columns],
        "best": run.logits.argmax(axis=1).astype(np.int32),
        "lead": lead,
        "scale": scale,
        "digest": np.str_(random_checkpoint.digest(subject.weights)),
        "made_with": np.str_(f"torch {torch.__version__}, transformers {transformers_model.transformers.__version__}"),
    }
    return arrays, verdict


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("names", nargs=-1)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "tests" / "golden", show_default=True)
def main(names: tuple[str, ...], output: Path) -> None:
    """Make the golden files of the cases NAMES (all of them by default)."""
    torch.set_num_threads(1)  # a fixed order of sums
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(names, Path(folder)):
            arrays, verdict = make(subject)
            path = output / f"{subject.name}.npz"
            np.savez_compressed(path, **arrays)
            click.echo(f"{verdict}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
