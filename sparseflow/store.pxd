"""The mapping of experts.sfx as a C struct, and the calls that leases.pyx makes on it without the GIL.

Ownership: a PackedStore owns its Extents; nobody else frees or remaps them. Threads: every function here may be called
from any thread, with or without the GIL; `lock` guards `kept`, `leases`, `calls` and `closed`, and is never held while a
page is read. A slice number is layer * num_experts + expert.
"""

from libc.stdint cimport uint8_t, uintptr_t


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t* mutex, const void* attributes) noexcept
    int pthread_mutex_destroy(pthread_mutex_t* mutex) noexcept
    int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept
    int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept


cdef struct Extents:
    int fd
    uint8_t* base           # start of the mapping of the whole file, NULL once closed
    size_t file_bytes
    size_t header_bytes     # offset of slice 0
    size_t stride           # distance between slices
    size_t page             # size of a memory page
    size_t window           # what one page-table page maps: no fault maps pages beyond it
    size_t ahead            # the most that the kernel reads for one MADV_WILLNEED
    Py_ssize_t count        # number of slices
    uint8_t* kept           # [count] 1: asked for or admitted, so its pages must not be dropped
    Py_ssize_t leases       # open leases: the mapping must stay
    Py_ssize_t calls        # calls in progress: the mapping must stay
    bint strict             # evicting also drops the page cache copy
    bint populates          # the kernel knows MADV_POPULATE_READ
    bint closed
    pthread_mutex_t lock


cdef int store_enter(Extents* extents) noexcept nogil       # 0 when closed; else store_leave must follow
cdef void store_leave(Extents* extents) noexcept nogil
cdef int store_lease(Extents* extents) noexcept nogil       # 0 when closed; else store_unlease must follow
cdef void store_unlease(Extents* extents) noexcept nogil
cdef uintptr_t store_address(Extents* extents, Py_ssize_t slice) noexcept nogil
cdef void store_will_need(Extents* extents, Py_ssize_t slice) noexcept nogil    # keeps the slice, starts reading it
cdef int store_admit(Extents* extents, Py_ssize_t slice) noexcept nogil         # reads and maps it: 0 or an errno
cdef void store_forget(Extents* extents, Py_ssize_t slice) noexcept nogil       # no longer kept; drops nothing yet
cdef void store_drop(Extents* extents, Py_ssize_t slice) noexcept nogil         # drops it and what was mapped beside it


cdef class PackedStore:
    cdef Extents extents
    cdef readonly str path
    cdef readonly dict header
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly Py_ssize_t stride
    cdef readonly Py_ssize_t slice_bytes
    cdef readonly Py_ssize_t file_bytes

    cdef Py_ssize_t slice_number(self, layer, expert) except -1
    cdef object error(self, Py_ssize_t slice, int number)
