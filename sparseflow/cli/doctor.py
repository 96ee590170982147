"""`sparseflow doctor`: whether a model fits on this machine, and what to run it with."""

from __future__ import annotations

import json
import sys

import click

from sparseflow.checks import Check
from sparseflow.cli.options import SparseFlowCommand
from sparseflow.doctor import Diagnosis, diagnose, unreadable
from sparseflow.errors import PackedModelError, StorageError
from sparseflow.footprint import planned_context
from sparseflow.kernels.threads import check_threads
from sparseflow.model import check_context, model_folder
from sparseflow.packfile import read_manifest
from sparseflow.sizes import format_bytes

_EXIT_STATUSES = """\b
Exit status:
  0  it fits
  1  it does not: a check failed
  2  it cannot be told: the system does not say what memory there is,
     or an option is wrong
  5  the cache is below the smallest that works
  130  stopped by Ctrl-C        141  the reader of the output went away"""

_MARKS = {"ok": "ok", "warning": "WARNING", "fail": "FAIL", "unknown": "UNKNOWN"}


@click.command(cls=SparseFlowCommand, epilog=_EXIT_STATUSES)
@click.argument("model")
@click.option("--cache", default="auto", show_default=True, metavar="SIZE",
              help="The cache to judge: a size such as 4GiB, 'resident' (all experts) or 'auto' (the recommended one).")
@click.option("--context", type=int, metavar="TOKENS", help="Tokens of one session to plan for.  [default: 4096, or the model's limit]")
@click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores this process may use]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of text.")
@click.pass_context
def doctor(command: click.Context, model: str, cache: str, context: int | None, threads: int | None, as_json: bool) -> None:
    """Find out whether MODEL runs on this machine before running it, with which cache, and how fast that may be.

    Each line is a check: ok, WARNING (it runs, but not well) or FAIL (it does not), with what to do. Memory and disk are measured
    for a second or two; the model is only read. A run makes the same checks, but for those that measure.

    \b
    Examples:
      sparseflow doctor demo
      sparseflow doctor qwen-packed --context 32768
      sparseflow doctor qwen-packed --cache 4GiB --json
    """
    found = examine(model, cache, context, threads)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else as_text(found))
    command.exit(found.exit_status)


def examine(model: str, cache: str, context: int | None, threads: int | None) -> Diagnosis:
    """`diagnose`, with a line on the terminal that says what takes time."""
    checked = check_threads(threads)
    try:
        manifest = read_manifest(model_folder(model))
    except (PackedModelError, StorageError) as error:
        return unreadable(model, error)
    planned = planned_context(context, manifest.geometry.max_position_embeddings)
    shown = sys.stderr.isatty()

    def progress(what: str) -> None:
        if shown:
            click.echo(f"\r{what}\x1b[K", nl=False, err=True)

    try:
        return diagnose(
            model, manifest, cache=cache, context=check_context(planned, manifest.geometry), threads=checked, progress=progress)
    finally:
        if shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def as_text(found: Diagnosis) -> str:
    """The report for people."""
    lines = [line for check in found.checks for line in check_lines(check)]
    if found.plan is not None:
        plan = found.plan
        rows = [("Python and imports", plan.held_bytes, "resident in this process now"),
                *((item.name, item.bytes, item.arithmetic) for item in plan.items)]
        lines += ["", f"memory of a run with a cache of {plan.slots} experts and a context of {plan.context}"]
        lines += [f"  {name:<20}{format_bytes(size):>11}   {arithmetic}" for name, size, arithmetic in rows]
        lines.append(f"  {'together':<20}{format_bytes(plan.peak_bytes):>11}   peak resident set")
    return "\n".join([*lines, "", f"{found.model}: {found.verdict}"])


def check_lines(check: Check) -> list[str]:
    """A check in one line, and what to do about it in another."""
    lines = [f"{_MARKS[check.status]:<9}{check.name:<12}{check.text}"]
    return lines if check.advice is None else [*lines, f"{'':<21}-> {check.advice}"]
