"""Write the corpus of the demo checkpoint: documents about a small world, each ended by <|endoftext|>.

The text is a function of the seed and the options alone, to the byte. The tokenizer of the demo was trained on

    python tools/demo/corpus.py --seed 1 --mb 30 --novel 0 --out corpus.txt
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from chats import write_chat
from draws import Draws
from everyday import write_everyday
from facts import write_facts
from special_tokens import END_OF_TEXT
from stories import tell_story
from words import NAMES

_NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")


class Mix(NamedTuple):
    """The shares of the kinds of documents; chats get what the others leave of 1."""

    stories: float
    facts: float
    everyday: float


DEFAULT_MIX = Mix(stories=0.33, facts=0.24, everyday=0.08)
DEFAULT_NOVEL = 0.25


class DocumentSource:
    """An endless source of documents.

    In the share `novel` of them the names of people are replaced by made-up ones, so that a reader of the document has
    to take them from the context.
    """

    def __init__(self, seed: int, novel: float = DEFAULT_NOVEL, mix: Mix = DEFAULT_MIX) -> None:
        self.draws = Draws(seed)
        self.novel = novel
        self.mix = mix

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self.document()

    def document(self) -> str:
        """The next document."""
        document = self.plain_document()
        if self.novel and self.draws.chance(self.novel):
            return self._with_made_up_names(document)
        return document

    def plain_document(self) -> str:
        """The next document, with the names it was written with."""
        kind = self.draws.fraction()
        if kind < self.mix.stories:
            return tell_story(self.draws)
        if kind < self.mix.stories + self.mix.facts:
            return write_facts(self.draws)
        if kind < self.mix.stories + self.mix.facts + self.mix.everyday:
            return write_everyday(self.draws)
        return write_chat(self.draws)

    def _with_made_up_names(self, document: str) -> str:
        made_up: dict[str, str] = {}
        # A name is drawn at every place, also where it is already known: the recorded corpus was drawn that way.
        return _NAME.sub(lambda name: made_up.setdefault(name[0], self._make_up_name()), document)

    def _make_up_name(self) -> str:
        pick, chance = self.draws.pick, self.draws.chance
        syllables = 2 + chance(0.3)
        name = "".join(pick("bdfghjklmnprstvz") + pick("aeiou") for _ in range(syllables)).capitalize()
        return name + pick("nlrs") if chance(0.3) else name


def write_corpus(seed: int, size: int, novel: float = DEFAULT_NOVEL) -> str:
    """The first documents of the source, as many as it takes to reach `size` bytes."""
    pieces = []
    written = 0
    for document in DocumentSource(seed, novel):
        pieces.append(document + END_OF_TEXT)
        written += len(pieces[-1].encode())
        if written >= size:
            break
    return "".join(pieces)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the documents (default: 1)")
    parser.add_argument("--mb", type=float, default=30, help="size in units of 1,000,000 bytes (default: 30)")
    parser.add_argument(
        "--novel",
        type=float,
        default=DEFAULT_NOVEL,
        help=f"share of the documents with made-up names (default: {DEFAULT_NOVEL})",
    )
    parser.add_argument("--out", type=Path, help="file to write (default: standard output, with a newline added)")
    options = parser.parse_args(arguments)
    text = write_corpus(options.seed, int(options.mb * 1e6), options.novel)
    if options.out:
        options.out.write_text(text, encoding="utf-8", newline="\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
