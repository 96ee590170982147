"""One run of one cell of a benchmark, in a process of its own, which `sparseflow.benchmark` starts.

    python -P -m sparseflow.bench_cell          a Run as one line of JSON on standard input, what was measured on standard output

Inside the timed windows: `load_s` is sparseflow.load, so opening the files, reading the dense core and, for a resident cell, all
experts. `ttft_s` is the forward of the prompt and the choice of the first token. `token_s` is the same for each later token.
Outside: starting Python and importing, reading the prompt, text (none is made). Tokens are chosen greedily and none ends the
text, so that every run computes the same. The session keeps no trace.

What the lease table counts and the disk reads is told apart for load, prefill and decode. An error is told as JSON
too, {"error", "exit_status"}. The process ends when its standard input does: it does not outlive who measures.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparseflow
from sparseflow.errors import CapacityError, SparseFlowError
from sparseflow.evidence import disk_bytes_read, peak_rss_bytes
from sparseflow.model import Model
from sparseflow.replay import RouteReplay


@dataclass(frozen=True, slots=True)
class Run:
    """What to run: the arguments of sparseflow.load, the prompt's ids, how many tokens to make, FILE.npz:NAME to replay."""

    model: str
    cache: str | int
    threads: int
    strict: bool
    prompt_ids: Sequence[int]
    new_tokens: int
    replay: str | None = None


def measure(run: Run) -> dict[str, Any]:
    """Loads the model, runs, and tells what it took: the fields that bench/README.md describes, one value each."""
    replay = None if run.replay is None else RouteReplay.load(run.replay)
    read_before = disk_bytes_read()
    started = time.perf_counter()
    context = len(run.prompt_ids) + run.new_tokens
    with sparseflow.load(run.model, cache=run.cache, threads=run.threads, strict=run.strict, context=context) as model:
        load_s = time.perf_counter() - started
        marks = [dict.fromkeys(model.leases.counters(), 0) | {"physical_bytes": read_before}, _mark(model)]
        session = model.session(trace=False, replay=replay)
        ids: Sequence[int] = run.prompt_ids
        generated: list[int] = []
        seconds: list[float] = []
        while len(generated) < run.new_tokens:
            started = time.perf_counter()
            generated.append(int(np.argmax(session.forward(ids, last_only=True)[-1])))
            seconds.append(time.perf_counter() - started)
            ids = generated[-1:]
            if len(generated) == 1:
                marks.append(_mark(model))
        marks.append(_mark(model))
    phases = [_between(before, after) for before, after in zip(marks, marks[1:])]
    return {
        "load_s": load_s,
        "ttft_s": seconds[0],
        "token_s": seconds[1:],
        "peak_rss_bytes": peak_rss_bytes(),
        **dict(zip(("load", "prefill", "decode"), phases, strict=True)),
        "ids": generated,
    }


def _mark(model: Model) -> dict[str, int | None]:
    return {**model.leases.counters(), "physical_bytes": disk_bytes_read()}


def _between(before: dict[str, int | None], after: dict[str, int | None]) -> dict[str, int | None]:
    """What happened from one mark to the next; None for what the system does not tell."""
    return {
        name: None if count is None or (earlier := before[name]) is None else count - earlier for name, count in after.items()
    }


def main() -> None:
    """The process: reads a Run, prints what was measured."""
    line = sys.stdin.buffer.readline()
    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        answer = measure(Run(**json.loads(line)))
    except SparseFlowError as error:
        answer = {"error": str(error), "exit_status": error.exit_status}
    except MemoryError:
        answer = {"error": "the machine has no memory left", "exit_status": CapacityError.exit_status}
    print(json.dumps(answer), flush=True)


def leave_with_parent() -> None:
    """Ends this process when its standard input does."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
