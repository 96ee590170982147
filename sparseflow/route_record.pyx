# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""RouteRecord: what the layers of a forward tell while it runs, written down so fast that it changes no measurement.

A layer of a small model takes a tenth of a millisecond, and tracing may cost no more than a hundredth of that.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

import numpy as np

from sparseflow.evidence import disk_bytes_read
from sparseflow.kernels.arrays cimport data_of

SAMPLE_SECONDS = 0.002
"""The system is asked what the disk moved at the end of a layer, unless all experts are resident or it was asked less than this ago:
a question takes up to 10 microseconds. Layers of a full-sized model take longer."""

LAYER_VALUES = ("wait_seconds", "bytes_asked", "asked_at", "arrived_at", "ended_at", "layer_read")
"""Of each layer, in this order in `of_layers`; the times by time.perf_counter()."""

cdef enum:
    VALUES = 6


cdef class RouteRecord:
    """Forwards of as many tokens each, at most `capacity` of them.

    Attributes
        tokens, forwards: how many of each; forwards that were ended.
        expert_ids int16, hit bool [capacity, layers, tokens, top_k]; of_layers float64 [capacity, layers, LAYER_VALUES].
    """

    cdef readonly int tokens, forwards, capacity
    cdef readonly object expert_ids, hit, of_layers
    cdef int layers, top_k
    cdef int16_t *ids_of
    cdef uint8_t *hit_of
    cdef double *values_of
    cdef bint ask
    cdef double sampled
    cdef int64_t counted

    def __init__(self, int layers, int tokens, int top_k, int capacity):
        self.layers, self.tokens, self.top_k, self.capacity = layers, tokens, top_k, capacity
        self.expert_ids = np.zeros((capacity, layers, tokens, top_k), np.int16)
        self.hit = np.zeros((capacity, layers, tokens, top_k), np.bool_)
        self.of_layers = np.zeros((capacity, layers, VALUES))
        self.ids_of = <int16_t *>data_of(self.expert_ids)
        self.hit_of = <uint8_t *>data_of(self.hit)
        self.values_of = <double *>data_of(self.of_layers)

    def begin(self, double now, disk_bytes) -> None:
        """A forward begins, in place of one that was begun and not ended. disk_bytes: `evidence.disk_bytes_read()` now, or None not
        to ask for it after each layer."""
        if self.forwards == self.capacity:
            raise ValueError(f"a record of {self.capacity} forwards is full")
        self.ask = disk_bytes is not None
        self.counted = disk_bytes or 0
        self.sampled = now

    def add_layer(
        self, int layer, expert_ids, hit, double wait_seconds, int64_t bytes_asked, double asked_at, double arrived_at, double now
    ) -> None:
        """What one layer of the forward did, as soon as it is done.

        Parameters
            expert_ids: int32 [tokens, top_k], contiguous, each row ascending.
            hit: bool, as many and contiguous: whether that expert was in memory when its wave of leases was acquired.
            wait_seconds: how long this layer stood still for the disk.
            bytes_asked: distinct experts of the layer times the bytes of one.
            asked_at, arrived_at, now: time.perf_counter() when the experts were asked for, when the last was there, and at the end.

        Raises ValueError for a layer that is not there, or arrays of another size.
        """
        cdef Py_buffer ids_buffer, hit_buffer
        cdef Py_ssize_t row = <Py_ssize_t>self.forwards * self.layers + layer, pairs = <Py_ssize_t>self.tokens * self.top_k, i
        cdef int16_t *ids = self.ids_of + row * pairs
        cdef double *values = self.values_of + row * VALUES
        if not 0 <= layer < self.layers:
            raise ValueError(f"there is no layer {layer} among {self.layers}")
        PyObject_GetBuffer(expert_ids, &ids_buffer, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(hit, &hit_buffer, PyBUF_SIMPLE)
            try:
                if ids_buffer.len != pairs * 4 or hit_buffer.len != pairs:
                    raise ValueError(f"{ids_buffer.len} bytes of expert ids and {hit_buffer.len} flags are not those of {self.tokens} "
                                     f"tokens with {self.top_k} experts")
                for i in range(pairs):
                    ids[i] = <int16_t>(<const int32_t *>ids_buffer.buf)[i]
                memcpy(self.hit_of + row * pairs, hit_buffer.buf, pairs)
            finally:
                PyBuffer_Release(&hit_buffer)
        finally:
            PyBuffer_Release(&ids_buffer)
        values[0], values[1], values[2], values[3], values[4], values[5] = wait_seconds, bytes_asked, asked_at, arrived_at, now, -1
        if self.ask and now - self.sampled >= SAMPLE_SECONDS:
            self.sample(values, now)

    cdef int sample(self, double *values, double now) except -1:
        told = disk_bytes_read()
        self.ask = told is not None
        if self.ask:
            values[5] = <int64_t>told - self.counted
            self.counted = told
            self.sampled = now
        return 0

    def end(self) -> None:
        """The forward has ended, and counts."""
        self.forwards += 1

    def clear(self) -> None:
        """Begin anew: what was recorded has been copied."""
        self.forwards = 0
