"""`sparseflow run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
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
    sampling_options,
)
from sparseflow.errors import OptionError


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("model")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message through the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message before it.")
@click.option("--thinking/--no-thinking", default=None, help="With --chat: let the model think first, or not.")
@sampling_options
@engine_options
@force_option
@output_options
def run(model: str, prompt: str, chat: bool, system: str | None, thinking: bool | None, max_new_tokens: int, stop: tuple[str, ...],
        cache: str, threads: int | None, strict: bool, context: int | None, force: bool, check_finite: bool, as_json: bool,
        trace_file: str | None, **sampling: Any) -> None:
    """Continue PROMPT with MODEL and print the text as it comes.

    PROMPT "-" is read from standard input, without its last line break. It is a raw prompt: control tokens such as <|im_start|> are
    parsed, and sampling is greedy unless options say otherwise. With --chat it is a message: nothing in it is a control token, and
    sampling is what the checkpoint's generation config says. Afterwards one line on stderr tells speed, memory, cache and reads.

    \b
    Examples:
      sparseflow run demo "The red fox" --max-new-tokens 64
      sparseflow run demo "What do bees live in?" --chat --no-thinking
      sparseflow run qwen-packed - --cache 4GiB --strict < prompt.txt
      sparseflow run demo "The red fox" --json --trace routes.npz
    """
    if not chat and (system is not None or thinking is not None):
        raise OptionError("--system and --thinking act on a chat template: add --chat")
    check_early(sampling, stop, trace_file)
    text = read_prompt(prompt)
    with open_model(
        model, cache=cache, threads=threads, strict=strict, context=context, force=force, check_finite=check_finite
    ) as opened:
        generation = opened.generate(
            as_messages(text, system) if chat else text, max_new_tokens=max_new_tokens, stop=stop, enable_thinking=thinking,
            trace=trace_file is not None, **sampling)
        show(opened, generation, as_json)
        if trace_file is not None:
            generation.session.trace.save(trace_file)


def show(model: sparseflow.Model, generation: sparseflow.Generation, as_json: bool) -> None:
    """Print an answer as it comes, or as one line of JSON at its end; then the evidence. Ctrl-C leaves what was said, and evidence."""
    if as_json:
        text = "".join(generation)
        evidence = model.evidence(generation)
        click.echo(json.dumps({"opening": generation.opening, "text": text, "ids": generation.ids, "finish_reason": generation.finish_reason,
                               "evidence": evidence.to_json()}))
    else:
        try:
            print_pieces(generation)
        except KeyboardInterrupt:
            if generation.ids:
                click.echo(model.evidence(generation).line(), err=True)
            raise
        evidence = model.evidence(generation)
    click.echo(evidence.line(), err=True)


def print_pieces(generation: sparseflow.Generation) -> None:
    click.echo(generation.opening, nl=False)
    try:
        for piece in generation:
            click.echo(piece, nl=False)  # echo flushes
    finally:
        click.echo()


def read_prompt(prompt: str) -> str:
    """The prompt itself, or for "-" standard input without its last line break."""
    if prompt != "-":
        return prompt
    return sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape").removesuffix("\n").removesuffix("\r")


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A user's message, after the system message if there is one."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]
