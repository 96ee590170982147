# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The eviction policy: experts are valued by how soon they are likely to be used again, which is learned while running.

Design
    A token asks for a few experts of every layer, in the same order of layers each time. So the experts of a layer get a
    chance once per token, and least-recently-used keeps nothing at all until the cache holds a whole token.

    The value of an expert is the estimated probability that it is used at its next chance. As a rule it only falls while an
    expert goes unused, so that a slot earns most per token at the very next chance, and what may come later does not decide.

    The probability is linear in what is known of an expert: each past use adds to it, less the longer ago it was, as in
    a self-exciting process (Hawkes, "Spectra of some self-exciting and mutually exciting point processes", 1971). A sum of
    three memories, of one token, of four and of sixteen, stands for the curve; how high the router ranked the last use is added.
    The five weights, shared by all layers, are fitted while running: recursive least squares with forgetting (Ljung,
    "System Identification", ch. 11) towards prior weights, which count for as much as all that is remembered. All experts of
    a layer teach, in memory or not. The prior weights and the lengths of the memories are round figures chosen on four recorded
    texts of Qwen3.6-35B-A3B (bench/policy.py): near what the fit alone finds on the three whose prompts are recorded token by
    token. A prompt that teaches badly does less harm with them, and a fifth more or less in one changes little.

    The victim is the idle slot of least value, discounted further by how far off its layer's next chance is. Idle slots lie in
    lists by layer and rounded logarithm of value, with a bit mask per layer, so that finding it looks at each layer once,
    and a request costs the same whatever the size of the cache. An expert whose chance came and went is sorted anew then.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

cdef enum:
    NONE = -1
    BUCKETS = 64                # an eighth of an octave of value each

cdef float SHIFT = 2.5          # buckets that a whole round of layers is worth: a chance right ahead counts a quarter more
cdef float LEAST = 0.001        # value, of whatever the weights make less
cdef double MEMORY = 10         # tokens that the fit remembers, and that its prior weights count for

# What is known of an expert: used in the last token or not, decayed counts of its uses, the rank then, and 1.
cdef float[FEATURES] DECAY = [0, 0.75, 0.9375, 0, 1]                    # per token
cdef double[FEATURES] PRIOR = [0.15, 0.09, 0.025, 0.15, 0.006]          # weights before anything was seen


cdef int policy_init(Policy* policy, int32_t layers, int32_t experts, int32_t slots) noexcept nogil:
    cdef Py_ssize_t i, expert
    memset(policy, 0, sizeof(Policy))
    policy.layers = layers
    policy.experts = experts
    policy.known = <float*>calloc(layers * FEATURES * experts, sizeof(float))
    policy.values = <float*>malloc(layers * experts * sizeof(float))
    policy.first = <int32_t*>malloc(layers * BUCKETS * sizeof(int32_t))
    policy.last = <int32_t*>malloc(layers * BUCKETS * sizeof(int32_t))
    policy.filled = <uint64_t*>calloc(layers, sizeof(uint64_t))
    policy.before = <int32_t*>malloc(slots * sizeof(int32_t))
    policy.after = <int32_t*>malloc(slots * sizeof(int32_t))
    policy.key = <int32_t*>malloc(slots * sizeof(int32_t))
    policy.bucket = <uint8_t*>malloc(slots)
    if (policy.known == NULL or policy.values == NULL or policy.first == NULL or policy.last == NULL or policy.filled == NULL
            or policy.before == NULL or policy.after == NULL or policy.key == NULL or policy.bucket == NULL):
        return ENOMEM
    memset(policy.first, 0xFF, layers * BUCKETS * sizeof(int32_t))         # NONE
    memset(policy.last, 0xFF, layers * BUCKETS * sizeof(int32_t))
    for i in range(layers * experts):
        policy.values[i] = PRIOR[CONSTANT]
    for i in range(layers):
        for expert in range(experts):
            policy.known[(i * FEATURES + CONSTANT) * experts + expert] = 1
    return 0


cdef void policy_destroy(Policy* policy) noexcept nogil:
    free(policy.known)
    free(policy.values)
    free(policy.first)
    free(policy.last)
    free(policy.filled)
    free(policy.before)
    free(policy.after)
    free(policy.key)
    free(policy.bucket)


# --- values ---

cdef int bucket_of(float value) noexcept nogil:
    """0 for a value of 1, and one more for every eighth of an octave below: exponent and three bits of the mantissa."""
    cdef uint32_t bits
    cdef int bucket
    memcpy(&bits, &value, 4)
    bucket = (127 << 3) - <int>(bits >> 20)
    return 0 if bucket < 0 else min(bucket, BUCKETS - 1)


