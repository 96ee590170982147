# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""LeaseTable: which experts are in memory, who computes with them, and which goes next.

Design
    A fixed number of slots, each standing for the memory of one expert. A slot is free, admitting (given to an expert
    whose bytes are not known to be there) or resident. Everything is allocated when the table is made; a direct index
    [layer * num_experts + expert] leads to the slot; resident slots that nobody leases form a doubly linked list in
    order of last use, whose head is the next to be evicted. A leased slot is not in that list, so it cannot be.

    `acquire` is all or nothing: it pins what is there, evicts for what is not, and asks the disk for all of it before it
    returns. `Lease.wait` makes sure the bytes are there. `Lease.release` unpins.

Thread-safety
    Any thread may acquire. One mutex guards the table; it is held for a few hundred nanoseconds, never across a system
    call and never while a Python object is made. A lease is used by one thread at a time, and counts for the thread that
    acquired it.

Waiting
    When leases of other threads hold too many slots, `acquire` waits, first come first served, until enough are
    released. Do not acquire while holding a lease whose slots the new one needs: it would have to be released first, and
    the waiting thread cannot. Where waiting could never end (this thread's own leases leave too few slots, or every
    thread that holds a lease waits) CapacityError is raised instead. A thread that holds a lease does not queue.
"""

from __future__ import annotations

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from sparseflow.store cimport (
    Extents, PackedStore, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
    store_address, store_admit, store_drop, store_forget, store_lease, store_unlease, store_will_need,
)

import numpy as np

from sparseflow.errors import CapacityError, OptionError, SparseFlowError

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_cond_t:
        pass
    ctypedef unsigned long pthread_t
    int pthread_cond_init(pthread_cond_t* condition, const void* attributes) noexcept
    int pthread_cond_destroy(pthread_cond_t* condition) noexcept
    int pthread_cond_broadcast(pthread_cond_t* condition) noexcept
    pthread_t pthread_self() noexcept

cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>
    static void sf_wait_a_while(pthread_cond_t *condition, pthread_mutex_t *mutex) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        if (until.tv_nsec >= 1000 * 1000 * 1000) { until.tv_sec += 1; until.tv_nsec -= 1000 * 1000 * 1000; }
        pthread_cond_timedwait(condition, mutex, &until);
    }
    """
    void sf_wait_a_while(pthread_cond_t* condition, pthread_mutex_t* mutex) noexcept nogil

cdef enum:
    NONE = -1                   # no slot, or the end of a list
    ADMIT_ALL_EXPERTS = 16      # so many are asked for at once in resident mode: keeps the disk's queue full

cdef enum SlotState:
    FREE, ADMITTING, RESIDENT

cdef enum Outcome:
    RESERVED, WAIT, NEVER, CLOSED


cdef struct Slot:
    int32_t key                 # layer * num_experts + expert
    int32_t leases              # how many leases hold it
    int32_t before              # neighbours in the list of unleased resident slots; `after` also links the free slots
    int32_t after
    uint8_t state


cdef struct Grip:               # the C half of a Lease
    Py_ssize_t n
    int32_t* keys               # [n]
    int32_t* slots              # [n]
    int32_t* dropped            # [n] keys of evicted experts, whose pages are still to be dropped; slots, at release
    uint8_t* hit                # [n] had a slot when the lease was acquired
    uint8_t* pending            # [n] not known to be in memory: still to be waited for
    Py_ssize_t num_dropped
    pthread_t thread            # who acquired it
    bint held
    Grip* before                # neighbours in the table's list of open leases
    Grip* after


cdef struct Waiter:             # an acquire that waits, in order of arrival
    pthread_t thread
    bint queued
    uint64_t looked             # the table's `releases` when it last found too few slots
    Waiter* after


cdef struct Counters:
    int64_t requests
    int64_t hits
    int64_t evictions
    int64_t admissions
    int64_t waves


cdef struct Table:
    Extents* extents
    Py_ssize_t num_slots
    Slot* slots                 # [num_slots]
    int32_t* index              # [layers * experts] slot or NONE
    int32_t oldest              # ends of the list of unleased resident slots
    int32_t newest
    int32_t free
    Py_ssize_t num_unleased     # resident, in that list
    Py_ssize_t num_free
    Py_ssize_t num_dropping     # on their way to the free list
    Py_ssize_t num_resident
    uint64_t releases           # goes up whenever waiting threads should look again
    Grip* open
    Py_ssize_t num_open
    Waiter* waiting
    Counters counters
    pthread_mutex_t lock
    pthread_cond_t released


