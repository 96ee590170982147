"""LeaseTable: hits, misses, eviction, sharing, waiting, and what is left when something fails."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from expert_store import cut, disk_path, expected_marks, mapped_bytes, page_marks, write_expert_store  # noqa: F401

from sparseflow.errors import CapacityError, OptionError, SparseFlowError, StorageError
from sparseflow.layout import PAGE
from sparseflow.leases import LeaseTable
from sparseflow.store import PackedStore

LAYERS, EXPERTS, PAGES = 2, 12, 5


@pytest.fixture
def path(disk_path: Path) -> Path:  # noqa: F811
    return write_expert_store(disk_path / "experts.sfx", LAYERS, EXPERTS, PAGES * PAGE)


@pytest.fixture
def store(path: Path) -> Iterator[PackedStore]:
    with PackedStore(path, strict=True) as store:
        yield store


@dataclass(frozen=True)
class Kind:
    """Tables of one kind: `direct`, or over the mapping."""

    direct: bool

    def table(self, store: PackedStore, slots: int) -> LeaseTable:
        return LeaseTable(store, slots, direct=self.direct)

    def experts_in_memory(self, store: PackedStore, table: LeaseTable) -> int:
        """As the kernel tells it for the mapping; for slots, where the page cache may hold nothing, as the table does."""
        assert store.resident_bytes() == mapped_bytes(store)
        if not self.direct:
            return store.resident_bytes() // store.stride
        assert store.resident_bytes() == 0
        return table.num_resident


@pytest.fixture(params=[False, True], ids=["mapped", "direct"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def use(table: LeaseTable, layer: int, *experts: int) -> list[bool]:
    """Lease, wait, release; the hit flags."""
    with table.acquire(layer, ids(*experts)) as lease:
        lease.wait()
        return [bool(hit) for hit in lease.hit]


def in_threads(*work: Callable[[], None]) -> None:
    """Run each in a thread of its own; the first error of any is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


# --- hits, misses, eviction ---


