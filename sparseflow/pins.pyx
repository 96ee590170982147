# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Pins: how a lease gets slots for its experts, has them filled, and lets go of them.

The order of dropping and reading, of a table that is not direct
    An evicted expert is forgotten under the lock and its pages are dropped after it, by the thread that took the slot and
    before that thread asks for its own expert; a slot that never became resident is free only when its pages are
    dropped. So at every moment there are at most as many experts in memory as slots. An expert that someone asks for again
    in between is kept: the drop leaves it alone (extents.pyx).
"""

from libc.stdint cimport int32_t, uintptr_t

from sparseflow.extents cimport (
    extents_address, extents_admit, extents_cut, extents_drop, extents_forget, extents_lease, extents_unlease, extents_will_need,
    pthread_mutex_lock, pthread_mutex_unlock,
)
from sparseflow.policy cimport policy_reach
from sparseflow.prefetch cimport settle_ahead
from sparseflow.readers cimport NOW, readers_address, readers_cancel, readers_finished, readers_hurry, readers_wait
from sparseflow.slots cimport (
    ADMITTING, NONE, RESIDENT, Slot, arrived, give, give_free, idle_insert, idle_remove, lost, table_forked, take_free, take_victim,
)
from sparseflow.waiting cimport dequeue, fits, holds_lease, wait_for_release, waits_for_ever, wake

cdef enum:
    READS_AHEAD = 16            # begun before they are waited for: more only fill the queue of the disk, and asking blocks


# --- acquiring ---

cdef int32_t take_slot(Table* table, Pins* pins) noexcept nogil:
    """A slot for an expert that has none: a free one, or that of a victim. Only when there is one."""
    cdef int32_t s
    if table.totals.free > 0:
        pins.roomy += 1
        return take_free(table)
    s = take_victim(table)
    pins.dropping[pins.num_dropping] = table.slots[s].key
    pins.num_dropping += 1
    return s


cdef void hold(Table* table, Pins* pins) noexcept nogil:
    """The pins are pinned: list them among the open leases."""
    pins.held = True
    pins.before = NULL
    pins.after = table.open
    if table.open != NULL:
        table.open.before = pins
    table.open = pins
    table.totals.leases += 1


cdef void unlist(Table* table, Pins* pins) noexcept nogil:
    pins.held = False
    if pins.before == NULL:
        table.open = pins.after
    else:
        pins.before.after = pins.after
    if pins.after != NULL:
        pins.after.before = pins.before
    table.totals.leases -= 1


cdef void pin(Table* table, Pins* pins) noexcept nogil:
    """Pin what has a slot, then give slots to the rest. Only when it fits."""
    cdef Py_ssize_t i
    cdef int32_t s
    cdef Slot* slot
    for i in range(pins.n):
        s = table.index[pins.keys[i]]
        pins.slots[i] = s
        pins.found[i] = s != NONE
        pins.hit[i] = s != NONE
        pins.pending[i] = s == NONE or table.slots[s].state != RESIDENT
        if s != NONE:
            slot = &table.slots[s]
            if slot.ahead:
                slot.ahead = 0
                pins.hit[i] = 0
                readers_hurry(&table.readers, s)
            if slot.leases == 0:
                idle_remove(table, s)
            slot.leases += 1
    pins.num_dropping = pins.num_dropped = pins.roomy = pins.looked = pins.asked = pins.admitted = 0
    if pins.n > 0:
        policy_reach(&table.policy, pins.keys[0] // table.policy.experts)
    settle_ahead(table, pins.keys[0] // table.policy.experts if pins.n > 0 else NONE)
    for i in range(pins.n):
        if pins.slots[i] == NONE:
            s = take_slot(table, pins)
            give(table, s, pins.keys[i], NOW)
            table.slots[s].leases = 1
            pins.slots[i] = s
    hold(table, pins)


cdef Outcome look(Table* table, Pins* pins, Waiter* waiter) noexcept nogil:
    cdef bint holder = holds_lease(table, pins.thread)
    if (holder or table.waiting == NULL or table.waiting == waiter) and fits(table, pins):
        if not extents_lease(table.extents):
            return CLOSED
        pin(table, pins)
        return RESERVED
    if holder and waits_for_ever(table, pins):
        return NEVER
    return WAIT


cdef Outcome table_reserve(Table* table, Pins* pins, Waiter* waiter, bint counted, bint patient) noexcept nogil:
    cdef Outcome outcome
    cdef Py_ssize_t i
    pthread_mutex_lock(&table.lock)
    outcome = look(table, pins, waiter)
    if outcome == WAIT and patient:
        wait_for_release(table, waiter)
        outcome = look(table, pins, waiter)
        waiter.looked = table.releases
    if outcome != WAIT and waiter.queued:
        dequeue(table, waiter)
    if outcome == RESERVED and counted:
        table.totals.waves += 1
        table.totals.requests += pins.n
        for i in range(pins.n):
            table.totals.hits += pins.hit[i]
            table.totals.prefetched += pins.found[i] - pins.hit[i]
    pthread_mutex_unlock(&table.lock)
    return outcome


cdef void table_leave_queue(Table* table, Waiter* waiter) noexcept nogil:
    pthread_mutex_lock(&table.lock)
    if waiter.queued:
        dequeue(table, waiter)
    pthread_mutex_unlock(&table.lock)


cdef void ask(Table* table, Pins* pins, Py_ssize_t wanted, Py_ssize_t position) noexcept nogil:
    """Begin reads until `wanted` are begun and that of `position` is."""
    # Experts that need no eviction first, then an eviction before each: the disk starts at once, and the bound always holds.
    cdef Py_ssize_t i
    if table.direct:
        return                                                  # begun when they got their slots
    while pins.looked < pins.n and (pins.asked < wanted or pins.looked <= position):
        i = pins.looked
        pins.looked += 1
        if not pins.pending[i]:
            continue
        if not pins.found[i]:
            if pins.roomy > 0:
                pins.roomy -= 1
            else:
                extents_drop(table.extents, pins.dropping[pins.num_dropped], False)
                pins.num_dropped += 1
        pthread_mutex_lock(&table.lock)
        table.slots[pins.slots[i]].asked = 1
        pthread_mutex_unlock(&table.lock)
        extents_will_need(table.extents, pins.keys[i])
        pins.asked += 1


cdef void table_fetch(Table* table, Pins* pins) noexcept nogil:
    ask(table, pins, READS_AHEAD, NONE)


cdef void table_recheck(Table* table, Pins* pins) noexcept nogil:
    # Touching a page that a truncation has taken away is a SIGBUS, admitting it an errno.
    cdef Py_ssize_t i
    if table.direct or not extents_cut(table.extents, table.extents.count - 1):
        return
    for i in range(pins.n):
        pins.pending[i] |= extents_cut(table.extents, pins.keys[i])


# --- admitting and releasing ---

cdef uintptr_t table_address(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil:
    if table.direct:
        return readers_address(&table.readers, pins.slots[i])
    return extents_address(table.extents, pins.keys[i])


cdef bint table_ready(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil:
    if not pins.pending[i] or not pins.found[i]:
        return not pins.pending[i]
    return table.direct and readers_finished(&table.readers, pins.slots[i])


cdef int table_admit(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil:
    cdef Slot* slot = &table.slots[pins.slots[i]]
    cdef int number
    if not pins.pending[i]:
        return 0
    ask(table, pins, pins.admitted + READS_AHEAD, i)
    if table.direct:
        number = readers_wait(&table.readers, pins.slots[i])
    else:
        number = extents_admit(table.extents, pins.keys[i])
    pthread_mutex_lock(&table.lock)
    if number == 0:
        pins.pending[i] = 0
        pins.admitted += 1
        if slot.state == ADMITTING:
            arrived(table, pins.slots[i])
    elif slot.state == RESIDENT:                # another lease was told that it is there; nobody will be told so again
        lost(table, pins.slots[i])
    pthread_mutex_unlock(&table.lock)
    return number


cdef void let_go(Table* table, Pins* pins, int32_t s) noexcept nogil:
    """Nobody leases this slot any more. If its pages are to be dropped before it is free, it is listed as `dropping`."""
    cdef Slot* slot = &table.slots[s]
    if table.direct and slot.state == ADMITTING and readers_finished(&table.readers, s) and readers_wait(&table.readers, s) == 0:
        arrived(table, s)                                       # though nobody waited for it
    if slot.state == RESIDENT:
        idle_insert(table, s)
        return
    table.index[slot.key] = NONE
    if table.direct:
        readers_cancel(&table.readers, s)
        give_free(table, s)
    else:
        extents_forget(table.extents, slot.key)
        pins.dropping[pins.num_dropping] = s
        pins.num_dropping += 1


cdef void table_release(Table* table, Pins* pins) noexcept nogil:
    cdef Py_ssize_t i
    cdef int32_t s
    if table_forked(table):                                     # the threads that could be waited for are another process's
        pins.held = False
        extents_unlease(table.extents)
        return
    if not table.direct:
        for i in range(pins.num_dropped, pins.num_dropping):    # evicted for experts that were never asked for
            extents_drop(table.extents, pins.dropping[i], False)
    pins.num_dropping = 0
    pthread_mutex_lock(&table.lock)
    for i in range(pins.n):
        s = pins.slots[i]
        table.slots[s].leases -= 1
        if table.slots[s].leases == 0:
            let_go(table, pins, s)
    table.totals.dropping += pins.num_dropping
    unlist(table, pins)
    wake(table)
    pthread_mutex_unlock(&table.lock)
    if pins.num_dropping > 0:
        for i in range(pins.num_dropping):
            s = pins.dropping[i]
            extents_drop(table.extents, table.slots[s].key, table.slots[s].asked)
        pthread_mutex_lock(&table.lock)
        for i in range(pins.num_dropping):
            give_free(table, pins.dropping[i])
        table.totals.dropping -= pins.num_dropping
        wake(table)
        pthread_mutex_unlock(&table.lock)
    extents_unlease(table.extents)