# --- the list of unleased resident slots: O(1), under the lock ---

cdef inline void list_remove(Table* table, int32_t s) noexcept nogil:
    cdef Slot* slot = &table.slots[s]
    if slot.before == NONE:
        table.oldest = slot.after
    else:
        table.slots[slot.before].after = slot.after
    if slot.after == NONE:
        table.newest = slot.before
    else:
        table.slots[slot.after].before = slot.before
    table.num_unleased -= 1


cdef inline void list_append(Table* table, int32_t s) noexcept nogil:
    cdef Slot* slot = &table.slots[s]
    slot.before = table.newest
    slot.after = NONE
    if table.newest == NONE:
        table.oldest = s
    else:
        table.slots[table.newest].after = s
    table.newest = s
    table.num_unleased += 1


cdef inline int32_t take_free(Table* table) noexcept nogil:
    cdef int32_t s = table.free
    table.free = table.slots[s].after
    table.num_free -= 1
    return s


cdef inline void give_free(Table* table, int32_t s) noexcept nogil:
    table.slots[s].state = FREE
    table.slots[s].key = NONE
    table.slots[s].after = table.free
    table.free = s
    table.num_free += 1


cdef inline void evict_oldest(Table* table) noexcept nogil:
    """Free the slot that was not used for longest. Its pages must be dropped by the caller, after unlocking."""
    cdef int32_t s = table.oldest
    cdef int32_t key = table.slots[s].key
    list_remove(table, s)
    store_forget(table.extents, key)
    table.index[key] = NONE
    table.num_resident -= 1
    table.counters.evictions += 1
    give_free(table, s)


# --- acquiring ---

cdef bint fits(Table* table, Grip* grip) noexcept nogil:
    """Whether the request can be met now: enough slots are free or can be evicted, not counting those it pins itself."""
    cdef Py_ssize_t needed = 0, own = 0, i
    cdef int32_t s
    for i in range(grip.n):
        s = table.index[grip.keys[i]]
        if s == NONE:
            needed += 1
        elif table.slots[s].leases == 0:
            own += 1
    return needed <= table.num_free + table.num_unleased - own


cdef void reserve(Table* table, Grip* grip, bint counted) noexcept nogil:
    """Pin hits, then give slots to misses. Only when `fits`."""
    cdef Py_ssize_t i
    cdef int32_t s
    cdef int64_t hits = 0
    grip.num_dropped = 0
    for i in range(grip.n):
        s = table.index[grip.keys[i]]
        grip.slots[i] = s
        grip.hit[i] = s != NONE
        if s != NONE:
            if table.slots[s].leases == 0:
                list_remove(table, s)
            table.slots[s].leases += 1
            grip.pending[i] = table.slots[s].state != RESIDENT
            hits += 1
    for i in range(grip.n):
        if grip.slots[i] == NONE:
            if table.num_free == 0:
                grip.dropped[grip.num_dropped] = table.slots[table.oldest].key
                grip.num_dropped += 1
                evict_oldest(table)
            s = take_free(table)
            table.slots[s].key = grip.keys[i]
            table.slots[s].state = ADMITTING
            table.slots[s].leases = 1
            table.index[grip.keys[i]] = s
            grip.slots[i] = s
            grip.pending[i] = 1
    grip.held = True
    grip.before = NULL
    grip.after = table.open
    if table.open != NULL:
        table.open.before = grip
    table.open = grip
    table.num_open += 1
    if counted:
        table.counters.waves += 1
        table.counters.requests += grip.n
        table.counters.hits += hits


cdef bint holds(Table* table, pthread_t thread) noexcept nogil:
    cdef Grip* grip = table.open
    while grip != NULL:
        if grip.thread == thread:
            return True
        grip = grip.after
    return False


