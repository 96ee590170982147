# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""How likely each expert is to be used by the next token, learned while running.

Design
    Two estimates of the probability that a layer's next token uses an expert, and a mixture of them.

    What is remembered of the expert. Each past use adds to the probability, less the longer ago it was, as in a self-exciting
    process (Hawkes, "Spectra of some self-exciting and mutually exciting point processes", 1971). A sum of three memories, of
    one token, of four and of sixteen, stands for the curve; how high the router ranked the last use is added.

    What tokens alike did. Tokens that chose the same experts in the layers before mostly agree in the next one too, and so do
    the tokens after them. Each of the last tokens is compared with the present one: the share of experts in common, layer by
    layer, averaged with less weight for layers farther back. They vote with that likeness to the fourth power (a kernel
    estimate of a conditional mean: Nadaraya, "On estimating regression", 1964): once for what they used themselves, once for
    what the token after them used.

    The five weights of the first and the three of the mixture are shared by all layers and fitted while running: least squares with
    forgetting (Ljung, "System Identification", ch. 11) towards prior weights, which count like some of what is remembered.
    All experts of a layer teach, in memory or not. Every token teaches the first; the mixture is taught by the first token of each
    forward, which is the one that the parts were about.

    Prior weights, lengths and powers are round figures chosen on four recorded texts of Qwen3.6-35B-A3B (bench/policy.py).
    Those of the votes and the mixture, chosen on three of the texts alone, do within a tenth of a point as well on the fourth.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil

cdef float LEAST = 0.001        # value, of whatever the weights make less
cdef float NOTHING = 1e-9       # what has decayed to less is 0: the smallest of floats are slow to compute with
cdef double MEMORY = 10         # tokens that a fit remembers
cdef float LAYERS_BEFORE = 0.8  # weight of a layer's likeness in that of the next

# What is known of an expert: used in the last token or not, decayed counts of its uses, the rank then, and 1.
cdef float[FEATURES] DECAY = [0, 0.75, 0.9375, 0, 1]                    # per token
cdef double[FEATURES] PRIOR = [0.15, 0.09, 0.025, 0.15, 0.006]          # weights before anything was seen
cdef double[PARTS] PRIOR_MIX = [0.8, 0.2, 0.1]
cdef double MIX_SQUARE = 0.1    # mean square of a part that its prior weight counts for, in shares of top_k / experts


cdef int estimate_init(Estimate* estimate, int32_t layers, int32_t experts) noexcept nogil:
    cdef Py_ssize_t i, expert
    memset(estimate, 0, sizeof(Estimate))
    estimate.layers = layers
    estimate.experts = experts
    estimate.known = <float*>calloc(layers * FEATURES * experts, sizeof(float))
    estimate.parts = <float*>calloc(layers * PARTS * experts, sizeof(float))
    estimate.values = <float*>malloc(layers * experts * sizeof(float))
    estimate.uses = <uint64_t*>calloc(layers * experts, sizeof(uint64_t))
    estimate.foretold = <uint8_t*>calloc(layers, 1)
    if (estimate.known == NULL or estimate.parts == NULL or estimate.values == NULL or estimate.uses == NULL
            or estimate.foretold == NULL):
        return ENOMEM
    for i in range(layers * experts):
        estimate.values[i] = PRIOR[CONSTANT]
    for i in range(layers):
        for expert in range(experts):
            estimate.known[(i * FEATURES + CONSTANT) * experts + expert] = 1
    return 0


cdef void estimate_destroy(Estimate* estimate) noexcept nogil:
    free(estimate.known)
    free(estimate.parts)
    free(estimate.values)
    free(estimate.uses)
    free(estimate.foretold)


# --- least squares ---

cdef void remember(
        Fit* fit, int n, const float* moments, double keep, const float* given, int32_t experts, const int32_t* ids,
        int32_t top_k) noexcept nogil:
    """Add what was given of a layer's experts [n, experts], the sums of its products [n, FEATURES], and which were used."""
    cdef int32_t k
    cdef int i, j
    for i in range(n):
        for j in range(i, n):
            fit.moments[i][j] = keep * fit.moments[i][j] + moments[i * FEATURES + j]
        fit.used[i] *= keep
        for k in range(top_k):
            fit.used[i] += given[i * experts + ids[k]]


