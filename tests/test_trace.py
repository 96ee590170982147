"""RouteTrace: what a session records, the totals, and the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from expert_store import disk_path, write_expert_store  # noqa: F401

from sparseflow.errors import OptionError, SparseFlowError, StorageError
from sparseflow.evidence import disk_bytes_read
from sparseflow.leases import LeaseTable
from sparseflow.route_record import FORWARDS_AT_ONCE, RouteRecord
from sparseflow.store import PackedStore
from sparseflow.trace import TRACE_VERSION, RouteTrace

LAYERS, EXPERTS, TOP_K, STRIDE = 3, 10, 2, 4096
BY_LAYER = ("asked_at", "arrived_at", "ended_at", "wait_seconds", "bytes_asked_by_layer", "bytes_read_by_layer")


def new_trace(layers: int = LAYERS) -> RouteTrace:
    return RouteTrace(layers, EXPERTS, TOP_K, expert_bytes=STRIDE, slots=5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackedStore]:
    with PackedStore(write_expert_store(tmp_path_factory.mktemp("store") / "experts.sfx", LAYERS, EXPERTS, STRIDE)) as opened:
        yield opened


def lease(store: PackedStore, record: RouteRecord, layer: int, experts: list[int], hit: list[bool], waves: int = 1) -> None:
    """Lease ascending experts of a layer, of which some are in memory, and tell the record."""
    table = LeaseTable(store, LAYERS * EXPERTS)
    with table.acquire(layer, np.array([expert for expert, met in zip(experts, hit, strict=True) if met], np.int32)) as inside:
        inside.wait()
    for part in np.array_split(np.array(experts, np.int32), waves):
        with table.acquire(layer, part, record) as wave:
            assert wave.hit.tolist() == [met for expert, met in zip(experts, hit, strict=True) if expert in part]
            wave.wait_for(0, len(wave))


def record(
    store: PackedStore, trace: RouteTrace, tokens: int, seed: int, bytes_read: int | None = 0, waves: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Add a forward of random routes; its ids and flags, [tokens, layers, top_k]."""
    rng = np.random.default_rng(seed)
    ids = np.sort(np.argsort(rng.random((tokens, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K], axis=-1).astype(np.int32)
    inside = rng.random((LAYERS, EXPERTS)) < 0.5
    forward = trace.begin_forward(tokens, 1000)
    for layer in range(LAYERS):
        chosen = np.ascontiguousarray(ids[:, layer])
        distinct = np.unique(chosen)
        lease(store, forward, layer, distinct.tolist(), inside[layer, distinct].tolist(), waves)
        if tokens > 1:
            forward.share_out(layer, chosen)
    forward.end(None if bytes_read is None else 1000 + bytes_read)
    return ids, inside[np.arange(LAYERS)[:, None], ids]


def test_an_empty_trace() -> None:
    trace = new_trace()
    assert (trace.forwards, trace.tokens, trace.requests, trace.hits, trace.misses) == (0, 0, 0, 0, 0)
    assert (trace.hit_rate, trace.bytes_asked, trace.bytes_read) == (None, 0, 0)
    assert trace.expert_ids.shape == trace.hit.shape == (0, LAYERS, TOP_K)
    for name in BY_LAYER:
        assert getattr(trace, name).shape == (0, LAYERS), name
    assert trace.forward_of_token.shape == trace.bytes_read_by_forward.shape == trace.seconds.shape == (0,)


def test_forwards_follow_each_other(store: PackedStore) -> None:
    trace = new_trace()
    forwards = [record(store, trace, tokens, seed, 1000 * tokens) for seed, tokens in enumerate([5, 1, 1, 3])]
    ids, hit = (np.concatenate(arrays) for arrays in zip(*forwards, strict=True))
    assert trace.expert_ids.dtype == np.int16 and np.array_equal(trace.expert_ids, ids)
    assert trace.hit.dtype == np.bool_ and np.array_equal(trace.hit, hit)
    assert trace.forward_of_token.tolist() == [0] * 5 + [1] + [2] + [3] * 3
    assert (trace.forwards, trace.tokens, trace.requests) == (4, 10, 10 * LAYERS * TOP_K)
    assert (trace.hits, trace.misses) == (hit.sum(), (~hit).sum())
    assert trace.hit_rate == hit.mean()
    assert trace.bytes_read == 10_000 and trace.bytes_read_by_forward.tolist() == [5000, 1000, 1000, 3000]


def test_bytes_asked_count_each_expert_of_a_forward_once(store: PackedStore) -> None:
    trace = new_trace()
    ids, _ = record(store, trace, 6, 0)
    distinct = [len(np.unique(ids[:, layer])) for layer in range(LAYERS)]
    assert trace.bytes_asked == sum(distinct) * STRIDE < trace.requests * STRIDE
    assert trace.bytes_asked_by_layer.tolist() == [[count * STRIDE for count in distinct]]


def test_forwards_come_in_any_number(store: PackedStore) -> None:
    trace = new_trace()
    tokens = [1] * (2 * FORWARDS_AT_ONCE + 3) + [4, 4, 1, 2]
    recorded = []
    for number, count in enumerate(tokens):
        recorded.append(record(store, trace, count, number, number))
        if number % 20 == 0:
            assert trace.forwards == number + 1
    ids, hit = (np.concatenate(arrays) for arrays in zip(*recorded, strict=True))
    assert np.array_equal(trace.expert_ids, ids)
    assert np.array_equal(trace.hit, hit)
    assert trace.forward_tokens.tolist() == tokens
    distinct = [[len(np.unique(chosen[:, layer])) for layer in range(LAYERS)] for chosen, _ in recorded]
    assert trace.bytes_asked_by_layer.tolist() == (np.array(distinct) * STRIDE).tolist()
    assert trace.bytes_read_by_forward.tolist() == list(range(len(tokens)))


def test_a_forward_that_failed_is_not_in_the_trace(store: PackedStore) -> None:
    trace = new_trace()
    record(store, trace, 2, 0)
    lease(store, trace.begin_forward(4, 0), 0, [0, 1], [True, False])
    lease(store, trace.begin_forward(1, 0), 0, [0, 1], [True, False])
    ids, _ = record(store, trace, 1, 1)
    assert (trace.forwards, trace.tokens) == (2, 3)
    assert np.array_equal(trace.expert_ids[2:], ids)


def test_times_count_from_the_begin_of_the_forward(store: PackedStore) -> None:
    trace = new_trace()
    for tokens in (1, 1, 3):
        record(store, trace, tokens, 0, waves=2)
    times = np.stack([trace.asked_at, trace.arrived_at, trace.ended_at], axis=-1).reshape(3, LAYERS * 3)
    assert (np.diff(times, axis=-1) >= 0).all() and (times[:, 0] >= 0).all() and (trace.seconds >= times[:, -1]).all()


def test_only_experts_that_were_missed_are_waited_for(store: PackedStore) -> None:
    trace = new_trace()
    forward = trace.begin_forward(1, None)
    for layer, hit in enumerate([True, False, True]):
        lease(store, forward, layer, [1, 2], [True, hit])
    forward.end(None)
    waits, stood = trace.wait_seconds[0], (trace.arrived_at - trace.asked_at)[0]
    assert waits[0] == waits[2] == stood[0] == stood[2] == 0
    assert 0 < waits[1] <= stood[1]


def test_a_layer_tells_what_the_disk_moved_since_the_count_before(disk_path: Path) -> None:  # noqa: F811
    path = write_expert_store(disk_path / "experts.sfx", LAYERS, EXPERTS, 1 << 20)
    trace, asked = new_trace(), TOP_K << 20
    other_reads = 1 << 19  # the interpreter may read a file of its own meanwhile
    with PackedStore(path, strict=True) as store:
        forward = trace.begin_forward(1, disk_bytes_read())
        for layer, least in enumerate([3600.0, 0.0, 3600.0]):
            forward.sample_seconds = least
            lease(store, forward, layer, [1, 2], [True, True])
        forward.end(disk_bytes_read())
    first, second, third = trace.bytes_read_by_layer[0].tolist()
    assert first == third == -1 and 2 * asked <= second < 2 * asked + other_reads
    assert 3 * asked <= trace.bytes_read_by_forward[0] < 3 * asked + other_reads


def test_nothing_is_asked_between_layers_when_all_experts_are_resident(store: PackedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.route_record.SAMPLE_SECONDS", 0.0)
    for slots, told in ((LAYERS * EXPERTS, False), (LAYERS * EXPERTS - 1, True)):
        trace = RouteTrace(LAYERS, EXPERTS, TOP_K, expert_bytes=STRIDE, slots=slots)
        forward = trace.begin_forward(1, disk_bytes_read())
        for layer in range(LAYERS):
            lease(store, forward, layer, [1, 2], [True, True])
        forward.end(disk_bytes_read())
        assert ((trace.bytes_read_by_layer >= 0) == told).all()


def test_a_system_that_does_not_tell(store: PackedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.route_record.SAMPLE_SECONDS", 0.0)
    trace = new_trace()
    forward = trace.begin_forward(1, None)
    lease(store, forward, 0, [1, 2], [True, True])
    forward.end(None)
    assert trace.bytes_read_by_layer[0, 0] == -1
    assert trace.bytes_read is None


def test_bytes_read_are_unknown_as_a_whole_when_one_is(store: PackedStore) -> None:
    trace = new_trace()
    record(store, trace, 1, 0, 4096)
    record(store, trace, 1, 1, None)
    assert trace.bytes_read is None and trace.bytes_read_by_forward.tolist() == [4096, -1]


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_experts_of_a_layer_may_come_in_waves(store: PackedStore, tokens: int) -> None:
    trace = new_trace()
    ids, hit = record(store, trace, tokens, 3, waves=2)
    assert np.array_equal(trace.expert_ids, ids) and np.array_equal(trace.hit, hit)


def test_what_does_not_belong_to_the_forward_is_refused(store: PackedStore) -> None:
    table = LeaseTable(store, LAYERS * EXPERTS)
    ids = np.array([1, 2, 3], np.int32)
    forward = new_trace().begin_forward(1, 0)
    with pytest.raises(ValueError, match="3 more experts of layer 0 for a token that chose 2 and has 0"):
        table.acquire(0, ids, forward)
    table.acquire(0, ids[:1], forward).release()
    with pytest.raises(ValueError, match="2 more experts of layer 0 for a token that chose 2 and has 1"):
        table.acquire(0, ids[1:], forward)
    forward.end(0)
    with pytest.raises(ValueError, match="no forward"):
        table.acquire(0, ids[:2], forward)
    with pytest.raises(ValueError, match="no forward"):
        forward.end(0)
    with pytest.raises(ValueError, match="layer 1 of 1"):
        table.acquire(1, ids[:2], new_trace(layers=1).begin_forward(1, 0))
    other = RouteRecord(LAYERS, EXPERTS - 1, TOP_K, 1, 1, True)
    other.begin(0)
    with pytest.raises(ValueError, match="of 9 experts a layer, for a store of 10"):
        table.acquire(0, ids[:2], other)
    assert table.pinned == table.leases == 0


def test_leases_of_other_layers_in_between_write_nowhere_else(store: PackedStore) -> None:
    table = LeaseTable(store, LAYERS * EXPERTS)
    for tokens in (1, 2):
        trace = new_trace()
        forward = trace.begin_forward(tokens, 0)
        held = [table.acquire(layer, np.array([1, 2], np.int32), forward) for layer in (0, 1)]
        trace.begin_forward(tokens, 0)
        for lease in held:
            lease.wait()
            lease.release()
        ids, hit = record(store, trace, tokens, 4)
        assert np.array_equal(trace.expert_ids, ids) and np.array_equal(trace.hit, hit)


def test_choices_of_another_form_or_that_were_not_leased_are_refused(store: PackedStore) -> None:
    forward = new_trace().begin_forward(2, 0)
    with pytest.raises(ValueError, match="layer -1 was not leased last"):
        forward.share_out(-1, np.zeros((2, TOP_K), np.int32))
    lease(store, forward, 0, [1, 2], [True, True])
    ids = np.tile(np.array([1, 2], np.int32), (2, 1))
    for bad in (ids[:1], ids.astype(np.int64), ids[:, ::-1], ids + 1, ids - 2, ids + EXPERTS):
        with pytest.raises(ValueError, match="are not those of 2 tokens|dtype mismatch|contiguous|was not leased"):
            forward.share_out(0, bad)
    for layer in (-1, 1, LAYERS):
        with pytest.raises(ValueError, match="was not leased last"):
            forward.share_out(layer, ids)
    forward.share_out(0, ids)
    with pytest.raises(ValueError, match="are not those of 1 tokens"):
        new_trace().begin_forward(1, 0).share_out(0, ids[:1])


def test_a_full_record_begins_no_forward() -> None:
    record = RouteRecord(LAYERS, EXPERTS, TOP_K, 1, 1, False)
    record.begin(None)
    record.end(None)
    with pytest.raises(ValueError, match="full"):
        record.begin(None)


def test_more_experts_than_an_id_can_hold() -> None:
    with pytest.raises(OptionError, match="32767"):
        RouteTrace(LAYERS, 32768, TOP_K, expert_bytes=STRIDE, slots=5)


# --- files ---


@pytest.mark.parametrize("tokens", [[], [4], [5, 1, 1, 3]])
def test_a_saved_trace_is_the_same_when_loaded(store: PackedStore, tmp_path: Path, tokens: list[int]) -> None:
    trace = new_trace()
    for seed, count in enumerate(tokens):
        record(store, trace, count, seed, None if seed == 1 else seed)
    trace.save(tmp_path / "run.trace")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trace"]
    again = RouteTrace.load(tmp_path / "run.trace")
    assert (again.num_layers, again.num_experts, again.top_k) == (LAYERS, EXPERTS, TOP_K)
    assert (again.expert_bytes, again.slots, again.replayed) == (STRIDE, 5, None)
    for name in ("expert_ids", "hit", "forward_of_token", "seconds", "bytes_read_by_forward", *BY_LAYER):
        assert np.array_equal(getattr(again, name), getattr(trace, name)), name
        assert getattr(again, name).dtype == getattr(trace, name).dtype, name
    assert (again.bytes_read, again.bytes_asked, again.hits) == (trace.bytes_read, trace.bytes_asked, trace.hits)
    record(store, again, 2, 9)
    assert again.forwards == len(tokens) + 1


def test_saving_replaces_the_file(store: PackedStore, tmp_path: Path) -> None:
    trace = new_trace()
    trace.save(tmp_path / "run.trace")
    record(store, trace, 2, 0)
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


def saved(store: PackedStore, tmp_path: Path) -> Path:
    trace = new_trace()
    record(store, trace, 4, 0)
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


def test_a_truncated_trace(store: PackedStore, tmp_path: Path) -> None:
    path = saved(store, tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OptionError, match="not a trace"):
        RouteTrace.load(path)


def test_a_flipped_byte_is_an_error_of_ours_or_harmless(store: PackedStore, tmp_path: Path) -> None:
    path = saved(store, tmp_path)
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
def test_a_trace_of_another_version(store: PackedStore, tmp_path: Path, version: int, way_out: str) -> None:
    path = saved(store, tmp_path)
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
def test_arrays_that_do_not_belong_together(store: PackedStore, tmp_path: Path, changes: dict[str, object]) -> None:
    path = saved(store, tmp_path)
    rewrite(path, **changes)
    with pytest.raises(OptionError, match="not a trace"):
        RouteTrace.load(path)