cdef bint stuck(Table* table, pthread_t thread) noexcept nogil:
    """Whether nobody is left to release a slot: every open lease belongs to this thread or to one that waits in vain."""
    cdef Grip* grip = table.open
    cdef Waiter* waiter
    if table.num_dropping > 0:
        return False
    while grip != NULL:
        if grip.thread != thread:
            waiter = table.waiting
            while waiter != NULL and not (waiter.thread == grip.thread and waiter.looked == table.releases):
                waiter = waiter.after
            if waiter == NULL:
                return False
        grip = grip.after
    return True


cdef bint leaves_room(Table* table, Grip* grip) noexcept nogil:
    """Whether the request would fit if all other threads released everything."""
    cdef Grip* own = table.open
    cdef Py_ssize_t taken = grip.n, i, j
    cdef bint counted
    while own != NULL:
        if own.thread == grip.thread:
            for i in range(own.n):
                counted = False
                for j in range(grip.n):
                    counted = counted or grip.keys[j] == own.keys[i]
                taken += not counted
        own = own.after
    return taken <= table.num_slots


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


cdef Outcome try_reserve(Table* table, Grip* grip, Waiter* waiter, bint counted, bint patient) noexcept nogil:
    """Reserve, or with `patient` wait up to 50 ms for a release and try once more."""
    cdef Outcome outcome = WAIT
    cdef bint holder, turn
    pthread_mutex_lock(&table.lock)
    while True:
        holder = holds(table, grip.thread)
        turn = holder or table.waiting == NULL or table.waiting == waiter
        if turn and fits(table, grip):
            if store_lease(table.extents):
                reserve(table, grip, counted)
                outcome = RESERVED
            else:
                outcome = CLOSED
        elif holder and not leaves_room(table, grip) or holder and stuck(table, grip.thread):
            outcome = NEVER
        else:
            if not waiter.queued:
                enqueue(table, waiter)
            waiter.looked = table.releases
            if patient:
                sf_wait_a_while(&table.released, &table.lock)
                patient = False
                continue
        break
    if outcome != WAIT and waiter.queued:
        dequeue(table, waiter)
    pthread_mutex_unlock(&table.lock)
    return outcome


cdef void leave_queue(Table* table, Waiter* waiter) noexcept nogil:
    pthread_mutex_lock(&table.lock)
    if waiter.queued:
        dequeue(table, waiter)
    pthread_mutex_unlock(&table.lock)


cdef void fetch(Table* table, Grip* grip) noexcept nogil:
    """After `reserve`, unlocked: drop what was evicted, then ask the disk for all that is not known to be here."""
    cdef Py_ssize_t i
    for i in range(grip.num_dropped):
        store_drop(table.extents, grip.dropped[i])
    grip.num_dropped = 0
    for i in range(grip.n):
        if grip.pending[i]:
            store_will_need(table.extents, grip.keys[i])


# --- waiting for bytes, releasing ---

cdef int admit_one(Table* table, Grip* grip, Py_ssize_t i) noexcept nogil:
    """Wait for one expert of the lease: 0 or an errno. On failure its slot is no longer taken for resident."""
    cdef Slot* slot = &table.slots[grip.slots[i]]
    cdef int number = store_admit(table.extents, grip.keys[i])
    pthread_mutex_lock(&table.lock)
    if number == 0 and slot.state == ADMITTING:
        slot.state = RESIDENT
        table.num_resident += 1
        table.counters.admissions += 1
    elif number != 0 and slot.state == RESIDENT:
        slot.state = ADMITTING
        table.num_resident -= 1
        table.counters.evictions += 1
    if number == 0:
        grip.pending[i] = 0
    pthread_mutex_unlock(&table.lock)
    return number


cdef int admit_pending(Table* table, Grip* grip, Py_ssize_t* failed) noexcept nogil:
    cdef Py_ssize_t i
    cdef int number
    for i in range(grip.n):
        if grip.pending[i]:
            number = admit_one(table, grip, i)
            if number != 0:
                failed[0] = i
                return number
    return 0


