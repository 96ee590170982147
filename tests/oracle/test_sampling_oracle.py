"""The candidates of a draw against the logits processors of transformers, in the order its `generate` builds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparseflow.sampling import Sampler, SamplingOptions, candidates

pytestmark = pytest.mark.oracle

VOCAB = 500
CASES = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.7, "min_p": 0.2, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8},
    {"temperature": 1.0, "top_k": 10_000},
]


def expected(logits: np.ndarray, history: list[int], options: SamplingOptions) -> np.ndarray:
    """Probabilities float64 [vocab] of transformers."""
    steps = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    steps.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        steps.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        steps.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        steps.append(MinPLogitsWarper(options.min_p))
    scores = steps(torch.tensor([history]), torch.from_numpy(logits.astype(np.float64))[None])
    return scores[0].softmax(-1).numpy()


def ours(logits: np.ndarray, history: list[int], options: SamplingOptions) -> np.ndarray:
    seen: list[np.ndarray] = []

    class Recording(Sampler):
        def _draw(self, scores: np.ndarray) -> int:
            seen.append(scores)
            return super()._draw(scores)

    Recording(options).next(logits, history)
    ids, probabilities = candidates(seen[0], options)
    result = np.zeros(len(logits))
    result[ids] = probabilities
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_candidates_equal_those_of_transformers(case, seed):
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(VOCAB) * 4).astype(np.float32)
    history = random.integers(0, VOCAB, 60).tolist()
    options = SamplingOptions(**case)
    found, want = ours(logits, history, options), expected(logits, history, options)
    np.testing.assert_array_equal(found > 0, want > 0)
    np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.parametrize("case", [{"top_k": 3}, {"min_p": 0.5}, {"top_k": 3, "min_p": 1.0}], ids=str)
def test_equal_logits_are_kept_as_transformers_keeps_them(case):
    logits = np.array([1, 5, 3, 3, 3, 5, 2], dtype=np.float32)
    options = SamplingOptions(temperature=1.0, **case)
    np.testing.assert_allclose(ours(logits, [0], options), expected(logits, [0], options), rtol=1e-9)


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_equal_logits_at_the_edge_of_top_p(top_p):
    """Which of equals are kept is left to the sort in transformers; how many, and their probability, is not."""
    logits = np.zeros(10, dtype=np.float32)
    options = SamplingOptions(temperature=1.0, top_p=top_p)
    np.testing.assert_allclose(np.sort(ours(logits, [0], options)), np.sort(expected(logits, [0], options)))
