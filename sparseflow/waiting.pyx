# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Waiting for slots: first come, first served, so that a large request is not starved by small ones.

A thread that holds a lease does not queue behind others, who may be waiting for that very lease.
"""

from libc.stdint cimport int32_t

from sparseflow.extents cimport pthread_cond_t, pthread_mutex_t, pthread_t
from sparseflow.slots cimport NONE

cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>
    /* Bounded, so that the caller can look for signals. */
    static void sf_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        if (until.tv_nsec >= 1000 * 1000 * 1000) { until.tv_sec += 1; until.tv_nsec -= 1000 * 1000 * 1000; }
        pthread_cond_timedwait(condition, mutex, &until);
    }
    """
    int pthread_cond_broadcast(pthread_cond_t* condition) noexcept nogil
    void sf_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) noexcept nogil


# --- whether to wait ---

cdef bint fits(Table* table, Pins* pins) noexcept nogil:
    """Whether enough slots are free or can be evicted, not counting those that the request pins itself."""
    cdef Py_ssize_t needed = 0, own = 0, i
    cdef int32_t s
    for i in range(pins.n):
        s = table.index[pins.keys[i]]
        if s == NONE:
            needed += 1
        elif table.slots[s].leases == 0:
            own += 1
    return needed <= table.totals.free + table.totals.idle - own


cdef bint holds_lease(Table* table, pthread_t thread) noexcept nogil:
    """Whether a thread has acquired a lease that is not released."""
    cdef Pins* pins = table.open
    while pins != NULL and pins.thread != thread:
        pins = pins.after
    return pins != NULL


cdef bint leaves_room(Table* table, Pins* pins) noexcept nogil:
    """Whether the request would fit beside the leases of its own thread, if all other threads released theirs."""
    cdef Pins* own = table.open
    cdef Py_ssize_t taken = pins.n, i, j
    cdef bint shared
    while own != NULL:
        if own.thread == pins.thread:
            for i in range(own.n):
                shared = False
                for j in range(pins.n):
                    shared = shared or pins.keys[j] == own.keys[i]
                taken += not shared
        own = own.after
    return taken <= table.num_slots


cdef bint waits_in_vain(Table* table, pthread_t thread) noexcept nogil:
    """Whether a thread waits, and nothing was released since it last looked."""
    cdef Waiter* waiter = table.waiting
    while waiter != NULL and not (waiter.thread == thread and waiter.looked == table.releases):
        waiter = waiter.after
    return waiter != NULL


cdef bint nobody_releases(Table* table, pthread_t thread) noexcept nogil:
    """Whether every lease belongs to this thread or to one that waits in vain."""
    cdef Pins* pins = table.open
    if table.totals.dropping > 0:
        return False
    while pins != NULL:
        if pins.thread != thread and not waits_in_vain(table, pins.thread):
            return False
        pins = pins.after
    return True


cdef bint waits_for_ever(Table* table, Pins* pins) noexcept nogil:
    return not leaves_room(table, pins) or nobody_releases(table, pins.thread)


# --- the queue ---

cdef void enqueue(Table* table, Waiter* waiter) noexcept nogil:
    cdef Waiter** end = &table.waiting
    while end[0] != NULL:
        end = &end[0].after
    waiter.after = NULL
    waiter.queued = True
    end[0] = waiter


cdef void dequeue(Table* table, Waiter* waiter) noexcept nogil:
    cdef Waiter** link = &table.waiting
    while link[0] != waiter:
        link = &link[0].after
    link[0] = waiter.after
    waiter.queued = False
    pthread_cond_broadcast(&table.released)                 # the next in line may fit


cdef void wait_for_release(Table* table, Waiter* waiter) noexcept nogil:
    if not waiter.queued:
        enqueue(table, waiter)
    waiter.looked = table.releases
    sf_wait(&table.released, &table.lock)


cdef void wake(Table* table) noexcept nogil:
    table.releases += 1
    if table.waiting != NULL:
        pthread_cond_broadcast(&table.released)
