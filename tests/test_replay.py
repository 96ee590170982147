"""RouteReplay: reading recorded routes, and sessions that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparseflow
from sparseflow.errors import CapacityError, OptionError
from sparseflow.generate import generate
from sparseflow.replay import RouteReplay
from sparseflow.trace import RouteTrace

PROMPT, TOKENS = 5, 12


@pytest.fixture(scope="module")
def model(packed_demo: Path) -> Iterator[sparseflow.Model]:
    with sparseflow.load(packed_demo, cache="1MiB", threads=2) as opened:
        yield opened


def random_routes(model: sparseflow.Model, *, extra_layers: int = 0, tokens: int = TOKENS) -> np.ndarray:
    """int16 [tokens, layers, top_k] in a random order, every expert in use."""
    g = model.geometry
    rng = np.random.default_rng(3)
    draws = rng.random((tokens, g.num_hidden_layers + extra_layers, g.num_experts))
    return np.argsort(draws, axis=-1)[..., : g.num_experts_per_tok].astype(np.int16)


def replay_of(ids: np.ndarray, *, ranked: bool = True) -> RouteReplay:
    return RouteReplay("routes.npz:text", ids, PROMPT, ranked=ranked)


# --- the file ---


def test_routes_in_router_order(tmp_path: Path, model: sparseflow.Model) -> None:
    ids = random_routes(model)
    np.savez(tmp_path / "routes.npz", text_ids=ids, text_n_prefill=np.int32(PROMPT), text_token_ids=np.arange(TOKENS))
    replay = RouteReplay.load(f"{tmp_path / 'routes.npz'}:text")
    assert (replay.label, replay.n_prefill, replay.tokens, replay.ranked) == ("routes.npz:text", PROMPT, TOKENS, True)
    assert replay.ids.dtype == np.int32 and np.array_equal(replay.ids, ids)


def test_a_prompt_of_which_only_the_union_is_known(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    unions = [np.sort(rng.choice(64, size, replace=False)) for size in (8, 40, 64)]
    padded = np.full((3, 70), -1, np.int16)
    for row, union in zip(padded, unions, strict=True):
        row[: len(union)] = union
    decode = np.sort(np.argsort(rng.random((31, 3, 64)), axis=-1)[..., :8], axis=-1).astype(np.int16)
    np.savez(tmp_path / "routes.npz", core_decode_sets=decode, core_prefill_union=padded)
    replay = RouteReplay.load(f"{tmp_path / 'routes.npz'}:core")
    assert (replay.n_prefill, replay.tokens, replay.ranked) == (41, 72, False)
    assert np.array_equal(replay.ids[41:], decode)
    for layer, union in enumerate(unions):
        assert np.array_equal(np.unique(replay.ids[:41, layer]), union)
        assert all(len(set(row)) == 8 for row in replay.ids[:41, layer].tolist())


@pytest.mark.parametrize("spec", ["", "routes.npz", ":text", "routes.npz:", "no:where"])
def test_what_is_not_a_replay(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="FILE.npz:NAME|cannot be read: No such file"):
        RouteReplay.load(spec)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04damaged"])
def test_what_is_not_an_npz(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "routes.npz").write_bytes(content)
    with pytest.raises(OptionError, match="not an .npz file of routes"):
        RouteReplay.load(f"{tmp_path / 'routes.npz'}:text")


def test_a_name_that_is_not_there_tells_which_are(tmp_path: Path) -> None:
    ids = np.arange(8).reshape(1, 1, 8)
    arrays = {"a_ids": ids, "a_n_prefill": 1, "b_decode_sets": ids, "b_prefill_union": ids[0], "c_token_ids": ids}
    np.savez(tmp_path / "routes.npz", **arrays)
    with pytest.raises(OptionError, match="holds no routes of 'c', but of a, b$"):
        RouteReplay.load(f"{tmp_path / 'routes.npz'}:c")
    assert RouteReplay.names(str(tmp_path / "routes.npz")) == ["a", "b"]
    np.savez(tmp_path / "empty.npz", x=1)
    with pytest.raises(OptionError, match="but of none at all"):
        RouteReplay.load(f"{tmp_path / 'empty.npz'}:a")


IDS = np.arange(24).reshape(3, 2, 4)
UNION = np.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"t_ids": IDS[0], "t_n_prefill": 1}, "no routes, expected integers"),
        ({"t_ids": IDS[:0], "t_n_prefill": 1}, "no routes, expected integers"),
        ({"t_ids": IDS.astype(np.float32), "t_n_prefill": 1}, "float32"),
        ({"t_ids": IDS - 1, "t_n_prefill": 1}, "negative"),
        ({"t_ids": np.where(IDS == 1, 0, IDS), "t_n_prefill": 1}, "twice"),
        ({"t_ids": IDS, "t_n_prefill": 0}, "prompt of 0"),
        ({"t_ids": IDS, "t_n_prefill": 4}, "prompt of 4"),
        ({"t_ids": IDS, "t_n_prefill": 1.5}, "whole number"),
        ({"t_ids": IDS, "t_n_prefill": [1, 2]}, "whole number"),
        ({"t_decode_sets": IDS, "t_prefill_union": UNION[:1]}, "does not belong"),
        ({"t_decode_sets": IDS[0], "t_prefill_union": UNION}, "does not belong"),
        ({"t_decode_sets": IDS, "t_prefill_union": UNION[:, :3]}, "3 experts in layer 0"),
        ({"t_decode_sets": IDS, "t_prefill_union": np.tile(np.arange(165), (2, 1))}, "165 experts in layer 0"),
    ],
)
def test_arrays_that_are_no_routes(arrays: dict[str, object], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "routes.npz", **arrays)
    with pytest.raises(OptionError, match=message) as error:
        RouteReplay.load(f"{tmp_path / 'routes.npz'}:t")
    assert "\n" not in str(error.value) and "routes.npz:t" in str(error.value)


# --- a session that follows one ---


def forward_all(session: sparseflow.Session, tokens: int = TOKENS) -> np.ndarray:
    """A prompt, then single tokens; all logits."""
    ids = list(range(100, 100 + tokens))
    return np.concatenate([session.forward(ids[:PROMPT]), *(session.forward([token]) for token in ids[PROMPT:])])


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("extra_layers", [0, 2])
def test_the_session_asks_for_the_recorded_experts(model: sparseflow.Model, extra_layers: int, ranked: bool) -> None:
    ids = random_routes(model, extra_layers=extra_layers)
    session = model.session(replay=replay_of(ids, ranked=ranked))
    logits = forward_all(session)
    assert np.isfinite(logits).all()
    assert session.trace is not None
    assert np.array_equal(session.trace.expert_ids, np.sort(ids, axis=-1)[:, : model.geometry.num_hidden_layers])
    assert not np.array_equal(logits, forward_all(model.session()))


def test_its_own_routes_give_its_own_logits(model: sparseflow.Model) -> None:
    session = model.session()
    logits = forward_all(session)
    assert session.trace is not None
    replayed = model.session(replay=replay_of(session.trace.expert_ids, ranked=False))
    assert forward_all(replayed).tobytes() == logits.tobytes()


def test_chunks_cache_and_threads_leave_no_trace(model: sparseflow.Model, packed_demo: Path) -> None:
    replay = replay_of(random_routes(model))
    expected = forward_all(model.session(replay=replay))
    with sparseflow.load(packed_demo, cache="resident", threads=1, prefill_chunk=2) as other:
        assert other.session(replay=replay).forward(list(range(100, 100 + TOKENS))).tobytes() == expected.tobytes()


def test_a_fork_goes_on_with_the_routes(model: sparseflow.Model) -> None:
    ids = random_routes(model)
    session = model.session(replay=replay_of(ids))
    session.forward([1, 2, 3])
    fork = session.fork()
    fork.forward([4, 5])
    assert fork.trace is not None and fork.trace.replayed == "routes.npz:text"
    assert np.array_equal(fork.trace.expert_ids, np.sort(ids[3:5], axis=-1))


def test_the_end_of_the_recording(model: sparseflow.Model) -> None:
    session = model.session(replay=replay_of(random_routes(model)))
    session.forward([1] * (TOKENS - 1))
    with pytest.raises(CapacityError, match="holds routes of 12 tokens, 13 are asked for"):
        session.forward([1, 2])
    session.forward([1])  # the refusal did no harm


def test_models_that_cannot_follow_the_routes(model: sparseflow.Model) -> None:
    ids = random_routes(model)
    experts = model.geometry.num_experts
    for wrong, message in [
        (ids[:, :-1], "at most 7 layers"),
        (ids[..., :-1], "experts a token"),
        (ids + 1, f"ids up to {experts}"),
        (np.argsort(np.random.default_rng(0).random((TOKENS, 8, experts // 2 - 1)))[..., : ids.shape[2]], f"{experts} experts a layer"),
    ]:
        with pytest.raises(OptionError, match=message):
            model.session(replay=replay_of(wrong))


# --- the label ---


def test_trace_and_evidence_carry_the_label(model: sparseflow.Model, tmp_path: Path) -> None:
    replayed, plain = model.session(replay=replay_of(random_routes(model))), model.session()
    for session, label in ((replayed, "routes.npz:text"), (plain, None)):
        session.forward([1, 2])
        assert session.trace is not None and session.trace.replayed == label
        session.trace.save(tmp_path / "run.npz")
        assert RouteTrace.load(tmp_path / "run.npz").replayed == label
        generation = generate(model.session(replay=session.replay), [1, 2], model.tokenizer, max_new_tokens=3)
        list(generation)
        evidence = model.evidence(generation)
        assert evidence.to_json()["replayed"] == label
        assert ("routes replayed from routes.npz:text" in evidence.line()) == (label is not None)
