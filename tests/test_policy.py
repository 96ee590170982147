"""The eviction policy, through the table it serves: it learns what to keep, and never breaks the table's accounts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import OptionError
from sparseflow.leases import LeaseTable
from sparseflow.packfile import HEADER_BYTES, Header
from sparseflow.store import PackedStore

LAYERS, EXPERTS, TOP_K, STRIDE = 6, 32, 4, 4096


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackedStore]:
    path = tmp_path_factory.mktemp("policy") / "experts.sfx"
    size = LAYERS * EXPERTS * STRIDE
    header = Header(
        kind=1, weight_bits=8, num_layers=LAYERS, num_experts=EXPERTS, hidden_size=32, intermediate_size=16, stride=STRIDE,
        slice_bytes=STRIDE, file_bytes=HEADER_BYTES + size,
    )
    path.write_bytes(header.pack() + bytes(size))
    with PackedStore(path) as opened:
        yield opened


def step(table: LeaseTable, layer: int, ids: np.ndarray, weights: np.ndarray | None = None) -> int:
    """One token in one layer; how many of its experts were in memory."""
    chosen = np.sort(ids).astype(np.int32)
    if weights is None:
        weights = np.ones(len(ids), np.float32)
    table.observe(layer, chosen[None], weights[None])
    with table.acquire(layer, chosen) as lease:
        lease.wait()
        return int(lease.hit.sum())


def popular_routes(tokens: int, seed: int) -> np.ndarray:
    """[tokens, layers, top_k] routes whose experts differ in popularity, as those of a trained router do."""
    rng = np.random.default_rng(seed)
    popularity = np.stack([rng.permutation(1 / np.arange(1, EXPERTS + 1)) for _ in range(LAYERS)])
    noise = rng.gumbel(size=(tokens, LAYERS, EXPERTS))
    return np.argsort(-(np.log(popularity) + noise), axis=-1)[:, :, :TOP_K]


def least_recently_used_hits(routes: np.ndarray, slots: int) -> int:
    held: list[tuple[int, int]] = []
    hits = 0
    for token in routes:
        for layer, ids in enumerate(token):
            keys = [(layer, int(expert)) for expert in ids]
            hits += sum(key in held for key in keys)
            held = ([key for key in held if key not in keys] + keys)[-slots:]
    return hits


@pytest.mark.parametrize("slots", [8, 12, 24, 48, 96])
def test_it_beats_least_recently_used_on_popular_routes(store: PackedStore, slots: int) -> None:
    routes = popular_routes(120, slots)
    table = LeaseTable(store, slots)
    hits = [[step(table, layer, ids) for layer, ids in enumerate(token)] for token in routes]
    assert np.sum(hits) > least_recently_used_hits(routes, slots)
    if slots < LAYERS * TOP_K:  # less than a token: least recently used keeps nothing at all
        assert least_recently_used_hits(routes, slots) <= 0.01 * routes.size
        # A slot that a step in progress does not need can hold an expert that is asked for by four tokens in ten.
        assert np.sum(hits[20:]) > 0.4 * (slots - TOP_K) * len(hits[20:])


def test_an_expert_in_use_outlives_one_that_was_used_once(store: PackedStore) -> None:
    table = LeaseTable(store, TOP_K + 2)
    for token in range(12):
        other = np.array([8 + token % 3, 12 + token % 5, 20 + token % 7])
        step(table, 0, np.append(other, 3))  # expert 3 every time
    for expert in (29, 30, 31):
        with table.acquire(0, np.array([expert], np.int32)) as lease:
            lease.wait()
    assert table.resident(0, 3)


@pytest.mark.parametrize("heavy", [1, 2])
def test_of_two_experts_used_alike_the_one_of_higher_rank_is_kept(store: PackedStore, heavy: int) -> None:
    table = LeaseTable(store, TOP_K)
    weights = np.array([0.3, 0.1, 0.1, 0.2], np.float32)
    weights[heavy] = 0.4  # of experts 1 and 2; the other one is the lightest
    weights[3 - heavy] = 0.05
    step(table, 0, np.arange(TOP_K), weights)
    with table.acquire(1, np.array([0], np.int32)) as lease:  # takes one slot: that of the expert worth least
        lease.wait()
    assert [table.resident(0, expert) for expert in range(TOP_K)] == [True, heavy == 1, heavy == 2, True]


def test_what_followed_a_token_alike_is_kept_rather_than_what_was_used_last(store: PackedStore) -> None:
    even, odd = np.arange(TOP_K), np.arange(TOP_K, 2 * TOP_K)
    table = LeaseTable(store, TOP_K + 2)
    for _ in range(6):
        step(table, 0, even)
        step(table, 0, odd)
    assert [table.resident(0, expert) for expert in range(2 * TOP_K)].count(True) == TOP_K + 2
    with table.acquire(1, np.array([0], np.int32)) as lease:  # takes one slot: of an expert that is not up next
        lease.wait()
    assert sum(table.resident(0, int(expert)) for expert in even) == 2
    assert sum(table.resident(0, int(expert)) for expert in odd) == TOP_K - 1


@given(
    slots=st.integers(TOP_K, 2 * LAYERS * TOP_K),
    seed=st.integers(0, 999),
    waits=st.lists(st.booleans(), min_size=20, max_size=60),
)
@settings(max_examples=30, deadline=None)
def test_accounts_hold_whatever_is_observed(store: PackedStore, slots: int, seed: int, waits: list[bool]) -> None:
    rng = np.random.default_rng(seed)
    table = LeaseTable(store, slots)
    for number, wait in enumerate(waits):
        layer = int(rng.integers(LAYERS))
        ids = np.sort(rng.choice(EXPERTS, TOP_K, replace=False)).astype(np.int32)
        if rng.random() < 0.8:
            table.observe(layer, np.repeat(ids[None], 1 + number % 3, axis=0), rng.random((1 + number % 3, TOP_K), np.float32))
        before = [table.resident(layer, int(expert)) for expert in ids]
        with table.acquire(layer, ids) as lease:
            assert lease.hit.tolist() == before
            if wait:
                lease.wait()
        counters = table.counters()
        assert counters["hits"] + counters["misses"] == counters["requests"]
        assert counters["admissions"] - counters["evictions"] == table.num_resident <= slots
        assert table.pinned == 0


@pytest.mark.parametrize(
    ("layer", "ids"), [(LAYERS, [[0]]), (-1, [[0]]), (0, [[EXPERTS]]), (0, [[-1]]), (0, [[2, 1]]), (0, [[1, 1]])]
)
def test_observations_that_make_no_sense_are_refused(store: PackedStore, layer: int, ids: list[list[int]]) -> None:
    array = np.array(ids, np.int32)
    with pytest.raises(OptionError):
        LeaseTable(store, TOP_K).observe(layer, array, np.ones(array.shape, np.float32))
    with pytest.raises(OptionError, match="with weights"):
        LeaseTable(store, TOP_K).observe(0, np.zeros((1, 2), np.int32), np.ones((2, 2), np.float32))
