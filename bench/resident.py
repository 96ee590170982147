"""Resident decode against the memory's bandwidth, pair by pair.

    python bench/resident.py MODEL [--pairs 60] [--threads 2] [--json FILE]

On a machine that is shared, the memory's bandwidth changes within seconds, and its best moment before or after a run says little
about the run; and where in it a buffer happens to lie makes a difference of a fifth. So each decode step is followed by one plain
read, with the same threads, of memory that weights lie in: the experts of one layer, and of another the next time. The share of the
bandwidth is taken of each pair. Bytes of a step are those of the weights it touches; keys, values and states are not counted.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from pathlib import Path

import click
import numpy as np

import sparseflow
from sparseflow.cli.options import SparseFlowCommand
from sparseflow.cli.table import table
from sparseflow.footprint import Footprint
from sparseflow.kernels.bandwidth import read_once
from sparseflow.kernels.threads import check_threads

WARM_UP = 5


def read_layer(model: sparseflow.Model, layer: int) -> float:
    """Bytes per second of a plain read of all experts of a layer, which lie side by side in a resident model."""
    experts = np.arange(model.geometry.num_experts, dtype=np.int32)
    with model.leases.acquire(layer, experts) as lease:
        lease.wait()
        first, size = int(lease.addresses[0]), len(lease) * model.layout.stride
        assert int(lease.addresses[-1]) - first == size - model.layout.stride
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(first))
        return size / read_once(memory, model.threads)[0]


@click.command(cls=SparseFlowCommand)
@click.argument("model")
@click.option("--pairs", type=click.IntRange(2), default=60, show_default=True)
@click.option("--threads", type=int, help="Compute threads.  [default: the cores this process may use]")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures.")
def main(model: str, pairs: int, threads: int | None, json_file: str | None) -> None:
    """Measure how much of the memory's bandwidth a resident decode step of MODEL reaches."""
    threads = check_threads(threads)
    with sparseflow.load(model, cache="resident", threads=threads, context=pairs + 64) as opened:
        touched = Footprint.of(opened.manifest).bytes_per_token
        rng = np.random.default_rng(0)
        session = opened.session(trace=False)
        session.forward(rng.integers(0, opened.geometry.vocab_size, 25), last_only=True)
        found = []
        for pair in range(WARM_UP + pairs):
            token = rng.integers(0, opened.geometry.vocab_size, 1)
            started = time.perf_counter()
            session.forward(token, last_only=True)
            step = time.perf_counter() - started
            found.append((step, read_layer(opened, pair % opened.geometry.num_hidden_layers)))
    found = found[WARM_UP:]
    shares = [touched / step / bandwidth for step, bandwidth in found]
    low, _, high = statistics.quantiles(shares, n=4)
    click.echo("\n".join(table([
        ("bytes a step", "step ms", "reached GB/s", "memory GB/s", "share", "middle half"),
        (
            f"{touched / 1e9:.3f} GB",
            f"{1000 * statistics.median(step for step, _ in found):.1f}",
            f"{statistics.median(touched / step for step, _ in found) / 1e9:.1f}",
            f"{statistics.median(bandwidth for _, bandwidth in found) / 1e9:.1f}",
            f"{statistics.median(shares):.0%}",
            f"{low:.0%} to {high:.0%}",
        ),
    ])))
    if json_file is not None:
        record = {"bytes_per_token": touched, "threads": threads, "step_s": [step for step, _ in found],
                  "memory_bytes_per_second": [bandwidth for _, bandwidth in found], "share": shares}
        Path(json_file).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
