# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Lease: some experts, pinned. LeaseTable (leases.pyx) makes it; pins.pyx does the work."""

from __future__ import annotations

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EIO
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc

from sparseflow.extents cimport extents_lost, pthread_t
from sparseflow.pins cimport table_address, table_admit, table_ready, table_release
from sparseflow.route_record cimport clock
from sparseflow.slots cimport Pins, Table, table_forked, table_inherit
from sparseflow.store cimport PackedStore

import numpy as np

from sparseflow.errors import OptionError, SparseFlowError

cdef extern from "<pthread.h>" nogil:
    pthread_t pthread_self() noexcept

cdef object _empty = np.empty
cdef object _int32 = np.dtype(np.int32)
cdef object _bool = np.dtype(np.bool_)
cdef object _uint64 = np.dtype(np.uint64)


cdef int check_process(PackedStore store, Table* table) except -1:
    if table_forked(table) and not table_inherit(table):
        raise SparseFlowError(
            f"{store.path}: opened by another process, of which this is a fork; open the model again in this one")
    return 0


# Holds nothing that could refer back to it; so the garbage collector never clears it before __dealloc__ releases.
@cython.no_gc
cdef class Lease:
    """Some experts of one layer, pinned until released. Made by `LeaseTable.acquire`; a context manager that releases.

    A lease that goes out of use releases itself, so an exception anywhere leaves nothing pinned.

    Attributes
        layer: the layer.
        ids: int32 [n], ascending.
        hit: bool [n], whether the expert had a slot when this was acquired: it was in memory, or on its way there for
            another lease (then it is still waited for here). One that had been prefetched is no hit: the disk was read for it.
        num_hits: how many of them.
        order: int32 [n], positions in `ids` in the order in which waiting for them is shortest: the first `num_ready` were in memory
            when this was acquired.
        addresses: uint64 [n], where each slice begins. The bytes are there once waited for, until release.
    """

    def __cinit__(self, PackedStore store not None, int layer, Py_ssize_t n):
        cdef Pins* pins = &self.pins
        self.store = store
        self.layer = layer
        self.ids = _empty(n, _int32)
        self.hit = _empty(n, _bool)
        self.order = _empty(n, _int32)
        self.addresses = _empty(n, _uint64)
        pins.keys = <int32_t*>malloc(n * (3 * sizeof(int32_t) + 4) + 1)
        if pins.keys == NULL:
            raise MemoryError
        pins.slots = pins.keys + n
        pins.dropping = pins.slots + n
        pins.hit = <uint8_t*>(pins.dropping + n)
        pins.pending = pins.hit + n
        pins.found = pins.pending + n
        pins.turn = pins.found + n
        pins.n = n
        pins.thread = pthread_self()

    def __dealloc__(self):
        if self.pins.held:
            with nogil:
                table_release(self.table, &self.pins)
        free(self.pins.keys)

    cdef int tell(self) except -1:
        """Fill the arrays, once reserved."""
        cdef Pins* pins = &self.pins
        cdef Py_ssize_t first = <Py_ssize_t>self.layer * self.store.num_experts
        cdef Py_buffer ids, hit, order, addresses
        cdef Py_ssize_t i, place = 0
        cdef int turn
        PyObject_GetBuffer(self.ids, &ids, PyBUF_WRITABLE)
        PyObject_GetBuffer(self.hit, &hit, PyBUF_WRITABLE)
        PyObject_GetBuffer(self.order, &order, PyBUF_WRITABLE)
        PyObject_GetBuffer(self.addresses, &addresses, PyBUF_WRITABLE)
        for i in range(pins.n):
            self.num_hits += pins.hit[i]
            (<int32_t*>ids.buf)[i] = pins.keys[i] - first
            (<uint8_t*>hit.buf)[i] = pins.hit[i]
            (<uint64_t*>addresses.buf)[i] = table_address(self.table, pins, i)
            pins.turn[i] = 0 if table_ready(self.table, pins, i) else 2 - pins.found[i]
        # What is there, what was being read before, what is read from now on; each in ascending id.
        for turn in range(3):
            for i in range(pins.n):
                if pins.turn[i] == turn:
                    (<int32_t*>order.buf)[place] = i
                    place += 1
            if turn == 0:
                self.num_ready = place
        PyBuffer_Release(&ids)
        PyBuffer_Release(&hit)
        PyBuffer_Release(&order)
        PyBuffer_Release(&addresses)
        if self.record is not None:
            self.record.leased(pins.keys, pins.hit, pins.n)
        return 0

    cdef int check_held(self) except -1:
        if not self.pins.held:
            raise SparseFlowError(f"a lease of {self.pins.n} experts of layer {self.layer} was released; acquire it again")
        return check_process(self.store, self.table)

    cdef int fail(self, Py_ssize_t i, int number) except -1:
        error = self.store.error(self.pins.keys[i], number)
        self.release()
        raise error

    @property
    def released(self) -> bool:
        """True once this lease pins nothing."""
        return not self.pins.held

    def wait(self) -> None:
        """Return when all experts of the lease are in memory. The disk is waited for in ascending id, without the GIL.

        Raises
            StorageError: the disk failed, for this lease or for another that shares the expert. The lease is released;
                experts that did arrive stay cached, the others hold no slot.
            SparseFlowError: released already, or of a direct table of the process that this one was forked from.
        """
        cdef Py_ssize_t i
        self.check_held()
        for i in range(self.pins.n):
            self.admit(i)

    def wait_one(self, i: int) -> None:
        """Return when expert `ids[i]` is in memory. Raises as `wait`, and OptionError for a position that is not there."""
        self.check_held()
        if not 0 <= i < self.pins.n:
            raise OptionError(f"there is no position {i} in a lease of {self.pins.n} experts")
        self.admit(i)

    cdef int admit(self, Py_ssize_t position) except -1:
        cdef int number = 0
        cdef double started
        if self.pins.pending[position]:
            with nogil:
                started = clock()
                number = table_admit(self.table, &self.pins, position)
            if self.record is not None and self.pins.turn[position] != 0:
                self.record.waited(started)
        if number != 0:
            self.fail(position, number)
        return 0

    def wait_for(self, start: int, stop: int) -> None:
        """Return when the experts at positions order[start:stop] are in memory. Raises as `wait`, and OptionError for places that
        are not there."""
        cdef const int32_t[::1] order = self.order
        cdef Py_ssize_t first = start, last = stop, place
        self.check_held()
        if not 0 <= first <= last <= self.pins.n:
            raise OptionError(f"there are no places {start} to {stop} in a lease of {self.pins.n} experts")
        for place in range(first, last):
            self.admit(order[place])

    def release(self) -> None:
        """Unpin the experts; those that were not waited for lose their slot. Does nothing when released already."""
        cdef Py_ssize_t i
        cdef bint dropping = False
        if self.pins.held:
            for i in range(self.pins.n):
                dropping = dropping or self.pins.pending[i]
            if dropping:
                with nogil:
                    table_release(self.table, &self.pins)
            else:
                table_release(self.table, &self.pins)
            if self.record is not None:
                self.record.released()

    def __enter__(self) -> Lease:
        self.check_held()
        return self

    def __exit__(self, kind, *exception) -> None:
        """Releases. Raises StorageError when what was computed meanwhile is void, because a page was lost under it."""
        lost = extents_lost(&self.store.extents)        # while the store cannot be closed
        self.release()
        if kind is None and lost >= 0:
            raise self.store.error(lost, EIO)

    def __len__(self) -> int:
        return self.pins.n
