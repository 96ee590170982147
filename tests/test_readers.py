"""Direct tables: slices read past the page cache into slots. Order, cancelling, recalling, failing, closing, forking."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from expert_store import cut, disk_path, expected_marks, page_marks, wait_for, without_direct_reads, write_expert_store  # noqa: F401

from sparseflow.errors import CapacityError, OptionError, SparseFlowError, StorageError
from sparseflow.evidence import rss_bytes
from sparseflow.layout import PAGE
from sparseflow.leases import Lease, LeaseTable
from sparseflow.packfile import HEADER_BYTES
from sparseflow.store import PackedStore

LAYERS, EXPERTS = 2, 12
SLICE = (3 << 20) + 5 * PAGE  # several parts, none of which is as long as the others


@pytest.fixture
def path(disk_path: Path) -> Path:  # noqa: F811
    return write_expert_store(disk_path / "experts.sfx", LAYERS, EXPERTS, SLICE)


@pytest.fixture
def store(path: Path) -> Iterator[PackedStore]:
    with PackedStore(path, strict=True) as store:
        yield store


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def bytes_of(lease: Lease, position: int, store: PackedStore) -> bytes:
    return ctypes.string_at(int(lease.addresses[position]), store.stride)


def slice_of(path: Path, slice_number: int, stride: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES + slice_number * stride)
        return file.read(stride)


def use(table: LeaseTable, layer: int, *experts: int) -> list[bool]:
    with table.acquire(layer, ids(*experts)) as lease:
        lease.wait()
        return [bool(hit) for hit in lease.hit]


def settle(table: LeaseTable) -> None:
    """Have the table take note of what was read ahead and has arrived."""
    table.prefetch(0, ids(), 0)


def adds_up(table: LeaseTable) -> bool:
    counters = table.counters()
    return counters["admissions"] - counters["evictions"] == table.num_resident <= table.slots


# --- what is read ---


@pytest.mark.parametrize("slice_bytes", [1, PAGE, 3 * PAGE + 1, 5 << 18, (5 << 18) + 1, SLICE])
def test_every_byte_of_every_slice(disk_path: Path, slice_bytes: int) -> None:  # noqa: F811
    path = write_expert_store(disk_path / "sizes.sfx", LAYERS, 3, slice_bytes)
    with PackedStore(path, strict=True) as store:
        table = LeaseTable(store, 4, direct=True)
        for layer in (0, 1, 0):
            with table.acquire(layer, ids(0, 1, 2)) as lease:
                for position in lease.order.tolist():
                    lease.wait_one(position)
                    assert bytes_of(lease, position, store) == slice_of(path, layer * 3 + position, store.stride)


def test_the_page_cache_holds_none_of_it(store: PackedStore) -> None:
    table = LeaseTable(store, 4, direct=True)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            use(table, layer, expert)
            assert store.resident_bytes() == 0


def test_addresses_are_distinct_slots_of_anonymous_memory(store: PackedStore) -> None:
    table = LeaseTable(store, 3, direct=True)
    seen = set()
    for expert in range(EXPERTS):
        with table.acquire(0, ids(expert)) as lease:
            seen.add(int(lease.addresses[0]))
    assert len(seen) <= 3
    with table.acquire(1, ids(0, 1, 2)) as lease:
        addresses = sorted(lease.addresses.tolist())
    assert set(np.diff(addresses)) == {store.stride} and all(address % PAGE == 0 for address in addresses)
    mapped = range(store.address(0, 0), store.address(0, 0) + store.file_bytes)
    assert not any(address in mapped for address in addresses)


def test_order_is_what_is_there_then_what_was_begun_then_the_rest(store: PackedStore) -> None:
    table = LeaseTable(store, 8, direct=True)
    use(table, 0, 3, 5)
    assert table.prefetch(0, ids(4), 0) == 1
    with table.acquire(0, ids(2, 3, 4, 5)) as lease:
        assert lease.hit.tolist() == [False, True, False, True]
        assert lease.order[-1] == 0  # begun last
        assert sorted(lease.order.tolist()) == [0, 1, 2, 3]
        assert lease.order[: lease.num_ready].tolist() in ([1, 3], [1, 2, 3])  # 4 may have arrived
        lease.wait()
    with table.acquire(0, ids(2, 3, 4, 5)) as lease:
        assert (lease.num_ready, lease.order.tolist()) == (4, [0, 1, 2, 3])


# --- letting go of what is being read ---


def test_a_slot_is_read_into_by_one_read_at_a_time(path: Path, store: PackedStore) -> None:
    table = LeaseTable(store, 1, direct=True)
    for turn in range(60):  # the read before is cancelled, with parts of it in progress
        table.acquire(0, ids(turn % EXPERTS)).release()
        with table.acquire(1, ids(turn % EXPERTS)) as lease:
            lease.wait()
            marks = page_marks(int(lease.addresses[0]), store.stride)
            assert np.array_equal(marks, expected_marks(EXPERTS + turn % EXPERTS, store.stride))
        assert adds_up(table) and table.pinned == 0


def test_releasing_does_not_wait_and_frees_the_slots_at_once(store: PackedStore) -> None:
    table = LeaseTable(store, EXPERTS, direct=True)
    for turn in range(20):
        lease = table.acquire(turn % LAYERS, np.arange(EXPERTS, dtype=np.int32))
        lease.release()
        assert table.pinned == 0 and adds_up(table)
    use(table, 0, *range(EXPERTS))
    assert table.num_resident == EXPERTS and adds_up(table)


def test_what_arrived_is_kept_though_nobody_waited_for_it(store: PackedStore) -> None:
    table = LeaseTable(store, 2, direct=True)
    lease = table.acquire(0, ids(1))
    other = table.acquire(0, ids(1))
    other.wait()
    other.release()
    lease.release()
    assert table.resident(0, 1) and use(table, 0, 1) == [True] and adds_up(table)


# --- reading ahead ---


def test_a_prefetched_expert_is_a_miss_that_was_prefetched(path: Path, store: PackedStore) -> None:
    table = LeaseTable(store, 8, direct=True)
    use(table, 0, 0)
    assert table.prefetch(1, ids(5, 2, 5), 0) == 2
    assert table.pinned == 0 and table.leases == 0
    wait_for(lambda: settle(table) or (table.resident(1, 2) and table.resident(1, 5)))
    assert table.prefetch(1, ids(2, 5), 0) == 0  # there already
    with table.acquire(1, ids(2, 5)) as lease:
        assert lease.hit.tolist() == [False, False] and lease.num_ready == 2
        lease.wait()
        for position, expert in enumerate((2, 5)):
            assert bytes_of(lease, position, store) == slice_of(path, EXPERTS + expert, store.stride)
    assert use(table, 1, 2) == [True]
    counters = table.counters()
    assert (counters["prefetches"], counters["prefetched"]) == (2, 2)
    assert (counters["requests"], counters["hits"], counters["misses"]) == (4, 1, 3)
    assert adds_up(table)


def test_what_is_requested_while_it_is_read_ahead_is_waited_for(store: PackedStore) -> None:
    table = LeaseTable(store, EXPERTS, direct=True)
    for _ in range(4):
        assert table.prefetch(0, np.arange(EXPERTS, dtype=np.int32), 0) == EXPERTS
        with table.acquire(0, ids(0, EXPERTS - 1)) as lease:
            lease.wait()
            for position, expert in enumerate((0, EXPERTS - 1)):
                marks = page_marks(int(lease.addresses[position]), store.stride)
                assert np.array_equal(marks, expected_marks(expert, store.stride))
        assert adds_up(table)
        use(table, 1, *range(EXPERTS))  # evicts all of it, arrived or not
        assert table.num_resident == EXPERTS and adds_up(table)


def test_what_was_not_begun_when_its_layer_chose_otherwise_is_given_up(store: PackedStore) -> None:
    table = LeaseTable(store, LAYERS * EXPERTS, direct=True)
    assert table.prefetch(1, np.arange(1, EXPERTS, dtype=np.int32), 0) == EXPERTS - 1
    use(table, 1, 0)
    settled = -1

    def no_more_arrive() -> bool:
        nonlocal settled
        before, settled = settled, table.num_resident
        settle(table)
        time.sleep(0.05)
        return settled == before == table.num_resident

    wait_for(no_more_arrive)
    given_up = [expert for expert in range(EXPERTS) if not table.resident(1, expert)]
    assert given_up == [] or given_up == list(range(given_up[0], EXPERTS))  # the least likely
    assert table.pinned == 0 and adds_up(table)


def test_reading_ahead_does_not_evict_what_it_reads_ahead(store: PackedStore) -> None:
    table = LeaseTable(store, 3, direct=True)
    assert table.prefetch(0, np.arange(EXPERTS, dtype=np.int32), 0) == 3
    with table.acquire(0, ids(0, 1, 2)) as lease:
        assert lease.hit.tolist() == [False] * 3
        lease.wait()
    assert table.counters()["prefetched"] == 3


def test_spare_is_what_is_not_leased(store: PackedStore) -> None:
    table = LeaseTable(store, 4, direct=True)
    with table.acquire(0, ids(0, 1, 2)) as lease:
        assert table.prefetch(1, ids(0), 1) == 0
        assert table.prefetch(1, ids(0), 0) == 1
        lease.wait()
        with table.acquire(0, ids(3)) as other:  # its slot is taken from what was read ahead
            other.wait()
            assert table.pinned == 4
            assert table.prefetch(1, ids(1), 0) == 0
            with pytest.raises(OptionError, match="spare is -1"):
                table.prefetch(1, ids(1), -1)
            assert table.prefetch(1, ids(1), 10**12) == 0
    assert adds_up(table)


@pytest.mark.parametrize(("layer", "expert"), [(LAYERS, 0), (-1, 0), (0, -1), (0, EXPERTS)])
def test_reading_ahead_what_does_not_exist_is_refused(store: PackedStore, layer: int, expert: int) -> None:
    table = LeaseTable(store, 4, direct=True)
    with pytest.raises(OptionError, match="no expert"):
        table.prefetch(layer, ids(0, expert), 0)
    assert table.counters()["prefetches"] == 0


def test_a_mapped_table_reads_nothing_ahead(store: PackedStore) -> None:
    table = LeaseTable(store, 4)
    assert not table.direct and table.prefetch(0, ids(0, 1), 0) == 0
    assert table.counters()["prefetches"] == 0 and store.resident_bytes() == 0


def test_read_ahead_that_fails_is_forgotten(path: Path, store: PackedStore) -> None:
    table = LeaseTable(store, 4, direct=True)
    content = slice_of(path, 3, store.stride)
    cut(path, 3, store.stride)
    assert table.prefetch(0, ids(2, 3), 0) == 2
    wait_for(lambda: settle(table) or table.resident(0, 2))
    wait_for(lambda: table.prefetch(0, ids(3), 0) == 1)  # the failed read holds no slot any more
    with pytest.raises(StorageError, match="expert 3 of layer 0: the file was cut"), table.acquire(0, ids(2, 3)) as lease:
        lease.wait()
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 3 * store.stride)
        file.write(content)
        os.fsync(file.fileno())
    assert use(table, 0, 2, 3) == [True, False] and table.pinned == 0 and adds_up(table)


# --- closing ---


def test_memory_that_is_touched_for_the_first_time_is_told_before(store: PackedStore) -> None:
    table = LeaseTable(store, 4, direct=True)
    told: list[int] = []
    table.watch = told.append
    for experts in ((0, 1), (0, 2), (3, 4), (5, 6)):
        use(table, 0, *experts)
    table.prefetch(1, ids(0), 0)
    assert told == [2 * store.stride, 2 * store.stride, store.stride]  # as many as asked for at most, and none once all are in use

    def refuse(needed: int) -> None:
        raise CapacityError(f"{needed} bytes are too many")

    table = LeaseTable(store, 4, direct=True)
    use(table, 0, 0, 1, 2)
    table.watch = refuse
    with pytest.raises(CapacityError, match=f"{store.stride} bytes are too many"):
        table.acquire(0, ids(0, 4))
    assert table.leases == table.pinned == 0 and table.num_resident == 3
    mapped = LeaseTable(store, 4)
    mapped.watch = refuse
    use(mapped, 0, 0, 1)


def test_a_table_is_closed_after_its_store(path: Path) -> None:
    store = PackedStore(path, strict=True)
    table = LeaseTable(store, 4, direct=True)
    with pytest.raises(SparseFlowError, match="close the store first"):
        table.close()
    lease = table.acquire(0, ids(0))
    with pytest.raises(SparseFlowError, match="leases are still out"):
        store.close()
    lease.release()
    use(table, 0, 0, 1)
    before = table.counters()
    store.close()
    for _ in range(2):
        table.close()
    assert table.counters() == before and (table.slots, table.direct, table.pinned) == (4, True, 0)
    assert not table.resident(0, 0) and table.prefetch(0, ids(0), 0) == 0
    table.observe(0, np.array([[1]], np.int32), np.ones((1, 1), np.float32))
    with pytest.raises(SparseFlowError, match="closed"):
        table.acquire(0, ids(0))


def test_closing_ends_what_is_read_ahead(path: Path) -> None:
    gc.collect()
    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        store = PackedStore(path, strict=True)
        table = LeaseTable(store, EXPERTS, direct=True)
        assert table.prefetch(0, np.arange(EXPERTS, dtype=np.int32), 0) == EXPERTS
        store.close()
        with open(path, "rb"), open(path, "rb"):  # these take the numbers of the descriptors just closed
            table.close()
    assert len(os.listdir("/proc/self/task")) == threads and len(os.listdir("/proc/self/fd")) == descriptors


def test_a_table_in_a_cycle_outlives_its_reads(path: Path) -> None:
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        table = LeaseTable(PackedStore(path, strict=True), EXPERTS, direct=True)
        cycle: list[object] = [table]
        cycle.append(cycle)
        table.prefetch(0, np.arange(EXPERTS, dtype=np.int32), 0)
        del table, cycle
        gc.collect()
    assert len(os.listdir("/proc/self/task")) == threads


def test_closing_gives_the_memory_back(path: Path) -> None:
    before = rss_bytes()
    store = PackedStore(path, strict=True)
    table = LeaseTable(store, LAYERS * EXPERTS, direct=True)
    assert rss_bytes() < before + 8 * store.stride  # slots take memory when they are read into
    table.admit_all()
    size = table.slots * store.stride
    assert rss_bytes() >= before + size * 0.9
    store.close()
    table.close()
    assert rss_bytes() <= before + size * 0.1


def test_closing_while_another_thread_observes(path: Path) -> None:
    chosen, weights = np.tile(np.arange(4, dtype=np.int32), (64, 1)), np.ones((64, 4), np.float32)
    for _ in range(10):
        store = PackedStore(path, strict=True)
        table = LeaseTable(store, 4, direct=True)
        stop, begun, errors = threading.Event(), threading.Event(), []

        def work(table: LeaseTable = table, stop: threading.Event = stop, begun: threading.Event = begun) -> None:
            while not stop.is_set():
                try:
                    table.observe(1, chosen, weights)
                    table.resident(0, 0), table.counters(), table.prefetch(0, ids(1, 2), 0)
                except BaseException as error:
                    errors.append(error)
                begun.set()

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        begun.wait(30)
        while not store.closed:
            try:
                store.close()
            except SparseFlowError as error:
                assert "another thread is inside a call" in str(error)
        table.close()
        stop.set()
        worker.join(30)
        assert errors == [] and not worker.is_alive()


# --- what is refused ---


def test_a_descriptor_that_cannot_be_had_is_a_capacity_error(disk_path: Path) -> None:  # noqa: F811
    with PackedStore(write_expert_store(disk_path / "one.sfx", 1, 1, PAGE), strict=True) as store:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(CapacityError, match="Too many open files"):
                LeaseTable(store, 1, direct=True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert use(LeaseTable(store, 1, direct=True), 0, 0) == [False]


@pytest.mark.parametrize("when", ["open", "read"])
def test_a_file_system_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    without_direct_reads(monkeypatch, when)
    with PackedStore(path, strict=True) as store:
        assert not store.direct
        with pytest.raises(OptionError, match=r"experts\.sfx: its file system has no direct reads"):
            LeaseTable(store, 4, direct=True)
        assert use(LeaseTable(store, 4), 0, 1) == [False]
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- a forked child ---


def in_child(body: Callable[[], object]) -> str:
    """What `body` raises or returns in a forked child, as text."""
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
        child = os.fork()
    if child == 0:
        try:
            text = repr(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(sender, text.encode())
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as answers:
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(answers.read()), daemon=True)
        reader.start()
        reader.join(120)
        if reader.is_alive():
            os.kill(child, 9)
        reader.join()
    os.waitpid(child, 0)
    return answer[0].decode()


def test_a_forked_child_is_refused_and_the_parent_goes_on(path: Path, store: PackedStore) -> None:
    table = LeaseTable(store, 6, direct=True)
    lease = table.acquire(0, ids(0, 1, 2))
    table.prefetch(1, ids(4, 5), 0)
    refusal = f"SparseFlowError: {path}: opened by another process, of which this is a fork; open the model again in this one"
    assert in_child(lambda: table.acquire(0, ids(0))) == refusal
    assert in_child(lambda: table.prefetch(0, ids(0), 0)) == refusal
    assert in_child(lease.wait) == in_child(lambda: lease.wait_one(2)) == refusal
    assert in_child(table.admit_all) == "CapacityError: 24 experts do not fit in a cache of 6; give a larger cache"
    assert in_child(lambda: lease.release() or (lease.released, table.counters()["waves"])) == "(True, 1)"

    def close() -> str:
        lease.release()
        store.close()
        table.close()
        return str(use(LeaseTable(PackedStore(path), 2, direct=True), 0, 3))

    assert in_child(close) == repr("[False]")
    lease.wait()
    assert bytes_of(lease, 2, store) == slice_of(path, 2, store.stride)
    lease.release()
    assert use(table, 1, 4, 5) == [False, False] and table.pinned == 0 and adds_up(table)


def test_a_forked_child_does_not_hold_the_slots(store: PackedStore) -> None:
    table = LeaseTable(store, LAYERS * EXPERTS, direct=True)
    table.admit_all()
    held = int(in_child(rss_bytes))
    assert held < rss_bytes() - 0.9 * table.slots * store.stride


def test_a_child_that_drops_the_table_ends(path: Path) -> None:
    for _ in range(5):
        holder = [LeaseTable(PackedStore(path, strict=True), 4, direct=True)]
        holder[0].prefetch(0, np.arange(EXPERTS, dtype=np.int32), 0)
        assert in_child(holder.clear) == "None"


# --- many threads ---


def test_many_threads_compare_every_byte(disk_path: Path) -> None:  # noqa: F811
    stride = 80 * PAGE
    path = write_expert_store(disk_path / "many.sfx", LAYERS, EXPERTS, stride)
    content = path.read_bytes()
    errors: list[BaseException] = []
    asked = [0] * 6

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(120):
                layer = int(rng.integers(LAYERS))
                table.prefetch(1 - layer, rng.permutation(EXPERTS)[:4].astype(np.int32), int(rng.integers(3)))
                experts = np.sort(rng.choice(EXPERTS, int(rng.integers(1, 5)), replace=False)).astype(np.int32)
                with table.acquire(layer, experts) as lease:
                    asked[seed] += len(experts)
                    for position in lease.order.tolist():
                        if rng.integers(8) == 0:
                            break  # released with reads in progress
                        lease.wait_one(position)
                        start = HEADER_BYTES + (layer * EXPERTS + int(experts[position])) * stride
                        assert bytes_of(lease, position, store) == content[start : start + stride]
                assert table.pinned <= table.slots
        except BaseException as error:
            errors.append(error)

    with PackedStore(path, strict=True) as store:
        table = LeaseTable(store, 7, direct=True)
        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a thread waits for ever"
        assert errors == []
        settle(table)
        counters = table.counters()
        assert (table.pinned, table.leases) == (0, 0) and adds_up(table)
        assert counters["requests"] == counters["hits"] + counters["misses"] == sum(asked)
        assert counters["prefetched"] <= min(counters["prefetches"], counters["misses"])
        assert store.resident_bytes() == 0
