"""What every command shares: the error handler with its exit statuses, and the options for engine and sampling."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import sparseflow
from sparseflow.errors import CapacityError, OptionError, SparseFlowError, StorageError
from sparseflow.generate import StopStrings
from sparseflow.sampling import SamplingOptions
from sparseflow.sizes import format_bytes

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
CLOSED_PIPE = 141  # 128 + SIGPIPE

EXIT_STATUSES = """\b
Exit status:
  0  done
  1  another error              4  packed model unfinished, damaged or newer
  2  wrong option or argument   5  cache, context or memory too small
  3  checkpoint cannot be used  6  the disk refused a read or a write
  7  NaN or infinity arose in a forward
  130  stopped by Ctrl-C        141  the reader of the output went away"""

Command = TypeVar("Command", bound=Callable[..., Any])


class LoadProgress:
    """Says on a terminal how far reading the weights is, once it takes longer than a second."""

    def __init__(self) -> None:
        self._begun = self._shown = time.monotonic()
        self._visible = False

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._begun > 1 and now - self._shown > 0.2:
            self._shown, self._visible = now, True
            click.echo(f"\rreading {what}: {done / total:4.0%} of {format_bytes(total)}\x1b[K", nl=False, err=True)

    def finish(self) -> None:
        """Take the line away."""
        if self._visible:
            click.echo("\r\x1b[K", nl=False, err=True)


def open_model(
    model: str, *, cache: str, threads: int | None, strict: bool, context: int | None, force: bool, check_finite: bool
) -> sparseflow.Model:
    """`sparseflow.load` with a progress line, and a line for each of its warnings."""
    progress = LoadProgress()
    try:
        return sparseflow.load(
            model, cache=cache, threads=threads, strict=strict, context=context, force=force, check_finite=check_finite,
            progress=progress, on_warning=lambda warning: click.echo(f"warning: {warning}", err=True))
    finally:
        progress.finish()


def check_early(sampling: dict[str, Any], stop: tuple[str, ...], trace_file: str | None) -> None:
    """OptionError for what can be known to be wrong before the weights are read, which may take minutes."""
    SamplingOptions().replace(**sampling)
    StopStrings(stop)
    if trace_file is not None and (not trace_file or (os.path.lexists(trace_file) and not Path(trace_file).is_file())):
        raise OptionError(f"--trace {trace_file!r}: is not the name of a file")
    if trace_file is not None and not Path(trace_file).absolute().parent.is_dir():
        raise OptionError(f"--trace {trace_file}: the folder {Path(trace_file).absolute().parent} does not exist, make it first")


def report_error(message: str) -> None:
    """Print `message` as the one line ``error: …`` on stderr."""
    try:
        click.echo(f"error: {' '.join(message.split())}", err=True)
    except OSError:
        _silence(sys.stderr)


def _open_streams() -> None:
    """Puts something in place of standard streams that the caller closed. Raises StorageError for output, which nobody would see."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        raise StorageError("standard output is closed: give it a file, or /dev/null")


def _silence(stream: Any) -> None:
    """Point a stream whose reader is gone at /dev/null, so that the interpreter's last flush stays quiet."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass  # not a real file: a test's buffer has no reader that could leave


class _ExitStatus(click.Command):
    """Turns every expected failure into one line on stderr and the exit status of its class; a bug stays a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            _silence(sys.stdout)
            raise click.exceptions.Exit(CLOSED_PIPE) from None

    def main(self, args: Any = None, prog_name: Any = None, complete_var: Any = None,
             standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            _open_streams()
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? rather than nothing
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            status = result if isinstance(result, int) else 0
        except SparseFlowError as error:
            report_error(str(error))
            status = error.exit_status
        except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:  # click before 8.2 prints the help itself
            click.echo(error.format_message(), err=True)
            status = error.exit_code
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            hint = f" (see '{context.command_path} --help')" if context is not None else ""
            report_error(error.format_message() + hint)
            status = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            status = INTERRUPTED
        except MemoryError:
            report_error("the machine has no memory left: use a smaller --cache or --context")
            status = CapacityError.exit_status
        except RuntimeError as error:
            if str(error) != "can't start new thread":
                raise
            report_error("the system starts no more threads: allow this process more memory, or more threads")
            status = CapacityError.exit_status
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            report_error(f"{error.strerror or error}{where}")
            status = StorageError.exit_status
            if error.filename is None:
                _silence(sys.stdout)  # it may be what was refused, and would be again at the end
        sys.exit(status)


class SparseFlowCommand(_ExitStatus):
    """A click command whose failures end as ``error: …`` and an exit status (``@click.command(cls=SparseFlowCommand)``)."""


class SparseFlowGroup(_ExitStatus, click.Group):
    """A click group of such commands."""

    command_class = SparseFlowCommand


class DefaultCommandGroup(SparseFlowGroup):
    """A group whose first word may be left out: where it is not one of the group's commands, `default_command` is meant."""

    default_command = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


def _apply(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command
    return decorate


def engine_options(command: Command) -> Command:
    """--cache, --threads, --strict, --context, --check-finite: passed to `sparseflow.load` under the same names."""
    return _apply([
        click.option("--cache", default="auto", show_default=True, metavar="SIZE",
                     help="Memory for routed experts: a size such as 4GiB, 'resident' (all of them) or 'auto'."),
        click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores this process may use]"),
        click.option("--strict", is_flag=True, help="Also keep evicted experts out of the page cache."),
        click.option("--context", type=int, metavar="TOKENS", help="Most tokens of one session.  [default: the model's own]"),
        click.option("--check-finite", is_flag=True, help="Look for NaN and infinity after every layer, and name where they began."),
    ])(command)


def force_option(command: Command) -> Command:
    """--force: passed to `sparseflow.load` under the same name."""
    return click.option("--force", is_flag=True, help="Run even what does not fit in the available memory.")(command)


def sampling_options(command: Command) -> Command:
    """--max-new-tokens and the sampling options; an option that was not given arrives as None."""
    return _apply([
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
                     help="Stop after N new tokens."),
        click.option("--temperature", type=float, metavar="T", help="0 is greedy; above 0, tokens are drawn at random."),
        click.option("--top-k", type=int, metavar="K", help="Draw from the K most likely tokens; 0 is off."),
        click.option("--top-p", type=float, metavar="P", help="Draw from the most likely tokens that together hold P; 1 is off."),
        click.option("--min-p", type=float, metavar="P", help="Leave out tokens less likely than P times the best; 0 is off."),
        click.option("--repetition-penalty", type=float, metavar="R", help="Above 1 makes seen tokens less likely; 1 is off."),
        click.option("--seed", type=int, metavar="N", help="The same seed draws the same tokens."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before TEXT; may be given several times."),
    ])(command)


def output_options(command: Command) -> Command:
    """--json and --trace."""
    return _apply([
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of text."),
        click.option("--trace", "trace_file", type=click.Path(dir_okay=False, writable=True), metavar="FILE",
                     help="Save which experts each token asked for, and what that cost; see 'sparseflow route'."),
    ])(command)
