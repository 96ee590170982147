# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The mixture of experts of one layer: router, expert MLPs over leased slices, ordered sum."""

from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memset

import numpy

from sparseflow.kernels.arrays cimport data_of
from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.linear cimport Quantized, padded_columns, sf_quantized
from sparseflow.kernels.threads cimport empty, keep, parallel_for, unit_function

cdef extern from "csrc/experts.h":
    struct sf_experts:
        const uint64_t *addresses
        const int32_t *pair_start
        const int32_t *pair_end
        const int32_t *pair_token
        const int32_t *pair_slot
        long hidden, hidden_padded, intermediate, intermediate_padded
        long gate_up_unit_tiles, down_unit_tiles, down_tiles, gate_up_scales, down_scales
        int bits
        const float *x
        sf_quantized x_quantized
        float *h
        sf_quantized h_quantized
        float *out

    struct sf_combine:
        const float *out
        const float *weights
        const float *shared
        const float *shared_gate
        float *residual
        long top_k, hidden

    struct sf_router:
        const float *logits
        const int32_t *given
        int ranked
        int32_t *ids
        float *weights
        long experts, top_k

    long sf_unit_tiles(long tile_bytes) noexcept nogil
    const char *sf_expert_gate_up_weights(const void *argument, long unit) noexcept nogil
    const char *sf_expert_down_weights(const void *argument, long unit) noexcept nogil
    unit_function *sf_expert_gate_up_units
    unit_function *sf_expert_quantize_units
    unit_function *sf_expert_down_units
    unit_function *sf_combine_units
    unit_function *sf_router_units

cdef object _float32 = numpy.dtype(numpy.float32)
cdef object _int32 = numpy.dtype(numpy.int32)
cdef object _uint64 = numpy.dtype(numpy.uint64)


cdef long units_of(long rows, long unit_tiles) noexcept nogil:
    return ((rows + 15) // 16 + unit_tiles - 1) // unit_tiles


def route(router_logits, Py_ssize_t top_k, int threads=1):
    """The top_k experts of each token and their weights, from router logits float32 [tokens, experts].

    Returns ids int32 [tokens, top_k], ascending, and weights float32 [tokens, top_k]: softmax over all experts,
    renormalised over the chosen. Of equal logits the lower id is chosen.
    """
    cdef const float[:, ::1] logits = router_logits
    cdef sf_router call
    if logits.shape[0] == 0 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"cannot choose {top_k} of {logits.shape[1]} experts for {logits.shape[0]} tokens")
    ids = empty((logits.shape[0], top_k), _int32)
    weights = empty((logits.shape[0], top_k), _float32)
    call.logits = &logits[0, 0]
    call.given = NULL
    call.ranked = False
    call.ids = <int32_t *>data_of(ids)
    call.weights = <float *>data_of(weights)
    call.experts = logits.shape[1]
    call.top_k = top_k
    keep((router_logits, ids, weights))
    with nogil:
        parallel_for(sf_router_units[active_index()], &call, sizeof(call), logits.shape[0], threads,
                     logits.shape[0] * logits.shape[1] * top_k)
    return ids, weights


def route_given(router_logits, given_ids, bint ranked=False, int threads=1):
    """The weights of experts that were chosen elsewhere, given int32 [tokens, top_k], distinct and ascending in each row.

    Returns ids and weights as `route` does: softmax of the logits of these experts alone. With `ranked`, each row of `given`
    is in the order of a router instead, heaviest first, and the same weights are dealt out in that order.
    """
    cdef const float[:, ::1] logits = router_logits
    cdef const int32_t[:, ::1] given = given_ids
    cdef sf_router call
    cdef Py_ssize_t token, k
    if logits.shape[0] == 0 or given.shape[0] != logits.shape[0] or given.shape[1] == 0:
        raise ValueError(f"expert ids for {given.shape[0]} tokens, router logits for {logits.shape[0]}")
    for token in range(given.shape[0]):
        for k in range(given.shape[1]):
            if not 0 <= given[token, k] < logits.shape[1]:
                raise ValueError(f"expert id {given[token, k]} is not below {logits.shape[1]}")
    ids = empty((given.shape[0], given.shape[1]), _int32)
    weights = empty((given.shape[0], given.shape[1]), _float32)
    call.logits = &logits[0, 0]
    call.given = &given[0, 0]
    call.ranked = ranked
    call.ids = <int32_t *>data_of(ids)
    call.weights = <float *>data_of(weights)
    call.experts = logits.shape[1]
    call.top_k = given.shape[1]
    keep((router_logits, given_ids, ids, weights))
    with nogil:
        parallel_for(sf_router_units[active_index()], &call, sizeof(call), logits.shape[0], threads,
                     logits.shape[0] * call.top_k * call.top_k)
    return ids, weights


