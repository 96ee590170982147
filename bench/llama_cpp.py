"""llama.cpp beside SparseFlow, on the same weights: tokens per second of prefill and decode, everything in memory.

    python tools/make_model.py MODEL --layers 12
    python tools/export_gguf.py MODEL MODEL.gguf
    python bench/llama_cpp.py MODEL MODEL.gguf --llama-bench build/bin/llama-bench --json result.json

How it is measured: both engines run by turns, each in a fresh process, and who goes first changes every round, so that
whatever else the machine does falls on both. A round of either is llama-bench's: an empty context, ids drawn uniformly, one
untimed run of each prompt length, then timed once: the prompt with the logits of its last position; then, for decode, single
tokens from an empty context. Loading is outside the timed window. llama.cpp runs with the settings llama-bench chooses.
The memory must hold the larger of the two models; each is read from disk again if it does not hold both.

How to read it: each round also says how many processors other work (or the hypervisor) took meanwhile. Engines that wait for
each other's threads by spinning lose far more than that share, so take figures only from rounds where it is near zero.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

import sparseflow
from sparseflow.cli.options import SparseFlowCommand
from sparseflow.errors import OptionError, SparseFlowError
from sparseflow.evidence import peak_rss_bytes
from sparseflow.kernels import isa
from sparseflow.kernels.threads import check_threads
from sparseflow.model import model_folder
from sparseflow.packfile import read_manifest

Speeds = dict[str, float]
"""Name of a test -> tokens per second."""
ENGINES = ("llama.cpp", "sparseflow")


def prefill_name(tokens: int) -> str:
    return f"prefill {tokens}"


def decode_name(tokens: int) -> str:
    return f"decode {tokens}"


def run_sparseflow(model: str, prompts: list[int], decode: int, threads: int, seed: int) -> tuple[Speeds, dict[str, Any]]:
    """One round of ours, in this process: speeds, and what ran."""
    rng = np.random.default_rng(seed)
    speeds = {}
    with sparseflow.load(model, cache="resident", threads=threads, context=max(*prompts, decode)) as opened:
        vocab = opened.geometry.vocab_size

        def prefill(tokens: int) -> float:
            ids = rng.integers(0, vocab, tokens)
            with opened.session(trace=False) as session:
                begun = time.perf_counter()
                session.forward(ids, last_only=True)
                return time.perf_counter() - begun

        def steps(tokens: int) -> float:
            ids = rng.integers(0, vocab, tokens)
            with opened.session(trace=False) as session:
                begun = time.perf_counter()
                for token in ids:
                    session.forward([token], last_only=True)
                return time.perf_counter() - begun

        for tokens in prompts:
            prefill(tokens)
            speeds[prefill_name(tokens)] = tokens / prefill(tokens)
        steps(1)
        speeds[decode_name(decode)] = decode / steps(decode)
        g = opened.geometry
        experts = g.num_hidden_layers * g.num_experts_per_tok * opened.layout.slice_bytes
        about = {
            "version": version("sparseflow"),
            "isa": isa.active(),
            "bytes_per_decoded_token": opened.core_bytes + experts,
            "peak_rss_bytes": peak_rss_bytes(),
        }
    return speeds, about


def run_in_fresh_process(*arguments: Any) -> tuple[Speeds, dict[str, Any]]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_sparseflow, *arguments).result()


def run_llama_bench(
    binary: Path, gguf: Path, prompts: list[int], decode: int, threads: int
) -> tuple[Speeds, dict[str, Any]]:
    """One round of llama.cpp: speeds, and what ran."""
    command = [str(binary), "-m", str(gguf), "-t", str(threads), "-r", "1", "-o", "json"]
    command += ["-p", ",".join(map(str, prompts)), "-n", str(decode)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        reason = error.strerror
        raise OptionError(f"--llama-bench {binary}: cannot be run ({reason}), build it from llama.cpp's sources") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise SparseFlowError(f"llama-bench ended with status {done.returncode}: {said[-1] if said else 'it said nothing'}")
    results = json.loads(done.stdout)
    speeds = {
        prefill_name(result["n_prompt"]) if result["n_prompt"] else decode_name(result["n_gen"]): result["samples_ts"][0]
        for result in results
    }
    kept = ("build_commit", "model_type", "model_size", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "load_mode")
    return speeds, {key: results[0][key] for key in kept if key in results[0]}


class OtherWork:
    """How many processors were busy with something else than this process and its children, since it was made."""

    def __init__(self) -> None:
        self.begun = self._now()

    def processors(self) -> float:
        seconds, busy, own = (now - then for now, then in zip(self._now(), self.begun, strict=True))
        return max(0.0, (busy - own) / seconds)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Wall-clock seconds, busy processor seconds of the machine, those of this process and its ended children."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in usages)


def summary(samples: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": samples}


def table(tests: dict[str, dict[str, Any]], decode: str, about: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'tok/s: median (min–max)':24} {'llama.cpp':>22} {'sparseflow':>22} {'ratio':>7}"]
    for name, test in tests.items():
        cells = [f"{t['median']:8.2f} ({t['min']:.2f}–{t['max']:.2f})" for t in (test[engine] for engine in ENGINES)]
        lines.append(f"{name:24} {cells[0]:>22} {cells[1]:>22} {test['ratio']:6.2f}x")
    token = about["sparseflow"]["bytes_per_decoded_token"] / 1e9
    lines.append(f"sparseflow reads {token:.3f} GB a token: {token * tests[decode]['sparseflow']['median']:.1f} GB/s")
    return "\n".join(lines)


@click.command(cls=SparseFlowCommand)
@click.argument("model")
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--llama-bench", required=True, type=click.Path(path_type=Path), help="llama.cpp's program of that name.")
@click.option(
    "--prompt", "prompts", multiple=True, type=click.IntRange(1), default=(128, 512), show_default=True, help="Tokens to prefill."
)
@click.option("--decode", type=click.IntRange(1), default=64, show_default=True, help="Tokens decoded one by one.")
@click.option("--threads", type=int, help="Of both engines.  [default: the cores this process may use]")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Rounds, each one sample of every test.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the samples.")
def main(
    model: str,
    gguf: Path,
    llama_bench: Path,
    prompts: tuple[int, ...],
    decode: int,
    threads: int | None,
    repeats: int,
    json_file: Path | None,
) -> None:
    """Compare llama.cpp on a GGUF file with SparseFlow on the packed MODEL it was exported from."""
    threads = check_threads(threads)
    lengths = list(dict.fromkeys(prompts))
    read_manifest(model_folder(model))
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise OptionError(f"--json {json_file}: the folder {json_file.absolute().parent} does not exist, make it first")
    samples: dict[str, dict[str, list[float]]] = {}
    about: dict[str, dict[str, Any]] = {}
    others: list[float] = []
    for turn in range(repeats):
        for engine in ENGINES if turn % 2 == 0 else reversed(ENGINES):
            other = OtherWork()
            if engine == "llama.cpp":
                speeds, about[engine] = run_llama_bench(llama_bench, gguf, lengths, decode, threads)
            else:
                speeds, about[engine] = run_in_fresh_process(model, lengths, decode, threads, turn)
            for name, speed in speeds.items():
                samples.setdefault(name, {}).setdefault(engine, []).append(speed)
            others.append(other.processors())
            shown = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
            print(
                f"round {turn + 1} of {repeats}, {engine}: {shown} tok/s; other work took {others[-1]:.2f} processors",
                file=sys.stderr,
            )
    tests = {}
    for name, by_engine in samples.items():
        cells: dict[str, Any] = {engine: summary(by_engine[engine]) for engine in ENGINES}
        tests[name] = cells | {"ratio": cells["sparseflow"]["median"] / cells["llama.cpp"]["median"]}
    print(table(tests, decode_name(decode), about))
    print(f"other work took {min(others):.2f}–{max(others):.2f} processors during the rounds")
    if json_file is not None:
        report = {
            "benchmark": "llama_cpp",
            "unit": "tokens per second",
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": processor(), "kernel": platform.release()},
            "threads": threads,
            "repeats": repeats,
            "model": Path(model).name,
            "gguf": gguf.name,
            "processors_taken_by_other_work": others,
            "engines": about,
            "tests": tests,
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def processor() -> str:
    """The processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
