"""Logits to one id: greedy, or drawn after the steps transformers applies, in its order."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator  # now, since numpy itself would load it when memory may be scarce

from sparseflow.errors import OptionError, PackedModelError
from sparseflow.finite import require_finite_logits
from sparseflow.tokenizer import GENERATION_CONFIG_FILE

# transformers' value where a generation_config.json that samples names none
_DEFAULT_TOP_K = 50


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token (of equals the lowest id); above 0 one is drawn, and the options below act.
        top_k: draw from the k most likely tokens, with those equal to the last of them; 0 is off.
        top_p: draw from the most likely tokens that together hold this probability, at least one; 1 is off.
        min_p: leave out tokens less likely than this times the most likely one; 0 is off.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens seen before; 1 is off. Acts on
            greedy choice too.
        seed: the same seed and logits draw the same tokens; None draws anew each time.

    Raises OptionError, naming option, value and range, when a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, math.inf, "a finite number of at least 0")
        _check_integer("top_k", self.top_k)
        _check_real("top_p", self.top_p, 0.0, 1.0, "a number from 0 to 1")
        _check_real("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _check_real("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "a number from 0.01 to 100")
        if self.seed is not None:
            _check_integer("seed", self.seed)
            object.__setattr__(self, "seed", int(self.seed))
        # An unsigned numpy integer would turn round when negated.
        object.__setattr__(self, "top_k", int(self.top_k))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingOptions:
        """The options a generation_config.json asks for: greedy unless `do_sample` is true.

        Raises PackedModelError when a value is out of range.
        """
        given = {"repetition_penalty": _given(config, "repetition_penalty", 1.0)}
        if config.get("do_sample"):
            given |= {"temperature": _given(config, "temperature", 1.0), "top_k": _given(config, "top_k", _DEFAULT_TOP_K),
                      "top_p": _given(config, "top_p", 1.0), "min_p": _given(config, "min_p", 0.0)}
        try:
            return cls(**given)
        except OptionError as error:
            raise PackedModelError(f"{GENERATION_CONFIG_FILE} of the model's folder: {error}; correct it there") from None

    def replace(self, **options: Any) -> SamplingOptions:
        """These options with those given (not None) in place of their own."""
        return dataclasses.replace(self, **{name: value for name, value in options.items() if value is not None})


class Sampler:
    """Chooses tokens one after the other; its random state goes on from call to call. For one thread at a time."""

    def __init__(self, options: SamplingOptions | None = None) -> None:
        self.options = options or SamplingOptions()
        self._random = Generator(PCG64(self.options.seed))

    def next(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """The next id.

        Args:
            logits: float32 [vocab].
            history: all ids so far, prompt and answer; read only when there is a repetition penalty.

        Raises NonFiniteError when a logit is NaN or infinite.
        """
        require_finite_logits(logits)
        options = self.options
        if options.repetition_penalty != 1.0:
            logits = _penalize(logits, history, options.repetition_penalty)
        return int(logits.argmax()) if options.temperature == 0.0 else self._draw(logits)

    def _draw(self, scores: np.ndarray) -> int:
        ids, probabilities = candidates(scores, self.options)
        cumulative = probabilities.cumsum()
        drawn = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(ids[min(drawn, len(ids) - 1)])


def candidates(logits: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be drawn, ascending, and their probabilities (float64, summing to 1) after temperature, top_k, top_p and min_p."""
    ids = np.arange(len(logits))
    scores = logits.astype(np.float64)
    # Relative to the best first: a tiny temperature must not overflow.
    scores = (scores - scores.max()) / options.temperature
    if 0 < options.top_k < len(scores):
        smallest = np.partition(scores, -options.top_k)[-options.top_k]
        ids, scores = _keep(scores >= smallest, ids, scores)
    if options.top_p < 1.0:
        # From the least likely up; of equals the higher id goes first. Reversing makes a stable sort do that.
        order = len(scores) - 1 - np.argsort(scores[::-1], kind="stable")
        keep = np.empty(len(scores), dtype=bool)
        keep[order] = _softmax(scores[order]).cumsum() > 1.0 - options.top_p
        keep[order[-1]] = True
        ids, scores = _keep(keep, ids, scores)
    if options.min_p > 0.0:
        ids, scores = _keep(np.exp(scores) >= options.min_p, ids, scores)  # the best score is 0, its exp 1
    return ids, _softmax(scores)


def _penalize(logits: np.ndarray, history: Sequence[int], penalty: float) -> np.ndarray:
    seen = np.unique(np.asarray(history, dtype=np.int64))
    seen = seen[seen < len(logits)]
    scores = logits.astype(np.float64)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


def _keep(mask: np.ndarray, ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ids[mask], scores[mask]


def _given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _check_real(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high or math.isinf(number):
        raise OptionError(f"{name} is {value!r}, expected {allowed}")


def _check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise OptionError(f"{name} is {value!r}, expected a whole number of at least 0")
