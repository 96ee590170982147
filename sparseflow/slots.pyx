# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The table of slots: which experts are in memory, who computes with them, and which goes next.

Design
    A fixed number of slots, each standing for the memory of one expert. A slot is free, admitting (given to an expert
    whose bytes are not known to be there) or resident. Everything is allocated when the table is made. A direct index leads
    from expert to slot. Resident slots that nobody leases are in the hands of the policy (policy.pyx), which says the next
    to be evicted; a leased slot is not, so it cannot be.

    How leases pin slots is in pins.pyx, who waits for whom in waiting.pyx, reading ahead in prefetch.pyx.

Fork
    A child inherits the table of a mapping when nobody was using it at that moment. One that reads past the page cache has
    threads and memory that a child does not get (readers.pyx).
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset
from posix.unistd cimport getpid

from sparseflow.extents cimport (
    Extents, extents_forget, extents_unused, pthread_cond_t, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_trylock, pthread_mutex_unlock,
)
from sparseflow.policy cimport policy_destroy, policy_init, policy_insert, policy_observe, policy_remove, policy_settle, policy_victim
from sparseflow.readers cimport readers_begin, readers_destroy, readers_init

cdef extern from *:
    """
    #include <pthread.h>
    static int sf_condition_init(pthread_cond_t *condition) {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        int result = pthread_cond_init(condition, &attributes);
        pthread_condattr_destroy(&attributes);
        return result;
    }
    """
    int sf_condition_init(pthread_cond_t* condition) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t* condition) noexcept nogil


cdef int table_init(Table* table, Extents* extents, int32_t layers, int32_t num_slots, bint direct) noexcept nogil:
    cdef int32_t s
    cdef int number
    memset(table, 0, sizeof(Table))
    table.process = getpid()
    pthread_mutex_init(&table.lock, NULL)
    sf_condition_init(&table.released)
    table.extents = extents
    table.num_slots = num_slots
    table.slots = <Slot*>calloc(num_slots, sizeof(Slot))
    table.index = <int32_t*>malloc(extents.count * sizeof(int32_t))
    table.arriving = <int32_t*>malloc(MOST_AHEAD * sizeof(int32_t))
    if table.slots == NULL or table.index == NULL or table.arriving == NULL:
        return ENOMEM
    memset(table.index, 0xFF, extents.count * sizeof(int32_t))      # NONE
    if policy_init(&table.policy, layers, extents.count // layers, num_slots) != 0:
        return ENOMEM
    table.free = NONE
    for s in range(num_slots - 1, -1, -1):
        give_free(table, s)
    if direct:
        number = readers_init(&table.readers, extents, num_slots)
        if number != 0:
            return number
    table.direct = direct
    return 0


cdef void table_close(Table* table) noexcept nogil:
    cdef bint own = not table_forked(table)
    if own:                                                     # in a child, somebody may hold it for ever
        pthread_mutex_lock(&table.lock)
    readers_destroy(&table.readers)
    free(table.slots)
    free(table.index)
    free(table.arriving)
    policy_destroy(&table.policy)
    memset(&table.policy, 0, sizeof(Policy))
    table.slots = NULL
    table.index = table.arriving = NULL
    if own:
        pthread_mutex_unlock(&table.lock)


cdef void table_destroy(Table* table) noexcept nogil:
    table_close(table)
    if not table_forked(table):                                 # destroying what somebody waits for is waiting for them
        pthread_cond_destroy(&table.released)
        pthread_mutex_destroy(&table.lock)


cdef bint table_forked(Table* table) noexcept nogil:
    return table.process != getpid()


cdef bint table_inherit(Table* table) noexcept nogil:
    # A lock that was held at the fork stays so for ever, and so do the leases of threads that the child does not have.
    cdef bint unused
    if table.direct or pthread_mutex_trylock(&table.lock) != 0:
        return False
    unused = table.open == NULL and table.waiting == NULL and table.totals.dropping == 0 and extents_unused(table.extents)
    if unused:
        table.process = getpid()
    pthread_mutex_unlock(&table.lock)
    return unused


# --- lists of slots, under the lock ---

cdef void idle_remove(Table* table, int32_t s) noexcept nogil:
    policy_remove(&table.policy, s)
    table.totals.idle -= 1


cdef void idle_insert(Table* table, int32_t s) noexcept nogil:
    policy_insert(&table.policy, s, table.slots[s].key)
    table.totals.idle += 1


cdef int32_t take_free(Table* table) noexcept nogil:
    cdef int32_t s = table.free
    table.free = table.slots[s].next_free
    table.totals.free -= 1
    table.touched = max(table.touched, s + 1)
    return s


cdef void give_free(Table* table, int32_t s) noexcept nogil:
    table.slots[s].state = FREE
    table.slots[s].ahead = 0
    table.slots[s].key = NONE
    table.slots[s].next_free = table.free
    table.free = s
    table.totals.free += 1


cdef int32_t take_victim(Table* table) noexcept nogil:
    cdef int32_t s = policy_victim(&table.policy)
    idle_remove(table, s)
    table.slots[s].ahead = 0
    table.index[table.slots[s].key] = NONE
    if not table.direct:
        extents_forget(table.extents, table.slots[s].key)       # its pages are dropped by the caller, after unlocking
    if table.slots[s].state == RESIDENT:
        lost(table, s)
    return s


cdef void give(Table* table, int32_t s, int32_t key, int urgency) noexcept nogil:
    table.slots[s].key = key
    table.slots[s].state = ADMITTING
    table.slots[s].asked = 0
    table.index[key] = s
    if table.direct:
        readers_begin(&table.readers, s, key, urgency)          # at once: whoever finds the slot may wait for it


cdef void arrived(Table* table, int32_t s) noexcept nogil:
    table.slots[s].state = RESIDENT
    table.totals.resident += 1
    table.totals.admissions += 1


cdef void lost(Table* table, int32_t s) noexcept nogil:
    table.slots[s].state = ADMITTING
    table.totals.resident -= 1
    table.totals.evictions += 1


# --- learning ---

cdef void table_observe(
        Table* table, int32_t layer, const int32_t* ids, const float* weights, Py_ssize_t n, int32_t top_k) noexcept nogil:
    cdef Py_ssize_t token
    if table_forked(table):
        return
    pthread_mutex_lock(&table.lock)
    for token in range(n):
        policy_observe(&table.policy, layer, ids + token * top_k, weights + token * top_k, top_k)
    policy_settle(&table.policy, layer)
    pthread_mutex_unlock(&table.lock)


# --- asking ---

cdef bint table_resident(Table* table, Py_ssize_t key) noexcept nogil:
    cdef int32_t s
    cdef bint resident = False, own = not table_forked(table)       # in a child, nothing changes, and the lock may be held for ever
    if own:
        pthread_mutex_lock(&table.lock)
    if table.slots != NULL:
        s = table.index[key]
        resident = s != NONE and table.slots[s].state == RESIDENT
    if own:
        pthread_mutex_unlock(&table.lock)
    return resident


cdef Totals table_totals(Table* table) noexcept nogil:
    cdef Totals totals
    cdef bint own = not table_forked(table)
    if own:
        pthread_mutex_lock(&table.lock)
    totals = table.totals
    if own:
        pthread_mutex_unlock(&table.lock)
    return totals
