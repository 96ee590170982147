"""`sparseflow chat`: a conversation, line by line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import sparseflow
from sparseflow.cli.options import (
    EXIT_STATUSES,
    SparseFlowCommand,
    check_early,
    engine_options,
    force_option,
    open_model,
    output_options,
    report_error,
    sampling_options,
)
from sparseflow.cli.run import show
from sparseflow.errors import CapacityError, OptionError


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("model")
@click.option("--system", metavar="TEXT", help="The system message at the beginning.")
@click.option("--thinking/--no-thinking", default=None, help="Let the model think before it answers, or not.")
@sampling_options
@engine_options
@force_option
@output_options
def chat(model: str, system: str | None, thinking: bool | None, max_new_tokens: int, stop: tuple[str, ...], cache: str,
         threads: int | None, strict: bool, context: int | None, force: bool, check_finite: bool, as_json: bool,
         trace_file: str | None, **sampling: Any) -> None:
    """Talk with MODEL: one line is one message. Each turn computes only what is new in the conversation.

    /reset forgets the conversation, /exit or the end of input ends it. Ctrl-C stops an answer; at the prompt it ends the chat.
    Messages may come from a pipe. With --json each answer is one line of JSON. --trace FILE writes one file per turn: FILE-1, FILE-2
    and so on, the number before the suffix. Sampling is what the checkpoint's generation config says, unless options say otherwise.

    \b
    Examples:
      sparseflow chat demo --no-thinking
      sparseflow chat qwen-packed --cache 4GiB --system "Answer in one sentence."
      printf 'Hello\\nWhat do bees live in?\\n' | sparseflow chat demo --json
    """
    check_early(sampling, stop, trace_file)
    start = [] if system is None else [{"role": "system", "content": system}]
    interactive = is_terminal()
    with open_model(
        model, cache=cache, threads=threads, strict=strict, context=context, force=force, check_finite=check_finite
    ) as opened, sparseflow.Conversation(
            opened, messages=start, max_new_tokens=max_new_tokens, stop=stop, enable_thinking=thinking,
            trace=trace_file is not None, **sampling) as conversation:
        turn = 0
        while (line := read_line(interactive)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line:
                turn += 1
                answer(opened, conversation, line, as_json, numbered(trace_file, turn), interactive)


def answer(model: sparseflow.Model, conversation: sparseflow.Conversation, text: str, as_json: bool, trace_file: str | None,
           interactive: bool) -> None:
    """One turn. With a person at the terminal, Ctrl-C and a refused message end the turn only."""
    try:
        generation = conversation.send(text)
        show(model, generation, as_json)
    except (OptionError, CapacityError) as error:
        if not interactive:
            raise
        report_error(f"{error} (/reset forgets the conversation)")
    except KeyboardInterrupt:
        if not interactive:
            raise
    else:
        if trace_file is not None:
            generation.session.trace.save(trace_file)


def read_line(interactive: bool) -> str | None:
    """The next message without white space around it; None at the end of input."""
    if interactive:
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.buffer.readline()
    if not line and interactive:
        click.echo(err=True)
    return line.decode("utf-8", errors="surrogateescape").strip() if line else None


def is_terminal() -> bool:
    """Whether a person types the messages."""
    return sys.stdin.isatty()


def numbered(path: str | None, turn: int) -> str | None:
    """FILE.npz → FILE-2.npz."""
    return None if path is None else str(Path(path).with_name(f"{Path(path).stem}-{turn}{Path(path).suffix}"))
