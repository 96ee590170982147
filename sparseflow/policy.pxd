"""Which expert to evict: a value for every expert, learned while running, and idle slots sorted by it.

Ownership: a table of slots owns its Policy and calls it under its own lock; nothing here locks, waits or allocates after
policy_init. A key is layer * experts + expert.
"""

from libc.stdint cimport int32_t, uint8_t, uint64_t

from sparseflow.estimate cimport Estimate


cdef struct Policy:
    int32_t layers
    int32_t experts             # of a layer
    Estimate estimate           # what the next token will use
    int32_t* first              # [layers * BUCKETS] ends of the lists of idle slots, by layer and value
    int32_t* last
    uint64_t* filled            # [layers] bit b: bucket b holds a slot
    int32_t* before             # [slots] neighbours in those lists
    int32_t* after
    int32_t* key                # [slots]
    uint8_t* bucket             # [slots]
    int32_t layer               # where the run is: the next chance of a layer's experts is as far as its distance from here


cdef int policy_init(Policy* policy, int32_t layers, int32_t experts, int32_t slots) noexcept nogil    # 0 or ENOMEM
cdef void policy_destroy(Policy* policy) noexcept nogil

cdef void policy_insert(Policy* policy, int32_t slot, int32_t key) noexcept nogil     # the slot becomes idle
cdef void policy_remove(Policy* policy, int32_t slot) noexcept nogil                  # it is no longer
cdef int32_t policy_victim(Policy* policy) noexcept nogil                             # the idle slot worth least; some must be idle
cdef void policy_reach(Policy* policy, int32_t layer) noexcept nogil                  # the run is at this layer now

# One token chose `ids` [top_k] with `weights` [top_k] in `layer`.
cdef void policy_observe(Policy* policy, int32_t layer, const int32_t* ids, const float* weights, int32_t top_k) noexcept nogil
cdef void policy_settle(Policy* policy, int32_t layer) noexcept nogil                 # after observing: value its experts and sort its idle slots anew
