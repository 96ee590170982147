"""`sf-bench quality`: multiple-choice questions by log-likelihood."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from sparseflow.cli.against import AGAINST_HELP, open_packed, open_reference
from sparseflow.cli.options import EXIT_STATUSES, SparseFlowCommand, engine_options
from sparseflow.cli.pack import ProgressLine
from sparseflow.cli.table import table
from sparseflow.likelihood import LanguageModel
from sparseflow.quality import WAYS, Accuracy, Comparison, Score, accuracies, compare, score_questions
from sparseflow.questions import Question, read_questions
from sparseflow.tokenizer import Tokenizer


@click.command(cls=SparseFlowCommand, epilog=EXIT_STATUSES)
@click.argument("model")
@click.option("--questions", "questions_file", required=True, metavar="FILE.jsonl", help="One JSON object a line, see above.")
@click.option("--against", metavar="MODEL_OR_CHECKPOINT", help=AGAINST_HELP)
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of a table.")
def quality(model: str, questions_file: str, against: str | None, as_json: bool, **engine: Any) -> None:
    """Score multiple-choice questions with MODEL: how many it gets right, and whether another model answers alike.

    Each line of FILE.jsonl has "id", "task", "ctx" (the text before), "choices" (two or more texts that could follow) and "gold"
    (the index of the right one). A choice is scored by its log-likelihood after ctx, as it stands, without a chat template;
    control tokens in ctx are parsed. Choices are compared by the sum, and by the mean per character and per token. Intervals
    are Wilson's, 95 %.

    With --against the same questions go to a second model afterwards. "nats from a tie" says by how much the reference would
    have had to move to answer as MODEL does.

    \b
    Examples:
      sf-bench quality demo --questions bench/quality_public.jsonl --cache 1MiB
      sf-bench quality qwen-packed --questions q.jsonl --against qwen-bf16 --cache 4GiB
      sf-bench quality demo --questions q.jsonl --against ./checkpoint --json
    """
    questions = read_questions(questions_file)
    opened = open_packed(model, **engine)
    tokenizer, context = opened.model.tokenizer, opened.model.context
    results = [(opened.name, _score(opened, questions, tokenizer, context))]
    if against is not None:
        reference = open_reference(against, **engine)
        results.append((reference.name, _score(reference, questions, tokenizer, context)))
    record = describe(questions_file, questions, results)
    click.echo(json.dumps(record, indent=2) if as_json else as_text(questions, results))


def _score(model: LanguageModel, questions: Sequence[Question], tokenizer: Tokenizer, context: int) -> list[Score]:
    """All questions, with progress; closes the model, so that two need not be open at once."""
    progress = ProgressLine(sys.stderr, label="scoring", amount=lambda count: f"{count} questions")
    try:
        return score_questions(model, questions, tokenizer, context, progress)
    finally:
        progress.finish()
        model.close()


def describe(questions_file: str, questions: Sequence[Question], results: Sequence[tuple[str, list[Score]]]) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "schema": "sparseflow-quality",
        "schema_version": 1,
        "questions_file": questions_file,
        "models": [
            {
                "model": name,
                "accuracy": {
                    task: {way: asdict(accuracy) for way, accuracy in by_way.items()}
                    for task, by_way in accuracies(questions, scores).items()
                },
                "scores": [asdict(score) | {"picks": {way: score.pick(way) for way in WAYS}} for score in scores],
            }
            for name, scores in results
        ],
        "comparison": compare(results[0][1], results[1][1]).to_json() if len(results) > 1 else None,
    }


def as_text(questions: Sequence[Question], results: Sequence[tuple[str, list[Score]]]) -> str:
    """Tables for people."""
    lines = []
    for name, scores in results:
        rows = [("task", "questions", *(f"by {way}" for way in WAYS))]
        for task, by_way in accuracies(questions, scores).items():
            rows.append((task, str(by_way["sum"].asked), *(_share(by_way[way]) for way in WAYS)))
        lines += [name, "", *table(rows), ""]
    if len(results) > 1:
        lines += comparison_lines(compare(results[0][1], results[1][1]))
    return "\n".join(lines).rstrip()


def comparison_lines(comparison: Comparison) -> list[str]:
    """Agreement and differences in words."""
    count = comparison.questions
    lines = [f"same answer by {way}: {comparison.agreements(way)} of {count}" for way in WAYS]
    for way in WAYS:
        lines += [
            f"  {found.id} by {way}: choice {found.pick} instead of {found.reference_pick}, {found.nats_from_tie:.3f} nats from a tie"
            for found in comparison.disagreements[way]
        ]
    lines.append(f"sums identical to the last bit: {comparison.identical} of {count}")
    lines.append(f"sums differ by {comparison.largest_difference:.4f} nats at most, {comparison.mean_difference:.4f} in the mean")
    return lines


def _share(accuracy: Accuracy) -> str:
    return f"{accuracy.right} ({100 * accuracy.right / accuracy.asked:.0f} %, {100 * accuracy.low:.0f}–{100 * accuracy.high:.0f})"
