# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""LeaseTable: a bounded cache of experts over a PackedStore. It checks and explains; slots.pyx and pins.pyx do the work.

    with table.acquire(layer, ids) as lease:    # pins what is there, starts reading the rest
        lease.wait()                            # all of it is there
        ...compute with lease.addresses...
                                                # unpinned

Thread-safety
    Any thread may acquire. A lease is used by one thread at a time, and counts for the thread that acquired it. No Python
    code runs and no Python object is made while the table is locked, so neither Ctrl-C nor the garbage collector can
    leave it half-changed.

Waiting
    When leases of other threads pin too many slots, `acquire` waits, first come, first served, until enough are released.
    Do not acquire while holding a lease whose slots the new one needs: the thread that waits cannot release it. Where
    waiting could never end (this thread's own leases leave too few slots, or every thread that holds a lease waits),
    CapacityError is raised instead.
"""

from __future__ import annotations

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t
from libc.string cimport strcmp

from sparseflow.extents cimport extents_enter, extents_leave
from sparseflow.lease cimport Lease as CLease, check_process
from sparseflow.pins cimport CLOSED, NEVER, WAIT, Outcome, table_fetch, table_leave_queue, table_recheck, table_reserve
from sparseflow.prefetch cimport table_prefetch
from sparseflow.route_record cimport RouteRecord
from sparseflow.slots cimport (
    MOST_AHEAD, Pins, Table, Totals, Waiter, table_close, table_destroy, table_init, table_observe, table_resident, table_totals,
)
from sparseflow.store cimport PackedStore

import os

import numpy as np

from sparseflow.errors import CapacityError, OptionError, SparseFlowError
from sparseflow.lease import Lease       # the same class, for those who import it from here

cdef enum:
    ADMIT_ALL_EXPERTS = 16      # asked for at once in resident mode: enough to keep the disk busy


# Not cleared by the garbage collector, so that the store lives until the threads that read from it are gone.
@cython.no_gc_clear
cdef class LeaseTable:
    """A bounded cache of the experts of a store; the one least likely to be used again soon goes first (policy.pyx).

    Parameters
        store: the experts. One table per store: two would evict each other's experts.
        slots: how many may be in memory at once, each taking `store.stride` bytes. More than there are experts is taken
            as all of them.
        direct: read slices past the page cache into memory of the table's own (readers.pyx) instead of admitting pages of
            the store's mapping. Only with a store that is `direct`.

    Attributes
        store, slots, direct
        watch: called with bytes of memory before slots are used for the first time, when `direct`; what it raises keeps the lease from
            being acquired. None for nothing.

    Raises
        OptionError: fewer than one slot, or `direct` with a store that is not.
        CapacityError: the system does not give the memory or the threads.
    """

    cdef Table table
    cdef readonly PackedStore store
    cdef public object watch

    def __cinit__(self, PackedStore store not None, slots: int, direct: bool = False):
        cdef int number
        if slots < 1:
            raise OptionError(f"a cache of {slots} experts; it takes at least 1")
        if store.closed:
            raise SparseFlowError(f"{store.path}: the store is closed, or was never opened; open it with PackedStore")
        if direct and not store.direct:
            raise OptionError(f"{store.path}: its file system has no direct reads (O_DIRECT); make the table without `direct`")
        slots = min(slots, store.num_layers * store.num_experts)
        self.store = store
        number = table_init(&self.table, &store.extents, store.num_layers, slots, direct)
        if number != 0:
            raise CapacityError(
                f"a cache of {slots} experts takes {slots * store.stride} bytes, which cannot be had ({os.strerror(number)});"
                " give a smaller cache")

    def __dealloc__(self):
        table_destroy(&self.table)

    def close(self) -> None:
        """Free the slots, once the store is closed. Does nothing when done already.

        Raises
            SparseFlowError: the store is still open.
        """
        if not self.store.closed:
            raise SparseFlowError(f"{self.store.path}: a table of leases is closed after its store; close the store first")
        with nogil:
            table_close(&self.table)

    @property
    def direct(self) -> bool:
        """Whether slices are read past the page cache."""
        return self.table.direct

    @property
    def slots(self) -> int:
        """How many experts may be in memory at once."""
        return self.table.num_slots

    @property
    def pinned(self) -> int:
        """Slots that some lease holds now."""
        cdef Totals totals = table_totals(&self.table)
        return self.table.num_slots - totals.idle - totals.free - totals.dropping

    @property
    def leases(self) -> int:
        """Leases that are not released."""
        return table_totals(&self.table).leases

    @property
    def num_resident(self) -> int:
        """Experts that are in memory now."""
        return table_totals(&self.table).resident

    def resident(self, layer: int, expert: int) -> bool:
        """Whether an expert is in memory now. Raises OptionError if there is no such expert."""
        return table_resident(&self.table, self.store.slice_number(layer, expert))

    def counters(self) -> dict[str, int]:
        """What happened since the table was made, all of one instant.

        waves: leases acquired. requests = hits + misses: the experts in them, each once per lease. admissions, and
        admitted_bytes by the stride: experts read into a slot. evictions: experts that lost their slot to another, or to
        a failing disk. admissions - evictions = experts in memory. `admit_all` counts among the admissions only. prefetches:
        reads begun ahead; prefetched: the misses that such a read was for.

        This is what was asked for. What the disk moved is in the operating system's books: see evidence.py.
        """
        cdef Totals totals = table_totals(&self.table)
        return {
            "waves": totals.waves,
            "requests": totals.requests,
            "hits": totals.hits,
            "misses": totals.requests - totals.hits,
            "admissions": totals.admissions,
            "admitted_bytes": totals.admissions * self.store.stride,
            "evictions": totals.evictions,
            "prefetches": totals.prefetches,
            "prefetched": totals.prefetched,
        }

    def acquire(self, layer: int, ids, RouteRecord record=None) -> Lease:
        """Pin some experts of one layer: all of them, or none and an error. On return, the first of what is not there is being
        read; the rest follows as experts are waited for, so that a long request does not wait for the disk here.

        Parameters
            layer: the layer.
            ids: int32 [n], contiguous, ascending, distinct.
            record: is told what the lease met, how long it waited for the disk, and when it was released.

        Waits while leases of other threads pin too many slots (see the module's text); Ctrl-C ends the wait.

        Raises
            OptionError: ids of another form, or experts that do not exist.
            CapacityError: more ids than slots (ask for them in waves of at most `slots`), or waiting could never end.
            SparseFlowError: the store is closed, or this is a fork of a process that was using it, or of one whose table is direct.
            ValueError: what the record cannot take: no forward was begun, its token chose fewer, or it is of another model.
        """
        cdef CLease lease = self.request(layer, ids)
        if record is not None:
            record.asked(lease.layer, lease.pins.n, self.store.num_experts)
            lease.record = record
        return self.reserve(lease, True)

    def observe(self, layer: int, chosen, router_weights) -> None:
        """Tell what tokens chose in a layer, before acquiring it: the table learns from it what to keep.

        Parameters
            layer: the layer.
            chosen: int32 [tokens, top_k], expert ids, each row ascending and distinct.
            router_weights: float32 [tokens, top_k].

        Raises
            OptionError: a layer or experts that do not exist, or arrays of different shape.
        """
        cdef const int32_t[:, ::1] ids
        cdef const float[:, ::1] weights
        cdef int32_t number
        cdef Py_ssize_t token, k
        cdef int num_experts = self.store.num_experts
        # With a slot for every expert nothing is ever evicted.
        if self.table.slots == NULL or self.table.num_slots == self.table.extents.count:
            return
        self.store.slice_number(layer, 0)
        number = layer
        ids, weights = chosen, router_weights
        if ids.shape[0] != weights.shape[0] or ids.shape[1] != weights.shape[1]:
            raise OptionError(f"ids [{ids.shape[0]}, {ids.shape[1]}] with weights [{weights.shape[0]}, {weights.shape[1]}]")
        for token in range(ids.shape[0]):
            for k in range(ids.shape[1]):
                if not (-1 if k == 0 else ids[token, k - 1]) < ids[token, k] < num_experts:
                    raise OptionError(f"layer {layer}: expert {ids[token, k]} of {num_experts}, out of range or of order")
        if ids.shape[0] == 0 or ids.shape[1] == 0:
            return
        if extents_enter(self.table.extents):                       # nor may the table be closed meanwhile
            with nogil:
                table_observe(&self.table, number, &ids[0, 0], &weights[0, 0], ids.shape[0], ids.shape[1])
                extents_leave(self.table.extents)

    def prefetch(self, layer: int, ids, spare: int) -> int:
        """Begin to read experts that are likely to be requested soon, when the disk has nothing more urgent to do.

        They take the slots that are worth least, are evicted like any other, and count as misses when they are requested
        after all. What has not begun to be read when a lease of the same layer is acquired without it is given up.

        Parameters
            layer: the layer.
            ids: int32 [n], contiguous, likeliest first. Those that have a slot already are left alone.
            spare: stop when no more slots than this are free or not leased.

        Returns how many reads that began: none unless the table is `direct`.

        Raises
            OptionError: a layer or experts that do not exist, or a negative `spare`.
        """
        cdef const int32_t[::1] experts = ids
        cdef int32_t keys[MOST_AHEAD]
        cdef Py_ssize_t first = self.store.slice_number(layer, 0), n = min(<Py_ssize_t>MOST_AHEAD, experts.shape[0]), i
        cdef int32_t begun = 0, kept
        if spare < 0:
            raise OptionError(f"spare is {spare}: give a whole number of at least 0")
        kept = min(spare, self.table.num_slots)
        for i in range(n):
            if not 0 <= experts[i] < self.store.num_experts:
                raise OptionError(f"there is no expert {experts[i]} in layer {layer}, which has {self.store.num_experts}")
            keys[i] = first + experts[i]
        check_process(self.store, &self.table)
        self.grow(n)
        if extents_enter(self.table.extents):                       # the store stays open meanwhile
            with nogil:
                begun = table_prefetch(&self.table, keys, n, kept)
                extents_leave(self.table.extents)
        return begun

    def admit_all(self, progress=None) -> None:
        """Bring every expert into memory, in the order of the file: the resident mode.

        Parameters
            progress: called as progress(bytes so far, bytes in all) after every few experts; may raise to stop.

        Raises
            CapacityError: fewer slots than experts.
            StorageError: the disk failed.
        """
        cdef Py_ssize_t stride = self.store.stride, count = self.table.extents.count, done = 0
        if self.table.num_slots < count:
            raise CapacityError(f"{count} experts do not fit in a cache of {self.table.num_slots}; give a larger cache")
        for layer in range(self.store.num_layers):
            for first in range(0, self.store.num_experts, ADMIT_ALL_EXPERTS):
                ids = np.arange(first, min(first + ADMIT_ALL_EXPERTS, self.store.num_experts), dtype=np.int32)
                with self.reserve(self.request(layer, ids), False) as lease:
                    lease.wait()
                done += len(ids)
                if progress is not None:
                    progress(done * stride, count * stride)

    cdef CLease request(self, layer, ids):
        """A lease that holds nothing yet, its ids checked."""
        cdef Py_ssize_t first = self.store.slice_number(layer, 0), i
        cdef int num_experts = self.store.num_experts
        cdef Py_buffer buffer
        cdef int32_t* expert
        cdef CLease lease
        try:
            PyObject_GetBuffer(ids, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        except (TypeError, ValueError, BufferError) as error:
            raise OptionError(f"expert ids must be a contiguous int32 array [n]; {error}") from error
        try:
            if buffer.ndim != 1 or strcmp(buffer.format, b"i") != 0:
                raise OptionError(
                    f"expert ids must be int32 [n], not {buffer.ndim} dimensions of type {buffer.format.decode()!r}")
            lease = CLease(self.store, layer, buffer.shape[0])
            lease.owner = self
            lease.table = &self.table
            expert = <int32_t*>buffer.buf
            for i in range(lease.pins.n):
                if not 0 <= expert[i] < num_experts:
                    raise OptionError(f"there is no expert {expert[i]} in layer {layer}, which has {num_experts}")
                if i > 0 and expert[i] <= expert[i - 1]:
                    raise OptionError(
                        f"expert ids must be ascending and distinct, but {expert[i]} follows {expert[i - 1]}")
                lease.pins.keys[i] = first + expert[i]
        finally:
            PyBuffer_Release(&buffer)
        self.grow(lease.pins.n)
        return lease

    cdef int grow(self, Py_ssize_t experts) except -1:
        """Say that so many slots may be taken."""
        cdef Py_ssize_t fresh = min(experts, <Py_ssize_t>(self.table.num_slots - self.table.touched))
        if self.watch is not None and self.table.direct and fresh > 0:
            self.watch(fresh * self.store.stride)
        return 0

    cdef CLease reserve(self, CLease lease, bint counted):
        cdef Pins* pins = &lease.pins
        cdef Waiter waiter
        cdef Outcome outcome
        cdef Py_ssize_t i
        cdef bint pending = False
        check_process(self.store, &self.table)
        if pins.n > self.table.num_slots:
            raise CapacityError(
                f"{pins.n} experts of layer {lease.layer} do not fit in a cache of {self.table.num_slots};"
                " ask for fewer at once or give a larger cache")
        waiter.thread = pins.thread
        waiter.queued = False
        outcome = CLOSED
        if extents_enter(self.table.extents):                       # it is not closed while this waits
            try:
                outcome = table_reserve(&self.table, pins, &waiter, counted, False)
                while outcome == WAIT:
                    PyErr_CheckSignals()        # only while nothing is pinned: no error may come between here and the fetch
                    with nogil:
                        outcome = table_reserve(&self.table, pins, &waiter, counted, True)
            finally:
                table_leave_queue(&self.table, &waiter)
                extents_leave(self.table.extents)
        if outcome == CLOSED:
            raise SparseFlowError(f"{self.store.path}: the store is closed; open it again with PackedStore")
        if outcome == NEVER:
            raise CapacityError(
                f"{pins.n} experts of layer {lease.layer} do not fit in a cache of {self.table.num_slots} beside the leases"
                " that this thread holds, and no other thread can release any; release one first or give a larger cache")
        table_recheck(&self.table, pins)
        for i in range(pins.n):
            pending = pending or pins.pending[i]
        if pending:
            with nogil:
                table_fetch(&self.table, pins)
        lease.tell()
        return lease