cdef void solve(const Fit* fit, int n, const double* prior, const double* square, double* weights) noexcept nogil:
    """Least squares for what was seen and for prior weights, which count for sums of squares of `square`: elimination without
    pivots, the matrix being positive."""
    cdef double[FEATURES][FEATURES] left
    cdef double factor
    cdef int i, j, k
    for i in range(n):
        for j in range(i, n):
            left[i][j] = fit.moments[i][j]
        left[i][i] += square[i]
        weights[i] = fit.used[i] + square[i] * prior[i]
    for i in range(n):
        for j in range(i + 1, n):
            factor = left[i][j] / left[i][i]
            for k in range(j, n):
                left[j][k] -= factor * left[i][k]
            weights[j] -= factor * weights[i]
    for i in range(n - 1, -1, -1):
        for j in range(i + 1, n):
            weights[i] -= left[i][j] * weights[j]
        weights[i] /= left[i][i]


# --- learning from a token ---

cdef void learn_memories(Estimate* estimate, const float* known, const int32_t* ids, int32_t top_k) noexcept nogil:
    """What was known of each expert of a layer, and whether it was used now."""
    cdef const float* last = known
    cdef const float* short = known + estimate.experts
    cdef const float* long = known + 2 * estimate.experts
    cdef const float* rank = known + 3 * estimate.experts
    cdef float[FEATURES][FEATURES] moments
    cdef int32_t expert
    memset(&moments, 0, sizeof(moments))
    # Written out, so that the sums are independent of one another and stay in registers.
    for expert in range(estimate.experts):
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
    moments[4][4] = estimate.experts
    remember(&estimate.memories, FEATURES, &moments[0][0], 1 - 1 / (MEMORY * estimate.layers), known, estimate.experts, ids, top_k)


cdef void learn_mix(Estimate* estimate, const float* parts, const int32_t* ids, int32_t top_k) noexcept nogil:
    """What the parts said of each expert of a layer, and whether it was used now."""
    cdef const float* remembered = parts
    cdef const float* followed = parts + estimate.experts
    cdef const float* alike = parts + 2 * estimate.experts
    cdef float[FEATURES][FEATURES] moments
    cdef int32_t expert
    memset(&moments, 0, sizeof(moments))
    for expert in range(estimate.experts):
        moments[0][0] += remembered[expert] * remembered[expert]
        moments[0][1] += remembered[expert] * followed[expert]
        moments[0][2] += remembered[expert] * alike[expert]
        moments[1][1] += followed[expert] * followed[expert]
        moments[1][2] += followed[expert] * alike[expert]
        moments[2][2] += alike[expert] * alike[expert]
    remember(&estimate.mix, PARTS, &moments[0][0], 1 - 1 / (MEMORY * estimate.layers), parts, estimate.experts, ids, top_k)


cdef void estimate_observe(
        Estimate* estimate, int32_t layer, const int32_t* ids, const float* weights, int32_t top_k) noexcept nogil:
    cdef float* known = estimate.known + <Py_ssize_t>layer * FEATURES * estimate.experts
    cdef uint64_t* uses = estimate.uses + <Py_ssize_t>layer * estimate.experts
    cdef float decayed
    cdef int32_t expert, k, other, above, below
    cdef int i
    estimate.top_k = top_k
    learn_memories(estimate, known, ids, top_k)
    if estimate.foretold[layer]:
        learn_mix(estimate, estimate.parts + <Py_ssize_t>layer * PARTS * estimate.experts, ids, top_k)
        estimate.foretold[layer] = 0
    for i in range(CONSTANT):
        for expert in range(estimate.experts):
            decayed = known[i * estimate.experts + expert] * DECAY[i]
            known[i * estimate.experts + expert] = 0 if decayed < NOTHING else decayed
    for expert in range(estimate.experts):
        uses[expert] <<= 1
    for k in range(top_k):
        uses[ids[k]] |= 1
        above = below = 0
        for other in range(top_k):
            above += weights[other] > weights[k]
            below += weights[other] < weights[k]
        for i in range(RANK):
            known[i * estimate.experts + ids[k]] += 1
        # From 1 for the heaviest to -1; 0 on average, and where weights are equal, so that they say nothing then.
        known[RANK * estimate.experts + ids[k]] = <float>(below - above) / top_k


