# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Extents: one expert is one extent of a mapped file, and these are the ways to have its pages in memory or not.

Design
    The whole file is mapped once, read-only and shared, and stays mapped, so an address is a fact of the file and not of
    the cache. What changes is which slices have their pages in memory. There is no budget and no policy here; those are
    the lease table's (slots.pyx).

Admission
    MADV_WILLNEED starts reading and returns; MADV_POPULATE_READ waits and maps. The kernel cuts one WILLNEED down to the
    device's readahead, so it is given in pieces of that size. POPULATE_READ turns a truncated file or a failing disk into
    an errno where a plain access would be a SIGBUS; kernels before 5.14 lack it, and there one byte a page is touched.

What a fault maps beside what was asked
    The kernel maps cached pages around the one that faulted: a 64 KiB window, and since Linux 6.18 the whole large folio
    it finds there, up to the reach of one page-table page (2 MiB on x86-64). Those pages belong to other slices and would
    pile up in the resident set, so admission unmaps again what it finds mapped of slices that are not kept. Huge page
    mappings are refused for the same reason: unmapping a part of one unmaps all of it, kept neighbours included.

Strict
    Dropping a slice also drops it from the page cache (posix_fadvise), and reads are exact (MADV_RANDOM: no readahead
    beyond the slice), so the page cache holds of this file what is kept and no more. A folio that straddles two slices
    goes with the second of them, because the range that is dropped spans all neighbours that are not kept. Other
    processes that read the file are outside that promise.

A page that is lost while it is read
    Admitted pages can still go: somebody cuts the file, or the kernel needs the memory and then cannot read them again. The
    next access is a SIGBUS. Its handler notes the place, puts zeros there, and lets the access have them; whoever leases
    anything of this mapping then looks at the note before the result counts (`extents_lost`), and from there on always.
    A SIGBUS elsewhere is left to whoever handled it before.
