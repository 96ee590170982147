"""Perplexity of a text, and how far the next-token distributions of a model are from those of a reference.

    perplexity   exp of the mean negative log-likelihood of the tokens
    KL           sum over the vocabulary of p (log p - log q), p the reference's distribution, q the model's; in nats
    top-1        share of positions where both hold the same token for the most likely
    top-10       mean share of the reference's ten most likely tokens that are among the model's ten
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import OptionError
from sparseflow.likelihood import LanguageModel, log_softmax

TOP = 10
_FLOATS_AT_ONCE = 1 << 21  # of each float64 array


@dataclass(frozen=True, slots=True)
class Divergence:
    """A model against a reference; see the module. KL in nats."""

    mean_kl: float
    p99_kl: float
    largest_kl: float
    top1_agreement: float
    top10_overlap: float
    reference_perplexity: float


@dataclass(frozen=True, slots=True)
class TextMeasure:
    """A text under a model. `tokens` were predicted, in windows of at most `window`; `against` is None without a reference."""

    tokens: int
    window: int
    perplexity: float
    against: Divergence | None

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        return asdict(self)


def measure_text(
    model: LanguageModel,
    ids: Sequence[int],
    window: int,
    reference: LanguageModel | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    document_end: int | None = None,
) -> TextMeasure:
    """Measures a text of token ids, at least two.

    It is cut into windows of at most `window` tokens that know nothing of each other, after a token `document_end` wherever a window
    has one: a model is not trained on texts whose begin is missing, and what it does with them says little. Each token but the very
    first is predicted once. What is held is some rows of logits and a few numbers a token. `progress(done, total)` is called with
    tokens. Raises OptionError when the text is too short or the reference has another vocabulary.
    """
    if len(ids) < 2:
        raise OptionError(f"the text has {len(ids)} tokens, at least 2 are needed")
    if reference is not None and reference.vocab_size != model.vocab_size:
        raise OptionError(
            f"{reference.name} has {reference.vocab_size} tokens and {model.name} has {model.vocab_size}: compare models of one vocabulary"
        )
    total = len(ids) - 1
    losses: list[NDArray[np.float64]] = []
    compared: list[NDArray[np.float64]] = []
    done = 0
    for logits, other in _pieces(model, reference, ids[:-1], window, document_end):
        if progress is not None:
            progress(done, total)
        targets = np.asarray(ids[done + 1 : done + 1 + len(logits)])
        rows = max(_FLOATS_AT_ONCE // model.vocab_size, 1)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            own = log_softmax(logits[part])
            losses.append(-np.take_along_axis(own, targets[part, None], 1)[:, 0])
            if other is not None:
                compared.append(_compare(own, log_softmax(other[part]), targets[part]))
        done += len(logits)
    perplexity = math.exp(np.concatenate(losses).mean())
    if reference is None:
        return TextMeasure(total, window, perplexity, None)
    kl, same, overlap, reference_loss = np.concatenate(compared).T
    return TextMeasure(
        tokens=total,
        window=window,
        perplexity=perplexity,
        against=Divergence(
            mean_kl=float(kl.mean()),
            p99_kl=float(np.quantile(kl, 0.99)),
            largest_kl=float(kl.max()),
            top1_agreement=float(same.mean()),
            top10_overlap=float(overlap.mean()),
            reference_perplexity=math.exp(reference_loss.mean()),
        ),
    )


def _pieces(
    model: LanguageModel, reference: LanguageModel | None, ids: Sequence[int], window: int, document_end: int | None
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
    """Logits of both, the same rows of the same windows."""
    for part in windows_of(ids, window, document_end):
        if reference is None:
            yield from ((logits, None) for logits in model.logits(part))
        else:
            yield from zip(model.logits(part), reference.logits(part), strict=True)


def windows_of(ids: Sequence[int], window: int, document_end: int | None = None) -> Iterator[Sequence[int]]:
    """A text in windows of at most `window` tokens, in order; all but the last end with a document if one ends in them."""
    start = 0
    while start < len(ids):
        stop = min(start + window, len(ids))
        if stop < len(ids):
            stop = next((end for end in range(stop, start, -1) if ids[end - 1] == document_end), stop)
        yield ids[start:stop]
        start = stop


def _compare(own: NDArray[np.float64], other: NDArray[np.float64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """[rows, 4]: KL, whether the best token is the same, overlap of the best ten, the reference's loss."""
    kl = (np.exp(other) * (other - own)).sum(axis=1)
    same = own.argmax(axis=1) == other.argmax(axis=1)
    count = min(TOP, own.shape[1])
    best, reference_best = (np.argpartition(values, -count, axis=1)[:, -count:] for values in (own, other))
    overlap = [len(np.intersect1d(a, b)) / count for a, b in zip(best, reference_best, strict=True)]
    loss = -np.take_along_axis(other, targets[:, None], 1)[:, 0]
    return np.column_stack([kl, same, overlap, loss])
