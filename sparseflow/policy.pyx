# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The eviction policy: experts are valued by how soon they are likely to be used again, which is learned while running.

Design
    A token asks for a few experts of every layer, in the same order of layers each time. So the experts of a layer get a
    chance once per token, and least-recently-used keeps nothing at all until the cache holds a whole token.

    The value of an expert is the estimated probability that it is used at its next chance (estimate.pyx). As a rule it only
    falls while an expert goes unused, so that a slot earns most per token at the very next chance, and what may come later
    does not decide.

    The victim is the idle slot of least value, discounted further by how far off its layer's next chance is. Idle slots lie in
    lists by layer and rounded logarithm of value, with a bit mask per layer, so that finding it looks at each layer once,
    and a request costs the same whatever the size of the cache. An expert whose chance came and went is sorted anew then.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from sparseflow.estimate cimport estimate_destroy, estimate_init, estimate_observe, estimate_values

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

cdef enum:
    NONE = -1
    BUCKETS = 64                # an eighth of an octave of value each

cdef float SHIFT = 4            # buckets that a whole round of layers is worth: a chance right ahead counts 1.4 times as much


cdef int policy_init(Policy* policy, int32_t layers, int32_t experts, int32_t slots) noexcept nogil:
    memset(policy, 0, sizeof(Policy))
    policy.layers = layers
    policy.experts = experts
    policy.first = <int32_t*>malloc(layers * BUCKETS * sizeof(int32_t))
    policy.last = <int32_t*>malloc(layers * BUCKETS * sizeof(int32_t))
    policy.filled = <uint64_t*>calloc(layers, sizeof(uint64_t))
    policy.before = <int32_t*>malloc(slots * sizeof(int32_t))
    policy.after = <int32_t*>malloc(slots * sizeof(int32_t))
    policy.key = <int32_t*>malloc(slots * sizeof(int32_t))
    policy.bucket = <uint8_t*>malloc(slots)
    if (policy.first == NULL or policy.last == NULL or policy.filled == NULL or policy.before == NULL or policy.after == NULL
            or policy.key == NULL or policy.bucket == NULL):
        return ENOMEM
    memset(policy.first, 0xFF, layers * BUCKETS * sizeof(int32_t))         # NONE
    memset(policy.last, 0xFF, layers * BUCKETS * sizeof(int32_t))
    return estimate_init(&policy.estimate, layers, experts)


cdef void policy_destroy(Policy* policy) noexcept nogil:
    estimate_destroy(&policy.estimate)
    free(policy.first)
    free(policy.last)
    free(policy.filled)
    free(policy.before)
    free(policy.after)
    free(policy.key)
    free(policy.bucket)


cdef int bucket_of(float value) noexcept nogil:
    """0 for a value of 1, and one more for every eighth of an octave below: exponent and three bits of the mantissa."""
    cdef uint32_t bits
    cdef int bucket
    memcpy(&bits, &value, 4)
    bucket = (127 << 3) - <int>(bits >> 20)
    return 0 if bucket < 0 else min(bucket, BUCKETS - 1)


cdef void policy_observe(Policy* policy, int32_t layer, const int32_t* ids, const float* weights, int32_t top_k) noexcept nogil:
    estimate_observe(&policy.estimate, layer, ids, weights, top_k)


# --- idle slots ---

cdef void policy_insert(Policy* policy, int32_t slot, int32_t key) noexcept nogil:
    cdef int32_t layer = key // policy.experts
    cdef int bucket = bucket_of(policy.estimate.values[key])
    cdef Py_ssize_t where = layer * BUCKETS + bucket
    policy.key[slot] = key
    policy.bucket[slot] = bucket
    policy.after[slot] = NONE
    policy.before[slot] = policy.last[where]
    if policy.last[where] == NONE:
        policy.first[where] = slot
    else:
        policy.after[policy.last[where]] = slot
    policy.last[where] = slot
    policy.filled[layer] |= <uint64_t>1 << bucket


cdef void policy_remove(Policy* policy, int32_t slot) noexcept nogil:
    cdef int32_t layer = policy.key[slot] // policy.experts
    cdef Py_ssize_t where = layer * BUCKETS + policy.bucket[slot]
    if policy.before[slot] == NONE:
        policy.first[where] = policy.after[slot]
    else:
        policy.after[policy.before[slot]] = policy.after[slot]
    if policy.after[slot] == NONE:
        policy.last[where] = policy.before[slot]
    else:
        policy.before[policy.after[slot]] = policy.before[slot]
    if policy.first[where] == NONE:
        policy.filled[layer] &= ~(<uint64_t>1 << policy.bucket[slot])


cdef int32_t policy_victim(Policy* policy) noexcept nogil:
    cdef int32_t layer, distance, slot = NONE
    cdef float worth, least = -1                                    # in buckets: more is worth less
    cdef int bucket
    for layer in range(policy.layers):
        if policy.filled[layer] == 0:
            continue
        distance = layer - policy.layer
        if distance <= 0:
            distance += policy.layers
        bucket = BUCKETS - 1 - __builtin_clzll(policy.filled[layer])
        worth = bucket + SHIFT * distance / policy.layers
        if worth > least:
            least = worth
            slot = policy.first[layer * BUCKETS + bucket]           # of equals, the one that is idle for longest
    return slot


cdef void policy_reach(Policy* policy, int32_t layer) noexcept nogil:
    policy.layer = layer


cdef void policy_settle(Policy* policy, int32_t layer) noexcept nogil:
    cdef uint64_t left = policy.filled[layer]
    cdef int bucket
    cdef int32_t slot, following, moved = NONE, end = NONE
    estimate_values(&policy.estimate, layer)
    # All lists of the layer are chained into one, least value first, and dealt out again in that order.
    while left != 0:
        bucket = BUCKETS - 1 - __builtin_clzll(left)
        left &= ~(<uint64_t>1 << bucket)
        if moved == NONE:
            moved = policy.first[layer * BUCKETS + bucket]
        else:
            policy.after[end] = policy.first[layer * BUCKETS + bucket]
        end = policy.last[layer * BUCKETS + bucket]
        policy.first[layer * BUCKETS + bucket] = NONE
        policy.last[layer * BUCKETS + bucket] = NONE
    policy.filled[layer] = 0
    slot = moved
    while slot != NONE:
        following = policy.after[slot]
        policy_insert(policy, slot, policy.key[slot])
        slot = following
