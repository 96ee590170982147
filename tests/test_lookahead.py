"""Looking ahead: ranks are read ahead while they are mostly right, guessing stops when none is, and no result depends on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparseflow
from sparseflow.lookahead import ENOUGH, TRIAL, GuessRecord


def record(right: list[bool], count: int) -> GuessRecord:
    record = GuessRecord(len(right))
    for _ in range(count):
        record.add(np.array(right))
    return record


def test_nothing_is_read_ahead_before_enough_was_seen() -> None:
    assert record([True] * 4, ENOUGH - 1).ranks == 0
    assert record([True] * 4, ENOUGH).ranks == 4


def test_only_the_first_ranks_that_are_right_count() -> None:
    assert record([True, True, False, True], ENOUGH).ranks == 2
    assert record([False, True, True, True], ENOUGH).ranks == 0


def test_a_share_follows_what_changes() -> None:
    ahead = record([True, True], 300)
    for _ in range(400):
        ahead.add(np.array([True, False]))
    assert ahead.ranks == 1


def test_where_nothing_pays_only_some_tokens_are_guessed_for() -> None:
    ahead = record([False] * 4, ENOUGH)
    assert sum(ahead.begin_token() for _ in range(10 * TRIAL)) == 10
    assert all(record([True] * 4, ENOUGH).begin_token() for _ in range(10))


def test_no_result_depends_on_it(packed_demo: Path) -> None:
    ids = np.random.default_rng(5).integers(0, 4096, 40)
    logits = {}
    for prefetch in (False, True):
        with sparseflow.load(packed_demo, cache="1MiB", threads=2, strict=True, prefetch=prefetch) as model:
            session = model.session()
            logits[prefetch] = b"".join(session.forward([token]).tobytes() for token in ids.tolist())
            counters = model.leases.counters()
            guessing = model.decoder.guess_record
            assert (guessing is None) == (not prefetch) and counters["prefetched"] <= counters["prefetches"]
            if guessing is not None:
                assert guessing.share.shape == (model.geometry.num_experts_per_tok,) and guessing.share.any()
    assert logits[False] == logits[True]