cdef class ExpertBatch:
    """The expert MLPs of one layer for a chunk of tokens, computed expert by expert in any order.

    `choose` says which experts each token has, as often as there is something else to choose for the same arrays; `experts` int32
    then holds the distinct ones, ascending. `compute` runs some of them from the addresses where their slices are leased; `out`
    float32 [tokens, top_k, hidden] then holds each expert's output for each of its tokens, in the order of the ids, not yet
    weighted.
    """

    cdef readonly object experts, out
    cdef object x, quantized, counts, h, h_quantized
    cdef int32_t *next_pair
    cdef int32_t *start
    cdef int32_t *end
    cdef int32_t *pair_token
    cdef int32_t *pair_slot
    cdef Py_ssize_t tokens, top_k, num_experts, distinct
    cdef sf_experts call

    def __init__(self, x, Quantized quantized, Py_ssize_t top_k, Py_ssize_t num_experts, Py_ssize_t intermediate, layout):
        """x float32 [tokens, hidden]; quantized: its int8 form, for int8 experts, else None; layout: where the sections of a
        slice lie (layout.ExpertLayout)."""
        cdef const float[:, ::1] rows = x
        cdef Py_ssize_t tokens = rows.shape[0], pairs = tokens * top_k, hidden = rows.shape[1]
        cdef Quantized h_quantized
        if pairs == 0:
            raise ValueError(f"{tokens} rows of activations, {top_k} experts for each")
        self.tokens, self.top_k, self.num_experts = tokens, top_k, num_experts
        # One piece for all that counts.
        self.counts = numpy.empty(3 * num_experts + 1 + 2 * pairs, numpy.int32)
        self.next_pair = <int32_t *>data_of(self.counts)            # [num_experts + 1]
        self.start = self.next_pair + num_experts + 1               # [num_experts]
        self.end = self.start + num_experts                         # [num_experts]
        self.pair_token = self.end + num_experts                    # [pairs]
        self.pair_slot = self.pair_token + pairs                    # [pairs]
        self.x, self.quantized = x, quantized
        self.out = empty((tokens, top_k, hidden), _float32)
        self.call.hidden = hidden
        self.call.hidden_padded = padded_columns(hidden)
        self.call.intermediate = intermediate
        self.call.intermediate_padded = padded_columns(intermediate)
        self.h = empty((pairs, self.call.intermediate_padded), _float32)
        self.call.bits = layout.bits
        self.call.gate_up_unit_tiles = sf_unit_tiles(2 * self.call.hidden_padded * 16 * (layout.bits // 8))
        self.call.down_unit_tiles = sf_unit_tiles(self.call.intermediate_padded * 16 * (layout.bits // 8))
        self.call.down_tiles = layout.down_tiles
        if layout.bits == 8:
            if quantized is None or quantized.tokens != tokens or quantized.columns != hidden:
                raise ValueError("int8 experts need the activations quantised")
            self.call.gate_up_scales = layout.gate_up_scales
            self.call.down_scales = layout.down_scales
            self.call.x_quantized = quantized.view
            h_quantized = Quantized.__new__(Quantized)
            h_quantized.allocate(pairs, intermediate)
            self.h_quantized = h_quantized
            self.call.h_quantized = h_quantized.view
        self.call.pair_token = self.pair_token
        self.call.pair_slot = self.pair_slot
        self.call.x = &rows[0, 0]
        self.call.h = <float *>data_of(self.h)
        self.call.out = <float *>data_of(self.out)

    def choose(self, const int32_t[:, ::1] ids):
        """The experts of each token, ids int32 [tokens, top_k]. What was noted down for the experts before must have run."""
        cdef Py_ssize_t token, k, expert
        cdef int32_t *experts
        cdef int32_t *next_pair = self.next_pair
        if ids.shape[0] != self.tokens or ids.shape[1] != self.top_k:
            raise ValueError(f"expert ids [{ids.shape[0]}, {ids.shape[1]}] for {self.tokens} tokens of {self.top_k} experts")
        memset(next_pair, 0, (self.num_experts + 1) * sizeof(int32_t))
        self.distinct = 0
        for token in range(self.tokens):
            for k in range(self.top_k):
                if not 0 <= ids[token, k] < self.num_experts:
                    raise ValueError(f"expert id {ids[token, k]} is not below {self.num_experts}")
                self.distinct += next_pair[ids[token, k] + 1] == 0
                next_pair[ids[token, k] + 1] += 1
        self.experts = empty((self.distinct,), _int32)
        experts = <int32_t *>data_of(self.experts)
        self.distinct = 0
        for expert in range(self.num_experts):
            next_pair[expert + 1] += next_pair[expert]
            if next_pair[expert + 1] > next_pair[expert]:
                experts[self.distinct] = <int32_t>expert
                self.start[self.distinct] = next_pair[expert]
                self.end[self.distinct] = next_pair[expert + 1]
                self.distinct += 1
        for token in range(self.tokens):
            for k in range(self.top_k):
                self.pair_token[next_pair[ids[token, k]]] = <int32_t>token
                self.pair_slot[next_pair[ids[token, k]]] = <int32_t>(token * self.top_k + k)
                next_pair[ids[token, k]] += 1

    def compute(self, const int32_t[::1] which, const uint64_t[::1] addresses, int threads=1):
        """Computes experts[which] for all their tokens; addresses uint64 [len(which)]: where each of their slices begins.
        The slices must stay leased until they are computed."""
        compute_together([(self, which, addresses)], threads)

    cdef ExpertPart part(self, const int32_t[::1] which, const uint64_t[::1] addresses):
        cdef ExpertPart part = ExpertPart.__new__(ExpertPart)
        cdef int32_t *pairs
        cdef uint64_t *where
        cdef long count = which.shape[0], i
        if addresses.shape[0] != count:
            raise ValueError(f"{count} experts at {addresses.shape[0]} addresses")
        part.call = self.call
        part.count = count
        if count == 0:
            return part
        bounds = empty((2, count), _int32)
        copied = empty((count,), _uint64)
        pairs = <int32_t *>data_of(bounds)
        where = <uint64_t *>data_of(copied)
        for i in range(count):
            if not 0 <= which[i] < self.distinct:
                raise ValueError(f"expert {which[i]} of {self.distinct} in this batch")
            pairs[i] = self.start[which[i]]
            pairs[count + i] = self.end[which[i]]
            where[i] = addresses[i]
            part.work += (pairs[count + i] - pairs[i]) * self.call.intermediate_padded * self.call.hidden_padded
        part.call.addresses = where
        part.call.pair_start = pairs
        part.call.pair_end = pairs + count
        part.kept = (self, bounds, copied)
        return part


cdef class ExpertPart:
    """Some experts of a batch, ready to be computed."""

    cdef sf_experts call
    cdef long count, work
    cdef object kept


def compute_together(batches, int threads=1):
    """`ExpertBatch.compute` for several batches side by side: batches is a list of (batch, which, addresses)."""
    cdef int index = active_index()
    cdef ExpertPart part
    cdef bint joined = False
    parts = []
    for batch, which, addresses in batches:
        part = (<ExpertBatch?>batch).part(which, addresses)
        if part.count > 0:
            keep((part,))
            parts.append(part)
    for part in parts:
        with nogil:
            parallel_for(sf_expert_gate_up_units[index], &part.call, sizeof(sf_experts),
                         part.count * units_of(part.call.intermediate, part.call.gate_up_unit_tiles), threads, 2 * part.work,
                         sf_expert_gate_up_weights, joined)
        joined = True
    joined = False
    for part in parts:
        if part.call.bits == 8:
            with nogil:
                parallel_for(sf_expert_quantize_units[index], &part.call, sizeof(sf_experts), part.count, threads,
                             part.work // part.call.hidden * 4, NULL, joined)
            joined = True
    joined = False
    for part in parts:
        with nogil:
            parallel_for(sf_expert_down_units[index], &part.call, sizeof(sf_experts),
                         part.count * units_of(part.call.hidden, part.call.down_unit_tiles), threads, part.work,
                         sf_expert_down_weights, joined)
        joined = True


def combine(stream, outputs, expert_weights, shared_out, gate, int threads=1):
    """residual float32 [tokens, hidden] += sum over k of weights[:, k] * out[:, k] + sigmoid(shared_gate) * shared.

    out [tokens, top_k, hidden] and weights [tokens, top_k] in ascending expert id, shared [tokens, 1, hidden],
    shared_gate [tokens, 1]. One chain of fused multiply-adds per element, in that order.
    """
    cdef float[:, ::1] residual = stream
    cdef const float[:, :, ::1] out = outputs, shared = shared_out
    cdef const float[:, ::1] weights = expert_weights, shared_gate = gate
    cdef sf_combine call
    if (out.shape[0] != residual.shape[0] or out.shape[2] != residual.shape[1] or weights.shape[0] != out.shape[0]
            or weights.shape[1] != out.shape[1] or shared.shape[0] != out.shape[0] or shared.shape[1] != 1
            or shared.shape[2] != out.shape[2] or shared_gate.shape[0] != out.shape[0] or shared_gate.shape[1] != 1
            or residual.shape[0] == 0):
        raise ValueError("the parts of the expert sum differ in shape")
    call.out = &out[0, 0, 0]
    call.weights = &weights[0, 0]
    call.shared = &shared[0, 0, 0]
    call.shared_gate = &shared_gate[0, 0]
    call.residual = &residual[0, 0]
    call.top_k = out.shape[1]
    call.hidden = out.shape[2]
    keep((stream, outputs, expert_weights, shared_out, gate))
    with nogil:
        parallel_for(sf_combine_units[active_index()], &call, sizeof(call), residual.shape[0], threads,
                     residual.shape[0] * call.top_k * call.hidden)
