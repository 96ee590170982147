# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Gated attention between its projections, over a paged KV cache."""

from libc.stdint cimport int64_t, uint64_t

import numpy

from sparseflow.kernels.arrays cimport data_of
from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport empty, keep, parallel_for, team, unit_function

cdef extern from "csrc/attention.h":
    struct sf_attention:
        float *q_gate
        float *k
        const float *v
        const float *q_weight
        const float *k_weight
        const float *cosine
        const float *sine
        const uint64_t *key_pages
        const uint64_t *value_pages
        float *scores
        float *out
        const int64_t *position
        long tokens, heads, kv_heads, head_dim, rotary_dim, score_stride
        float eps

    enum: SF_PAGE
    enum: SF_HEADS_AT_ONCE
    unit_function *sf_attention_append_units
    unit_function *sf_attention_units

cdef object _float32 = numpy.dtype(numpy.float32)

PAGE_POSITIONS = SF_PAGE
"""Positions in one page of the KV cache. Keys: float32 [kv_heads, PAGE_POSITIONS / 16, head_dim, 16]; values:
float32 [kv_heads, PAGE_POSITIONS, head_dim]."""


def gated_attention(q_gate, k, v, q_weight, k_weight, cosine, sine, key_pages, value_pages,
                    position, float eps, int threads=1):
    """Appends a chunk's keys and values to the cache and attends; out float32 [tokens, heads * head_dim].

    q_gate float32 [tokens, heads * 2 * head_dim], each head's query then its output gate; k, v
    [tokens, kv_heads * head_dim]; q_gate and k are normalised and rotated in place. q_weight, k_weight [head_dim], the
    norms' 1 + w; cosine, sine [tokens, rotary_dim / 2] of the tokens' positions; key_pages, value_pages: addresses of
    the cache's pages, enough for position + tokens, where position int64 [1] is the number of tokens already cached: a kernel that
    is recorded reads it each time, and serves until another page is needed.

        out = softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate), causal, kv head = head // (heads / kv_heads)
    """
    cdef float[:, ::1] q_gate_view = q_gate, k_view = k
    cdef const float[:, ::1] v_view = v, cosine_view = cosine, sine_view = sine
    cdef const float[::1] q_factors = q_weight, k_factors = k_weight
    cdef const uint64_t[::1] key_pages_view = key_pages, value_pages_view = value_pages
    cdef Py_ssize_t tokens = q_gate_view.shape[0], head_dim = q_factors.shape[0]
    cdef Py_ssize_t heads = q_gate_view.shape[1] // (2 * head_dim), kv_heads = k_view.shape[1] // head_dim
    cdef const int64_t[::1] cached = position
    cdef Py_ssize_t pages = (cached[0] + tokens + SF_PAGE - 1) // SF_PAGE
    cdef Py_ssize_t parts
    cdef sf_attention call
    if (tokens == 0 or kv_heads < 1 or heads % kv_heads or q_gate_view.shape[1] != heads * 2 * head_dim
            or k_view.shape[1] != kv_heads * head_dim or v_view.shape[1] != k_view.shape[1] or k_view.shape[0] != tokens
            or v_view.shape[0] != tokens or k_factors.shape[0] != head_dim or cosine_view.shape[0] != tokens
            or sine_view.shape[0] != tokens or sine_view.shape[1] != cosine_view.shape[1] or 2 * cosine_view.shape[1] > head_dim):
        raise ValueError(f"queries [{tokens}, {q_gate_view.shape[1]}] and keys [{k_view.shape[0]}, {k_view.shape[1]}] do not make "
                         f"heads of {head_dim}")
    if cached[0] < 0 or key_pages_view.shape[0] < pages or value_pages_view.shape[0] < pages:
        raise ValueError(f"{key_pages_view.shape[0]} pages of cache do not hold {cached[0] + tokens} positions")
    if threads < 1:
        raise ValueError(f"{threads} threads")
    result = empty((tokens, heads * head_dim), _float32)
    scores = empty((team(threads), SF_HEADS_AT_ONCE * pages * SF_PAGE), _float32)
    call.q_gate = &q_gate_view[0, 0]
    call.k = &k_view[0, 0]
    call.v = &v_view[0, 0]
    call.q_weight = &q_factors[0]
    call.k_weight = &k_factors[0]
    call.cosine = &cosine_view[0, 0]
    call.sine = &sine_view[0, 0]
    call.key_pages = &key_pages_view[0]
    call.value_pages = &value_pages_view[0]
    call.scores = <float *>data_of(scores)
    call.out = <float *>data_of(result)
    call.tokens = tokens
    call.position = &cached[0]
    call.heads = heads
    call.kv_heads = kv_heads
    call.head_dim = head_dim
    call.rotary_dim = 2 * cosine_view.shape[1]
    call.score_stride = pages * SF_PAGE
    call.eps = eps
    parts = (heads // kv_heads + SF_HEADS_AT_ONCE - 1) // SF_HEADS_AT_ONCE
    keep((q_gate, k, v, q_weight, k_weight, cosine, sine, key_pages, value_pages, position, result, scores))
    with nogil:
        parallel_for(sf_attention_append_units[active_index()], &call, sizeof(call), tokens, threads,
                     4 * tokens * (heads + kv_heads) * head_dim)
        parallel_for(sf_attention_units[active_index()], &call, sizeof(call), tokens * kv_heads * parts, threads,
                     2 * tokens * heads * (cached[0] + tokens) * head_dim)
    return result
