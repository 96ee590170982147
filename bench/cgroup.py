"""A strict run inside a memory cgroup, beside the same run outside: does the bound hold for the kernel, and what does it cost?

    python bench/cgroup.py MODEL --cache 4GiB --limit 6.85GiB [--replay FILE.npz:NAME] [--repeats 5] [--json FILE]

Needs root, to make the cgroup, and the extra [test], whose helper makes it. Inside and outside take turns, each run in a fresh
process, the page cache of the model dropped before each.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from memory_cgroup import memory_cgroup  # noqa: E402
from sparseflow.bench_cell import Run  # noqa: E402
from sparseflow.bench_process import COMMAND, answer  # noqa: E402
from sparseflow.bench_prompt import bench_prompt  # noqa: E402
from sparseflow.benchmark import forget  # noqa: E402
from sparseflow.cli.options import SparseFlowCommand  # noqa: E402
from sparseflow.cli.table import table  # noqa: E402
from sparseflow.kernels.threads import check_threads  # noqa: E402
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, EXPERTS_FILE, read_manifest  # noqa: E402
from sparseflow.replay import RouteReplay  # noqa: E402
from sparseflow.sizes import format_bytes, parse_size  # noqa: E402


@click.command(cls=SparseFlowCommand)
@click.argument("model")
@click.option("--cache", required=True, help="Memory for routed experts.")
@click.option("--limit", required=True, help="Memory of the cgroup.")
@click.option("--replay", metavar="FILE.npz:NAME", help="Follow recorded routes.")
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=int)
@click.option("--json", "json_file", metavar="FILE", help="Write the figures.")
def main(
    model: str, cache: str, limit: str, replay: str | None, tokens: int, repeats: int, threads: int | None, json_file: str | None
) -> None:
    """Measure a strict run of MODEL inside a memory cgroup and outside of it."""
    manifest = read_manifest(Path(model))
    prompt = 41 if replay is None else RouteReplay.load(replay).n_prefill
    run = Run(model, parse_size(cache), check_threads(threads), True, list(bench_prompt(manifest, prompt)[0]), tokens, replay)
    files = [manifest.folder / name for name in (EXPERTS_FILE, DENSE_FILE, EMBED_FILE)]
    rounds: dict[str, list[dict[str, Any]]] = {"outside": [], "inside": []}
    for turn in range(repeats):
        for where in ("outside", "inside") if turn % 2 == 0 else ("inside", "outside"):
            forget(files)
            if where == "outside":
                measured = answer(COMMAND, asdict(run), lambda: None)
            else:
                with memory_cgroup(parse_size(limit)) as folder:
                    entered = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"), *COMMAND]
                    measured = answer(entered, asdict(run), lambda: None)
            seconds = measured["token_s"]
            rounds[where].append(
                {
                    "decode_tok_s": len(seconds) / sum(seconds),
                    "ttft_s": measured["ttft_s"],
                    "peak_rss_bytes": measured["peak_rss_bytes"],
                    "ids": measured["ids"],
                }
            )
    rows = [("where", "tok/s", "range", "first token s", "peak RSS")]
    for where, runs in rounds.items():
        speeds = [run["decode_tok_s"] for run in runs]
        rows.append(
            (
                where if where == "outside" else f"cgroup of {limit}",
                f"{statistics.median(speeds):.2f}",
                f"{min(speeds):.2f}–{max(speeds):.2f}",
                f"{statistics.median(run['ttft_s'] for run in runs):.1f}",
                format_bytes(max(run["peak_rss_bytes"] for run in runs)),
            )
        )
    click.echo("\n".join(table(rows)))
    ratios = [inside["decode_tok_s"] / outside["decode_tok_s"] for inside, outside in zip(rounds["inside"], rounds["outside"], strict=True)]
    same = all(run["ids"] == rounds["outside"][0]["ids"] for runs in rounds.values() for run in runs)
    click.echo(f"inside over outside, pair by pair: {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}); the tokens "
               + ("are the same" if same else "DIFFER"))
    if json_file is not None:
        record = {"cache": cache, "limit_bytes": parse_size(limit), "replayed": replay and Path(replay).name, "threads": run.threads, **rounds}
        Path(json_file).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