def test_a_lease_tells_what_it_holds(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    use(table, 1, 3)
    with table.acquire(1, ids(0, 3, 7)) as lease:
        lease.wait()
        assert lease.layer == 1 and len(lease) == 3
        assert (lease.ids.dtype, lease.hit.dtype, lease.addresses.dtype) == (np.int32, np.bool_, np.uint64)
        assert lease.ids.tolist() == [0, 3, 7]
        assert lease.hit.tolist() == [False, True, False]
        assert (lease.addresses.tolist() == [store.address(1, expert) for expert in (0, 3, 7)]) == (not kind.direct)
        for expert, address in zip(lease.ids.tolist(), lease.addresses.tolist(), strict=True):
            assert np.array_equal(page_marks(address, store.stride), expected_marks(EXPERTS + expert, store.stride))
        assert (table.pinned, table.leases, table.num_resident) == (3, 1, 3)
    assert (table.pinned, table.leases, table.num_resident) == (0, 0, 3)


def test_the_arrays_are_the_leases_own(kind: Kind, store: PackedStore) -> None:
    asked = ids(1, 2)
    lease = kind.table(store, 4).acquire(0, asked)
    asked[:] = 9
    assert lease.ids.tolist() == [1, 2]


def test_without_knowledge_the_longest_idle_goes_first(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    use(table, 0, 1)
    use(table, 0, 2)
    use(table, 1, 1)
    use(table, 0, 1)  # now 2 of layer 0 is the oldest
    assert use(table, 0, 5) == [False]
    assert [table.resident(*key) for key in [(0, 1), (0, 2), (1, 1), (0, 5)]] == [True, False, True, True]
    assert store.resident_pages(0, 2)[0] == 0 and kind.experts_in_memory(store, table) == 3
    assert table.counters() == {
        "waves": 5,
        "requests": 5,
        "hits": 1,
        "misses": 4,
        "admissions": 4,
        "admitted_bytes": 4 * store.stride,
        "evictions": 1,
        "prefetches": 0,
        "prefetched": 0,
    }


def test_what_is_leased_is_never_evicted(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    with table.acquire(0, ids(0, 1)) as lease:
        lease.wait()
        for expert in range(2, EXPERTS):
            use(table, 0, expert)
            assert table.resident(0, 0) and table.resident(0, 1)
            assert kind.direct or store.resident_pages(0, 0) == store.resident_pages(0, 1) == (PAGES, PAGES)
            assert kind.experts_in_memory(store, table) == 3
            for expert, address in enumerate(lease.addresses.tolist()):
                assert np.array_equal(page_marks(address, store.stride), expected_marks(expert, store.stride))


def test_hits_of_a_request_are_not_evicted_for_its_misses(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    use(table, 0, 0, 1, 2)  # 0 and 1 are the oldest
    assert use(table, 0, 0, 1, 5) == [True, True, False]
    assert not table.resident(0, 2)


def test_an_expert_shared_by_two_leases_stays_until_both_are_released(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 2)
    first = table.acquire(0, ids(4))
    first.wait()
    second = table.acquire(0, ids(4))
    assert second.hit.tolist() == [True] and table.pinned == 1 and table.leases == 2
    first.release()
    assert use(table, 0, 5) == [False] and use(table, 0, 6) == [False]
    assert table.resident(0, 4)
    second.release()
    assert use(table, 0, 7, 8) == [False, False]
    assert not table.resident(0, 4)


def test_one_slot_serves_one_expert_at_a_time(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 1)
    for expert in range(EXPERTS):
        assert use(table, 0, expert) == [False]
        assert kind.experts_in_memory(store, table) == 1
    assert use(table, 0, EXPERTS - 1) == [True]


def test_no_ids_are_a_lease_of_nothing(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 1)
    with table.acquire(0, ids()) as lease:
        lease.wait()
        assert len(lease) == 0 and lease.addresses.shape == (0,)
    assert table.counters()["requests"] == 0


def test_more_slots_than_experts_are_all_of_them(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 10**6)
    assert table.slots == LAYERS * EXPERTS
    for layer in range(LAYERS):
        use(table, layer, *range(EXPERTS))
    assert table.num_resident == table.slots and table.counters()["evictions"] == 0


def test_more_distinct_experts_than_slots_are_done_in_waves(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 5)
    wanted = np.arange(EXPERTS, dtype=np.int32)
    with pytest.raises(CapacityError, match="12 experts of layer 1 do not fit in a cache of 5"):
        table.acquire(1, wanted)
    seen = []
    for first in range(0, len(wanted), table.slots):
        with table.acquire(1, wanted[first : first + table.slots]) as lease:
            lease.wait()
            for expert, address in zip(lease.ids.tolist(), lease.addresses.tolist(), strict=True):
                assert np.array_equal(page_marks(address, store.stride), expected_marks(EXPERTS + expert, store.stride))
                seen.append(expert)
        assert kind.experts_in_memory(store, table) <= table.slots
    assert seen == wanted.tolist()


def test_wait_one_waits_for_one(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    with table.acquire(0, ids(2, 5)) as lease:
        lease.wait_one(1)
        assert table.resident(0, 5) and not table.resident(0, 2)
        lease.wait_one(1)
        lease.wait()
        assert table.resident(0, 2)
        for position in (-1, 2):
            with pytest.raises(OptionError, match="no position"):
                lease.wait_one(position)
    assert table.counters()["admissions"] == 2


def test_admit_all_makes_everything_resident(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, LAYERS * EXPERTS)
    steps: list[tuple[int, int]] = []
    table.admit_all(lambda done, total: steps.append((done, total)))
    total = LAYERS * EXPERTS * store.stride
    assert steps[-1] == (total, total) and [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert kind.experts_in_memory(store, table) == LAYERS * EXPERTS
    assert table.counters()["requests"] == 0 and table.counters()["admitted_bytes"] == total
    assert use(table, 1, 0, 11) == [True, True]


def test_admit_all_needs_a_slot_for_each(kind: Kind, store: PackedStore) -> None:
    with pytest.raises(CapacityError, match="24 experts do not fit in a cache of 23"):
        kind.table(store, LAYERS * EXPERTS - 1).admit_all()


def test_admit_all_can_be_stopped(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, LAYERS * EXPERTS)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.admit_all(stop)
    assert table.pinned == 0 and table.num_resident == EXPERTS
    assert kind.experts_in_memory(store, table) == EXPERTS
    table.admit_all()
    assert table.num_resident == table.slots


# --- what is refused ---


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 2], "contiguous int32 array"),
        (None, "contiguous int32 array"),
        (np.array([1, 2]), "must be int32"),
        (np.array([1, 2], np.uint32), "must be int32"),
        (np.array([1, 2], ">i4"), "must be int32"),
        (np.array([[1, 2]], np.int32), "must be int32"),
        (np.arange(8, dtype=np.int32)[::2], "contiguous int32 array"),
        (ids(2, 1), "1 follows 2"),
        (ids(1, 1), "1 follows 1"),
        (ids(-1, 1), "no expert -1"),
        (ids(1, EXPERTS), "no expert 12"),
    ],
)
def test_ids_of_another_form_are_refused(kind: Kind, store: PackedStore, wrong: object, message: str) -> None:
    table = kind.table(store, 4)
    with pytest.raises(OptionError, match=message):
        table.acquire(0, wrong)  # type: ignore[arg-type]
    assert table.pinned == 0 and table.counters()["waves"] == 0


def test_a_layer_that_does_not_exist_is_refused(kind: Kind, store: PackedStore) -> None:
    for layer in (-1, LAYERS):
        with pytest.raises(OptionError, match=f"layer {layer}"):
            kind.table(store, 4).acquire(layer, ids(0))


@pytest.mark.parametrize("slots", [0, -3])
def test_a_table_needs_a_slot(kind: Kind, store: PackedStore, slots: int) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        kind.table(store, slots)


def test_read_only_ids_are_taken(kind: Kind, store: PackedStore) -> None:
    asked = ids(0, 1)
    asked.flags.writeable = False
    kind.table(store, 2).acquire(0, asked).wait()


def test_a_lease_is_not_used_after_release(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 2)
    lease = table.acquire(0, ids(0))
    lease.release()
    lease.release()
    assert lease.released and table.pinned == 0
    for use_again in (lease.wait, lambda: lease.wait_one(0), lease.__enter__):
        with pytest.raises(SparseFlowError, match="was released"):
            use_again()


# --- nothing stays pinned ---


def test_what_was_not_waited_for_gives_its_slot_back(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    use(table, 0, 0)
    with table.acquire(0, ids(0, 1, 2)) as lease:
        lease.wait_one(1)
    assert table.resident(0, 0) and table.resident(0, 1) and table.pinned == 0
    assert table.num_resident == 2 or kind.direct and table.num_resident == 3  # it may have arrived meanwhile
    assert kind.experts_in_memory(store, table) == table.num_resident


def test_an_exception_in_the_body_leaves_nothing_pinned(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    with pytest.raises(ZeroDivisionError), table.acquire(0, ids(0, 1)) as lease:
        lease.wait()
        1 / 0  # noqa: B018
    assert lease.released and table.pinned == 0 and table.num_resident == 2


def test_ctrl_c_in_the_body_leaves_nothing_pinned(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    with pytest.raises(KeyboardInterrupt), table.acquire(0, ids(0, 1)) as lease:
        signal.raise_signal(signal.SIGINT)
        lease.wait()
    assert table.pinned == 0


def test_a_lease_that_goes_out_of_use_releases_itself(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 3)
    table.acquire(0, ids(0, 1))
    assert table.pinned == 0 and (table.num_resident == 0 or kind.direct)  # there, it may have arrived meanwhile
    table.acquire(0, ids(0, 1)).wait()
    assert (table.pinned, table.num_resident) == (0, 2)
    cycle: list[object] = [table.acquire(0, ids(1, 2))]
    cycle.append(cycle)
    del cycle
    assert table.pinned == 2
    gc.collect()
    assert table.pinned == 0 and kind.experts_in_memory(store, table) == table.num_resident


def test_a_failed_admission_releases_the_lease(path: Path, kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 6)
    use(table, 0, 0)
    cut(path, 4, store.stride)
    lease = table.acquire(0, ids(0, 2, 4, 5))
    with pytest.raises(StorageError, match=r"expert 4 of layer 0: the file was cut"):
        lease.wait()
    assert lease.released and (table.pinned, table.leases) == (0, 0)
    assert [table.resident(0, expert) for expert in (0, 2, 4, 5)] == [True, True, False, False]
    counters = table.counters()
    assert counters["admissions"] - counters["evictions"] == table.num_resident == 2
    assert kind.experts_in_memory(store, table) == 2
    with table.acquire(0, ids(3, 4)) as lease:
        lease.wait_one(0)
        with pytest.raises(StorageError, match="expert 4 of layer 0"):
            lease.wait_one(1)
        assert lease.released
    assert table.pinned == 0 and use(table, 0, 0, 1, 2, 3) == [True, False, True, True]


def test_two_leases_of_an_expert_that_fails_both_learn_of_it(path: Path, kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    cut(path, 3, store.stride)
    first = table.acquire(0, ids(3))
    second = table.acquire(0, ids(3))
    assert (first.hit[0], second.hit[0], table.pinned) == (False, True, 1)
    with pytest.raises(StorageError):
        first.wait()
    assert table.pinned == 1
    with pytest.raises(StorageError):
        second.wait()
    assert table.pinned == 0 and kind.experts_in_memory(store, table) == 0


def test_the_second_lease_still_waits_when_the_first_is_gone(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    first = table.acquire(0, ids(3))
    second = table.acquire(0, ids(3))
    first.release()
    assert table.pinned == 1 and not table.resident(0, 3)
    second.wait()
    assert table.resident(0, 3)
    marks = page_marks(int(second.addresses[0]), store.stride)
    assert np.array_equal(marks, expected_marks(3, store.stride))


def test_an_expert_that_fails_for_one_lease_is_not_kept_by_another(path: Path, store: PackedStore) -> None:
    table = LeaseTable(store, 4)
    first = table.acquire(0, ids(3))
    second = table.acquire(0, ids(3))
    first.wait()
    cut(path, 3, store.stride)
    with pytest.raises(StorageError):
        second.wait()
    assert table.pinned == 1 and not table.resident(0, 3)
    first.release()
    counters = table.counters()
    assert table.pinned == 0 and counters["admissions"] == counters["evictions"] == 1 and mapped_bytes(store) == 0


def test_a_slot_keeps_what_was_read_whatever_becomes_of_the_file(path: Path, store: PackedStore) -> None:
    table = LeaseTable(store, 4, direct=True)
    first = table.acquire(0, ids(3))
    second = table.acquire(0, ids(3))
    first.wait()
    cut(path, 0, store.stride)
    second.wait()
    for lease in (first, second):
        assert np.array_equal(page_marks(int(lease.addresses[0]), store.stride), expected_marks(3, store.stride))
        lease.release()
    with pytest.raises(StorageError, match="expert 1 of layer 0: the file was cut"):
        use(table, 0, 1, 3)
    assert use(table, 0, 3) == [True] and table.pinned == 0 and table.num_resident == 1


# --- several threads ---


def test_acquire_waits_until_another_thread_releases(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    held = table.acquire(0, ids(0, 1, 2))
    held.wait()
    hits: list[list[bool]] = []
    waiting = threading.Thread(target=lambda: hits.append(use(table, 1, 0, 1)), daemon=True)
    waiting.start()
    time.sleep(0.15)  # longer than one round of waiting
    assert hits == [] and table.pinned == 3
    held.release()
    waiting.join(30)
    assert hits == [[False, False]] and table.pinned == 0


def test_a_large_request_is_not_overtaken_for_ever(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    done = threading.Event()

    def small(expert: int) -> Callable[[], None]:
        def work() -> None:
            while not done.is_set():  # at every moment at least one of the small ones wants a slot
                use(table, 0, expert)

        return work

    def large() -> None:
        try:
            for _ in range(20):
                use(table, 1, 0, 1, 2, 3)
        finally:
            done.set()

    in_threads(small(0), small(1), small(2), large)
    assert table.pinned == 0


def test_waiting_for_oneself_is_an_error(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    with table.acquire(0, ids(0, 1, 2)) as lease:
        with pytest.raises(CapacityError, match="release one first"):
            table.acquire(1, ids(0, 1))
        with table.acquire(0, ids(1, 2, 3)) as other:  # shares two
            other.wait()
            assert table.pinned == 4
        lease.wait()
    assert table.pinned == 0


def test_two_threads_that_wait_for_each_other_are_an_error_in_one(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    both_hold = threading.Barrier(2)
    refused: list[int] = []

    def work(layer: int) -> Callable[[], None]:
        def body() -> None:
            with table.acquire(layer, ids(0, 1)) as lease:
                lease.wait()
                both_hold.wait(30)
                try:
                    with table.acquire(layer, ids(2, 3)) as more:
                        more.wait()
                except CapacityError:
                    refused.append(layer)

        return body

    in_threads(work(0), work(1))
    assert len(refused) == 1 and table.pinned == 0


def test_a_thread_that_holds_a_lease_does_not_queue_behind_those_who_wait_for_it(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 4)
    held = table.acquire(0, ids(0, 1, 2))
    held.wait()
    other = threading.Thread(target=lambda: use(table, 1, 0, 1), daemon=True)
    other.start()
    time.sleep(0.1)
    assert use(table, 0, 0, 3) == [True, False]
    held.release()
    other.join(30)
    assert not other.is_alive() and table.pinned == 0


def test_ctrl_c_ends_the_wait_and_leaves_the_queue(kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 2)
    holds, finish = threading.Event(), threading.Event()

    def hold() -> None:
        with table.acquire(0, ids(0, 1)) as lease:
            lease.wait()
            holds.set()
            finish.wait(30)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    holds.wait(30)
    main = threading.get_ident()
    alarm = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    alarm.start()
    with pytest.raises(KeyboardInterrupt):
        table.acquire(1, ids(0))
    assert (table.pinned, table.leases) == (2, 1)
    finish.set()
    holder.join(30)
    assert use(table, 1, 0, 1) == [False, False] and table.pinned == 0


def test_many_threads_read_what_they_asked_for(path: Path, kind: Kind, store: PackedStore) -> None:
    table = kind.table(store, 7)
    asked = [0] * 4

    def work(seed: int) -> Callable[[], None]:
        def body() -> None:
            rng = np.random.default_rng(seed)
            for _ in range(150):
                layer = int(rng.integers(LAYERS))
                experts = np.sort(rng.choice(EXPERTS, int(rng.integers(1, 6)), replace=False)).astype(np.int32)
                with table.acquire(layer, experts) as lease:
                    asked[seed] += len(experts)
                    if rng.integers(8) == 0:
                        continue  # released without waiting
                    lease.wait()
                    assert table.pinned <= table.slots
                    for expert, address in zip(experts.tolist(), lease.addresses.tolist(), strict=True):
                        marks = page_marks(address, store.stride)
                        assert np.array_equal(marks, expected_marks(layer * EXPERTS + expert, store.stride))

        return body

    in_threads(*(work(seed) for seed in range(4)))
    counters = table.counters()
    assert (table.pinned, table.leases) == (0, 0)
    assert counters["requests"] == counters["hits"] + counters["misses"] == sum(asked)
    assert counters["admissions"] - counters["evictions"] == table.num_resident <= table.slots
    assert kind.experts_in_memory(store, table) == table.num_resident
