"""RouteRecord for lease.pyx, whose leases write to it."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t


cdef double clock() noexcept nogil      # seconds, as time.perf_counter()


cdef class RouteRecord:
    cdef readonly int tokens, forwards, capacity
    cdef readonly object rows, of_forwards
    cdef public double sample_seconds
    cdef int layers, num_experts, top_k
    cdef int layer              # that was asked for last; -1: none of this forward
    cdef char *rows_of
    cdef char *forward_of       # the rows of this forward
    cdef double *values_of      # of this layer's row
    cdef int16_t *ids_of
    cdef uint8_t *hit_of
    cdef Py_ssize_t row_bytes
    cdef Py_ssize_t filled      # experts of this layer that are in its row, of a single token
    cdef object met
    cdef uint8_t *met_of        # [num_experts] 1 or 0: leased for this layer, and hit or not; of many tokens
    cdef double *whole_of
    cdef bint all_resident, told, ask, begun
    cdef double sampled
    cdef int64_t before, counted

    cpdef begin(self, disk_bytes)
    cdef int asked(self, int layer, Py_ssize_t n, int num_experts) except -1
    cdef void leased(self, const int32_t *keys, const uint8_t *hit, Py_ssize_t n) noexcept nogil
    cdef void waited(self, double since) noexcept nogil
    cdef void released(self) noexcept nogil
