"""How likely each expert is to be used by the next token, learned from what tokens chose.

Ownership: a Policy owns its Estimate and calls it under the lock of its table; nothing here locks, waits or allocates after
estimate_init. A key is layer * experts + expert.
"""

from libc.stdint cimport int32_t, uint8_t, uint64_t


cdef enum:
    RANK = 3                    # what is remembered of an expert: three memories of uses, the rank of the last one, and 1
    CONSTANT = 4
    FEATURES = 5
    REMEMBERED = 0              # what its value is mixed from: what those five make, and what followed and what was in tokens alike
    FOLLOWED = 1
    ALIKE = 2
    PARTS = 3
    TOKENS = 64                 # that are compared with the last one


cdef struct Fit:                # least squares that forgets
    double[FEATURES][FEATURES] moments  # sums of products of what was given (the upper triangle),
    double[FEATURES] used               # and of what was given for the experts that were used


cdef struct Estimate:
    int32_t layers
    int32_t experts             # of a layer
    int32_t top_k               # of the last token observed
    float* known                # [layers, FEATURES, experts]
    float* parts                # [layers, PARTS, experts] that the values were mixed from
    float* values               # [layers * experts] estimated probability that the next token uses it
    uint64_t* uses              # [layers * experts] bit b: the last token but b used it
    uint8_t* foretold           # [layers] 1: the parts are about the token to come
    float[TOKENS] likeness      # by how many tokens ago: of that token to the last one, in the layers that one has reached
    Fit memories                # of what is remembered
    Fit mix                     # of the parts


cdef int estimate_init(Estimate* estimate, int32_t layers, int32_t experts) noexcept nogil     # 0 or ENOMEM
cdef void estimate_destroy(Estimate* estimate) noexcept nogil

# One token chose `ids` [top_k] with `weights` [top_k] in `layer`.
cdef void estimate_observe(
    Estimate* estimate, int32_t layer, const int32_t* ids, const float* weights, int32_t top_k) noexcept nogil
cdef void estimate_values(Estimate* estimate, int32_t layer) noexcept nogil   # once after observing: the values of the layer's experts
