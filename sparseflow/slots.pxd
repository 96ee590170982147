"""The table of slots behind LeaseTable, as C structs and calls without the GIL.

Ownership: a LeaseTable owns its Table, a Lease its Pins; the pins of an open lease are linked into the table. Threads: every
call whose name begins with table_, here and in waiting, prefetch and pins, takes `lock` itself, for an instant and never across
a read; the others are called under it. A key is layer * num_experts + expert.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t

from posix.types cimport pid_t

from sparseflow.extents cimport Extents, pthread_cond_t, pthread_mutex_t, pthread_t
from sparseflow.policy cimport Policy
from sparseflow.readers cimport Readers


cdef enum:
    NONE = -1               # no slot


cdef enum SlotState:
    FREE, ADMITTING, RESIDENT


cdef enum:
    MOST_AHEAD = 64         # reads ahead in progress


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
    pid_t process           # whose it is: a forked child may touch it once it has inherited it
    Readers readers         # used if `direct`
    bint direct             # slices are read into memory of the table's own, not mapped
    int32_t num_slots
    Slot* slots             # [num_slots], NULL once closed
    int32_t* index          # [layers * experts] slot, or -1
    int32_t free            # first free slot
    int32_t touched         # slots that were taken at least once; only then others are
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
# Frees the slots and all that is known of them; the totals stay. Nobody may be in another call but table_totals and table_resident.
cdef void table_close(Table* table) noexcept nogil
cdef void table_destroy(Table* table) noexcept nogil
# Whether it is another process's. Then none of the calls below may be made but those that ask, table_close and table_release.
cdef bint table_forked(Table* table) noexcept nogil
# Makes it this forked child's own, if nobody was using it at the fork and no other threads belong to it: whether it is.
cdef bint table_inherit(Table* table) noexcept nogil
# Tokens [n] chose ids [n, top_k], each row ascending, with those weights.
cdef void table_observe(
    Table* table, int32_t layer, const int32_t* ids, const float* weights, Py_ssize_t n, int32_t top_k) noexcept nogil
cdef bint table_resident(Table* table, Py_ssize_t key) noexcept nogil
cdef Totals table_totals(Table* table) noexcept nogil           # all of one instant

cdef void idle_insert(Table* table, int32_t s) noexcept nogil   # a slot that no lease pins any more, or yet
cdef void idle_remove(Table* table, int32_t s) noexcept nogil
cdef int32_t take_free(Table* table) noexcept nogil
cdef void give_free(Table* table, int32_t s) noexcept nogil
cdef int32_t take_victim(Table* table) noexcept nogil           # evicts the expert worth least; some must be idle
cdef void give(Table* table, int32_t s, int32_t key, int urgency) noexcept nogil    # a slot that was taken, to an expert without one
cdef void arrived(Table* table, int32_t s) noexcept nogil       # its expert became resident
cdef void lost(Table* table, int32_t s) noexcept nogil          # its expert is not resident any more
