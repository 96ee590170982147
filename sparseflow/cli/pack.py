"""`sf-pack SRC DST`: turn a checkpoint into a packed model, once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from sparseflow.checkpoint import family
from sparseflow.cli.options import EXIT_STATUSES, INTERRUPTED, SparseFlowCommand
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import BITS
from sparseflow.sizes import format_bytes
from sparseflow.tokenizer import TOKENIZER_FILE

_QUIET_SECONDS = 2.0
_TERMINAL_SECONDS = 0.25
_LOG_SECONDS = 30.0
_PARTS = {"experts": "routed experts", "dense": "dense core", "embedding": "embedding"}
_LEFT_OUT = {"vision": "left out: vision", "mtp": "left out: MTP"}


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--experts", type=click.Choice(list(BITS)), default="int8", show_default=True, help="How to store routed experts.")
@click.option("--dense", type=click.Choice(list(BITS)), default="int8", show_default=True, help="How to store large dense matrices.")
@click.option("--quiet", is_flag=True, help="No progress and no table.")
def main(source: str, destination: str, experts: str, dense: str, quiet: bool) -> None:
    """Pack the checkpoint in folder SRC into the new folder DST.

    SRC holds a Qwen3.5 or Qwen3.6 mixture-of-experts model as it comes from the Hugging Face Hub, or as transformers saves it:
    config.json, the .safetensors files and the tokenizer's. It is only read. Vision and multi-token-prediction weights are left
    out.

    int8 halves the size: 8 bits a weight and one scale per 128 weights. bf16 keeps BF16 weights as they are (F32 and F16 ones are
    rounded to it, and the table says so), and is the reference to compare with. The router, the norms and other small tensors
    are never quantised. Where a norm has a few channels far larger than the rest, and the matrices behind it are as much smaller
    there, int8 would lose both: powers of two are moved from one to the other first, which is exact, and the table says where.

    Memory stays under 1 GiB however large the model. If packing is interrupted, the same command continues where it stopped.

    \b
    Examples:
      sf-pack Qwen3.6-35B-A3B qwen-packed
      sf-pack Qwen3.6-35B-A3B qwen-bf16 --experts bf16 --dense bf16
    """
    progress = None if quiet else ProgressLine(sys.stderr)
    try:
        manifest = pack_checkpoint(source, destination, experts=experts, dense=dense, progress=progress)
    except KeyboardInterrupt:
        if progress is not None:
            progress.finish()
        click.echo(f"stopped: run the same command again to finish {destination}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        if progress is not None:
            progress.finish()
    if not quiet:
        click.echo(report_table(manifest["report"]))
        if not (Path(destination) / TOKENIZER_FILE).exists():
            click.echo(f"packed without {TOKENIZER_FILE}: a session runs on token ids; for text, copy the file into {destination}")


class ProgressLine:
    """Says how far packing is (or what `label` says), how fast and how long it will take; silent for the first two seconds.

    On a terminal one line is rewritten; elsewhere a line is added now and then.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, label: str = "packing",
                 amount: Callable[[int], str] = format_bytes) -> None:
        self.stream = stream
        self.label = label
        self.amount = amount
        self.clock = clock
        self.terminal = stream.isatty()
        self.begun: tuple[float, int] | None = None
        self.due = 0.0
        self.shown = False

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` source bytes are read (or of what `amount` puts into words). What the first call reports was there before, and is not our speed."""
        now = self.clock()
        if self.begun is None:
            self.begun = (now, done)
            self.due = now + _QUIET_SECONDS
            if done:
                self.stream.write(f"continuing an interrupted pack at {done / total:.0%}\n")
        if now < self.due:
            return
        start, before = self.begun
        self.due = now + (_TERMINAL_SECONDS if self.terminal else _LOG_SECONDS)
        speed = (done - before) / (now - start)
        left = _duration((total - done) / speed) if speed > 0 else "?"
        text = f"{self.label}: {done / total:4.0%} of {self.amount(total)}, {self.amount(int(speed))}/s, {left} left"
        self.stream.write(f"\r{text}\x1b[K" if self.terminal else f"{text}\n")
        self.stream.flush()
        self.shown = True

    def finish(self) -> None:
        """Take the line away from the terminal."""
        if self.terminal and self.shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        self.shown = False


def report_table(report: dict[str, Any]) -> str:
    """The manifest's report as lines of text: what went where, what was rounded, and which channels were evened out."""
    rows = [("", "tensors", "source", "packed")]
    parts = [report[key] for key in _PARTS]
    left_out = [report["left_out"][key] for key in _LEFT_OUT]
    for name, part in zip(_PARTS.values(), parts, strict=True):
        rows.append((name, f"{part['tensors']}", format_bytes(part["source_bytes"]), format_bytes(part["packed_bytes"])))
    for name, part in zip(_LEFT_OUT.values(), left_out, strict=True):
        rows.append((name, f"{part['tensors']}", format_bytes(part["source_bytes"]), "-"))
    every = parts + left_out
    rows.append(
        (
            "total",
            f"{sum(part['tensors'] for part in every)}",
            format_bytes(sum(part["source_bytes"] for part in every)),
            format_bytes(sum(part["packed_bytes"] for part in parts)),
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{row[0]:<{widths[0]}}" + "".join(f"  {row[i]:>{widths[i]}}" for i in (1, 2, 3)) for row in rows]
    for name, entry in report["rounded_to_bf16"].items():
        lines.append(
            f"rounded to bfloat16 from a wider type: {name} ({entry['tensors']} tensors, {entry['values_changed']} values changed)"
        )
    return "\n".join(lines + _equalised_lines(report["equalised"]))


def _equalised_lines(equalised: dict[str, dict[str, int]]) -> list[str]:
    """A line for each kind of norm that had channels evened out."""
    lines = []
    for kind in sorted({family(name) for name in equalised}):
        found = {name: entry for name, entry in equalised.items() if family(name) == kind}
        layers = [int(name.split(".")[1]) for name in found if name.startswith("layers.")]
        channels = sum(entry["channels"] for entry in found.values())
        factor = max(entry["largest_factor"] for entry in found.values())
        where = f" of layers {_runs(layers)}" if layers else ""
        lines.append(f"outlier channels evened out: {kind}{where} ({channels} channels, by up to {factor})")
    return lines


def _runs(numbers: list[int]) -> str:
    """Ascending numbers, neighbours joined: 0-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _duration(seconds: float) -> str:
    """A time for people: 42 s, 3 min 05 s, 1 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