# --- estimating ---

cdef void compare(Estimate* estimate, const uint64_t* uses) noexcept nogil:
    """The likeness of the tokens before to the last one, which has reached this layer."""
    cdef int32_t[TOKENS] common                                     # experts that the last token and the one `ago` chose
    cdef uint64_t left
    cdef int32_t expert
    cdef int ago
    cdef float likeness
    memset(&common, 0, sizeof(common))
    for expert in range(estimate.experts):
        if uses[expert] & 1:
            left = uses[expert]
            while left != 0:
                common[__builtin_ctzll(left)] += 1
                left &= left - 1
    for ago in range(1, TOKENS):
        likeness = LAYERS_BEFORE * estimate.likeness[ago] + (1 - LAYERS_BEFORE) * common[ago] / estimate.top_k
        estimate.likeness[ago] = 0 if likeness < NOTHING else likeness


cdef void vote(Estimate* estimate, const uint64_t* uses, float* followed, float* alike) noexcept nogil:
    """What the tokens before chose in this layer, and what those after them chose, as shares of a vote weighted by likeness."""
    cdef float[TOKENS + 1] weight                                   # of the token `ago`; of the last one itself, none
    cdef float total = 0, of_followed, of_alike
    cdef uint64_t left, heard = 0
    cdef int32_t expert
    cdef int ago
    weight[0] = weight[TOKENS] = 0
    for ago in range(1, TOKENS):
        weight[ago] = estimate.likeness[ago] * estimate.likeness[ago]
        weight[ago] *= weight[ago]
        total += weight[ago]
    if total < NOTHING * NOTHING:
        total = 1
    for ago in range(1, TOKENS):
        weight[ago] /= total
        if weight[ago] < LEAST:                                     # alone it would not make a value
            weight[ago] = 0
        else:
            heard |= <uint64_t>3 << ago - 1
    for expert in range(estimate.experts):
        left = uses[expert] & heard
        of_followed = of_alike = 0
        while left != 0:
            ago = __builtin_ctzll(left)
            left &= left - 1
            of_followed += weight[ago + 1]
            of_alike += weight[ago]
        followed[expert] = of_followed
        alike[expert] = of_alike


cdef void estimate_values(Estimate* estimate, int32_t layer) noexcept nogil:
    cdef const float* known = estimate.known + <Py_ssize_t>layer * FEATURES * estimate.experts
    cdef float* parts = estimate.parts + <Py_ssize_t>layer * PARTS * estimate.experts
    cdef float* values = estimate.values + <Py_ssize_t>layer * estimate.experts
    cdef const uint64_t* uses = estimate.uses + <Py_ssize_t>layer * estimate.experts
    cdef double[FEATURES] square, fitted
    cdef double rows = MEMORY * estimate.layers * estimate.experts, used = MEMORY * estimate.layers * estimate.top_k
    cdef float weight
    cdef int32_t expert
    cdef int i
    compare(estimate, uses)
    vote(estimate, uses, parts + FOLLOWED * estimate.experts, parts + ALIKE * estimate.experts)

    # A prior weight counts for the squares that its feature has if every expert is used as often as any other.
    for i in range(FEATURES):
        square[i] = rows if i == CONSTANT else used / (1 - DECAY[i])
    solve(&estimate.memories, FEATURES, PRIOR, square, fitted)
    memset(parts, 0, estimate.experts * sizeof(float))
    for i in range(FEATURES):
        weight = fitted[i]
        for expert in range(estimate.experts):
            parts[expert] += weight * known[i * estimate.experts + expert]
    for expert in range(estimate.experts):
        parts[expert] = max(parts[expert], LEAST)

    for i in range(PARTS):
        square[i] = MIX_SQUARE * used
    solve(&estimate.mix, PARTS, PRIOR_MIX, square, fitted)
    memset(values, 0, estimate.experts * sizeof(float))
    for i in range(PARTS):
        weight = fitted[i]
        for expert in range(estimate.experts):
            values[expert] += weight * parts[i * estimate.experts + expert]
    for expert in range(estimate.experts):
        values[expert] = max(values[expert], LEAST)
    estimate.foretold[layer] = 1
