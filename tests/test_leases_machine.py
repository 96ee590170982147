"""A state machine over a LeaseTable: acquire, wait, release and a failing disk in any order, against a model in plain Python.

After every step: no more is pinned than there are slots, nothing leased was evicted, the counters add up, the same experts are
resident as in the model, and the kernel holds no more pages of the file than there are slots, mapped or cached.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from expert_store import disk_path, mapped_bytes, write_expert_store  # noqa: F401
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sparseflow.errors import CapacityError, StorageError
from sparseflow.layout import PAGE
from sparseflow.leases import Lease, LeaseTable
from sparseflow.packfile import HEADER_BYTES
from sparseflow.store import PackedStore

LAYERS, EXPERTS, PAGES = 2, 6, 3
ALL = LAYERS * EXPERTS


@dataclass(eq=False)
class OpenLease:
    """A lease and what the model knows of it."""

    lease: Lease
    keys: list[int]
    pending: set[int] = field(default_factory=set)


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.content = path.read_bytes()
        self.store = PackedStore(path, strict=True)
        self.open: list[OpenLease] = []
        self.pins = dict.fromkeys(range(ALL), 0)  # by key: how many leases
        self.admitting: set[int] = set()  # keys with a slot that are not resident
        self.idle: list[int] = []  # resident keys that nobody leases, oldest first
        self.first_bad = ALL  # slices from here on cannot be read
        self.requests = self.hits = self.admissions = self.evictions = 0

    @initialize(slots=st.integers(1, ALL - 1))
    def make_table(self, slots: int) -> None:
        self.slots = slots
        self.table = LeaseTable(self.store, slots)

    def teardown(self) -> None:
        for held in self.open:
            held.lease.release()
        if hasattr(self, "table"):
            assert (self.table.pinned, self.table.leases) == (0, 0)
        self.store.close()
        self.path.write_bytes(self.content)

    # --- the model ---

    @property
    def resident(self) -> set[int]:
        return {key for key, pins in self.pins.items() if pins and key not in self.admitting} | set(self.idle)

    def model_acquire(self, keys: list[int]) -> OpenLease | None:
        """What the lease will be, or None if it cannot be had; `lease` is filled in by the caller."""
        misses = [key for key in keys if not self.pins[key] and key not in self.idle]
        free = self.slots - len(self.resident) - len(self.admitting)
        if len(misses) > free + len([key for key in self.idle if key not in keys]):
            return None
        held = OpenLease(None, keys, set(misses) | (self.admitting & set(keys)))  # type: ignore[arg-type]
        self.idle = [key for key in self.idle if key not in keys]
        for _ in range(len(misses) - free):
            # Nothing was observed, so all are worth the same but for the distance of their layer's next chance.
            here = keys[0] // EXPERTS
            self.idle.remove(max(self.idle, key=lambda key: (key // EXPERTS - here - 1) % LAYERS))
            self.evictions += 1
        for key in keys:
            self.pins[key] += 1
        self.admitting |= set(misses)
        self.requests += len(keys)
        self.hits += len(keys) - len(misses)
        return held

    def model_admit(self, held: OpenLease, key: int) -> bool:
        if key not in held.pending:
            return True
        if key >= self.first_bad:
            if key not in self.admitting:
                self.evictions += 1
            self.admitting.add(key)
            return False
        held.pending.remove(key)
        if key in self.admitting:
            self.admissions += 1
            self.admitting.remove(key)
        return True

    def model_release(self, held: OpenLease) -> None:
        self.open.remove(held)
        for key in held.keys:
            self.pins[key] -= 1
            if self.pins[key] == 0:
                if key in self.admitting:
                    self.admitting.remove(key)
                else:
                    self.idle.append(key)

    # --- the rules ---

    def acquire(self, layer: int, experts: set[int]) -> OpenLease | None:
        ids = np.array(sorted(experts), np.int32)
        held = self.model_acquire([layer * EXPERTS + expert for expert in sorted(experts)])
        if held is None:
            with pytest.raises(CapacityError):
                self.table.acquire(layer, ids)
            return None
        hits = [key not in held.pending or self.pins[key] > 1 for key in held.keys]
        held.lease = self.table.acquire(layer, ids)
        assert held.lease.hit.tolist() == hits
        assert held.lease.addresses.tolist() == [self.store.address(layer, expert) for expert in sorted(experts)]
        held.pending |= {key for key in held.keys if key >= self.first_bad}  # the end of the file took them
        self.open.append(held)
        return held

    experts = st.sets(st.integers(0, EXPERTS - 1), max_size=EXPERTS)
    layers = st.integers(0, LAYERS - 1)

    @rule(layer=layers, experts=experts)
    def lease(self, layer: int, experts: set[int]) -> None:
        self.acquire(layer, experts)

    @rule(layer=layers, experts=experts)
    def lease_and_fail_in_the_body(self, layer: int, experts: set[int]) -> None:
        held = self.acquire(layer, experts)
        if held is not None:
            with pytest.raises(KeyboardInterrupt), held.lease:
                raise KeyboardInterrupt
            assert held.lease.released
            self.model_release(held)

    @rule(layer=layers, experts=experts)
    def lease_wait_and_release(self, layer: int, experts: set[int]) -> None:
        held = self.acquire(layer, experts)
        if held is not None:
            self.wait_for_all(held)
        if held in self.open:
            held.lease.release()
            self.model_release(held)

    def wait_for_all(self, held: OpenLease) -> None:
        if all(self.model_admit(held, key) for key in held.keys):
            held.lease.wait()
        else:
            with pytest.raises(StorageError, match="the file was cut"):
                held.lease.wait()
            assert held.lease.released
            self.model_release(held)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        self.wait_for_all(data.draw(st.sampled_from(self.open)))

    @precondition(lambda self: any(held.keys for held in self.open))
    @rule(data=st.data())
    def wait_one(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.open if held.keys]))
        position = data.draw(st.integers(0, len(held.keys) - 1))
        if self.model_admit(held, held.keys[position]):
            held.lease.wait_one(position)
        else:
            with pytest.raises(StorageError, match="the file was cut"):
                held.lease.wait_one(position)
            assert held.lease.released
            self.model_release(held)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.open))
        held.lease.release()
        held.lease.release()
        self.model_release(held)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def forget_to_release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.open))
        self.model_release(held)
        del held.lease

    @rule(first_bad=st.integers(0, ALL - 1))
    def disk_fails(self, first_bad: int) -> None:
        self.first_bad = min(self.first_bad, first_bad)
        os.truncate(self.path, HEADER_BYTES + (self.first_bad * PAGES + 1) * PAGE)

    @precondition(lambda self: self.first_bad < ALL)
    @rule()
    def disk_recovers(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(HEADER_BYTES + self.first_bad * PAGES * PAGE)
            file.write(self.content[file.tell() :])
        self.store.drop_page_cache()
        self.first_bad = ALL

    # --- what always holds ---

    @invariant()
    def table_agrees_with_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.pinned == sum(pins > 0 for pins in self.pins.values()) <= self.slots
        assert self.table.leases == len(self.open)
        resident = {key for key in range(ALL) if self.table.resident(key // EXPERTS, key % EXPERTS)}
        assert resident == self.resident
        assert self.table.num_resident == len(resident) <= self.slots
        counters = self.table.counters()
        assert (counters["requests"], counters["hits"]) == (self.requests, self.hits)
        assert counters["requests"] == counters["hits"] + counters["misses"]
        assert (counters["admissions"], counters["evictions"]) == (self.admissions, self.evictions)
        assert counters["admissions"] - counters["evictions"] == len(resident)

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "table"):
            assert mapped_bytes(self.store) <= self.slots * self.store.stride
            assert self.store.resident_bytes() <= self.slots * self.store.stride


def test_lease_table_agrees_with_its_model(disk_path: Path) -> None:  # noqa: F811
    path = write_expert_store(disk_path / "experts.sfx", LAYERS, EXPERTS, PAGES * PAGE)
    run_state_machine_as_test(
        lambda: LeaseMachine(path), settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
