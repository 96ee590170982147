"""What a training run is watched by: the loss on unseen documents, and whether the model reads its context."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import DocumentSource
from draws import Draws
from special_tokens import END_OF_TEXT
from training_forward import TrainingForward
from windows import DocumentWindows, common_tokens, inputs_and_targets, name_tokens

VALIDATION_SEED = 990001
_BATCHES = 4
_BATCH = 8
_LENGTH = 256
_COPIED = 32
# The first tokens of a copy do not yet tell that it is one.
_COPY_SETTLED = 4


class ProbeLosses(NamedTuple):
    """Mean losses in nats a token."""

    validation: float
    first_names: float  # names not yet in the document
    repeated_names: float
    copies: float  # second half of a random sequence said twice

    def __str__(self) -> str:
        return (
            f"validation {self.validation:.4f}  names: first {self.first_names:.3f} repeated "
            f"{self.repeated_names:.3f}  copies {self.copies:.3f}"
        )


class Probes:
    """A fixed set of unseen windows to measure a model on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._end_of_text = tokenizer.get_vocab()[END_OF_TEXT]
        windows = DocumentWindows(tokenizer, DocumentSource(VALIDATION_SEED, novel=0))
        self._batches = [windows.batch(_BATCH, _LENGTH) for _ in range(_BATCHES)]
        self._names = name_tokens(tokenizer, " ")
        self._copies = self._copy_batch(common_tokens(tokenizer))

    @torch.no_grad()
    def measure(self, forward: TrainingForward) -> ProbeLosses:
        """The losses of the model of this forward pass."""
        losses = [forward.losses(*batch).tokens for batch in self._batches]
        first, repeated = self._name_losses(*self._batches[0], losses[0])
        copied = forward.losses(*self._copies).tokens[:, _COPIED + _COPY_SETTLED : 2 * _COPIED - 1]
        return ProbeLosses(torch.stack(losses).mean().item(), first, repeated, copied.mean().item())

    def _copy_batch(self, common: list[int]) -> tuple[Tensor, Tensor]:
        draws = Draws(VALIDATION_SEED)
        sequences = [[draws.pick(common) for _ in range(_COPIED)] for _ in range(_BATCH)]
        padding = [self._end_of_text] * (_LENGTH + 1 - 2 * _COPIED)
        return inputs_and_targets([sequence * 2 + padding for sequence in sequences])

    def _name_losses(self, inputs: Tensor, targets: Tensor, losses: Tensor) -> tuple[float, float]:
        """The mean loss on names that are new in their document, and on those seen before."""
        first: list[float] = []
        repeated: list[float] = []
        for row in zip(inputs.tolist(), targets.tolist(), losses.tolist()):
            seen: set[int] = set()
            for token, target, loss in zip(*row):
                if token == self._end_of_text:
                    seen.clear()
                if target in self._names:
                    (repeated if target in seen else first).append(loss)
                    seen.add(target)
        return sum(first) / len(first), sum(repeated) / len(repeated)
