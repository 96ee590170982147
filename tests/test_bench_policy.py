"""bench/policy.py: its optimum is one, and its table is that of the library."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

from sparseflow.replay import RouteReplay

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def policy() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        import policy
    finally:
        sys.path.remove(str(BENCH))
    return policy


def routes(seed: int, tokens: int, layers: int, experts: int, top_k: int, n_prefill: int = 1) -> RouteReplay:
    draws = np.random.default_rng(seed).random((tokens, layers, experts)) * np.linspace(1, 3, experts)
    return RouteReplay("t", np.argsort(draws, axis=-1)[..., :top_k], n_prefill, ranked=True)


def optimum(replay: RouteReplay, slots: int, policy: ModuleType) -> float:
    """The most hits of decode that any sequence of evictions gives, by trying all of them."""
    sequence = [(counted, key) for counted, keys in policy.forwards(replay) for key in keys]

    @cache
    def best(position: int, held: frozenset[tuple[int, int]]) -> int:
        if position == len(sequence):
            return 0
        counted, key = sequence[position]
        if key in held:
            return counted + best(position + 1, held)
        choices = [held] if len(held) == slots else [held, held | {key}]
        choices += [held - {victim} | {key} for victim in held]
        return max(best(position + 1, choice) for choice in choices)

    return best(0, frozenset()) / sum(counted for counted, _ in sequence)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_no_policy_beats_belady(policy: ModuleType, slots: int) -> None:
    for seed in range(15):
        replay = routes(seed, tokens=6, layers=2, experts=4, top_k=2)
        assert policy.belady(replay, slots) == pytest.approx(optimum(replay, slots, policy))
        assert policy.lru(replay, slots) <= policy.belady(replay, slots)


def test_lru_by_hand(policy: ModuleType) -> None:
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 0]], [[2, 3]]])
    replay = RouteReplay("t", ids, 1, ranked=True)
    # two slots: 0 1 | 1 hits, 2 evicts 0 | 0 evicts 1, 2 hits | 2 hits, 3 evicts 0
    assert policy.lru(replay, 2) == pytest.approx(3 / 6)
    assert policy.lru(replay, 3) == pytest.approx(4 / 6)
    assert policy.belady(replay, 3) == pytest.approx(4 / 6)


@pytest.mark.parametrize("slots", [6, 9, 30, 64])
def test_the_shipped_table_lies_below_the_optimum(policy: ModuleType, slots: int) -> None:
    replay = routes(1, tokens=30, layers=4, experts=16, top_k=4, n_prefill=7)
    assert 0 < policy.shipped(replay, slots) <= policy.belady(replay, slots)
    if slots == 64:  # everything fits: what a prompt or an earlier token asked for is there
        assert policy.shipped(replay, slots) == policy.lru(replay, slots) == policy.belady(replay, slots)


def test_table_and_json(policy: ModuleType, tmp_path: Path) -> None:
    np.savez(tmp_path / "routes.npz", a_ids=routes(0, 6, 3, 16, 4).ids, a_n_prefill=2, b_ids=routes(1, 6, 3, 16, 4).ids, b_n_prefill=3)
    result = CliRunner().invoke(policy.main, [str(tmp_path / "routes.npz"), "--json", str(tmp_path / "rates.json")])
    assert result.exit_code == 0, result.output
    assert [row.split("|")[1].strip() for row in result.stdout.splitlines()[2:]] == ["a"] * 3 + ["b"] * 3 + ["mean"] * 3
    record = json.loads((tmp_path / "rates.json").read_text())
    assert record["slots"] == [85, 170, 341, 682, 1365, 2730]
    for policies in record["hit_rates"].values():
        assert list(policies) == ["lru", "shipped", "belady"] and all(len(rates) == 6 for rates in policies.values())
    result = CliRunner().invoke(policy.main, [str(tmp_path / "absent.npz")])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
