# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""RMSNorm, plain and gated."""

import numpy

from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport keep, parallel_for, unit_function

cdef extern from "csrc/norms.h":
    struct sf_norm:
        const float *x
        const float *weight
        const float *gate
        float *out
        long columns
        float eps

    unit_function *sf_norm_units


def rms_norm(const float[:, ::1] x, const float[::1] weight, float eps, const float[:, ::1] gate=None, int threads=1):
    """out float32 [rows, columns] = x / sqrt(mean(x^2) + eps) * weight, times silu(gate) where a gate is given.

    A zero-centred norm passes weight = 1 + w. `gate` has the shape of x.
    """
    cdef float[:, ::1] out
    cdef sf_norm call
    if x.shape[0] == 0 or weight.shape[0] != x.shape[1]:
        raise ValueError(f"a norm of {weight.shape[0]} weights does not fit {x.shape[0]} rows of {x.shape[1]}")
    if gate is not None and (gate.shape[0] != x.shape[0] or gate.shape[1] != x.shape[1]):
        raise ValueError(f"the gate is [{gate.shape[0]}, {gate.shape[1]}], its input [{x.shape[0]}, {x.shape[1]}]")
    result = numpy.empty((x.shape[0], x.shape[1]), numpy.float32)
    out = result
    call.x = &x[0, 0]
    call.weight = &weight[0]
    call.gate = NULL
    if gate is not None:
        call.gate = &gate[0, 0]
    call.out = &out[0, 0]
    call.columns = x.shape[1]
    call.eps = eps
    keep((x.base, None if gate is None else gate.base, result))
    with nogil:
        parallel_for(sf_norm_units[active_index()], &call, sizeof(call), x.shape[0], threads,
                     4 * x.shape[0] * x.shape[1])
    return result
