# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""RMSNorm, plain and gated."""

import numpy

from sparseflow.kernels.arrays cimport data_of
from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport empty, keep, parallel_for, unit_function

cdef extern from "csrc/norms.h":
    struct sf_norm:
        const float *x
        const float *weight
        const float *gate
        float *out
        long columns
        float eps

    unit_function *sf_norm_units

cdef object _float32 = numpy.dtype(numpy.float32)


def rms_norm(x, weight, float eps, gate=None, int threads=1):
    """out float32 [rows, columns] = x / sqrt(mean(x^2) + eps) * weight, times silu(gate) where a gate is given.

    A zero-centred norm passes weight = 1 + w. `gate` has the shape of x.
    """
    cdef const float[:, ::1] rows = x, gates
    cdef const float[::1] factors = weight
    cdef Py_ssize_t count = rows.shape[0], columns = rows.shape[1]
    cdef sf_norm call
    if count == 0 or factors.shape[0] != columns:
        raise ValueError(f"a norm of {factors.shape[0]} weights does not fit {count} rows of {columns}")
    call.gate = NULL
    if gate is not None:
        gates = gate
        if gates.shape[0] != count or gates.shape[1] != columns:
            raise ValueError(f"the gate is [{gates.shape[0]}, {gates.shape[1]}], its input [{count}, {columns}]")
        call.gate = &gates[0, 0]
    result = empty((count, columns), _float32)
    call.x = &rows[0, 0]
    call.weight = &factors[0]
    call.out = <float *>data_of(result)
    call.columns = columns
    call.eps = eps
    keep((x, weight, gate, result))
    with nogil:
        parallel_for(sf_norm_units[active_index()], &call, sizeof(call), count, threads, 4 * count * columns)
    return result
