"""The mapping of experts.sfx as a C struct, and what can be done with its slices without the GIL.

Ownership: a PackedStore owns its Extents; nobody else frees or remaps them. Threads: every function may be called from any
thread, with or without the GIL. `users` guards `leases`, `calls` and `closed` and is held for an instant only; `dropping`
is held while pages are dropped and while a slice becomes kept, so that no page of a kept slice is dropped. Neither is held
while a page is read. A slice number is layer * num_experts + expert.
"""

from libc.stdint cimport uint8_t, uintptr_t


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef unsigned long pthread_t
    int pthread_mutex_init(pthread_mutex_t* mutex, const void* attributes) noexcept
    int pthread_mutex_destroy(pthread_mutex_t* mutex) noexcept
    int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept
    int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept
    int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept


cdef enum Kept:
    ASKED = 1               # being read, perhaps
    ADMITTED = 2            # read and mapped


cdef struct Extents:
    int fd
    int direct              # opened with O_DIRECT, -1 where the file system has none
    uint8_t* base           # start of the mapping of the whole file, NULL while closed
    int guard               # under which its lost pages are noted, -1 when they are not
    size_t file_bytes
    size_t header_bytes     # offset of slice 0
    size_t stride           # distance between slices
    size_t page             # size of a memory page
    size_t window           # reach of one page-table page: no fault maps pages beyond it
    size_t ahead            # the most that the kernel reads for one MADV_WILLNEED
    Py_ssize_t count        # number of slices
    bint strict             # dropping a slice also drops its page cache copy
    bint populates          # the kernel knows MADV_POPULATE_READ
    uint8_t* kept           # [count] 0, or ASKED or ADMITTED: its pages must not be dropped
    pthread_mutex_t dropping
    Py_ssize_t leases       # open leases: the mapping must stay
    Py_ssize_t calls        # calls in progress: the mapping must stay
    bint closed
    pthread_mutex_t users


cdef void extents_init(Extents* extents) noexcept nogil
cdef int extents_map(Extents* extents) noexcept nogil       # all fields but base and kept are set: 0 or an errno
cdef void extents_close(Extents* extents) noexcept nogil    # unmaps; nobody may be inside
cdef void extents_destroy(Extents* extents) noexcept nogil

cdef bint extents_enter(Extents* extents) noexcept nogil    # False when closed; else extents_leave must follow
cdef void extents_leave(Extents* extents) noexcept nogil
cdef bint extents_unused(Extents* extents) noexcept nogil   # whether there are no leases, and nobody is inside; does not wait
cdef bint extents_lease(Extents* extents) noexcept nogil    # False when closed; else extents_unlease must follow
cdef void extents_unlease(Extents* extents) noexcept nogil

cdef uintptr_t extents_address(Extents* extents, Py_ssize_t slice) noexcept nogil
cdef int extents_kept(Extents* extents, Py_ssize_t slice) noexcept nogil
cdef void extents_will_need(Extents* extents, Py_ssize_t slice) noexcept nogil  # keeps the slice, starts reading it
cdef int extents_admit(Extents* extents, Py_ssize_t slice) noexcept nogil       # reads and maps it: 0 or an errno

# Eviction, in two steps so that the first can happen under a lock of the caller's. The second leaves a slice alone that was
# kept again in between. `reading`: the slice was ASKED for only, and the disk may still be at it.
cdef void extents_forget(Extents* extents, Py_ssize_t slice) noexcept nogil
cdef void extents_drop(Extents* extents, Py_ssize_t slice, bint reading) noexcept nogil

cdef bint extents_cut(Extents* extents, Py_ssize_t slice) noexcept nogil       # whether the file ends before the slice does, now
cdef Py_ssize_t extents_lost(Extents* extents) noexcept nogil                   # the first slice that was lost while mapped, or -1
cdef void extents_drop_cache(Extents* extents) noexcept nogil                   # of the whole file, but what is mapped
cdef Py_ssize_t extents_cached(Extents* extents, Py_ssize_t slice, Py_ssize_t* pages) noexcept nogil   # or -errno
cdef Py_ssize_t extents_cached_in_all(Extents* extents) noexcept nogil          # pages in the page cache, or -errno
