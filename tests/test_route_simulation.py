"""Simulated caches: the optimum is one, and least-recently-used is what its name says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.route_simulation import Requests, belady, lru


def optimum(requests: Requests, slots: int) -> float:
    """The most counted hits that any sequence of evictions gives, by trying all of them."""
    begin = len(requests.experts) - requests.counted

    @cache
    def best(position: int, held: frozenset[int]) -> int:
        if position == len(requests.experts):
            return 0
        expert = requests.experts[position]
        if expert in held:
            return (position >= begin) + best(position + 1, held)
        choices = [held] if len(held) == slots else [held, held | {expert}]
        choices += [held - {victim} | {expert} for victim in held]
        return max(best(position + 1, choice) for choice in choices)

    return best(0, frozenset()) / requests.counted


def random_requests(seed: int, tokens: int, layers: int, experts: int, top_k: int) -> Requests:
    draws = np.random.default_rng(seed).random((tokens, layers, experts)) * np.linspace(1, 3, experts)
    return Requests.of(np.argsort(draws, axis=-1)[..., :top_k], [1] * tokens, 1)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_no_policy_beats_belady(slots: int) -> None:
    for seed in range(15):
        requests = random_requests(seed, tokens=6, layers=2, experts=4, top_k=2)
        best, used = belady(requests, slots), lru(requests, slots)
        assert best is not None and used is not None
        assert best == pytest.approx(optimum(requests, slots))
        assert used <= best


def test_by_hand() -> None:
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 0]], [[2, 3]]])
    requests = Requests.of(ids, [1, 1, 1, 1], 1)
    # two slots: 0 1 | 1 hits, 2 evicts 0 | 0 evicts 1, 2 hits | 2 hits, 3 evicts 0
    assert lru(requests, 2) == pytest.approx(3 / 6)
    assert lru(requests, 3) == belady(requests, 3) == pytest.approx(4 / 6)


def test_a_forward_asks_for_each_expert_of_a_layer_once() -> None:
    ids = np.array([[[4, 2], [1, 0]], [[2, 3], [0, 2]], [[3, 4], [1, 2]]])
    requests = Requests.of(ids, [2, 1], 1)
    assert requests == Requests([2, 3, 4, 5, 6, 7, 3, 4, 6, 7], counted=4)
    assert Requests.of(ids, [2, 1], 0).counted == 10
    assert lru(requests, 6) == belady(requests, 6) == 1.0


def test_nothing_to_count() -> None:
    empty = Requests.of(np.zeros((0, 3, 2), np.int16), [], 0)
    assert empty == Requests([], 0)
    assert lru(empty, 3) is belady(empty, 3) is None
    prompt = Requests.of(np.array([[[0, 1]]]), [1], 1)
    assert lru(prompt, 3) is belady(prompt, 3) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8))
def test_more_memory_never_hurts(experts: list[int], slots: int) -> None:
    requests = Requests(experts, len(experts))
    for policy in (lru, belady):
        small, large = policy(requests, slots), policy(requests, slots + 1)
        assert small is not None and large is not None and small <= large
    distinct = len(set(experts))
    assert lru(requests, distinct) == belady(requests, distinct) == (len(experts) - distinct) / len(experts)
