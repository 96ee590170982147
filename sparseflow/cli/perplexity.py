"""`sf-bench perplexity`: a text under a model, and against a reference."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from typing import Any

import click

from sparseflow.cli.against import AGAINST_HELP, open_packed, open_reference
from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand, engine_options
from sparseflow.cli.pack import ProgressLine
from sparseflow.cli.table import table
from sparseflow.divergence import TextMeasure, measure_text
from sparseflow.questions import read_text

WINDOW = 2048
DOCUMENT_END = "<|endoftext|>"


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("model")
@click.option("--text", "text_file", required=True, metavar="FILE", help="A text in UTF-8; control tokens in it are parsed.")
@click.option("--against", metavar="MODEL_OR_CHECKPOINT", help=AGAINST_HELP)
@click.option("--window", type=click.IntRange(min=1), metavar="TOKENS", help=f"Cut the text into windows of at most so many"
              f" tokens that know nothing of each other.  [default: {WINDOW}, or the context if that is less]")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Use only the first N tokens of the text.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of a table.")
def perplexity(model: str, text_file: str, against: str | None, window: int | None, tokens: int | None, as_json: bool, **engine: Any) -> None:
    """Perplexity of a text under MODEL, and how far its next-token distributions are from those of a reference.

    With --against: the mean and the 99th percentile of the KL divergence from the reference, in nats; how often both hold the same
    token for the most likely; and how many of the reference's ten most likely are among the model's. Both models are open at the
    same time, each with its own --cache. Some megabytes of logits are held, however long the text.

    A window ends with the last document that ends in it, where documents end with <|endoftext|>: without the begin of a text a model
    guesses, and the guesses of two models differ more than what they know.

    \b
    Examples:
      sf-bench perplexity demo --text story.txt
      sf-bench perplexity qwen-packed --text book.txt --tokens 20000 --against qwen-bf16 --cache 4GiB
    """
    text = read_text(text_file)
    with ExitStack() as stack:
        opened = stack.enter_context(closing(open_packed(model, **engine)))
        reference = None if against is None else stack.enter_context(closing(open_reference(against, **engine)))
        ids = opened.model.tokenizer.encode(text)[:tokens]
        progress = ProgressLine(sys.stderr, label="measuring", amount=lambda count: f"{count} tokens")
        try:
            measure = measure_text(opened, ids, min(window or WINDOW, opened.model.context), reference, progress,
                                   document_end=opened.model.tokenizer.control_tokens.get(DOCUMENT_END))
        finally:
            progress.finish()
        names = (opened.name, None if reference is None else reference.name)
    if as_json:
        record = {"schema": "sparseflow-perplexity", "schema_version": 1, "text": text_file, "model": names[0], "reference": names[1]}
        click.echo(json.dumps(record | measure.to_json(), indent=2))
    else:
        click.echo(as_text(measure, *names))


def as_text(measure: TextMeasure, name: str, reference: str | None) -> str:
    """The figures as a table."""
    rows = [("", name), ("tokens", f"{measure.tokens} in windows of at most {measure.window}"), ("perplexity", f"{measure.perplexity:.4f}")]
    if measure.against is not None:
        found = measure.against
        rows += [
            ("reference", str(reference)),
            ("reference's perplexity", f"{found.reference_perplexity:.4f}"),
            ("KL, mean", f"{found.mean_kl:.3g}"),
            ("KL, 99th percentile", f"{found.p99_kl:.3g}"),
            ("KL, largest", f"{found.largest_kl:.3g}"),
            ("top-1 agreement", f"{100 * found.top1_agreement:.2f} %"),
            ("top-10 overlap", f"{100 * found.top10_overlap:.2f} %"),
        ]
    return "\n".join(table(rows))
