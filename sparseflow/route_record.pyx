# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""RouteRecord: what the leases of a forward tell while it runs, written down so fast that it changes no measurement.

A layer of a small model takes a tenth of a millisecond, and tracing may cost no more than a hundredth of that. So leases write here by
themselves, from code and data that are at work anyway.
"""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from sparseflow.kernels.arrays cimport data_of

import numpy as np

cdef extern from "<sys/resource.h>" nogil:
    enum:
        RUSAGE_SELF
    cdef struct rusage:
        long ru_inblock
    int getrusage(int who, rusage *usage)

SAMPLE_SECONDS = 0.002
"""The system is asked what the disk moved at the end of a layer, unless all experts are resident or it was asked less than this ago:
a question takes a microsecond. Layers of a full-sized model take longer."""

FORWARDS_AT_ONCE = 64
"""Forwards of one token share arrays that hold so many."""

LAYER_VALUES = ("wait_seconds", "asked_at", "arrived_at", "ended_at", "layer_read")
"""Of each layer, in this order at the begin of its row, float64; the times by time.perf_counter()."""

FORWARD_VALUES = ("begun_at", "seconds", "bytes_read")
"""Of each forward, in this order in `of_forwards`; begun_at by time.perf_counter(), bytes_read -1 where the system did not tell."""

cdef enum:
    VALUE_BYTES = 40
    WHOLE_VALUES = 3
    BLOCK = 512     # of ru_inblock, see evidence.disk_bytes_read
    NOT_LEASED = 2


cdef double clock() noexcept nogil:
    """time.perf_counter(), which is this clock on Linux."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef class RouteRecord:
    """Forwards of as many tokens each, at most `capacity` of them.

    Between `begin` and `end` of a forward, leases that are acquired with this record tell it the experts of their layers: one after the
    other, the waves of a layer in ascending order. Of a forward of many tokens, `share_out` has to say who chose what.

    Attributes
        tokens, forwards: how many of each; forwards that were ended.
        rows: structured array [capacity, layers] of LAYER_VALUES, expert_ids int16 and hit bool [tokens, top_k]: what a layer writes lies
            together. of_forwards float64 [capacity, FORWARD_VALUES].
        sample_seconds: see SAMPLE_SECONDS.
    """

    def __init__(self, int layers, int num_experts, int top_k, int tokens, int capacity, bint all_resident):
        """all_resident: no layer moves anything, so the system is not asked between them."""
        self.all_resident = all_resident
        self.sample_seconds = SAMPLE_SECONDS
        self.layers, self.num_experts, self.top_k, self.tokens, self.capacity = layers, num_experts, top_k, tokens, capacity
        row = np.dtype([
            *((name, np.float64) for name in LAYER_VALUES), ("expert_ids", np.int16, (tokens, top_k)), ("hit", np.bool_, (tokens, top_k)),
        ], align=True)
        self.row_bytes = row.itemsize
        self.rows = np.zeros((capacity, layers), row)
        self.of_forwards = np.zeros((capacity, WHOLE_VALUES))
        self.met = np.empty(num_experts if tokens > 1 else 0, np.uint8)
        self.rows_of = <char *>data_of(self.rows)
        self.whole_of = <double *>data_of(self.of_forwards)
        self.met_of = <uint8_t *>data_of(self.met)
        self.layer = -1

    cpdef begin(self, disk_bytes):
        """A forward begins, in place of one that was begun and not ended. disk_bytes: `evidence.disk_bytes_read()` now."""
        if self.forwards == self.capacity:
            raise ValueError(f"a record of {self.capacity} forwards is full")
        self.told = disk_bytes is not None
        self.before = self.counted = disk_bytes if self.told else 0
        self.ask = self.told and not self.all_resident
        self.forward_of = self.rows_of + self.forwards * self.layers * self.row_bytes
        self.layer = -1
        self.begun = True
        self.sampled = self.whole_of[self.forwards * WHOLE_VALUES] = clock()

    cdef int asked(self, int layer, Py_ssize_t n, int num_experts) except -1:
        """A lease is about to ask for n experts of a layer that has so many."""
        cdef double *values
        if num_experts != self.num_experts:
            raise ValueError(f"a record of {self.num_experts} experts a layer, for a store of {num_experts}")
        if not self.begun or not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} of {self.layers} of {'a' if self.begun else 'no'} forward that was begun")
        if layer != self.layer:
            self.values_of = values = <double *>(self.forward_of + layer * self.row_bytes)
            self.ids_of = <int16_t *>(values + VALUE_BYTES // 8)
            self.hit_of = <uint8_t *>(self.ids_of + <Py_ssize_t>self.tokens * self.top_k)
            values[0], values[1], values[4] = 0, clock(), -1
            values[2] = values[3] = values[1]
            self.layer = layer
            self.filled = 0
            if self.tokens > 1:
                memset(self.met_of, NOT_LEASED, self.num_experts)
        if self.tokens == 1 and n > self.top_k - self.filled:
            raise ValueError(f"{n} more experts of layer {layer} for a token that chose {self.top_k} and has {self.filled}")
        return 0

    cdef void leased(self, const int32_t *keys, const uint8_t *hit, Py_ssize_t n) noexcept nogil:
        """The lease has them; keys: their numbers in the file."""
        cdef int32_t expert
        cdef Py_ssize_t i
        for i in range(n):
            expert = keys[i] - self.layer * self.num_experts
            # Only where leases of one record were acquired at once, which is no use of it, but must not write elsewhere.
            if not 0 <= expert < self.num_experts or (self.tokens == 1 and self.filled == self.top_k):
                return
            if self.tokens == 1:
                self.ids_of[self.filled] = <int16_t>expert
                self.hit_of[self.filled] = hit[i]
                self.filled += 1
            else:
                self.met_of[expert] = hit[i]

    cdef void waited(self, double since) noexcept nogil:
        """It stood still for the disk until now."""
        cdef double *values = self.values_of
        values[2] = clock()
        values[0] += values[2] - since

    cdef void released(self) noexcept nogil:
        """It is done with."""
        cdef double *values = self.values_of
        cdef rusage usage
        values[3] = clock()
        if self.ask and values[3] - self.sampled >= self.sample_seconds:
            getrusage(RUSAGE_SELF, &usage)
            values[4] = <int64_t>usage.ru_inblock * BLOCK - self.counted
            self.counted += <int64_t>values[4]
            self.sampled = values[3]

    def share_out(self, int layer, expert_ids, /) -> None:
        """What the tokens of a forward chose in the layer that was leased last, when they are many.

        Parameters
            expert_ids: int32 [tokens, top_k], contiguous, each row ascending.

        Raises ValueError for experts that were not leased.
        """
        cdef const int32_t[:, ::1] ids = expert_ids
        cdef Py_ssize_t place = 0, token, k
        if ids.shape[0] != self.tokens or ids.shape[1] != self.top_k or self.tokens == 1:
            raise ValueError(f"expert ids [{ids.shape[0]}, {ids.shape[1]}] are not those of {self.tokens} tokens with {self.top_k} experts")
        if layer < 0 or layer != self.layer:
            raise ValueError(f"layer {layer} was not leased last")
        for token in range(self.tokens):
            for k in range(self.top_k):
                if not 0 <= ids[token, k] < self.num_experts or self.met_of[ids[token, k]] == NOT_LEASED:
                    raise ValueError(f"expert {ids[token, k]} of layer {layer} was not leased")
                self.ids_of[place] = <int16_t>ids[token, k]
                self.hit_of[place] = self.met_of[ids[token, k]]
                place += 1

    def end(self, disk_bytes, /) -> None:
        """The forward has ended, and counts. disk_bytes: `evidence.disk_bytes_read()` now."""
        cdef double *whole = self.whole_of + self.forwards * WHOLE_VALUES
        if not self.begun:
            raise ValueError("no forward was begun")
        whole[1] = clock() - whole[0]
        whole[2] = <int64_t>disk_bytes - self.before if self.told and disk_bytes is not None else -1
        self.forwards += 1
        self.begun = False


cdef class RouteRecorder:
    """The records of a session's forwards.

    Attributes
        records: list of RouteRecord, in order.
    """

    cdef readonly list records
    cdef RouteRecord last
    cdef int num_layers, num_experts, top_k
    cdef bint all_resident

    def __cinit__(self, *args, **kwargs):
        self.records = []

    def __init__(self, int num_layers, int num_experts, int top_k, bint all_resident):
        """all_resident: as of RouteRecord."""
        self.num_layers, self.num_experts, self.top_k, self.all_resident = num_layers, num_experts, top_k, all_resident

    def begin_forward(self, int tokens, disk_bytes, /) -> RouteRecord:
        """Begin a forward of some tokens; returns what its leases are to be acquired with. Drops one that was begun and never ended.

        disk_bytes: `evidence.disk_bytes_read()` now.
        """
        cdef RouteRecord record = self.last
        if record is None or record.tokens != tokens or record.forwards == record.capacity:
            record = self.last = RouteRecord(self.num_layers, self.num_experts, self.top_k, tokens,
                                             FORWARDS_AT_ONCE if tokens == 1 else 1, self.all_resident)
            self.records.append(record)
        record.begin(disk_bytes)
        return record

    def forget(self) -> None:
        """Drop the records: what is in them was copied. Not during a forward."""
        self.records, self.last = [], None
