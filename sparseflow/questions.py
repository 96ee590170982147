"""Multiple-choice questions, one JSON object a line: `id`, `task`, `ctx` (the text before), `choices` (its continuations) and
`gold` (the index of the right one)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sparseflow.errors import OptionError
from sparseflow.tokenizer import check_unicode

MIN_CHOICES = 2


@dataclass(frozen=True, slots=True)
class Question:
    """One question; its fields are those of the file."""

    id: str
    task: str
    ctx: str
    choices: tuple[str, ...]
    gold: int


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions of a file, at least one. Blank lines and fields of other names are passed over.

    Raises OptionError that names the file and the line: not UTF-8, no JSON object, a field that is missing or of the wrong kind, an
    empty context, fewer than two choices or an empty one, gold out of range, an id used twice.
    """
    questions: list[Question] = []
    lines_of_ids: dict[str, int] = {}
    for number, line in _lines(Path(path)):
        where = f"{path}, line {number}"
        question = _parse(where, line)
        if question.id in lines_of_ids:
            raise OptionError(f"{where}: id {question.id!r} is that of line {lines_of_ids[question.id]} already")
        lines_of_ids[question.id] = number
        questions.append(question)
    if not questions:
        raise OptionError(f"{path}: holds no question")
    return questions


def read_text(path: str | os.PathLike[str]) -> str:
    """A text file. Raises OptionError naming the file, and the line that is not UTF-8."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise OptionError(f"{path}, line {number}: is not UTF-8 (byte 0x{data[error.start]:02x})") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(where: str, line: str) -> Question:
    def refuse(what: str) -> NoReturn:
        raise OptionError(f"{where}: {what}")

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON ({error})")
    if not isinstance(entry, dict):
        refuse("is not a JSON object")

    def text(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            refuse(f"{name} is {value!r}, expected a text of at least one character")
        check_unicode(value, f"{where}: {name}")
        return value

    for name in ("id", "task", "ctx", "choices", "gold"):
        if name not in entry:
            refuse(f"has no field {name!r}")
    choices, gold = entry["choices"], entry["gold"]
    if not isinstance(choices, list) or len(choices) < MIN_CHOICES:
        refuse(f"choices is {choices!r}, expected a list of at least {MIN_CHOICES} texts")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
        refuse(f"gold is {gold!r}, expected the index of a choice, 0 to {len(choices) - 1}")
    return Question(
        id=text("id", entry["id"]),
        task=text("task", entry["task"]),
        ctx=text("ctx", entry["ctx"]),
        choices=tuple(text(f"choice {index}", choice) for index, choice in enumerate(choices)),
        gold=gold,
    )
