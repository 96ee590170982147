# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""How fast memory can be read: the same threads, loads and units of work as the kernels, and no arithmetic to speak of."""

from libc.stdint cimport uint8_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import numpy

from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport parallel_for, unit_function

cdef extern from "csrc/bandwidth.h":
    struct sf_read:
        const uint8_t *bytes
        long count
        uint64_t *folded

    enum: SF_READ_UNIT
    enum: SF_READ_STEP
    unit_function *sf_read_units


def read_once(const uint8_t[::1] buffer, int threads=1):
    """Reads every byte of a buffer, of a multiple of 256 bytes, with `threads` threads.

    Returns the seconds it took, and the exclusive or of its 64-bit words (little-endian), which shows that all were read.
    """
    cdef sf_read call
    cdef uint64_t[::1] folded
    cdef timespec begin, end
    cdef long units = (buffer.shape[0] + SF_READ_UNIT - 1) // SF_READ_UNIT
    cdef int index = active_index()
    if buffer.shape[0] == 0 or buffer.shape[0] % SF_READ_STEP:
        raise ValueError(f"a buffer of {buffer.shape[0]} bytes is not a multiple of {SF_READ_STEP}")
    folded = numpy.zeros(units, numpy.uint64)
    call.bytes = &buffer[0]
    call.count = buffer.shape[0]
    call.folded = &folded[0]
    with nogil:
        clock_gettime(CLOCK_MONOTONIC, &begin)
        parallel_for(sf_read_units[index], &call, sizeof(call), units, threads, buffer.shape[0])
        clock_gettime(CLOCK_MONOTONIC, &end)
    seconds = (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec)
    return seconds, int(numpy.bitwise_xor.reduce(folded))
