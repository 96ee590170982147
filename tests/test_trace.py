"""RouteTrace: what a session records, the totals, and the file."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from sparseflow.errors import OptionError, SparseFlowError, StorageError
from sparseflow.route_record import RouteRecord
from sparseflow.trace import FORWARDS_AT_ONCE, TRACE_VERSION, RouteTrace

LAYERS, EXPERTS, TOP_K, STRIDE = 3, 10, 2, 4096
BY_LAYER = ("asked_at", "arrived_at", "ended_at", "wait_seconds", "bytes_asked_by_layer", "bytes_read_by_layer")


def new_trace(layers: int = LAYERS) -> RouteTrace:
    return RouteTrace(layers, EXPERTS, TOP_K, expert_bytes=STRIDE, slots=5)


def record(trace: RouteTrace, tokens: int, seed: int, bytes_read: int | None = 0) -> tuple[np.ndarray, np.ndarray]:
    """Add a forward of random routes; its ids and flags, [tokens, layers, top_k]."""
    rng = np.random.default_rng(seed)
    ids = np.empty((tokens, LAYERS, TOP_K), np.int32)
    hit = rng.integers(2, size=ids.shape).astype(np.bool_)
    layers = trace.begin_forward(tokens, 1000)
    begun = time.perf_counter()
    for layer in range(LAYERS):
        for token in range(tokens):
            ids[token, layer] = np.sort(rng.choice(EXPERTS, TOP_K, replace=False))
        asked = len(np.unique(ids[:, layer])) * STRIDE
        chosen, flags = np.ascontiguousarray(ids[:, layer]), np.ascontiguousarray(hit[:, layer])
        layers.add_layer(layer, chosen, flags, 0.25 * layer, asked, begun + layer, begun + layer + 0.5, time.perf_counter())
    trace.end_forward(None if bytes_read is None else 1000 + bytes_read)
    return ids, hit


def test_an_empty_trace() -> None:
    trace = new_trace()
    assert (trace.forwards, trace.tokens, trace.requests, trace.hits, trace.misses) == (0, 0, 0, 0, 0)
    assert (trace.hit_rate, trace.bytes_asked, trace.bytes_read) == (None, 0, 0)
    assert trace.expert_ids.shape == trace.hit.shape == (0, LAYERS, TOP_K)
    for name in BY_LAYER:
        assert getattr(trace, name).shape == (0, LAYERS), name
    assert trace.forward_of_token.shape == trace.bytes_read_by_forward.shape == trace.seconds.shape == (0,)


def test_forwards_follow_each_other() -> None:
    trace = new_trace()
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
    trace = new_trace()
    ids, _ = record(trace, 6, 0)
    distinct = [len(np.unique(ids[:, layer])) for layer in range(LAYERS)]
    assert trace.bytes_asked == sum(distinct) * STRIDE < trace.requests * STRIDE
    assert trace.bytes_asked_by_layer.tolist() == [[count * STRIDE for count in distinct]]


def test_forwards_come_in_any_number() -> None:
    trace = new_trace(2)
    rng = np.random.default_rng(0)
    tokens = [1] * (2 * FORWARDS_AT_ONCE + 3) + [4, 4, 1, 2]
    ids = [rng.integers(0, EXPERTS, (count, 2, TOP_K)).astype(np.int32) for count in tokens]
    for number, chosen in enumerate(ids):
        layers = trace.begin_forward(len(chosen), 0)
        for layer in (0, 1):
            row = np.ascontiguousarray(chosen[:, layer])
            layers.add_layer(layer, row, row % 2 == 0, number, layer, 0.0, 0.0, 0.0)
        trace.end_forward(number)
        if number % 20 == 0:
            assert trace.forwards == number + 1
    assert np.array_equal(trace.expert_ids, np.concatenate(ids))
    assert np.array_equal(trace.hit, np.concatenate(ids) % 2 == 0)
    assert trace.forward_tokens.tolist() == tokens
    assert trace.wait_seconds.tolist() == [[number, number] for number in range(len(tokens))]
    assert trace.bytes_asked_by_layer.tolist() == [[0, 1]] * len(tokens)
    assert trace.bytes_read_by_forward.tolist() == list(range(len(tokens)))


def test_a_forward_that_failed_is_not_in_the_trace() -> None:
    trace = new_trace()
    record(trace, 2, 0)
    layers = trace.begin_forward(4, 0)
    layers.add_layer(0, np.zeros((4, TOP_K), np.int32), np.zeros((4, TOP_K), np.bool_), 0.0, STRIDE, 0.0, 0.0, 0.0)
    ids, _ = record(trace, 1, 1)
    assert (trace.forwards, trace.tokens) == (2, 3)
    assert np.array_equal(trace.expert_ids[2:], ids)


def test_times_count_from_the_begin_of_the_forward() -> None:
    trace = new_trace()
    record(trace, 1, 0)
    record(trace, 1, 1)
    assert np.allclose(trace.asked_at, [[0, 1, 2]] * 2, atol=0.5)
    assert np.allclose(trace.arrived_at - trace.asked_at, 0.5, atol=1e-5)
    assert (np.diff(trace.ended_at, axis=-1) >= 0).all() and (trace.seconds >= trace.ended_at[:, -1]).all()


def test_a_layer_tells_what_the_disk_moved_since_the_count_before(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = iter([300])
    monkeypatch.setattr("sparseflow.route_record.disk_bytes_read", lambda: next(moved))
    trace = new_trace()
    layers = trace.begin_forward(1, 100)
    begun = time.perf_counter()
    ids, hit = np.array([[1, 2]], np.int32), np.ones((1, 2), np.bool_)
    for layer, now in enumerate([begun, begun + 0.004, begun + 0.005]):
        layers.add_layer(layer, ids, hit, 0.0, 2 * STRIDE, begun, begun, now)
    trace.end_forward(450)
    assert trace.bytes_read_by_layer.tolist() == [[-1, 200, -1]]  # too early, counted, too early again
    assert trace.bytes_read_by_forward.tolist() == [350]


def test_nothing_is_asked_between_layers_when_all_experts_are_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.route_record.disk_bytes_read", lambda: 7)
    for slots, told in ((LAYERS * EXPERTS, -1), (LAYERS * EXPERTS - 1, 0)):
        trace = RouteTrace(LAYERS, EXPERTS, TOP_K, expert_bytes=STRIDE, slots=slots)
        layers = trace.begin_forward(1, 7)
        for layer in range(LAYERS):
            now = time.perf_counter() + 1 + layer
            layers.add_layer(layer, np.array([[1, 2]], np.int32), np.array([[True, True]]), 0.0, 2 * STRIDE, 0.0, 0.0, now)
        trace.end_forward(7)
        assert trace.bytes_read_by_layer.tolist() == [[told] * LAYERS]


@pytest.mark.parametrize("last", [None, 7])
def test_a_system_that_stops_telling(monkeypatch: pytest.MonkeyPatch, last: int | None) -> None:
    monkeypatch.setattr("sparseflow.route_record.SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr("sparseflow.route_record.disk_bytes_read", lambda: None)
    trace = new_trace()
    record(trace, 1, 0, last)
    assert trace.bytes_read_by_layer.tolist() == [[-1] * LAYERS]
    assert trace.bytes_read == last


def test_bytes_read_are_unknown_as_a_whole_when_one_is() -> None:
    trace = new_trace()
    record(trace, 1, 0, 4096)
    record(trace, 1, 1, None)
    assert trace.bytes_read is None and trace.bytes_read_by_forward.tolist() == [4096, -1]


def test_layers_and_arrays_that_do_not_belong_to_the_forward_are_refused() -> None:
    layers = new_trace().begin_forward(2, 0)
    ids, hit = np.zeros((2, TOP_K), np.int32), np.zeros((2, TOP_K), np.bool_)
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match="no layer"):
            layers.add_layer(layer, ids, hit, 0.0, 0, 0.0, 0.0, 0.0)
    for bad_ids, bad_hit in ((ids[:1], hit), (ids, hit[:1]), (ids.astype(np.int64), hit), (ids[:, ::-1], hit)):
        with pytest.raises(ValueError, match="contiguous|not those of 2 tokens"):
            layers.add_layer(0, bad_ids, bad_hit, 0.0, 0, 0.0, 0.0, 0.0)


def test_a_full_record_begins_no_forward() -> None:
    record = RouteRecord(LAYERS, 1, TOP_K, 1)
    record.begin(0.0, None)
    record.end()
    with pytest.raises(ValueError, match="full"):
        record.begin(0.0, None)


def test_more_experts_than_an_id_can_hold() -> None:
    with pytest.raises(OptionError, match="32767"):
        RouteTrace(LAYERS, 32768, TOP_K, expert_bytes=STRIDE, slots=5)


# --- files ---


@pytest.mark.parametrize("tokens", [[], [4], [5, 1, 1, 3]])
def test_a_saved_trace_is_the_same_when_loaded(tmp_path: Path, tokens: list[int]) -> None:
    trace = new_trace()
    for seed, count in enumerate(tokens):
        record(trace, count, seed, None if seed == 1 else seed)
    trace.save(tmp_path / "run.trace")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trace"]
    again = RouteTrace.load(tmp_path / "run.trace")
    assert (again.num_layers, again.num_experts, again.top_k) == (LAYERS, EXPERTS, TOP_K)
    assert (again.expert_bytes, again.slots, again.replayed) == (STRIDE, 5, None)
    for name in ("expert_ids", "hit", "forward_of_token", "seconds", "bytes_read_by_forward", *BY_LAYER):
        assert np.array_equal(getattr(again, name), getattr(trace, name)), name
        assert getattr(again, name).dtype == getattr(trace, name).dtype, name
    assert (again.bytes_read, again.bytes_asked, again.hits) == (trace.bytes_read, trace.bytes_asked, trace.hits)
    record(again, 2, 9)
    assert again.forwards == len(tokens) + 1


def test_saving_replaces_the_file(tmp_path: Path) -> None:
    trace = new_trace()
    trace.save(tmp_path / "run.trace")
    record(trace, 2, 0)
    trace.save(tmp_path / "run.trace")
    assert RouteTrace.load(tmp_path / "run.trace").tokens == 2


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    trace = new_trace()
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "absent" / "run.trace", tmp_path / "taken"):
        with pytest.raises(StorageError, match="cannot be written"):
            trace.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_a_missing_trace_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        RouteTrace.load(tmp_path / "absent")


def saved(tmp_path: Path) -> Path:
    trace = new_trace()
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


@pytest.mark.parametrize(("version", "way_out"), [(TRACE_VERSION + 1, "update"), (TRACE_VERSION - 1, "record it again")])
def test_a_trace_of_another_version(tmp_path: Path, version: int, way_out: str) -> None:
    path = saved(tmp_path)
    rewrite(path, version=version)
    with pytest.raises(OptionError, match=f"version {version}.*{way_out}"):
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
        {"forward_tokens": np.array([[4]])},
        {"expert_ids": np.full((4, LAYERS, TOP_K), EXPERTS, np.int16)},
        {"expert_ids": np.full((4, LAYERS, TOP_K), -1, np.int16)},
        {"asked_at": np.zeros((1, LAYERS + 1), np.float32)},
        {"ended_at": np.full((1, LAYERS), np.nan, np.float32)},
        {"seconds": np.zeros((1, 1), np.float32)},
        {"layer_read": np.zeros((1, LAYERS), np.float32)},
        {"slots": 0},
        {"expert_bytes": None},
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
