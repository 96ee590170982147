"""The wording of the corpus: reading the files of templates/, and filling their slots.

A template file is made of sections ("== name"), a section of blocks parted by empty lines, a block of lines. Lines
that begin with "#" are comments. A line is a `str.format` template with named slots.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from english import capitalized, with_article

TEMPLATES = Path(__file__).parent / "templates"


class Slots(dict[str, str]):
    """The values of a template's slots.

    A slot spelled with a capital first letter stands for its value with one, and the prefix "a_" for its value with
    an article: with {"animal": "owl"}, {A_animal} is "An owl".
    """

    def __missing__(self, slot: str) -> str:
        if slot[0].isupper():
            return capitalized(self[slot[0].lower() + slot[1:]])
        if slot.startswith("a_"):
            return with_article(self[slot.removeprefix("a_")])
        raise KeyError(slot)


def read_blocks(name: str) -> dict[str, list[list[str]]]:
    """The sections of a template file, each as a list of blocks of lines."""
    sections: dict[str, list[list[str]]] = {}
    blocks: list[list[str]] = []
    after_gap = True
    for line in (TEMPLATES / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("== "):
            blocks = sections[line.removeprefix("== ")] = []
            after_gap = True
        elif not line:
            after_gap = True
        else:
            if after_gap:
                blocks.append([])
            blocks[-1].append(line)
            after_gap = False
    return sections


def read_sections(name: str) -> dict[str, list[str]]:
    """The sections of a template file, each as a list of lines."""
    return {section: list(chain.from_iterable(blocks)) for section, blocks in read_blocks(name).items()}


def split_question(line: str) -> tuple[str, str]:
    """The question and the answer of a line "question => answer"."""
    question, answer = line.split(" => ")
    return question, answer
