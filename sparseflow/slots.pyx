# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The table of slots: which experts are in memory, who computes with them, and which goes next.

Design
    A fixed number of slots, each standing for the memory of one expert. A slot is free, admitting (given to an expert
    whose bytes are not known to be there) or resident. Everything is allocated when the table is made. A direct index leads
    from expert to slot. Resident slots that nobody leases are in the hands of the policy (policy.pyx), which says the next
    to be evicted; a leased slot is not, so it cannot be.

The order of dropping and reading
    An evicted expert is forgotten under the lock and its pages are dropped after it, by the thread that took the slot and
    before that thread asks for its own expert; a slot that never became resident is free only when its pages are
    dropped. So at every moment there are at most as many experts in memory as slots. An expert that someone asks for again
    in between is kept: the drop leaves it alone (extents.pyx).

Waiting
    First come, first served, so that a large request is not starved by small ones. A thread that holds a lease does not
    queue behind others, who may be waiting for that very lease.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from sparseflow.extents cimport (
    Extents, extents_address, extents_admit, extents_drop, extents_forget, extents_lease, extents_unlease, extents_will_need,
    pthread_cond_t, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, pthread_t,
)
from sparseflow.policy cimport (
    policy_destroy, policy_init, policy_insert, policy_observe, policy_reach, policy_remove, policy_settle, policy_victim,
)
from sparseflow.readers cimport (
    AHEAD, NOW, readers_address, readers_begin, readers_cancel, readers_destroy, readers_finished, readers_hurry,
    readers_init, readers_recall, readers_wait,
)

cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>
    static int sf_condition_init(pthread_cond_t *condition) {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        int result = pthread_cond_init(condition, &attributes);
        pthread_condattr_destroy(&attributes);
        return result;
    }
    /* Bounded, so that the caller can look for signals. */
    static void sf_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        if (until.tv_nsec >= 1000 * 1000 * 1000) { until.tv_sec += 1; until.tv_nsec -= 1000 * 1000 * 1000; }
        pthread_cond_timedwait(condition, mutex, &until);
    }
    """
    int sf_condition_init(pthread_cond_t* condition) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t* condition) noexcept nogil
    int pthread_cond_broadcast(pthread_cond_t* condition) noexcept nogil
    void sf_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) noexcept nogil

cdef enum:
    NONE = -1                   # no slot, or the end of a list
    READS_AHEAD = 16            # begun before they are waited for: more only fill the queue of the disk, and asking blocks


cdef int table_init(Table* table, Extents* extents, int32_t layers, int32_t num_slots, bint direct) noexcept nogil:
    cdef int32_t s
    cdef int number
    memset(table, 0, sizeof(Table))
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


cdef void table_destroy(Table* table) noexcept nogil:
    readers_destroy(&table.readers)
    free(table.slots)
    free(table.index)
    free(table.arriving)
    policy_destroy(&table.policy)
    pthread_cond_destroy(&table.released)
    pthread_mutex_destroy(&table.lock)


# --- where the bytes are: in slots of our own, or in the mapping ---

cdef int arrive(Table* table, int32_t s, Py_ssize_t key) noexcept nogil:
    return readers_wait(&table.readers, s) if table.direct else extents_admit(table.extents, key)


cdef void forget(Table* table, Py_ssize_t key) noexcept nogil:
    if not table.direct:
        extents_forget(table.extents, key)


cdef void drop(Table* table, Py_ssize_t key, bint reading) noexcept nogil:
    if not table.direct:
        extents_drop(table.extents, key, reading)


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
    return s


cdef void give_free(Table* table, int32_t s) noexcept nogil:
    table.slots[s].state = FREE
    table.slots[s].ahead = 0
    table.slots[s].key = NONE
    table.slots[s].next_free = table.free
    table.free = s
    table.totals.free += 1


cdef int32_t take_victim(Table* table) noexcept nogil:
    """Evict the expert worth least and take its slot. The caller drops its pages after unlocking."""
    cdef int32_t s = policy_victim(&table.policy)
    idle_remove(table, s)
    table.slots[s].ahead = 0
    forget(table, table.slots[s].key)
    table.index[table.slots[s].key] = NONE
    if table.slots[s].state == RESIDENT:
        table.totals.resident -= 1
        table.totals.evictions += 1
    else:
        readers_cancel(&table.readers, s)                       # read ahead: at worst a part of it is waited for
    return s


# --- acquiring ---

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


cdef void give(Table* table, int32_t s, int32_t key, int urgency) noexcept nogil:
    """A slot to an expert that has none. A direct read begins at once: whoever finds the slot may wait for it."""
    table.slots[s].key = key
    table.slots[s].state = ADMITTING
    table.slots[s].asked = 0
    table.index[key] = s
    if table.direct:
        readers_begin(&table.readers, s, key, urgency)


cdef void hold(Table* table, Pins* pins) noexcept nogil:
    """The pins are pinned: list them among the open leases."""
    pins.held = True
    pins.before = NULL
    pins.after = table.open
    if table.open != NULL:
        table.open.before = pins
    table.open = pins
    table.totals.leases += 1


cdef void settle_ahead(Table* table, int32_t layer) noexcept nogil:
    """Take note of what was read ahead and has arrived; what was meant for a layer that no longer needs it is recalled."""
    cdef int32_t kept = 0, i, s
    cdef Slot* slot
    for i in range(table.num_arriving):
        s = table.arriving[i]
        slot = &table.slots[s]
        if not slot.ahead or slot.state == RESIDENT:
            continue                                            # requested or evicted meanwhile
        if readers_finished(&table.readers, s):
            if readers_wait(&table.readers, s) == 0:
                slot.state = RESIDENT
                table.totals.resident += 1
                table.totals.admissions += 1
                continue
        elif slot.key // table.policy.experts != layer or not readers_recall(&table.readers, s):
            table.arriving[kept] = s
            kept += 1
            continue
        idle_remove(table, s)
        table.index[slot.key] = NONE
        give_free(table, s)
    table.num_arriving = kept


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
                table.totals.prefetched += 1
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


cdef bint holds(Table* table, pthread_t thread) noexcept nogil:
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


cdef Outcome look(Table* table, Pins* pins, Waiter* waiter) noexcept nogil:
    cdef bint holder = holds(table, pins.thread)
    if (holder or table.waiting == NULL or table.waiting == waiter) and fits(table, pins):
        if not extents_lease(table.extents):
            return CLOSED
        pin(table, pins)
        return RESERVED
    if holder and (not leaves_room(table, pins) or nobody_releases(table, pins.thread)):
        return NEVER
    return WAIT


cdef Outcome table_reserve(Table* table, Pins* pins, Waiter* waiter, bint counted, bint patient) noexcept nogil:
    cdef Outcome outcome
    cdef Py_ssize_t i
    pthread_mutex_lock(&table.lock)
    outcome = look(table, pins, waiter)
    if outcome == WAIT and patient:
        if not waiter.queued:
            enqueue(table, waiter)
        waiter.looked = table.releases
        sf_wait(&table.released, &table.lock)
        outcome = look(table, pins, waiter)
        waiter.looked = table.releases
    if outcome != WAIT and waiter.queued:
        dequeue(table, waiter)
    if outcome == RESERVED and counted:
        table.totals.waves += 1
        table.totals.requests += pins.n
        for i in range(pins.n):
            table.totals.hits += pins.hit[i]
    pthread_mutex_unlock(&table.lock)
    return outcome


cdef int32_t table_prefetch(Table* table, const int32_t* keys, Py_ssize_t n, int32_t spare) noexcept nogil:
    cdef int32_t begun = 0, s
    cdef Py_ssize_t i
    pthread_mutex_lock(&table.lock)
    settle_ahead(table, NONE)
    for i in range(n):
        if (not table.direct or table.waiting != NULL or table.num_arriving == MOST_AHEAD
                or table.totals.free + table.totals.idle <= spare):
            break
        if table.index[keys[i]] != NONE:
            continue
        s = take_free(table) if table.totals.free > 0 else take_victim(table)
        give(table, s, keys[i], AHEAD)
        table.slots[s].ahead = 1
        idle_insert(table, s)
        table.arriving[table.num_arriving] = s
        table.num_arriving += 1
        begun += 1
    table.totals.prefetches += begun
    pthread_mutex_unlock(&table.lock)
    return begun


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
    number = arrive(table, pins.slots[i], pins.keys[i])
    pthread_mutex_lock(&table.lock)
    if number == 0:
        pins.pending[i] = 0
        pins.admitted += 1
        if slot.state == ADMITTING:
            slot.state = RESIDENT
            table.totals.resident += 1
            table.totals.admissions += 1
    elif slot.state == RESIDENT:                # another lease was told that it is there; nobody will be told so again
        slot.state = ADMITTING
        table.totals.resident -= 1
        table.totals.evictions += 1
    pthread_mutex_unlock(&table.lock)
    return number


cdef void wake(Table* table) noexcept nogil:
    table.releases += 1
    if table.waiting != NULL:
        pthread_cond_broadcast(&table.released)


cdef void table_release(Table* table, Pins* pins) noexcept nogil:
    cdef Py_ssize_t i
    cdef Slot* slot
    for i in range(pins.num_dropped, pins.num_dropping):        # evicted for experts that were never asked for
        drop(table, pins.dropping[i], False)
    pins.num_dropping = 0
    pthread_mutex_lock(&table.lock)
    for i in range(pins.n):
        slot = &table.slots[pins.slots[i]]
        slot.leases -= 1
        if slot.leases > 0:
            continue
        if slot.state == ADMITTING and table.direct and readers_finished(&table.readers, pins.slots[i]):
            if readers_wait(&table.readers, pins.slots[i]) == 0:    # there, though nobody waited for it
                slot.state = RESIDENT
                table.totals.resident += 1
                table.totals.admissions += 1
        if slot.state == RESIDENT:
            idle_insert(table, pins.slots[i])
        else:
            table.index[slot.key] = NONE
            forget(table, slot.key)
            pins.dropping[pins.num_dropping] = pins.slots[i]
            pins.num_dropping += 1
    table.totals.dropping += pins.num_dropping
    pins.held = False
    if pins.before == NULL:
        table.open = pins.after
    else:
        pins.before.after = pins.after
    if pins.after != NULL:
        pins.after.before = pins.before
    table.totals.leases -= 1
    wake(table)
    pthread_mutex_unlock(&table.lock)
    if pins.num_dropping > 0:
        for i in range(pins.num_dropping):
            if table.direct:
                readers_cancel(&table.readers, pins.dropping[i])
            else:
                extents_drop(table.extents, table.slots[pins.dropping[i]].key, table.slots[pins.dropping[i]].asked)
        pthread_mutex_lock(&table.lock)
        for i in range(pins.num_dropping):
            give_free(table, pins.dropping[i])
        table.totals.dropping -= pins.num_dropping
        wake(table)
        pthread_mutex_unlock(&table.lock)
    extents_unlease(table.extents)


# --- learning ---

cdef void table_observe(
        Table* table, int32_t layer, const int32_t* ids, const float* weights, Py_ssize_t n, int32_t top_k) noexcept nogil:
    cdef Py_ssize_t token
    pthread_mutex_lock(&table.lock)
    for token in range(n):
        policy_observe(&table.policy, layer, ids + token * top_k, weights + token * top_k, top_k)
    policy_settle(&table.policy, layer)
    pthread_mutex_unlock(&table.lock)


# --- asking ---

cdef bint table_resident(Table* table, Py_ssize_t key) noexcept nogil:
    cdef int32_t s
    cdef bint resident
    pthread_mutex_lock(&table.lock)
    s = table.index[key]
    resident = s != NONE and table.slots[s].state == RESIDENT
    pthread_mutex_unlock(&table.lock)
    return resident


cdef Totals table_totals(Table* table) noexcept nogil:
    cdef Totals totals
    pthread_mutex_lock(&table.lock)
    totals = table.totals
    pthread_mutex_unlock(&table.lock)
    return totals
