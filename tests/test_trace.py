"""RouteTrace: what a session records, the totals, and the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparseflow.errors import OptionError, SparseFlowError, StorageError
from sparseflow.trace import TRACE_VERSION, RouteTrace

LAYERS, EXPERTS, TOP_K, STRIDE = 3, 10, 2, 4096


def record(trace: RouteTrace, tokens: int, seed: int, bytes_read: int | None = 0) -> tuple[np.ndarray, np.ndarray]:
    """Add a forward of random routes; its ids and flags, [tokens, layers, top_k]."""
    rng = np.random.default_rng(seed)
    ids = np.empty((tokens, LAYERS, TOP_K), np.int32)
    hit = rng.integers(2, size=ids.shape).astype(np.bool_)
    trace.begin_forward(tokens)
    for layer in range(LAYERS):
        for token in range(tokens):
            ids[token, layer] = np.sort(rng.choice(EXPERTS, TOP_K, replace=False))
        asked = len(np.unique(ids[:, layer])) * STRIDE
        trace.add_layer(layer, ids[:, layer], hit[:, layer], 0.25 * layer, asked)
    trace.end_forward(bytes_read)
    return ids, hit


def test_an_empty_trace() -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    assert (trace.forwards, trace.tokens, trace.requests, trace.hits, trace.misses) == (0, 0, 0, 0, 0)
    assert (trace.hit_rate, trace.bytes_asked, trace.bytes_read) == (None, 0, 0)
    assert trace.expert_ids.shape == trace.hit.shape == (0, LAYERS, TOP_K)
    assert trace.wait_seconds.shape == trace.bytes_asked_by_layer.shape == (0, LAYERS)
    assert trace.forward_of_token.shape == trace.bytes_read_by_forward.shape == (0,)


def test_forwards_follow_each_other() -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    forwards = [record(trace, tokens, seed, 1000 * tokens) for seed, tokens in enumerate([5, 1, 1, 3])]
    ids, hit = (np.concatenate(arrays) for arrays in zip(*forwards, strict=True))
    assert trace.expert_ids.dtype == np.int16 and np.array_equal(trace.expert_ids, ids)
    assert trace.hit.dtype == np.bool_ and np.array_equal(trace.hit, hit)
    assert trace.forward_of_token.tolist() == [0] * 5 + [1] + [2] + [3] * 3
    assert (trace.forwards, trace.tokens, trace.requests) == (4, 10, 10 * LAYERS * TOP_K)
    assert (trace.hits, trace.misses) == (hit.sum(), (~hit).sum())
    assert trace.hit_rate == hit.mean()
    assert trace.bytes_read == 10_000 and trace.bytes_read_by_forward.tolist() == [5000, 1000, 1000, 3000]
    assert np.array_equal(trace.wait_seconds, np.tile(np.float32([0, 0.25, 0.5]), (4, 1)))


def test_bytes_asked_count_each_expert_of_a_forward_once() -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    ids, _ = record(trace, 6, 0)
    distinct = [len(np.unique(ids[:, layer])) for layer in range(LAYERS)]
    assert trace.bytes_asked == sum(distinct) * STRIDE < trace.requests * STRIDE
    assert trace.bytes_asked_by_layer.tolist() == [[count * STRIDE for count in distinct]]


def test_the_session_may_reuse_its_arrays() -> None:
    trace = RouteTrace(1, EXPERTS, TOP_K)
    ids, hit = np.array([[1, 2]], np.int32), np.array([[True, False]])
    trace.begin_forward(1)
    trace.add_layer(0, ids, hit, 0.0, 0)
    ids[:], hit[:] = 7, True
    trace.end_forward(0)
    assert trace.expert_ids.tolist() == [[[1, 2]]] and trace.hit.tolist() == [[[True, False]]]


def test_a_forward_that_failed_is_not_in_the_trace() -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    record(trace, 2, 0)
    trace.begin_forward(4)
    trace.add_layer(0, np.zeros((4, TOP_K), np.int32), np.zeros((4, TOP_K), np.bool_), 0.0, STRIDE)
    ids, _ = record(trace, 1, 1)
    assert (trace.forwards, trace.tokens) == (2, 3)
    assert np.array_equal(trace.expert_ids[2:], ids)


def test_bytes_read_are_unknown_as_a_whole_when_one_is() -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    record(trace, 1, 0, 4096)
    record(trace, 1, 1, None)
    assert trace.bytes_read is None and trace.bytes_read_by_forward.tolist() == [4096, -1]


def test_more_experts_than_an_id_can_hold() -> None:
    with pytest.raises(OptionError, match="32767"):
        RouteTrace(LAYERS, 32768, TOP_K)


# --- files ---


@pytest.mark.parametrize("tokens", [[], [4], [5, 1, 1, 3]])
def test_a_saved_trace_is_the_same_when_loaded(tmp_path: Path, tokens: list[int]) -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    for seed, count in enumerate(tokens):
        record(trace, count, seed, None if seed == 1 else seed)
    trace.save(tmp_path / "run.trace")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trace"]
    again = RouteTrace.load(tmp_path / "run.trace")
    assert (again.num_layers, again.num_experts, again.top_k) == (LAYERS, EXPERTS, TOP_K)
    for name in ("expert_ids", "hit", "forward_of_token", "wait_seconds", "bytes_asked_by_layer", "bytes_read_by_forward"):
        assert np.array_equal(getattr(again, name), getattr(trace, name)), name
        assert getattr(again, name).dtype == getattr(trace, name).dtype, name
    assert (again.bytes_read, again.bytes_asked, again.hits) == (trace.bytes_read, trace.bytes_asked, trace.hits)
    record(again, 2, 9)
    assert again.forwards == len(tokens) + 1


def test_saving_replaces_the_file(tmp_path: Path) -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    trace.save(tmp_path / "run.trace")
    record(trace, 2, 0)
    trace.save(tmp_path / "run.trace")
    assert RouteTrace.load(tmp_path / "run.trace").tokens == 2


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "absent" / "run.trace", tmp_path / "taken"):
        with pytest.raises(StorageError, match="cannot be written"):
            trace.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_a_missing_trace_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        RouteTrace.load(tmp_path / "absent")


def saved(tmp_path: Path) -> Path:
    trace = RouteTrace(LAYERS, EXPERTS, TOP_K)
    record(trace, 4, 0)
    trace.save(tmp_path / "run.trace")
    return tmp_path / "run.trace"


def rewrite(path: Path, **changes: object) -> None:
    with np.load(path) as file:
        arrays = dict(file) | changes
    with open(path, "wb") as out:
        np.savez_compressed(out, **{name: np.asarray(value) for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize("content", [b"", b"not a trace", b"PK\x03\x04", b"\x93NUMPY"])
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.trace"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="not a trace"):
        RouteTrace.load(path)


def test_a_plain_array_is_no_trace(tmp_path: Path) -> None:
    with open(tmp_path / "run.trace", "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(OptionError, match="not a trace"):
        RouteTrace.load(tmp_path / "run.trace")


def test_a_truncated_trace(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OptionError, match="not a trace"):
        RouteTrace.load(path)


def test_a_flipped_byte_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    whole = RouteTrace.load(path)
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            again = RouteTrace.load(path)
        except SparseFlowError:
            continue
        assert np.array_equal(again.expert_ids, whole.expert_ids) and np.array_equal(again.hit, whole.hit)


def test_a_trace_of_a_later_version(tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewrite(path, version=TRACE_VERSION + 1)
    with pytest.raises(OptionError, match=f"version {TRACE_VERSION + 1}"):
        RouteTrace.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hit": None},
        {"replayed": None},
        {"hit": np.zeros((4, LAYERS, TOP_K + 1), np.bool_)},
        {"expert_ids": np.zeros((4, LAYERS), np.int16)},
        {"expert_ids": np.zeros((4, LAYERS, TOP_K), np.float32)},
        {"forward_tokens": np.array([3])},
        {"forward_tokens": np.array([5, -1])},
        {"wait_seconds": np.zeros(2, np.float32)},
        {"bytes_read": np.zeros(2, np.int64)},
        {"num_experts": "many"},
    ],
)
def test_arrays_that_do_not_belong_together(tmp_path: Path, changes: dict[str, object]) -> None:
    path = saved(tmp_path)
    rewrite(path, **changes)
    with pytest.raises(OptionError, match="not a trace"):
        RouteTrace.load(path)