cdef void let_go(Table* table, Grip* grip) noexcept nogil:
    """Unpin. What never became resident gives its slot back, once its pages are dropped."""
    cdef Py_ssize_t i, dropping = 0
    cdef int32_t s
    cdef Slot* slot
    pthread_mutex_lock(&table.lock)
    for i in range(grip.n):
        s = grip.slots[i]
        slot = &table.slots[s]
        slot.leases -= 1
        if slot.leases == 0:
            if slot.state == RESIDENT:
                list_append(table, s)
            else:
                table.index[slot.key] = NONE
                store_forget(table.extents, slot.key)
                grip.dropped[dropping] = s
                dropping += 1
    table.num_dropping += dropping
    grip.held = False
    if grip.before == NULL:
        table.open = grip.after
    else:
        grip.before.after = grip.after
    if grip.after != NULL:
        grip.after.before = grip.before
    table.num_open -= 1
    table.releases += 1
    if table.waiting != NULL:
        pthread_cond_broadcast(&table.released)
    pthread_mutex_unlock(&table.lock)
    if dropping > 0:
        for i in range(dropping):
            store_drop(table.extents, table.slots[grip.dropped[i]].key)
        pthread_mutex_lock(&table.lock)
        for i in range(dropping):
            give_free(table, grip.dropped[i])
        table.num_dropping -= dropping
        table.releases += 1
        if table.waiting != NULL:
            pthread_cond_broadcast(&table.released)
        pthread_mutex_unlock(&table.lock)
    store_unlease(table.extents)


@cython.no_gc
cdef class Lease:
    """Some experts of one layer, pinned until released. Made by `LeaseTable.acquire`; a context manager that releases.

        with table.acquire(layer, ids) as lease:
            lease.wait()
            ...compute with lease.addresses...

    A lease that is dropped without release releases itself, so an exception anywhere leaves nothing pinned.

    Attributes
        layer: the layer.
        ids: int32 [n], ascending.
        hit: bool [n], whether the expert was in memory (or on its way, for another lease) when this was acquired.
        addresses: uint64 [n], where each slice begins; its bytes are there once waited for, and stay until release.
    """

    cdef LeaseTable table
    cdef Grip grip
    cdef readonly int layer
    cdef readonly object ids
    cdef readonly object hit
    cdef readonly object addresses

    def __cinit__(self, LeaseTable table, int layer, const int32_t[::1] ids not None):
        cdef Py_ssize_t n = ids.shape[0], i
        cdef Grip* grip = &self.grip
        self.table = table
        self.layer = layer
        self.ids = np.array(ids)
        self.hit = np.empty(n, np.bool_)
        self.addresses = np.empty(n, np.uint64)
        grip.keys = <int32_t*>malloc(n * (3 * sizeof(int32_t) + 2))
        if grip.keys == NULL:
            raise MemoryError
        grip.slots = grip.keys + n
        grip.dropped = grip.slots + n
        grip.hit = <uint8_t*>(grip.dropped + n)
        grip.pending = grip.hit + n
        grip.n = n
        grip.thread = pthread_self()
        for i in range(n):
            grip.keys[i] = layer * table.store.num_experts + ids[i]
            grip.pending[i] = 0

    cdef void fill(self):
        """What the lease tells, once reserved."""
        cdef uint8_t[::1] hit = self.hit.view(np.uint8)
        cdef uint64_t[::1] addresses = self.addresses
        cdef Py_ssize_t i
        for i in range(self.grip.n):
            hit[i] = self.grip.hit[i]
            addresses[i] = store_address(self.table.table.extents, self.grip.keys[i])

    def __dealloc__(self):
        if self.grip.held:
            with nogil:
                let_go(&self.table.table, &self.grip)
        free(self.grip.keys)

    cdef int check_held(self) except -1:
        if not self.grip.held:
            raise SparseFlowError(f"the lease of {self.grip.n} expert(s) of layer {self.layer} was released; acquire again")
        return 0

    @property
    def released(self) -> bool:
        """True once nothing is pinned by this lease."""
        return not self.grip.held

    def wait(self) -> None:
        """Return when all experts of the lease are in memory; the disk is waited for in ascending id, without the GIL.

        An expert that was on its way for another lease is waited for too, so a failure reaches everyone who asked.

        Raises
            StorageError: the disk failed. The lease is released; experts that did arrive stay cached, others hold no slot.
            SparseFlowError: released already.
        """
        cdef Py_ssize_t failed = 0
        cdef int number
        self.check_held()
        with nogil:
            number = admit_pending(&self.table.table, &self.grip, &failed)
        if number != 0:
            self.fail(failed, number)

    def wait_one(self, i: int) -> None:
        """Return when expert `ids[i]` is in memory. Raises as `wait` does, and OptionError for an `i` that is not there."""
        cdef Py_ssize_t k = i
        cdef int number = 0
        self.check_held()
        if not 0 <= k < self.grip.n:
            raise OptionError(f"no expert at position {i} of a lease of {self.grip.n}")
        if self.grip.pending[k]:
            with nogil:
                number = admit_one(&self.table.table, &self.grip, k)
            if number != 0:
                self.fail(k, number)

    cdef int fail(self, Py_ssize_t i, int number) except -1:
        error = self.table.store.error(self.grip.keys[i], number)
        self.release()
        raise error

    def release(self) -> None:
        """Unpin the experts. Does nothing when released already."""
        cdef Py_ssize_t i
        cdef bint drops = False
        if not self.grip.held:
            return
        for i in range(self.grip.n):
            drops = drops or self.grip.pending[i]
        if drops:
            with nogil:
                let_go(&self.table.table, &self.grip)
        else:
            let_go(&self.table.table, &self.grip)

    def __enter__(self) -> Lease:
        self.check_held()
        return self

    def __exit__(self, *exception) -> None:
        self.release()

    def __len__(self) -> int:
        return self.grip.n