cdef void learn(Policy* policy, const float* known, const int32_t* ids, int32_t top_k) noexcept nogil:
    """Add a layer's experts to the fit: what was known of each, and whether it was used now."""
    cdef const float* last = known
    cdef const float* short = known + policy.experts
    cdef const float* long = known + 2 * policy.experts
    cdef const float* rank = known + 3 * policy.experts
    cdef float[FEATURES][FEATURES] moments
    cdef double keep = 1 - 1 / (MEMORY * policy.layers)
    cdef int32_t expert, k
    cdef int i, j
    memset(&moments, 0, sizeof(moments))
    # Written out, so that the sums are independent of one another and stay in registers.
    for expert in range(policy.experts):
        moments[0][0] += last[expert] * last[expert]
        moments[0][1] += last[expert] * short[expert]
        moments[0][2] += last[expert] * long[expert]
        moments[0][3] += last[expert] * rank[expert]
        moments[0][4] += last[expert]
        moments[1][1] += short[expert] * short[expert]
        moments[1][2] += short[expert] * long[expert]
        moments[1][3] += short[expert] * rank[expert]
        moments[1][4] += short[expert]
        moments[2][2] += long[expert] * long[expert]
        moments[2][3] += long[expert] * rank[expert]
        moments[2][4] += long[expert]
        moments[3][3] += rank[expert] * rank[expert]
        moments[3][4] += rank[expert]
    moments[4][4] = policy.experts
    for i in range(FEATURES):
        for j in range(i, FEATURES):
            policy.moments[i][j] = keep * policy.moments[i][j] + moments[i][j]
        policy.used[i] *= keep
        for k in range(top_k):
            policy.used[i] += known[i * policy.experts + ids[k]]


cdef void fit(Policy* policy, double* weights) noexcept nogil:
    """Least squares for what was seen and for the prior weights: elimination without pivots, the matrix being positive."""
    cdef double[FEATURES][FEATURES] left
    cdef double rows = MEMORY * policy.layers * policy.experts, prior, factor
    cdef int i, j, k
    for i in range(FEATURES):
        # The mean square that a feature has if every expert is used as often as any other.
        prior = rows if i == CONSTANT else rows * policy.top_k / policy.experts / (1 - DECAY[i])
        for j in range(i, FEATURES):
            left[i][j] = policy.moments[i][j]
        left[i][i] += prior
        weights[i] = policy.used[i] + prior * PRIOR[i]
    for i in range(FEATURES):
        for j in range(i + 1, FEATURES):
            factor = left[i][j] / left[i][i]
            for k in range(j, FEATURES):
                left[j][k] -= factor * left[i][k]
            weights[j] -= factor * weights[i]
    for i in range(FEATURES - 1, -1, -1):
        for j in range(i + 1, FEATURES):
            weights[i] -= left[i][j] * weights[j]
        weights[i] /= left[i][i]


cdef void policy_observe(Policy* policy, int32_t layer, const int32_t* ids, const float* weights, int32_t top_k) noexcept nogil:
    cdef float* known = policy.known + <Py_ssize_t>layer * FEATURES * policy.experts
    cdef int32_t expert, k, other, above, below
    cdef int i
    policy.top_k = top_k
    learn(policy, known, ids, top_k)
    for i in range(CONSTANT):
        for expert in range(policy.experts):
            known[i * policy.experts + expert] *= DECAY[i]
    for k in range(top_k):
        above = below = 0
        for other in range(top_k):
            above += weights[other] > weights[k]
            below += weights[other] < weights[k]
        for i in range(RANK):
            known[i * policy.experts + ids[k]] += 1
        # From 1 for the heaviest to -1; 0 on average, and where weights are equal, so that they say nothing then.
        known[RANK * policy.experts + ids[k]] = <float>(below - above) / top_k


# --- idle slots ---

cdef void policy_insert(Policy* policy, int32_t slot, int32_t key) noexcept nogil:
    cdef int32_t layer = key // policy.experts
    cdef int bucket = bucket_of(policy.values[key])
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


cdef void estimate(Policy* policy, int32_t layer) noexcept nogil:
    """The values of a layer's experts, from what is known of them now."""
    cdef const float* known = policy.known + <Py_ssize_t>layer * FEATURES * policy.experts
    cdef float* values = policy.values + <Py_ssize_t>layer * policy.experts
    cdef double[FEATURES] fitted
    cdef float weight
    cdef int32_t expert
    cdef int i
    fit(policy, fitted)
    memset(values, 0, policy.experts * sizeof(float))
    for i in range(FEATURES):
        weight = fitted[i]
        for expert in range(policy.experts):
            values[expert] += weight * known[i * policy.experts + expert]
    for expert in range(policy.experts):
        values[expert] = max(values[expert], LEAST)


cdef void policy_settle(Policy* policy, int32_t layer) noexcept nogil:
    cdef uint64_t left = policy.filled[layer]
    cdef int bucket
    cdef int32_t slot, following, moved = NONE, end = NONE
    estimate(policy, layer)
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
