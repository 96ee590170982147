"""Training data: fixed-length windows of token ids."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import DocumentSource
from draws import Draws
from special_tokens import END_OF_TEXT
from stories import tell_story
from words import NAMES

_COMMON_TOKENS = 1000
_SAMPLE_SEED = 7
_SAMPLE_DOCUMENTS = 4000
# Keeps the draws of the copied stories apart from those of the training data.
_COPY_SEED_OFFSET = 5000


class DocumentWindows:
    """Windows of consecutive documents, each starting at the start of a document."""

    def __init__(self, tokenizer: Tokenizer, documents: DocumentSource) -> None:
        self.documents_read = 0
        self._tokenizer = tokenizer
        self._documents = documents
        self._end_of_text = tokenizer.get_vocab()[END_OF_TEXT]

    def skip(self, documents: int) -> None:
        """Pass over as many documents, to go on where an earlier run stopped."""
        for _ in range(documents):
            self._documents.document()
        self.documents_read += documents

    def window(self, length: int) -> list[int]:
        """The next `length` + 1 token ids; the rest of the last document is dropped."""
        ids: list[int] = []
        while len(ids) <= length:
            ids += self._tokenizer.encode(self._documents.document()).ids
            ids.append(self._end_of_text)
            self.documents_read += 1
        return ids[: length + 1]

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """`size` windows as inputs and targets, both int64 [size, length]."""
        return inputs_and_targets([self.window(length) for _ in range(size)])


class CopyWindows:
    """Windows that can only be predicted by looking back: a curriculum for reading the context.

    In the share `stories` of them the names in documents are replaced by random tokens, one a name and document; the
    others are short random sequences, each repeated a few times.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, stories: float) -> None:
        self._tokenizer = tokenizer
        self._stories = stories
        self._draws = Draws(seed)
        self._documents = DocumentSource(seed + _COPY_SEED_OFFSET)
        self._end_of_text = tokenizer.get_vocab()[END_OF_TEXT]
        self._names = name_tokens(tokenizer, "") | name_tokens(tokenizer, " ")

    def window(self, length: int) -> list[int]:
        """A window of `length` + 1 token ids."""
        part = self._renamed_document if self._draws.chance(self._stories) else self._repeated_sequence
        ids: list[int] = []
        while len(ids) <= length:
            ids += part()
            ids.append(self._end_of_text)
        return ids[: length + 1]

    @cached_property
    def _common(self) -> list[int]:
        return common_tokens(self._tokenizer)

    def _renamed_document(self) -> list[int]:
        is_story = self._draws.chance(0.6)
        text = tell_story(self._documents.draws) if is_story else self._documents.plain_document()
        ids = self._tokenizer.encode(text).ids
        new_names = {name: self._draws.pick(self._common) for name in self._names.intersection(ids)}
        return [new_names.get(token, token) for token in ids]

    def _repeated_sequence(self) -> list[int]:
        sequence = [self._draws.pick(self._common) for _ in range(3 + self._draws.below(22))]
        return sequence * (2 + self._draws.below(4))


def inputs_and_targets(windows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The windows without their last token, and without their first."""
    ids = torch.tensor(windows)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def name_tokens(tokenizer: Tokenizer, prefix: str) -> set[int]:
    """The first token of each name of the small world after the prefix."""
    return {tokenizer.encode(prefix + name).ids[0] for name in NAMES}


def common_tokens(tokenizer: Tokenizer) -> list[int]:
    """The most common tokens of a sample of the corpus, ascending."""
    counts: Counter[int] = Counter()
    for document in islice(DocumentSource(_SAMPLE_SEED), _SAMPLE_DOCUMENTS):
        counts.update(tokenizer.encode(document).ids)
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    return sorted(by_count[:_COMMON_TOKENS])