cdef class LeaseTable:
    """A bounded cache of experts over a PackedStore (see the module's text).

    Parameters
        store: the experts.
        slots: how many may be in memory at once. More than there are experts is taken as all of them.

    Attributes: store, slots.

    Raises
        OptionError: fewer than one slot.

    One table per store: two would evict each other's experts.
    """

    cdef Table table
    cdef readonly PackedStore store

    def __cinit__(self, *args, **kwargs):
        pthread_mutex_init(&self.table.lock, NULL)
        pthread_cond_init(&self.table.released, NULL)

    def __init__(self, PackedStore store not None, slots: int) -> None:
        cdef Table* table = &self.table
        cdef Py_ssize_t i
        if self.store is not None:
            raise SparseFlowError("a lease table is set up once; make another LeaseTable")
        if slots < 1:
            raise OptionError(f"a lease table of {slots} slots; it takes at least 1")
        self.store = store
        table.extents = &store.extents
        table.num_slots = min(slots, store.num_layers * store.num_experts)
        table.slots = <Slot*>calloc(table.num_slots, sizeof(Slot))
        table.index = <int32_t*>malloc(table.extents.count * sizeof(int32_t))
        if table.slots == NULL or table.index == NULL:
            raise MemoryError
        for i in range(table.extents.count):
            table.index[i] = NONE
        table.oldest = table.newest = table.free = NONE
        for i in range(table.num_slots - 1, -1, -1):
            give_free(table, i)

    def __dealloc__(self):
        free(self.table.slots)
        free(self.table.index)
        pthread_cond_destroy(&self.table.released)
        pthread_mutex_destroy(&self.table.lock)

    @property
    def slots(self) -> int:
        """How many experts may be in memory at once."""
        return self.table.num_slots

    @property
    def pinned(self) -> int:
        """Slots that some lease holds now."""
        cdef Table* table = &self.table
        pthread_mutex_lock(&table.lock)
        result = table.num_slots - table.num_free - table.num_unleased - table.num_dropping
        pthread_mutex_unlock(&table.lock)
        return result

    @property
    def leases(self) -> int:
        """Leases that are not released."""
        return self.table.num_open

    @property
    def num_resident(self) -> int:
        """Experts that are in memory now."""
        return self.table.num_resident

    def resident(self, layer: int, expert: int) -> bool:
        """Whether an expert is in memory now."""
        cdef Table* table = &self.table
        cdef Py_ssize_t key = self.store.slice_number(layer, expert)
        cdef int32_t s
        pthread_mutex_lock(&table.lock)
        s = table.index[key]
        result = s != NONE and table.slots[s].state == RESIDENT
        pthread_mutex_unlock(&table.lock)
        return result

    def counters(self) -> dict[str, int]:
        """A snapshot of what happened since the table was made.

        waves: leases acquired. requests = hits + misses: experts asked for in them, each once per lease; an expert on its
        way for another lease is a hit. admissions: experts read into a slot, admitted_bytes of them by stride; those of
        `admit_all` count here only. evictions: experts that lost their slot. admissions - evictions are resident now.
        These are what was asked; what the disk moved is in the operating system's books (evidence.py).
        """
        cdef Counters counters
        pthread_mutex_lock(&self.table.lock)
        counters = self.table.counters
        pthread_mutex_unlock(&self.table.lock)
        return {
            "requests": counters.requests,
            "hits": counters.hits,
            "misses": counters.requests - counters.hits,
            "evictions": counters.evictions,
            "admissions": counters.admissions,
            "admitted_bytes": counters.admissions * self.store.stride,
            "waves": counters.waves,
        }

    def acquire(self, layer: int, ids) -> Lease:
        """Pin some experts of one layer: all of them, or none and an error. Reading of what is not there has begun on return.

        Parameters
            layer: the layer.
            ids: int32 [n], contiguous, ascending, distinct.

        Waits while leases of other threads hold too many slots (see the module's text); Ctrl-C ends the wait.

        Raises
            OptionError: ids of another form, or out of range.
            CapacityError: more ids than slots (ask for them in waves of at most `slots`), or waiting could never end.
            SparseFlowError: the store is closed.
        """
        return self.reserve(layer, ids, True)

    cdef Lease reserve(self, layer, ids, bint counted):
        cdef const int32_t[::1] view
        cdef Waiter waiter
        cdef Outcome outcome
        cdef Py_ssize_t i, pending = 0
        try:
            view = memoryview(ids)
        except (TypeError, ValueError, BufferError) as error:
            raise OptionError(f"expert ids must be a contiguous int32 array of one dimension: {error}") from error
        self.store.slice_number(layer, 0)
        for i in range(view.shape[0]):
            if not 0 <= view[i] < self.store.num_experts:
                raise OptionError(f"expert {view[i]} of layer {layer} does not exist; there are {self.store.num_experts}")
            if i > 0 and view[i] <= view[i - 1]:
                raise OptionError(f"expert ids must be ascending and distinct, but {view[i]} follows {view[i - 1]}")
        if view.shape[0] > self.table.num_slots:
            raise CapacityError(
                f"{view.shape[0]} experts of layer {layer} were asked for at once, but the cache has {self.table.num_slots} slots;"
                " ask in waves or give a larger cache")
        cdef Lease lease = Lease(self, layer, view)
        waiter.thread = lease.grip.thread
        waiter.queued = False
        outcome = try_reserve(&self.table, &lease.grip, &waiter, counted, False)
        if outcome == WAIT:
            try:
                while outcome == WAIT:
                    with nogil:
                        outcome = try_reserve(&self.table, &lease.grip, &waiter, counted, True)
                    PyErr_CheckSignals()
            finally:
                leave_queue(&self.table, &waiter)
        if outcome == CLOSED:
            raise SparseFlowError(f"{self.store.path}: the store is closed; open it again with PackedStore")
        if outcome == NEVER:
            raise CapacityError(
                f"{view.shape[0]} experts of layer {layer} do not fit beside the leases that this thread holds: the cache has"
                f" {self.table.num_slots} slots and nobody else can release any; release first or give a larger cache")
        for i in range(lease.grip.n):
            pending += lease.grip.pending[i]
        if pending > 0:
            with nogil:
                fetch(&self.table, &lease.grip)
        lease.fill()
        return lease

    def admit_all(self, progress=None) -> None:
        """Bring every expert into memory, in the order of the file, to stay (resident mode).

        Parameters
            progress: called as progress(bytes so far, bytes in all) after every few experts; may raise to stop.

        Raises
            CapacityError: fewer slots than experts.
            StorageError: the disk failed.
        """
        cdef Lease lease
        if self.table.num_slots < self.table.extents.count:
            raise CapacityError(
                f"all {self.table.extents.count} experts do not fit in {self.table.num_slots} slots; give a larger cache")
        done = 0
        for layer in range(self.store.num_layers):
            for first in range(0, self.store.num_experts, ADMIT_ALL_EXPERTS):
                ids = np.arange(first, min(first + ADMIT_ALL_EXPERTS, self.store.num_experts), dtype=np.int32)
                with self.reserve(layer, ids, False) as lease:
                    lease.wait()
                done += len(ids) * self.store.stride
                if progress is not None:
                    progress(done, self.table.extents.count * self.store.stride)
