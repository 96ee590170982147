"""A state machine over a direct LeaseTable: acquire, read ahead, wait, release and a failing disk in any order.

Reads go on by themselves here, so a model cannot know what has arrived; it knows what may have, and what must. After every step: no
two experts share a slot, every leased slice that was waited for has its bytes, nothing leased was evicted, what is pinned and the
counters add up, and the page cache holds nothing of the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from expert_store import cut, disk_path, expected_marks, page_marks, write_expert_store  # noqa: F401
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sparseflow.errors import CapacityError, StorageError
from sparseflow.layout import PAGE
from sparseflow.leases import Lease, LeaseTable
from sparseflow.packfile import HEADER_BYTES
from sparseflow.store import PackedStore

LAYERS, EXPERTS = 2, 6
ALL = LAYERS * EXPERTS
SLICE = (5 << 18) + PAGE  # two parts


@dataclass(eq=False)
class OpenLease:
    lease: Lease
    keys: list[int]
    there: set[int] = field(default_factory=set)  # waited for


class DirectMachine(RuleBasedStateMachine):
    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__()
        self.path = path
        self.content = content
        self.store = PackedStore(path, strict=True)
        self.open: list[OpenLease] = []
        self.ahead: set[int] = set()  # may have been read ahead, and not requested since
        self.first_bad = ALL  # slices from here on cannot be read now
        self.bad_since: dict[int, tuple[int, int]] = {}  # least and greatest `first_bad` since a key was last begun to be read
        self.waves = self.requests = self.hits = self.prefetches = 0

    @initialize(slots=st.integers(1, ALL))
    def make_table(self, slots: int) -> None:
        self.slots = slots
        self.table = LeaseTable(self.store, slots, direct=True)

    def teardown(self) -> None:
        for held in self.open:
            held.lease.release()
        if self.first_bad < ALL:
            self.disk_recovers()
        if hasattr(self, "table"):
            assert (self.table.pinned, self.table.leases) == (0, 0)
        self.store.close()
        if hasattr(self, "table"):
            self.table.close()

    # --- what the model knows ---

    @property
    def pinned(self) -> set[int]:
        return {key for held in self.open for key in held.keys}

    def resident(self) -> set[int]:
        return {key for key in range(ALL) if self.table.resident(key // EXPERTS, key % EXPERTS)}

    def wait_one(self, held: OpenLease, position: int) -> bool:
        """Wait for an expert and check the outcome, as far as it is certain; whether it arrived."""
        key = held.keys[position]
        low, high = self.bad_since[key]
        try:
            held.lease.wait_one(position)
        except StorageError as error:
            assert f"expert {key % EXPERTS} of layer {key // EXPERTS}: " in str(error)
            assert key >= low and key not in held.there and held.lease.released
            self.open.remove(held)
            return False
        assert key < high or key in held.there
        held.there.add(key)
        return True

    # --- the rules ---

    # Which leases are open may depend on the disk, so nothing that is drawn may depend on them.
    layers = st.integers(0, LAYERS - 1)
    some = st.integers(0, 59)

    @rule(layer=layers, experts=st.sets(st.integers(0, EXPERTS - 1), max_size=EXPERTS))
    def acquire(self, layer: int, experts: set[int]) -> None:
        keys = [layer * EXPERTS + expert for expert in sorted(experts)]
        ids = np.array(sorted(experts), np.int32)
        pinned, resident = self.pinned, self.resident()
        if len(pinned | set(keys)) > self.slots:
            with pytest.raises(CapacityError):
                self.table.acquire(layer, ids)
            return
        held = OpenLease(self.table.acquire(layer, ids), keys)
        for key, hit in zip(keys, held.lease.hit.tolist(), strict=True):
            if key in pinned or key not in self.ahead or key not in resident:
                assert hit == (key in pinned or key in resident)
            if not hit and key not in self.ahead:
                self.bad_since[key] = (self.first_bad, self.first_bad)
        assert sorted(held.lease.order.tolist()) == list(range(len(keys)))
        self.ahead -= set(keys)
        self.waves += 1
        self.requests += len(keys)
        self.hits += int(held.lease.hit.sum())
        self.open.append(held)

    @rule(layer=layers, experts=st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS), spare=st.integers(0, ALL))
    def prefetch(self, layer: int, experts: list[int], spare: int) -> None:
        pinned = self.pinned
        begun = self.table.prefetch(layer, np.array(experts, np.int32), spare)
        fresh = [layer * EXPERTS + expert for expert in experts if layer * EXPERTS + expert not in pinned]
        assert begun <= len(fresh) and (begun == 0 or self.slots - len(pinned) > spare)
        for key in fresh if begun else ():
            low, high = self.bad_since.get(key, (self.first_bad, self.first_bad))
            self.bad_since[key] = (min(low, self.first_bad), max(high, self.first_bad))
            self.ahead.add(key)
        self.prefetches += begun

    def one_of_the_open(self, which: int) -> OpenLease | None:
        return self.open[which % len(self.open)] if self.open else None

    @rule(which=some, position=some)
    def wait_for_one(self, which: int, position: int) -> None:
        held = self.one_of_the_open(which)
        if held is not None and held.keys:
            self.wait_one(held, position % len(held.keys))

    @rule(which=some)
    def wait_in_order_and_release(self, which: int) -> None:
        held = self.one_of_the_open(which)
        if held is not None and all(self.wait_one(held, position) for position in held.lease.order.tolist()):
            held.lease.release()
            self.open.remove(held)
            assert set(held.keys) <= self.resident()

    @rule(which=some)
    def release(self, which: int) -> None:
        held = self.one_of_the_open(which)
        if held is not None:
            held.lease.release()
            self.open.remove(held)

    @rule(which=some)
    def forget_to_release(self, which: int) -> None:
        held = self.one_of_the_open(which)
        if held is not None:
            self.open.remove(held)

    @rule(chosen=st.sets(st.integers(0, EXPERTS - 1), min_size=2, max_size=2), layer=layers)
    def observe(self, layer: int, chosen: set[int]) -> None:
        self.table.observe(layer, np.array([sorted(chosen)], np.int32), np.full((1, 2), 0.5, np.float32))

    def disk_is(self, first_bad: int) -> None:
        self.first_bad = first_bad
        self.bad_since = {key: (min(low, first_bad), max(high, first_bad)) for key, (low, high) in self.bad_since.items()}

    @rule(first_bad=st.integers(0, ALL - 1))
    def disk_fails(self, first_bad: int) -> None:
        if first_bad < self.first_bad:
            cut(self.path, first_bad, self.store.stride)
            self.disk_is(first_bad)

    @precondition(lambda self: self.first_bad < ALL)
    @rule()
    def disk_recovers(self) -> None:
        start = HEADER_BYTES + self.first_bad * self.store.stride
        with open(self.path, "r+b") as file:
            file.seek(start)
            file.write(self.content[start:])
            os.fsync(file.fileno())
        self.store.drop_page_cache()
        self.disk_is(ALL)

    # --- what always holds ---

    @invariant()
    def what_was_waited_for_has_its_bytes(self) -> None:
        slot_of: dict[int, int] = {}
        for held in self.open:
            for key, address in zip(held.keys, held.lease.addresses.tolist(), strict=True):
                assert slot_of.setdefault(key, address) == address
                if key in held.there:
                    assert np.array_equal(page_marks(address, self.store.stride), expected_marks(key, self.store.stride))
        assert len(set(slot_of.values())) == len(slot_of)

    @invariant()
    def the_table_adds_up(self) -> None:
        if not hasattr(self, "table"):
            return
        resident = self.resident()
        assert self.table.num_resident == len(resident) <= self.slots
        assert self.table.pinned == len(self.pinned) <= self.slots
        assert self.table.leases == len(self.open)
        assert {key for held in self.open for key in held.there} <= resident
        counters = self.table.counters()
        assert (counters["waves"], counters["requests"], counters["hits"]) == (self.waves, self.requests, self.hits)
        assert counters["misses"] == self.requests - self.hits
        assert counters["admissions"] - counters["evictions"] == len(resident)
        assert counters["prefetches"] == self.prefetches
        assert counters["prefetched"] <= min(self.prefetches, counters["misses"])
        assert self.store.resident_bytes() == 0


def test_direct_table_keeps_its_promises(disk_path: Path) -> None:  # noqa: F811
    path = write_expert_store(disk_path / "experts.sfx", LAYERS, EXPERTS, SLICE)
    content = path.read_bytes()
    run_state_machine_as_test(
        lambda: DirectMachine(path, content), settings=settings(max_examples=30, stateful_step_count=40, deadline=None)
    )
