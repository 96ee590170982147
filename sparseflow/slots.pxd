"""The table of slots behind LeaseTable, as C structs and calls without the GIL.

Ownership: a LeaseTable owns its Table, a Lease its Pins; the pins of an open lease are linked into the table. Threads: every
call takes `lock` itself, for an instant and never across a system call. A key is layer * num_experts + expert.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t

from sparseflow.extents cimport Extents, pthread_cond_t, pthread_mutex_t, pthread_t
from sparseflow.policy cimport Policy
from sparseflow.readers cimport Readers


cdef extern from "<pthread.h>" nogil:
    pthread_t pthread_self() noexcept


cdef enum SlotState:
    FREE, ADMITTING, RESIDENT


cdef enum:
    MOST_AHEAD = 64         # reads ahead in progress


cdef enum Outcome:
    RESERVED                # all pinned
    WAIT                    # too few slots now; somebody will release some
    NEVER                   # too few slots, and nobody can
    CLOSED                  # the store is


cdef struct Slot:
    int32_t key
    int32_t leases          # how many leases pin it
    int32_t next_free
    uint8_t state
    uint8_t asked           # 1: the disk was asked for it
    uint8_t ahead           # 1: read because it was thought likely, and not requested since; without a lease it may be ADMITTING


cdef struct Pins:           # what one lease holds
    Py_ssize_t n
    int32_t* keys           # [n]
    int32_t* slots          # [n]
    int32_t* dropping       # [n] evicted keys (acquiring) or slots (releasing) whose pages are still to be dropped
    uint8_t* hit            # [n] 1: had a slot when the lease was acquired, for another reason than being prefetched
    uint8_t* found          # [n] 1: had a slot then, for whatever reason
    uint8_t* turn           # [n] for the Lease to sort by
    uint8_t* pending        # [n] 1: not known to be in memory, still to be admitted
    Py_ssize_t num_dropping
    Py_ssize_t num_dropped  # of those, the ones that are (acquiring)
    Py_ssize_t roomy        # misses that may be asked for before anything need be dropped
    Py_ssize_t looked       # positions that were asked for, if they had to be
    Py_ssize_t asked        # reads begun
    Py_ssize_t admitted     # reads ended
    pthread_t thread        # who acquired it
    bint held
    Pins* before            # neighbours in the table's list of open leases
    Pins* after


cdef struct Waiter:         # an acquire that waits
    pthread_t thread
    bint queued
    uint64_t looked         # `releases` of the table when it last found too few slots
    Waiter* after           # who came next


cdef struct Totals:
    int64_t waves           # since the table was made: leases, experts in them, those that had a slot
    int64_t requests
    int64_t hits
    int64_t admissions      # experts that became resident; less the evictions, it is those that are
    int64_t evictions
    int64_t prefetches      # reads begun ahead, and experts requested while their slot was theirs
    int64_t prefetched
    int32_t resident        # now: slots whose expert is in memory
    int32_t idle            # slots that no lease pins: in memory, or being read ahead
    int32_t free
    int32_t dropping        # slots that become free once their pages are dropped
    int32_t leases          # leases that are not released


cdef struct Table:
    Extents* extents
    Readers readers         # used if `direct`
    bint direct             # slices are read into memory of the table's own, not mapped
    int32_t num_slots
    Slot* slots             # [num_slots]
    int32_t* index          # [layers * experts] slot, or -1
    int32_t free            # first free slot
    int32_t* arriving       # [MOST_AHEAD] slots that are being read ahead
    int32_t num_arriving
    Policy policy           # holds the resident slots that no lease pins
    Pins* open              # leases that are not released
    Waiter* waiting         # in order of arrival
    uint64_t releases       # goes up whenever those who wait should look again
    Totals totals
    pthread_mutex_t lock
    pthread_cond_t released


cdef int table_init(Table* table, Extents* extents, int32_t layers, int32_t num_slots, bint direct) noexcept nogil     # 0 or an errno
cdef void table_destroy(Table* table) noexcept nogil

# Pin `pins.keys`. With `patient`, waits up to 50 ms for a release. After WAIT the waiter stays in the queue: call again, or
# table_leave_queue. After RESERVED, table_fetch must follow.
cdef Outcome table_reserve(Table* table, Pins* pins, Waiter* waiter, bint counted, bint patient) noexcept nogil
# Read ahead those of the keys [n], likeliest first, that have no slot, when nothing else is to be read, while more than `spare`
# slots are free or idle. How many reads that began. Does nothing unless the table is `direct`.
cdef int32_t table_prefetch(Table* table, const int32_t* keys, Py_ssize_t n, int32_t spare) noexcept nogil
cdef void table_leave_queue(Table* table, Waiter* waiter) noexcept nogil
cdef void table_fetch(Table* table, Pins* pins) noexcept nogil          # asks for the first of what is pending
cdef uintptr_t table_address(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil
cdef bint table_ready(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil    # whether table_admit would not wait
cdef int table_admit(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil     # waits for one expert: 0 or an errno
cdef void table_release(Table* table, Pins* pins) noexcept nogil
# Tokens [n] chose ids [n, top_k], each row ascending, with those weights.
cdef void table_observe(
    Table* table, int32_t layer, const int32_t* ids, const float* weights, Py_ssize_t n, int32_t top_k) noexcept nogil
cdef bint table_resident(Table* table, Py_ssize_t key) noexcept nogil
cdef Totals table_totals(Table* table) noexcept nogil                   # all of one instant
