"""bench/policy.py: its table is that of the library, asked as the simulations are."""

from __future__ import annotations

import json
import sys
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


@pytest.mark.parametrize("slots", [6, 9, 30, 64])
def test_the_shipped_table_lies_below_the_optimum(policy: ModuleType, slots: int) -> None:
    replay = routes(1, tokens=30, layers=4, experts=16, top_k=4, n_prefill=7)
    assert 0 < policy.shipped(replay, slots) <= policy.POLICIES["belady"](replay, slots)
    if slots == 64:  # everything fits: what a prompt or an earlier token asked for is there
        assert len({simulate(replay, slots) for simulate in policy.POLICIES.values()}) == 1


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