"""

from libc.errno cimport EFAULT, EINTR, EINVAL, ENOMEM, errno
from libc.stdint cimport uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from posix.fcntl cimport POSIX_FADV_DONTNEED, posix_fadvise
from posix.mman cimport (
    MADV_DONTNEED, MADV_RANDOM, MADV_WILLNEED, MAP_FAILED, MAP_SHARED, PROT_READ, madvise, mincore, mmap, munmap,
)
from posix.stat cimport fstat, struct_stat
from posix.unistd cimport close

cdef extern from *:
    """
    #include <sys/mman.h>
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #endif
    #ifndef MADV_NOHUGEPAGE
    #define MADV_NOHUGEPAGE 15
    #endif
    static void sf_touch(const volatile unsigned char *bytes, size_t count, size_t page) {
        for (size_t i = 0; i < count; i += page) (void)bytes[i];
    }
    """
    enum: MADV_POPULATE_READ
    enum: MADV_NOHUGEPAGE
    enum: ATOMIC_ACQUIRE "__ATOMIC_ACQUIRE"
    enum: ATOMIC_RELEASE "__ATOMIC_RELEASE"
    void sf_touch(const uint8_t* bytes, size_t count, size_t page) noexcept nogil
    uint8_t __atomic_load_n(uint8_t* byte, int order) noexcept nogil
    void __atomic_store_n(uint8_t* byte, uint8_t value, int order) noexcept nogil

cdef extern from "csrc/lost_pages.h":
    int sf_guard(void* base, size_t bytes) noexcept nogil
    void sf_unguard(int number) noexcept nogil
    long sf_lost(int number) noexcept nogil

cdef enum:
    MINCORE_PAGES = 16384       # pages asked about in one mincore call, so that its answer fits on the stack
    SETTLE_PAGES = 16


# --- the mapping ---

cdef void extents_init(Extents* extents) noexcept nogil:
    extents.fd = extents.direct = extents.guard = -1
    extents.closed = True
    pthread_mutex_init(&extents.users, NULL)
    pthread_mutex_init(&extents.dropping, NULL)


cdef int extents_map(Extents* extents) noexcept nogil:
    cdef void* base
    extents.kept = <uint8_t*>calloc(extents.count, 1)
    if extents.kept == NULL:
        return ENOMEM
    base = mmap(NULL, extents.file_bytes, PROT_READ, MAP_SHARED, extents.fd, 0)
    if base == MAP_FAILED:
        return errno
    extents.base = <uint8_t*>base
    madvise(base, extents.file_bytes, MADV_NOHUGEPAGE)          # EINVAL where the kernel has no huge pages: as wanted
    if extents.strict:
        madvise(base, extents.file_bytes, MADV_RANDOM)
    extents.guard = sf_guard(base, extents.file_bytes)
    extents.closed = False
    return 0


cdef void extents_close(Extents* extents) noexcept nogil:
    extents.closed = True
    if extents.base != NULL:
        sf_unguard(extents.guard)
        extents.guard = -1
        munmap(extents.base, extents.file_bytes)
        extents.base = NULL
    free(extents.kept)
    extents.kept = NULL
    if extents.fd >= 0:
        close(extents.fd)
    if extents.direct >= 0:
        close(extents.direct)
    extents.fd = extents.direct = -1


cdef void extents_destroy(Extents* extents) noexcept nogil:
    extents_close(extents)
    pthread_mutex_destroy(&extents.users)
    pthread_mutex_destroy(&extents.dropping)


cdef bint extents_enter(Extents* extents) noexcept nogil:
    cdef bint open
    pthread_mutex_lock(&extents.users)
    open = not extents.closed
    extents.calls += open
    pthread_mutex_unlock(&extents.users)
    return open


cdef void extents_leave(Extents* extents) noexcept nogil:
    pthread_mutex_lock(&extents.users)
    extents.calls -= 1
    pthread_mutex_unlock(&extents.users)


cdef bint extents_unused(Extents* extents) noexcept nogil:
    cdef bint unused
    if pthread_mutex_trylock(&extents.users) != 0:
        return False
    unused = extents.leases == 0 and extents.calls == 0 and pthread_mutex_trylock(&extents.dropping) == 0
    if unused:
        pthread_mutex_unlock(&extents.dropping)
    pthread_mutex_unlock(&extents.users)
    return unused


cdef bint extents_lease(Extents* extents) noexcept nogil:
    cdef bint open
    pthread_mutex_lock(&extents.users)
    open = not extents.closed
    extents.leases += open
    pthread_mutex_unlock(&extents.users)
    return open


cdef void extents_unlease(Extents* extents) noexcept nogil:
    pthread_mutex_lock(&extents.users)
    extents.leases -= 1
    pthread_mutex_unlock(&extents.users)


# --- slices ---

cdef inline size_t slice_start(Extents* extents, Py_ssize_t slice) noexcept nogil:
    return extents.header_bytes + <size_t>slice * extents.stride


cdef uintptr_t extents_address(Extents* extents, Py_ssize_t slice) noexcept nogil:
    return <uintptr_t>extents.base + slice_start(extents, slice)


cdef inline void page_range(Extents* extents, Py_ssize_t slice, size_t* begin, size_t* end) noexcept nogil:
    """Offsets of the pages that hold any byte of the slice."""
    cdef size_t start = slice_start(extents, slice)
    begin[0] = start / extents.page * extents.page
    end[0] = (start + extents.stride + extents.page - 1) / extents.page * extents.page


cdef int extents_kept(Extents* extents, Py_ssize_t slice) noexcept nogil:
    return __atomic_load_n(&extents.kept[slice], ATOMIC_ACQUIRE)


cdef inline void keep(Extents* extents, Py_ssize_t slice) noexcept nogil:
    if not extents_kept(extents, slice):
        pthread_mutex_lock(&extents.dropping)
        __atomic_store_n(&extents.kept[slice], ASKED, ATOMIC_RELEASE)
        pthread_mutex_unlock(&extents.dropping)


cdef void extents_will_need(Extents* extents, Py_ssize_t slice) noexcept nogil:
    cdef size_t begin = 0, end = 0, length
    keep(extents, slice)
    page_range(extents, slice, &begin, &end)
    while begin < end:
        length = min(extents.ahead, end - begin)
        madvise(extents.base + begin, length, MADV_WILLNEED)    # a hint: what it could not do, admission does or reports
        begin += length


cdef int touch(Extents* extents, size_t begin, size_t end) noexcept nogil:
    """Admission for kernels without MADV_POPULATE_READ: read one byte of each page. 0 or an errno."""
    cdef struct_stat status
    if fstat(extents.fd, &status) != 0:
        return errno
    if <size_t>status.st_size < extents.file_bytes:
        return EFAULT                                           # touching the missing end would be a SIGBUS
    sf_touch(extents.base + begin, end - begin, extents.page)
    return 0


cdef int extents_admit(Extents* extents, Py_ssize_t slice) noexcept nogil:
    cdef size_t begin = 0, end = 0
    cdef int number = 0
    keep(extents, slice)
    page_range(extents, slice, &begin, &end)
    while extents.populates and madvise(extents.base + begin, end - begin, MADV_POPULATE_READ) != 0:
        number = errno
        if number == EINTR:
            continue
        if number != EINVAL:
            return number
        extents.populates = False
    if not extents.populates:
        number = touch(extents, begin, end)
        if number != 0:
            return number
    __atomic_store_n(&extents.kept[slice], ADMITTED, ATOMIC_RELEASE)
    drop_beside(extents, slice, False)
    return 0


cdef void extents_forget(Extents* extents, Py_ssize_t slice) noexcept nogil:
    # Without the lock: who drops meanwhile and still sees it kept leaves it to the extents_drop that follows.
    __atomic_store_n(&extents.kept[slice], 0, ATOMIC_RELEASE)


cdef void extents_drop(Extents* extents, Py_ssize_t slice, bint reading) noexcept nogil:
    if extents.strict and reading:
        settle(extents, slice)
    drop_beside(extents, slice, extents.strict)


cdef void settle(Extents* extents, Py_ssize_t slice) noexcept nogil:
    """Wait for reads that were asked for: a page that is being read cannot be dropped, and would stay once it is there."""
    cdef size_t begin = 0, end = 0, length
    page_range(extents, slice, &begin, &end)
    while begin < end and extents.populates:
        length = min(SETTLE_PAGES * extents.page, end - begin)
        madvise(extents.base + begin, length, MADV_POPULATE_READ)   # in pieces, to get past one that fails
        begin += length


cdef void drop_beside(Extents* extents, Py_ssize_t slice, bint cache) noexcept nogil:
    """Unmap all slices that are not kept within reach of a fault in this one; with `cache`, drop their page cache too.

    Under the lock, so that a slice which becomes kept meanwhile is either seen here or populated after this.
    """
    cdef uintptr_t base = <uintptr_t>extents.base
    cdef size_t begin = 0, end = 0, run, edge
    cdef Py_ssize_t k
    page_range(extents, slice, &begin, &end)
    begin = (base + begin) / extents.window * extents.window
    begin = begin - base if begin > base else 0
    end = (base + end + extents.window - 1) / extents.window * extents.window - base
    end = min(end, slice_start(extents, extents.count))
    k = 0
    if begin > extents.header_bytes:
        k = (begin - extents.header_bytes) / extents.stride
    run = begin
    pthread_mutex_lock(&extents.dropping)
    while k < extents.count:
        edge = slice_start(extents, k)
        if edge >= end:
            break
        if extents_kept(extents, k):
            drop_run(extents, run, edge, cache)
            run = edge + extents.stride
        k += 1
    drop_run(extents, run, end, cache)
    pthread_mutex_unlock(&extents.dropping)


cdef void drop_run(Extents* extents, size_t begin, size_t end, bint cache) noexcept nogil:
    """Drop the pages that lie wholly within [begin, end)."""
    begin = (begin + extents.page - 1) / extents.page * extents.page
    end = extents.file_bytes if end >= extents.file_bytes else end / extents.page * extents.page
    if begin < end:
        madvise(extents.base + begin, end - begin, MADV_DONTNEED)
        if cache:
            posix_fadvise(extents.fd, begin, end - begin, POSIX_FADV_DONTNEED)


cdef bint extents_cut(Extents* extents, Py_ssize_t slice) noexcept nogil:
    cdef struct_stat status
    return fstat(extents.fd, &status) == 0 and <size_t>status.st_size < slice_start(extents, slice) + extents.stride


cdef Py_ssize_t extents_lost(Extents* extents) noexcept nogil:
    cdef long offset = sf_lost(extents.guard)
    return -1 if offset < 0 else max(offset - <long>extents.header_bytes, 0) / <long>extents.stride


cdef void extents_drop_cache(Extents* extents) noexcept nogil:
    posix_fadvise(extents.fd, 0, 0, POSIX_FADV_DONTNEED)


# --- what the page cache holds ---

cdef Py_ssize_t cached_pages(Extents* extents, size_t begin, size_t end) noexcept nogil:
    """Pages of [begin, end) that are in the page cache, or -errno."""
    cdef unsigned char answer[MINCORE_PAGES]
    cdef Py_ssize_t total = 0
    cdef size_t length, pages, i
    while begin < end:
        length = min(end - begin, MINCORE_PAGES * extents.page)
        if mincore(extents.base + begin, length, answer) != 0:
            return -errno
        pages = (length + extents.page - 1) / extents.page
        for i in range(pages):
            total += answer[i] & 1
        begin += length
    return total


cdef Py_ssize_t extents_cached(Extents* extents, Py_ssize_t slice, Py_ssize_t* pages) noexcept nogil:
    cdef size_t begin = 0, end = 0
    page_range(extents, slice, &begin, &end)
    pages[0] = (end - begin) / extents.page
    return cached_pages(extents, begin, end)


cdef Py_ssize_t extents_cached_in_all(Extents* extents) noexcept nogil:
    return cached_pages(extents, 0, extents.file_bytes)
