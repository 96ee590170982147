"""Threads that read slices past the page cache (O_DIRECT) into slots of anonymous memory, as a C struct and calls without the GIL.

Ownership: a LeaseTable owns its Readers; they own the memory of the slots, the threads, and a descriptor of their own. Threads:
every call takes `lock` itself, for an instant and never across a read, except those that say they wait. None may be called in a
forked child but readers_destroy: the lock may be held for ever there.
"""

from libc.stdint cimport int32_t, uint8_t, uintptr_t
from posix.types cimport pid_t

from sparseflow.extents cimport Extents, pthread_cond_t, pthread_mutex_t, pthread_t


cdef enum:
    READERS = 4             # threads: enough to keep a disk busy with parts of a slice


cdef enum:                  # urgency
    NOW = 0                 # somebody waits for it
    AHEAD = 1               # only when nothing is waited for
    NOWHERE = 2             # none of its parts is to be handed out


cdef struct Read:           # the last read into a slot
    Py_ssize_t slice
    int32_t after           # next slot in its queue
    int32_t handed          # parts that a thread has taken
    int32_t finished        # parts that are done
    int32_t parts           # parts there will be: 0 once cancelled
    int32_t busy            # parts that threads are reading: its own, or while none is handed, what was cancelled before it
    int error               # 0 or the errno of a part that failed
    int queue               # an urgency: where it is queued, or will be once nothing cancelled is busy


cdef struct Readers:
    Extents* extents        # for the sizes
    int fd                  # the store's descriptor for direct reads, duplicated: it may be closed before the last read ends
    uint8_t* mapping        # anonymous, a little longer than the slots need
    size_t mapping_bytes
    uint8_t* memory         # [num_slots * stride], aligned to a huge page
    size_t part_bytes       # of one read call
    int32_t parts           # of one slice
    Read* reads             # [num_slots]
    int32_t first[2]        # queues of slots with parts to hand out, by urgency
    int32_t last[2]
    pthread_t threads[READERS]
    int started
    pid_t process           # whose threads they are: a forked child has neither them nor the memory
    int idle                # threads that wait for work
    bint stopping
    pthread_mutex_t lock
    pthread_cond_t work
    pthread_cond_t done


cdef int readers_init(Readers* readers, Extents* extents, int32_t num_slots) noexcept nogil    # 0 or an errno
cdef void readers_destroy(Readers* readers) noexcept nogil          # waits for the parts that threads are reading

cdef inline uintptr_t readers_address(Readers* readers, int32_t slot) noexcept nogil:
    return <uintptr_t>readers.memory + <size_t>slot * readers.extents.stride

# Replaces the read before it, of which nothing is written to the slot once the first part of this one is.
cdef void readers_begin(Readers* readers, int32_t slot, Py_ssize_t slice, int urgency) noexcept nogil
cdef void readers_hurry(Readers* readers, int32_t slot) noexcept nogil      # what was begun AHEAD is wanted NOW
cdef bint readers_finished(Readers* readers, int32_t slot) noexcept nogil   # with or without success
cdef int readers_wait(Readers* readers, int32_t slot) noexcept nogil        # waits until finished: 0 or an errno
cdef bint readers_recall(Readers* readers, int32_t slot) noexcept nogil     # cancels, unless a part was handed out: whether it did
cdef void readers_cancel(Readers* readers, int32_t slot) noexcept nogil     # parts handed out go on, for nobody
