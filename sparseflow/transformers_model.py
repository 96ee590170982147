"""A checkpoint computed by transformers in float32, as the reference to compare with. Needs the extra [oracle]."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import CheckpointError, OptionError
from sparseflow.likelihood import rows_at_once, token_log_probabilities


class TransformersModel:
    """An unpacked checkpoint folder as a LanguageModel.

    Every text is computed whole and from its start, without a cache; only the head is applied in pieces. Raises OptionError when
    the extra [oracle] is not installed, CheckpointError when transformers cannot load the folder.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._torch = _import("torch")
        transformers = _import("transformers")
        self._torch.set_num_threads(threads)
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32).eval()
        except Exception as error:  # whatever is wrong with a file, its readers raise what they like
            raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
        self.name = f"{folder} (transformers, float32)"
        self.vocab_size = int(self._model.lm_head.weight.shape[0])

    def logits(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        yield from self._head(self._hidden(ids))

    def continuations(self, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        found = []
        for ending in endings:
            hidden = self._hidden([*prefix, *ending])[len(prefix) - 1 : -1]
            scores, done = [], 0
            for logits in self._head(hidden):
                scores.append(token_log_probabilities(logits, ending[done : done + len(logits)]))
                done += len(logits)
            found.append(np.concatenate(scores))
        return found

    def close(self) -> None:
        del self._model

    def _hidden(self, ids: Sequence[int]) -> Any:
        with self._torch.inference_mode():
            return self._model.model(input_ids=self._torch.tensor([list(ids)])).last_hidden_state[0]

    def _head(self, hidden: Any) -> Iterator[NDArray[np.float32]]:
        for part in hidden.split(rows_at_once(self.vocab_size)):
            with self._torch.inference_mode():
                yield self._model.lm_head(part).numpy()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"--against a checkpoint needs {name}: pip install 'sparseflow[oracle]', or compare with a pack made by"
            " sf-pack --experts bf16 --dense bf16"
        ) from error
