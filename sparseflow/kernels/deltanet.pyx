# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Gated DeltaNet between its projections: causal convolution with state, and the gated delta rule.

Source of the recurrence: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), as in transformers'
torch_recurrent_gated_delta_rule.
"""

import numpy

from sparseflow.kernels.arrays cimport data_of
from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport empty, keep, parallel_for, unit_function

cdef extern from "csrc/deltanet.h":
    struct sf_conv:
        const float *x
        const float *weight
        float *state
        float *out
        long tokens, channels, kernel

    struct sf_delta:
        float *qkv
        const float *a
        const float *b
        const float *decay_rate
        const float *dt_bias
        float *decay
        float *beta
        float *state
        float *out
        long tokens, key_heads, value_heads, key_dim, value_dim

    enum: SF_CONV_BLOCK
    unit_function *sf_conv_units
    unit_function *sf_delta_prepare_units
    unit_function *sf_delta_units

cdef object _float32 = numpy.dtype(numpy.float32)


def causal_conv(x, weight, state, int threads=1):
    """out float32 [tokens, channels] = silu(depthwise causal convolution of x), weight [kernel, channels].

    state float32 [kernel - 1, channels] holds the inputs before x, oldest first, and is replaced by the last ones.
    """
    cdef const float[:, ::1] rows = x, taps = weight
    cdef float[:, ::1] before = state
    cdef Py_ssize_t tokens = rows.shape[0], channels = rows.shape[1]
    cdef sf_conv call
    if (tokens == 0 or taps.shape[1] != channels or before.shape[1] != channels
            or before.shape[0] != taps.shape[0] - 1 or taps.shape[0] < 1):
        raise ValueError(f"a convolution of [{taps.shape[0]}, {taps.shape[1]}] with state [{before.shape[0]}, "
                         f"{before.shape[1]}] does not fit inputs [{tokens}, {channels}]")
    result = empty((tokens, channels), _float32)
    call.x = &rows[0, 0]
    call.weight = &taps[0, 0]
    call.state = NULL
    if before.shape[0] > 0:
        call.state = &before[0, 0]
    call.out = <float *>data_of(result)
    call.tokens = tokens
    call.channels = channels
    call.kernel = taps.shape[0]
    keep((x, weight, state, result))
    with nogil:
        parallel_for(sf_conv_units[active_index()], &call, sizeof(call), (channels + SF_CONV_BLOCK - 1) // SF_CONV_BLOCK, threads,
                     tokens * channels * taps.shape[0])
    return result


def gated_delta(qkv, a, b, decay_rate, dt_bias, state, Py_ssize_t key_heads,
                Py_ssize_t value_dim, int threads=1):
    """The gated delta rule over a chunk of tokens; out float32 [tokens, value_heads * value_dim].

    qkv float32 [tokens, 2 * key_heads * key_dim + value_heads * value_dim] after the convolution; its q and k are
    normalised in place. a, b [tokens, value_heads]; decay_rate = -exp(A_log) and dt_bias [value_heads];
    state [value_heads, ceil(value_dim / 16), key_dim, 16], updated in place. Per token and value head, with q and k of
    key head h // (value_heads / key_heads), both of unit length and q divided by sqrt(key_dim):

        S *= exp(decay_rate * softplus(a + dt_bias));  S += k (sigmoid(b) * (v - S^T k))^T;  out = S^T q
    """
    cdef float[:, ::1] mixed = qkv
    cdef const float[:, ::1] a_rows = a, b_rows = b
    cdef const float[::1] rate = decay_rate, bias = dt_bias
    cdef float[:, :, :, ::1] memory = state
    cdef Py_ssize_t tokens = mixed.shape[0], value_heads = memory.shape[0], key_dim = memory.shape[2]
    cdef sf_delta call
    if (tokens == 0 or key_heads < 1 or value_heads % key_heads or memory.shape[1] != (value_dim + 15) // 16
            or memory.shape[3] != 16 or mixed.shape[1] != 2 * key_heads * key_dim + value_heads * value_dim
            or a_rows.shape[0] != tokens or b_rows.shape[0] != tokens or a_rows.shape[1] != value_heads or b_rows.shape[1] != value_heads
            or rate.shape[0] != value_heads or bias.shape[0] != value_heads):
        raise ValueError(f"q, k, v of [{tokens}, {mixed.shape[1]}] do not fit {key_heads} key heads and a state of "
                         f"{value_heads} value heads, {key_dim} by {value_dim}")
    result = empty((tokens, value_heads * value_dim), _float32)
    rates = empty((2, tokens, value_heads), _float32)
    call.qkv = &mixed[0, 0]
    call.a = &a_rows[0, 0]
    call.b = &b_rows[0, 0]
    call.decay_rate = &rate[0]
    call.dt_bias = &bias[0]
    call.decay = <float *>data_of(rates)
    call.beta = call.decay + tokens * value_heads
    call.state = &memory[0, 0, 0, 0]
    call.out = <float *>data_of(result)
    call.tokens = tokens
    call.key_heads = key_heads
    call.value_heads = value_heads
    call.key_dim = key_dim
    call.value_dim = value_dim
    keep((qkv, a, b, decay_rate, dt_bias, state, result, rates))
    with nogil:
        parallel_for(sf_delta_prepare_units[active_index()], &call, sizeof(call), tokens, threads, 4 * tokens * mixed.shape[1])
        parallel_for(sf_delta_units[active_index()], &call, sizeof(call), value_heads * memory.shape[1], threads,
                     4 * tokens * value_heads * key_dim * value_dim)
    return result
