"""Sessions: what they accept, count and trace, how they fork, and what a broken forward leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparseflow
from sparseflow import decoder
from sparseflow.errors import CapacityError, OptionError, SparseFlowError
from sparseflow.kernels.attention import PAGE_POSITIONS
from sparseflow.state import KVCache, state_bytes


@pytest.fixture(scope="module")
def model(packed_demo: Path) -> Iterator[sparseflow.Model]:
    with sparseflow.load(packed_demo, cache="1MiB", threads=2, context=100) as opened:
        yield opened


def test_logits_have_a_row_per_token(model: sparseflow.Model) -> None:
    session = model.session()
    logits = session.forward([1, 2, 3])
    assert (logits.shape, logits.dtype, session.position) == ((3, 4096), np.float32, 3)
    assert session.forward(np.array([4, 5]), last_only=True).shape == (1, 4096)
    assert session.position == 5


@pytest.mark.parametrize("ids", [[], [4096], [-1], [1.5], [[1]], "ab", [2**40]])
def test_ids_that_cannot_be_fed_are_refused(model: sparseflow.Model, ids: object) -> None:
    session = model.session()
    with pytest.raises(OptionError):
        session.forward(ids)
    assert session.position == 0
    session.forward([1])  # and the session is as good as new


def test_the_context_is_a_limit(model: sparseflow.Model) -> None:
    session = model.session()
    session.forward([7] * 99, last_only=True)
    with pytest.raises(CapacityError, match="101 tokens do not fit in the context of 100"):
        session.forward([1, 2])
    session.forward([1])


def test_forks_are_independent(model: sparseflow.Model) -> None:
    session = model.session()
    session.forward([1, 2, 3])
    fork = session.fork()
    mine, theirs = session.forward([4]), fork.forward([5])
    again = model.session()
    assert again.forward([1, 2, 3, 5])[-1].tobytes() == theirs[-1].tobytes()
    assert mine.tobytes() != theirs.tobytes()
    assert fork.trace.tokens == 1


def test_one_token_at_a_time_gives_the_bits_of_all_at_once(packed_demo: Path) -> None:
    """Across the end of a page of the cache, and with a fork on either side of it that goes on by itself."""
    with sparseflow.load(packed_demo, cache="1MiB", threads=2, context=PAGE_POSITIONS + 16) as model:
        feed_one_at_a_time(model)


def feed_one_at_a_time(model: sparseflow.Model) -> None:
    ids = np.random.default_rng(4).integers(0, model.geometry.vocab_size, PAGE_POSITIONS + 8)
    whole = model.session(trace=False).forward(ids)
    session = model.session(trace=False)
    forks = {}
    for position, token in enumerate(ids):
        if position in (PAGE_POSITIONS - 5, PAGE_POSITIONS + 1):
            forks[position] = session.fork()
        assert session.forward([token]).tobytes() == whole[position : position + 1].tobytes()
    after = session.forward([0]).tobytes()
    for start, fork in forks.items():
        for position in range(start, len(ids)):
            assert fork.forward([ids[position]]).tobytes() == whole[position : position + 1].tobytes()
        assert fork.forward([0]).tobytes() == after


def test_full_pages_are_shared_between_forks(model: sparseflow.Model) -> None:
    cache = KVCache(model.geometry)
    cache.reserve(PAGE_POSITIONS + 1)
    fork = cache.fork(PAGE_POSITIONS + 1)
    assert np.shares_memory(fork.pages[0].keys, cache.pages[0].keys)
    assert not np.shares_memory(fork.pages[1].keys, cache.pages[1].keys)


def test_state_bytes_count_what_is_allocated(model: sparseflow.Model) -> None:
    session = model.session()
    session.forward([3] * 70, last_only=True)
    state = session._live()
    held = 0
    for layer in state.layers:
        if isinstance(layer, KVCache):
            held += sum(page.keys.nbytes + page.values.nbytes for page in layer.pages)
        else:
            held += layer.conv.nbytes + layer.recurrent.nbytes
    assert held == state_bytes(model.geometry, 70)


def test_the_trace_tells_every_route(model: sparseflow.Model) -> None:
    session = model.session()
    session.forward([1, 2, 3])
    session.forward([4])
    trace, g = session.trace, model.geometry
    assert (trace.forwards, trace.tokens) == (2, 4)
    ids = trace.expert_ids
    assert ids.shape == (4, g.num_hidden_layers, g.num_experts_per_tok)
    assert (np.diff(ids, axis=-1) > 0).all() and ids.min() >= 0 and ids.max() < g.num_experts
    leased = [len(np.unique(ids[:3, layer])) for layer in range(g.num_hidden_layers)]
    assert session.usage[0].requests == sum(leased)
    assert session.usage[0].bytes_asked == sum(leased) * model.layout.stride
    assert session.usage[1].requests == g.num_hidden_layers * g.num_experts_per_tok
    assert session.usage[1].hits == trace.hit[3].sum()


def test_a_session_may_go_without_a_trace(model: sparseflow.Model) -> None:
    session = model.session(trace=False)
    assert session.forward([1]).tobytes() == model.session().forward([1]).tobytes()
    assert session.trace is None and session.usage[0].requests > 0


def test_closed_and_broken_sessions_say_so(model: sparseflow.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = model.session()
    closed.close()
    with pytest.raises(SparseFlowError, match="session is closed"):
        closed.forward([1])

    broken = model.session()
    layer = model.decoder.layers[3]

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer, "post_attention_layernorm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broken.forward([1])
    monkeypatch.undo()
    assert model.leases.pinned == 0
    with pytest.raises(SparseFlowError, match="broken off"):
        broken.forward([1])
    assert model.session().forward([1]).shape == (1, 4096)


def test_an_error_while_experts_are_leased_releases_them(
    model: sparseflow.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "compute_together", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.session().forward([1, 2])
    assert model.leases.pinned == 0
