# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Reading ahead: experts that are likely to be requested get slots before they are, while the disk has nothing else to do.

Their slots are idle from the start: no lease pins them, and whoever needs a slot may evict them, arrived or not.
"""

from libc.stdint cimport int32_t

from sparseflow.extents cimport pthread_mutex_lock, pthread_mutex_unlock
from sparseflow.policy cimport policy_victim
from sparseflow.readers cimport AHEAD, readers_finished, readers_recall, readers_wait
from sparseflow.slots cimport (
    ADMITTING, MOST_AHEAD, NONE, RESIDENT, Slot, arrived, give, give_free, idle_insert, idle_remove, take_free, take_victim,
)


cdef void settle_ahead(Table* table, int32_t layer) noexcept nogil:
    cdef int32_t kept = 0, i, s
    cdef Slot* slot
    for i in range(table.num_arriving):
        s = table.arriving[i]
        slot = &table.slots[s]
        if not slot.ahead or slot.state == RESIDENT:
            continue                                            # requested or evicted meanwhile
        if readers_finished(&table.readers, s):
            if readers_wait(&table.readers, s) == 0:
                arrived(table, s)
                continue
        elif slot.key // table.policy.experts != layer or not readers_recall(&table.readers, s):
            table.arriving[kept] = s
            kept += 1
            continue
        idle_remove(table, s)
        table.index[slot.key] = NONE
        give_free(table, s)
    table.num_arriving = kept


cdef int32_t table_prefetch(Table* table, const int32_t* keys, Py_ssize_t n, int32_t spare) noexcept nogil:
    cdef int32_t begun = 0, s
    cdef Py_ssize_t i
    if not table.direct:
        return 0
    pthread_mutex_lock(&table.lock)
    settle_ahead(table, NONE)
    for i in range(n):
        if table.waiting != NULL or table.num_arriving == MOST_AHEAD or table.totals.free + table.totals.idle <= spare:
            break
        if table.index[keys[i]] != NONE:
            continue
        if table.totals.free > 0:
            s = take_free(table)
        elif table.slots[policy_victim(&table.policy)].state == ADMITTING:
            break                                               # read ahead itself, and likelier than what is left
        else:
            s = take_victim(table)
        give(table, s, keys[i], AHEAD)
        table.slots[s].ahead = 1
        idle_insert(table, s)
        table.arriving[table.num_arriving] = s
        table.num_arriving += 1
        begun += 1
    table.totals.prefetches += begun
    pthread_mutex_unlock(&table.lock)
    return begun
