"""`sparseflow verify`: every byte of a packed model against its checksum."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import click

from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand
from sparseflow.cli.pack import ProgressLine
from sparseflow.model import model_folder
from sparseflow.sizes import format_bytes
from sparseflow.verify import Verification, verify_model


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of text.")
def verify(model: str, as_json: bool) -> None:
    """Check every byte of MODEL against the checksums made when it was packed, as fast as the disk reads.

    A single bit that changed anywhere is found. All that is damaged is listed, with its layer and expert or its tensor. The
    disk is read, not what the page cache holds. The exit status is 4 when something differs, 6 when there are only parts
    that the disk refuses to read, and 0 when all is as it was packed.

    \b
    Examples:
      sparseflow verify demo
      sparseflow verify qwen-packed --json
    """
    folder = model_folder(model)
    progress = ProgressLine(sys.stderr, label="verifying")
    begun = time.monotonic()
    try:
        result = verify_model(folder, progress=progress)
    finally:
        progress.finish()
    seconds = time.monotonic() - begun
    click.echo(json.dumps(to_json(result, seconds), indent=2) if as_json else as_text(result, seconds))
    result.require_sound()


def to_json(result: Verification, seconds: float) -> dict[str, Any]:
    """All that was found, by name."""
    return {
        "folder": str(result.folder),
        "sound": not result.faults,
        "faults": [asdict(fault) for fault in result.faults],
        "parts": result.parts,
        "bytes": result.bytes,
        "unchecked": list(result.unchecked),
        "seconds": seconds,
    }


def as_text(result: Verification, seconds: float) -> str:
    """A line for each fault, then what was checked."""
    lines = [f"damaged: {fault}" for fault in result.faults]
    lines += [f"not checked: {name}, which the pack does not know" for name in result.unchecked]
    speed = format_bytes(int(result.bytes / max(seconds, 1e-9)))
    verdict = f"{len(result.faults)} damaged" if result.faults else "all sound"
    lines.append(f"{result.parts} parts, {format_bytes(result.bytes)} in {seconds:.1f} s ({speed}/s): {verdict}")
    return "\n".join(lines)
