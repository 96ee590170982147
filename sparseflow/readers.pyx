# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Readers: slices come from the disk into slots of memory, past the page cache, while others compute.

Design
    With O_DIRECT the disk writes into the slots: no copy, no page to find, map, unmap or drop, and in a cache that is
    strictly bounded the page cache would only hold the same bytes twice. The memory of all slots is one piece in huge pages.

    A slice is read in a few parts by a few threads, so that the first slice asked for arrives first and not all at the same
    moment. Slots with parts to hand out wait in two queues, one for what somebody waits for and one for what was
    prefetched, which is looked at when the first is empty.

    A part that a thread is reading cannot be called back. So a cancelled read lets go at once, and the next read into its slot
    begins when those parts have come in: nobody waits for what nobody wants.

    A truncated file or a failing disk is an errno, and what is in a slot stays whatever becomes of the file.

Fork
    A child gets neither the threads nor the memory. With the memory, every page read into a slot after the fork would be a
    second copy for as long as the child lives, and a read in progress might end in the child's.
"""

from libc.errno cimport EINTR, EIO, ENOMEM, errno
from libc.stdint cimport int32_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.fcntl cimport F_DUPFD_CLOEXEC, fcntl
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap, munmap
from posix.unistd cimport close, getpid, pread

from sparseflow.extents cimport (
    Extents, pthread_cond_t, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
    pthread_t,
)

cdef extern from *:
    """
    #include <pthread.h>
    #include <signal.h>
    #include <sys/mman.h>
    #ifndef MADV_HUGEPAGE
    #define MADV_HUGEPAGE 14
    #endif
    #ifndef MADV_DONTFORK
    #define MADV_DONTFORK 10
    #endif
    /* Signals are for the threads of the interpreter. */
    static int sf_start_reader(pthread_t *thread, void *(*work)(void *), void *argument) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int result = pthread_create(thread, NULL, work, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return result;
    }
    """
    enum: MADV_HUGEPAGE
    enum: MADV_DONTFORK
    int sf_start_reader(pthread_t* thread, void* (*work)(void*) noexcept nogil, void* argument) noexcept nogil
    int pthread_join(pthread_t thread, void** result) noexcept nogil
    int pthread_cond_init(pthread_cond_t* condition, const void* attributes) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t* condition) noexcept nogil
    int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) noexcept nogil
    int pthread_cond_signal(pthread_cond_t* condition) noexcept nogil
    int pthread_cond_broadcast(pthread_cond_t* condition) noexcept nogil

cdef enum:
    NONE = -1
    BLOCK = 4096                # a multiple of what O_DIRECT asks offsets, lengths and addresses to be multiples of
    HUGE_PAGE = 1 << 21
    PART_BYTES = 5 << 18        # 1.25 MiB at most: a disk gives its full throughput from about a quarter of that on


cdef int readers_init(Readers* readers, Extents* extents, int32_t num_slots) noexcept nogil:
    cdef size_t needed = <size_t>num_slots * extents.stride
    cdef void* mapping
    cdef int number
    cdef int32_t s
    memset(readers, 0, sizeof(Readers))
    readers.extents = extents
    readers.process = getpid()
    readers.parts = (extents.stride + PART_BYTES - 1) / PART_BYTES
    readers.part_bytes = (extents.stride / readers.parts + BLOCK - 1) / BLOCK * BLOCK
    readers.parts = (extents.stride + readers.part_bytes - 1) / readers.part_bytes
    readers.first[NOW] = readers.first[AHEAD] = NONE
    pthread_mutex_init(&readers.lock, NULL)
    pthread_cond_init(&readers.work, NULL)
    pthread_cond_init(&readers.done, NULL)
    readers.fd = fcntl(extents.direct, F_DUPFD_CLOEXEC, 0)
    if readers.fd < 0:
        return errno
    readers.reads = <Read*>calloc(num_slots, sizeof(Read))
    if readers.reads == NULL:
        return ENOMEM
    for s in range(num_slots):
        readers.reads[s].queue = NOWHERE
    mapping = mmap(NULL, needed + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if mapping == MAP_FAILED:
        return errno
    readers.mapping = <uint8_t*>mapping
    readers.mapping_bytes = needed + HUGE_PAGE
    readers.memory = <uint8_t*>((<uintptr_t>mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE)
    madvise(readers.memory, needed, MADV_HUGEPAGE)              # EINVAL where the kernel has none: slower, not wrong
    if madvise(mapping, readers.mapping_bytes, MADV_DONTFORK) != 0:
        return errno
    while readers.started < READERS:
        number = sf_start_reader(&readers.threads[readers.started], work, readers)
        if number != 0:
            return number
        readers.started += 1
    return 0


cdef void readers_destroy(Readers* readers) noexcept nogil:
    cdef int i
    if readers.extents == NULL:
        return
    if readers.process == getpid():
        pthread_mutex_lock(&readers.lock)
        readers.stopping = True
        pthread_cond_broadcast(&readers.work)
        pthread_mutex_unlock(&readers.lock)
        for i in range(readers.started):
            pthread_join(readers.threads[i], NULL)
        if readers.mapping != NULL:
            munmap(readers.mapping, readers.mapping_bytes)
        pthread_cond_destroy(&readers.work)     # in a child this would wait for ever for the threads that it counts
        pthread_cond_destroy(&readers.done)
        pthread_mutex_destroy(&readers.lock)
    if readers.fd >= 0:
        close(readers.fd)
    free(readers.reads)
    readers.extents = NULL


# --- the queues, under the lock ---

cdef bint held_back(Read* read) noexcept nogil:
    """Whether parts of a cancelled read are still written to the slot."""
    return read.busy > 0 and read.handed == 0


cdef void push(Readers* readers, int32_t slot, int urgency) noexcept nogil:
    cdef Read* read = &readers.reads[slot]
    cdef int woken
    read.queue = urgency
    if held_back(read):
        return                                                  # until the last of them calls this again
    read.after = NONE
    if readers.first[urgency] == NONE:
        readers.first[urgency] = slot
    else:
        readers.reads[readers.last[urgency]].after = slot
    readers.last[urgency] = slot
    woken = min(readers.idle, read.parts)
    while woken > 0:
        pthread_cond_signal(&readers.work)
        woken -= 1


cdef void take_out(Readers* readers, int32_t slot) noexcept nogil:
    cdef Read* read = &readers.reads[slot]
    cdef int urgency = read.queue
    cdef int32_t before = NONE, s
    read.queue = NOWHERE
    if urgency == NOWHERE or held_back(read):
        return
    s = readers.first[urgency]
    while s != slot:
        before = s
        s = readers.reads[s].after
    if before == NONE:
        readers.first[urgency] = read.after
    else:
        readers.reads[before].after = read.after
    if readers.last[urgency] == slot:
        readers.last[urgency] = before


cdef void cancel(Readers* readers, int32_t slot) noexcept nogil:
    cdef Read* read = &readers.reads[slot]
    take_out(readers, slot)
    read.parts = read.handed = read.finished = 0


# --- the threads ---

cdef int read_part(Readers* readers, int32_t slot, Py_ssize_t slice, int32_t part) noexcept nogil:
    """Read one part of a slice: 0 or an errno."""
    cdef Extents* extents = readers.extents
    cdef size_t offset = part * readers.part_bytes
    cdef size_t end = min(offset + readers.part_bytes, extents.stride)
    cdef uint8_t* memory = <uint8_t*>readers_address(readers, slot)
    cdef Py_ssize_t count
    while offset < end:
        count = pread(readers.fd, memory + offset, end - offset, extents.header_bytes + slice * extents.stride + offset)
        if count < 0:
            if errno == EINTR:
                continue
            return errno
        if count == 0 or count % BLOCK != 0:                    # the file ends here
            return EIO
        offset += count
    return 0


cdef void* work(void* argument) noexcept nogil:
    cdef Readers* readers = <Readers*>argument
    cdef Read* read
    cdef int32_t slot, part
    cdef int number
    pthread_mutex_lock(&readers.lock)
    while not readers.stopping:
        slot = readers.first[NOW] if readers.first[NOW] != NONE else readers.first[AHEAD]
        if slot == NONE:
            readers.idle += 1
            pthread_cond_wait(&readers.work, &readers.lock)
            readers.idle -= 1
            continue
        read = &readers.reads[slot]
        part = read.handed
        read.handed += 1
        read.busy += 1
        if read.handed == read.parts:
            take_out(readers, slot)
        pthread_mutex_unlock(&readers.lock)
        number = read_part(readers, slot, read.slice, part)
        pthread_mutex_lock(&readers.lock)
        if held_back(read):                                     # cancelled meanwhile
            read.busy -= 1
            if read.busy == 0 and read.queue != NOWHERE:
                push(readers, slot, read.queue)
            continue
        read.busy -= 1
        if number != 0:
            read.error = number
        read.finished += 1
        if read.finished == read.parts:
            pthread_cond_broadcast(&readers.done)
    pthread_mutex_unlock(&readers.lock)
    return NULL


# --- what others ask ---

cdef void readers_begin(Readers* readers, int32_t slot, Py_ssize_t slice, int urgency) noexcept nogil:
    cdef Read* read = &readers.reads[slot]
    pthread_mutex_lock(&readers.lock)
    cancel(readers, slot)
    read.slice = slice
    read.parts = readers.parts
    read.error = 0
    push(readers, slot, urgency)
    pthread_mutex_unlock(&readers.lock)


cdef void readers_hurry(Readers* readers, int32_t slot) noexcept nogil:
    pthread_mutex_lock(&readers.lock)
    if readers.reads[slot].queue == AHEAD:
        take_out(readers, slot)
        push(readers, slot, NOW)
    pthread_mutex_unlock(&readers.lock)


cdef bint readers_finished(Readers* readers, int32_t slot) noexcept nogil:
    cdef bint finished
    pthread_mutex_lock(&readers.lock)
    finished = readers.reads[slot].finished == readers.reads[slot].parts
    pthread_mutex_unlock(&readers.lock)
    return finished


cdef int readers_wait(Readers* readers, int32_t slot) noexcept nogil:
    cdef Read* read = &readers.reads[slot]
    cdef int number
    pthread_mutex_lock(&readers.lock)
    while read.finished < read.parts:
        pthread_cond_wait(&readers.done, &readers.lock)
    number = read.error
    pthread_mutex_unlock(&readers.lock)
    return number


cdef bint readers_recall(Readers* readers, int32_t slot) noexcept nogil:
    cdef bint untouched
    pthread_mutex_lock(&readers.lock)
    untouched = readers.reads[slot].handed == 0
    if untouched:
        cancel(readers, slot)
    pthread_mutex_unlock(&readers.lock)
    return untouched


cdef void readers_cancel(Readers* readers, int32_t slot) noexcept nogil:
    pthread_mutex_lock(&readers.lock)
    cancel(readers, slot)
    pthread_mutex_unlock(&readers.lock)
