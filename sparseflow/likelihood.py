"""How likely a text is under a language model: what quality and perplexity are computed from.

Logits of a whole text are never held: with a vocabulary of 248,320 they take 1 MB a token. Log-probabilities are float64, from
float32 logits, row by row, so they are a function of the logits alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparseflow.model import Model
from sparseflow.session import Session

_LOGITS_AT_ONCE = 1 << 24  # 64 MiB of float32


class LanguageModel(Protocol):
    """What scoring needs of a model, in this engine or another."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def vocab_size(self) -> int:
        """Logits of a position."""

    def logits(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """The logits [rows, vocab] after each token of a text, in pieces of `rows_at_once(vocab_size)` rows; the last may be shorter."""

    def continuations(self, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """For each ending the log-probabilities [len(ending)] of its tokens after the prefix."""

    def close(self) -> None:
        """Frees it."""


def rows_at_once(vocab_size: int) -> int:
    """Positions whose logits are held at once."""
    return max(_LOGITS_AT_ONCE // vocab_size, 1)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of logits [..., vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def token_log_probabilities(logits: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float64]:
    """The log-probability [n] of token ids[i] under logits[i], of logits [n, vocab]."""
    return np.array([log_softmax(row)[token] for row, token in zip(logits, ids, strict=True)], np.float64)


class EngineModel:
    """A packed model as a LanguageModel."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.name = str(model.folder)
        self.vocab_size = model.geometry.vocab_size

    def logits(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        with self.model.session(trace=False) as session:
            yield from _in_pieces(session, ids, self.vocab_size)

    def continuations(self, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """One forward of the prefix; every ending goes on from a fork of that session."""
        found = []
        with self.model.session(trace=False) as session:
            first = session.forward(prefix, last_only=True)
            for ending in endings:
                scores = [token_log_probabilities(first, ending[:1])]
                with session.fork() as branch:
                    done = 1
                    for logits in _in_pieces(branch, ending[:-1], self.vocab_size):
                        scores.append(token_log_probabilities(logits, ending[done : done + len(logits)]))
                        done += len(logits)
                found.append(np.concatenate(scores))
        return found

    def close(self) -> None:
        self.model.close()


def _in_pieces(session: Session, ids: Sequence[int], vocab_size: int) -> Iterator[NDArray[np.float32]]:
    rows = rows_at_once(vocab_size)
    for start in range(0, len(ids), rows):
        yield session.forward(ids[start : start + rows])
