# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""PackedStore: the only door to experts.sfx.

Design
    The whole file is mapped once, read-only and shared, and stays mapped until `close()`, so an address is a fact of the
    file and not of the cache. What changes is which slices have their pages in memory: `admit` brings one in, `evict`
    drops it. The store has no budget and no policy; those are the lease table's (leases.pyx).

Admission
    MADV_WILLNEED starts reading and returns; MADV_POPULATE_READ waits and maps. The kernel cuts one WILLNEED down to the
    device's readahead, so it is given in pieces of that size. POPULATE_READ turns a truncated file or a failing disk into
    an errno where a plain access would be a SIGBUS; kernels before 5.14 lack it, and there one byte a page is touched.

What a fault maps beside what was asked
    The kernel maps cached pages around the one that faulted: a 64 KiB window, and since Linux 6.18 the whole large folio
    it finds there, up to the reach of one page-table page (2 MiB on x86-64). Those pages belong to other slices and would
    pile up in the resident set, so `admit` unmaps again whatever it finds mapped of slices that are not kept. Huge page
    mappings are refused for the same reason: unmapping a part of one unmaps all of it, neighbours included.

Strict
    `evict` also drops the slice from the page cache (posix_fadvise), and reads are exact (MADV_RANDOM: no readahead
    beyond the slice), so the page cache holds of this file what is kept and no more. Other processes that read the
    file are outside that promise.

Thread-safety
    All methods may be called from any thread; the GIL is released while pages are read. `close()` refuses while leases
    are out or another thread is inside a call.
"""

from __future__ import annotations

import errno
import os
import stat

from libc.errno cimport EINTR, EINVAL, EFAULT, errno as last_errno
from libc.stdint cimport uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from posix.fcntl cimport POSIX_FADV_DONTNEED, POSIX_FADV_RANDOM, posix_fadvise
from posix.mman cimport (
    MADV_DONTNEED, MADV_RANDOM, MADV_WILLNEED, MAP_FAILED, MAP_SHARED, PROT_READ, madvise, mincore, mmap, munmap,
)
from posix.stat cimport fstat, struct_stat
from posix.unistd cimport close

from sparseflow.errors import OptionError, PackedModelError, SparseFlowError, StorageError
from sparseflow.packfile import HEADER_BYTES, Header

cdef extern from *:
    """
    #include <sys/mman.h>
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #endif
    #ifndef MADV_NOHUGEPAGE
    #define MADV_NOHUGEPAGE 15
    #endif
    """
    enum: MADV_POPULATE_READ
    enum: MADV_NOHUGEPAGE

cdef enum:
    MINCORE_PAGES = 16384       # pages asked about in one mincore call, so that its answer fits on the stack


# --- slices: nogil, any thread ---

cdef int store_enter(Extents* extents) noexcept nogil:
    cdef int open
    pthread_mutex_lock(&extents.lock)
    open = not extents.closed
    extents.calls += open
    pthread_mutex_unlock(&extents.lock)
    return open


cdef void store_leave(Extents* extents) noexcept nogil:
    pthread_mutex_lock(&extents.lock)
    extents.calls -= 1
    pthread_mutex_unlock(&extents.lock)


cdef int store_lease(Extents* extents) noexcept nogil:
    cdef int open
    pthread_mutex_lock(&extents.lock)
    open = not extents.closed
    extents.leases += open
    pthread_mutex_unlock(&extents.lock)
    return open


cdef void store_unlease(Extents* extents) noexcept nogil:
    pthread_mutex_lock(&extents.lock)
    extents.leases -= 1
    pthread_mutex_unlock(&extents.lock)


cdef inline size_t slice_start(Extents* extents, Py_ssize_t slice) noexcept nogil:
    return extents.header_bytes + <size_t>slice * extents.stride


cdef uintptr_t store_address(Extents* extents, Py_ssize_t slice) noexcept nogil:
    return <uintptr_t>extents.base + slice_start(extents, slice)


cdef inline void page_range(Extents* extents, Py_ssize_t slice, size_t* begin, size_t* end) noexcept nogil:
    """Offsets of the pages that hold any byte of the slice."""
    cdef size_t start = slice_start(extents, slice)
    begin[0] = start / extents.page * extents.page
    end[0] = (start + extents.stride + extents.page - 1) / extents.page * extents.page


cdef void store_will_need(Extents* extents, Py_ssize_t slice) noexcept nogil:
    cdef size_t begin, end, length
    pthread_mutex_lock(&extents.lock)
    extents.kept[slice] = 1
    pthread_mutex_unlock(&extents.lock)
    page_range(extents, slice, &begin, &end)
    while begin < end:
        length = min(extents.ahead, end - begin)
        madvise(extents.base + begin, length, MADV_WILLNEED)    # a hint: what it could not do, admission does or reports
        begin += length


cdef int touch(Extents* extents, size_t begin, size_t end) noexcept nogil:
    """Admission for kernels without MADV_POPULATE_READ: read one byte of each page. 0 or an errno."""
    cdef struct_stat status
    cdef volatile uint8_t* byte = extents.base
    cdef uint8_t seen
    if fstat(extents.fd, &status) != 0:
        return last_errno
    if <size_t>status.st_size < extents.file_bytes:
        return EFAULT                                           # touching the missing end would be a SIGBUS
    while begin < end:
        seen = byte[begin]
        begin += extents.page
    return 0


cdef int store_admit(Extents* extents, Py_ssize_t slice) noexcept nogil:
    cdef size_t begin, end
    cdef int number = 0
    pthread_mutex_lock(&extents.lock)
    extents.kept[slice] = 1
    pthread_mutex_unlock(&extents.lock)
    page_range(extents, slice, &begin, &end)
    while extents.populates and madvise(extents.base + begin, end - begin, MADV_POPULATE_READ) != 0:
        number = last_errno
        if number == EINTR:
            continue
        if number != EINVAL:
            return number
        extents.populates = False
    if not extents.populates:
        number = touch(extents, begin, end)
        if number != 0:
            return number
    drop_beside(extents, slice, False)
    return 0


cdef void store_forget(Extents* extents, Py_ssize_t slice) noexcept nogil:
    pthread_mutex_lock(&extents.lock)
    extents.kept[slice] = 0
    pthread_mutex_unlock(&extents.lock)


cdef void store_drop(Extents* extents, Py_ssize_t slice) noexcept nogil:
    drop_beside(extents, slice, extents.strict)


cdef void drop_beside(Extents* extents, Py_ssize_t slice, bint cache) noexcept nogil:
    """Unmap all slices that are not kept within reach of a fault in this one; with `cache`, drop their page cache too.

    Under the lock, so that a slice which is being kept meanwhile is either seen here or populated after this.
    """
    cdef uintptr_t base = <uintptr_t>extents.base
    cdef size_t begin, end, run, edge
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
    pthread_mutex_lock(&extents.lock)
    while k < extents.count:
        edge = slice_start(extents, k)
        if edge >= end:
            break
        if extents.kept[k]:
            drop_run(extents, run, edge, cache)
            run = edge + extents.stride
        k += 1
    drop_run(extents, run, end, cache)
    pthread_mutex_unlock(&extents.lock)


cdef void drop_run(Extents* extents, size_t begin, size_t end, bint cache) noexcept nogil:
    """Drop the pages that lie wholly within [begin, end)."""
    begin = (begin + extents.page - 1) / extents.page * extents.page
    end = extents.file_bytes if end >= extents.file_bytes else end / extents.page * extents.page
    if begin < end:
        madvise(extents.base + begin, end - begin, MADV_DONTNEED)
        if cache:
            posix_fadvise(extents.fd, begin, end - begin, POSIX_FADV_DONTNEED)


cdef Py_ssize_t cached_pages(Extents* extents, size_t begin, size_t end) noexcept nogil:
    """Pages of [begin, end) that are in the page cache, or -1 with errno set."""
    cdef unsigned char answer[MINCORE_PAGES]
    cdef Py_ssize_t total = 0
    cdef size_t length, pages, i
    while begin < end:
        length = min(end - begin, MINCORE_PAGES * extents.page)
        if mincore(extents.base + begin, length, answer) != 0:
            return -1
        pages = (length + extents.page - 1) / extents.page
        for i in range(pages):
            total += answer[i] & 1
        begin += length
    return total


cdef void close_extents(Extents* extents) noexcept nogil:
    extents.closed = True
    if extents.base != NULL:
        munmap(extents.base, extents.file_bytes)
        extents.base = NULL
    free(extents.kept)
    extents.kept = NULL
    if extents.fd >= 0:
        close(extents.fd)
        extents.fd = -1


# --- the Python class: checks and explains ---

def read_ahead_bytes(device: int) -> int:
    """The readahead of a block device in bytes, from sysfs; that of the whole disk for a partition, 128 KiB if unknown."""
    node = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{node}/queue", f"{node}/../queue"):
        try:
            with open(f"{queue}/read_ahead_kb") as file:
                return (int(file.read()) or 128) * 1024
        except (OSError, ValueError):
            continue
    return 128 * 1024


cdef class PackedStore:
    """The routed experts of a packed model, mapped read-only; one slice is one expert of one layer.

    Parameters
        path: the experts.sfx file.
        strict: keep in the page cache no more of the file than what is admitted (see the module's text). Opening drops
            what the page cache held of it.

    Attributes
        path, header (dict of the header's fields), num_layers, num_experts, file_bytes
        stride: bytes from one slice to the next, a multiple of 4096; the memory that one admitted expert takes.
        slice_bytes: bytes of a slice that mean something; the rest of the stride is zero.

    Raises
        PackedModelError: not an experts file, of a later version, truncated, or with numbers that contradict each other.
        StorageError: the system refused to open, read or map it.

    `address` may be used by anyone until `close()`; reading there is only cheap and safe from SIGBUS while the slice is
    admitted. The file must not be changed while it is open: packing replaces files by rename, and so should you.
    """

    def __cinit__(self, *args, **kwargs):
        self.extents.fd = -1
        self.extents.closed = True
        pthread_mutex_init(&self.extents.lock, NULL)

    def __init__(self, path: str | os.PathLike, strict: bool = False) -> None:
        if self.path is not None:
            raise SparseFlowError(f"{self.path}: a store is opened once; make another PackedStore")
        self.path = os.fspath(path)
        try:
            self.extents.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(self.extents.fd)
            if not stat.S_ISREG(status.st_mode):
                raise PackedModelError(f"{self.path}: not a regular file; give the experts.sfx of a packed model")
            # Without this, reading the header would bring in the first experts as readahead.
            posix_fadvise(self.extents.fd, 0, 0, POSIX_FADV_RANDOM)
            head = os.pread(self.extents.fd, HEADER_BYTES, 0)
        except OSError as error:
            close_extents(&self.extents)
            raise StorageError(f"{self.path}: cannot be opened: {error.strerror}") from error
        except BaseException:
            close_extents(&self.extents)
            raise
        try:
            self._map(Header.unpack(head, self.path), status.st_size, read_ahead_bytes(status.st_dev), strict)
        except BaseException:
            close_extents(&self.extents)
            raise

    def _map(self, header, file_bytes: int, ahead: int, strict: bool) -> None:
        """Check the header against the file, in Python's integers (no overflow), and map."""
        if header.kind != 1:
            raise PackedModelError(f"{self.path}: holds no experts (kind {header.kind}, want 1); give the experts.sfx of a packed model")
        count = header.num_layers * header.num_experts
        if not 0 < count < 2**31:
            raise PackedModelError(f"{self.path}: the header counts {header.num_layers} layers of {header.num_experts} experts; pack the model again")
        if not 0 < header.slice_bytes <= header.stride or header.stride % 4096:
            raise PackedModelError(
                f"{self.path}: the header gives {header.slice_bytes} bytes an expert at a stride of {header.stride}; pack the model again")
        expected = HEADER_BYTES + count * header.stride
        if header.file_bytes != expected:
            raise PackedModelError(f"{self.path}: the header gives {header.file_bytes} bytes where its experts take {expected}; pack the model again")
        if file_bytes != expected:
            state = "truncated" if file_bytes < expected else "too long"
            raise PackedModelError(f"{self.path}: {state}: {file_bytes} bytes of {expected}; copy or pack the model again")
        cdef Extents* extents = &self.extents
        extents.file_bytes = expected
        extents.header_bytes = HEADER_BYTES
        extents.stride = header.stride
        extents.page = os.sysconf("SC_PAGESIZE")
        extents.window = extents.page // 8 * extents.page
        extents.ahead = max(ahead // extents.page * extents.page, extents.page)
        extents.count = count
        extents.strict = strict
        extents.populates = True
        extents.kept = <uint8_t*>calloc(count, 1)
        if extents.kept == NULL:
            raise MemoryError
        cdef void* base = mmap(NULL, extents.file_bytes, PROT_READ, MAP_SHARED, extents.fd, 0)
        if base == MAP_FAILED:
            raise StorageError(f"{self.path}: {expected} bytes cannot be mapped: {os.strerror(last_errno)}")
        extents.base = <uint8_t*>base
        madvise(base, extents.file_bytes, MADV_NOHUGEPAGE)      # EINVAL where the kernel has no huge pages: as wanted
        if strict:
            madvise(base, extents.file_bytes, MADV_RANDOM)
        extents.closed = False
        self.header = {name: getattr(header, name) for name in (
            "kind", "weight_bits", "num_layers", "num_experts", "hidden_size", "intermediate_size",
            "weight_group", "activation_group", "stride", "slice_bytes", "file_bytes")}
        self.num_layers = header.num_layers
        self.num_experts = header.num_experts
        self.stride = header.stride
        self.slice_bytes = header.slice_bytes
        self.file_bytes = expected
        if strict:
            self.drop_page_cache()

    def __dealloc__(self):
        close_extents(&self.extents)
        pthread_mutex_destroy(&self.extents.lock)

    cdef Py_ssize_t slice_number(self, layer, expert) except -1:
        cdef Py_ssize_t l = layer
        cdef Py_ssize_t e = expert
        if not (0 <= l < self.num_layers and 0 <= e < self.num_experts):
            raise OptionError(f"{self.path}: no expert {expert} of layer {layer}; there are {self.num_layers} layers of {self.num_experts} experts")
        return l * self.num_experts + e

    cdef object error(self, Py_ssize_t slice, int number):
        """The StorageError for an errno of `store_admit`."""
        reason = f"the disk could not read it ({errno.errorcode.get(number, number)}: {os.strerror(number)})"
        cdef struct_stat status
        if fstat(self.extents.fd, &status) == 0 and <size_t>status.st_size < self.extents.file_bytes:
            reason = f"the file was truncated to {status.st_size} bytes of {self.file_bytes} while open; copy or pack the model again"
        return StorageError(f"{self.path}: expert {slice % self.num_experts} of layer {slice // self.num_experts}: {reason}")

    def _enter(self) -> None:
        if not store_enter(&self.extents):
            raise SparseFlowError(f"{self.path}: the store is closed; open it again with PackedStore")

    @property
    def closed(self) -> bool:
        """True once `close()` has unmapped the file."""
        return self.extents.closed

    @property
    def strict(self) -> bool:
        """Whether evicting also drops the page cache copy."""
        return self.extents.strict

    def address(self, layer: int, expert: int) -> int:
        """The address of a slice in this process, valid until `close()`."""
        slice = self.slice_number(layer, expert)
        self._enter()
        result = store_address(&self.extents, slice)
        store_leave(&self.extents)
        return result

    def will_need(self, layer: int, expert: int) -> None:
        """Start reading a slice and return without waiting for it."""
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        self._enter()
        with nogil:
            store_will_need(&self.extents, slice)
            store_leave(&self.extents)

    def admit(self, layer: int, expert: int) -> None:
        """Bring all pages of a slice into memory and map them; returns when they are there.

        Raises
            StorageError: the disk failed or the file was truncated; nothing of the slice stays admitted.
        """
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        cdef int number
        self._enter()
        with nogil:
            if not self.extents.kept[slice]:
                store_will_need(&self.extents, slice)
            number = store_admit(&self.extents, slice)
            if number != 0:
                store_forget(&self.extents, slice)
                store_drop(&self.extents, slice)
            store_leave(&self.extents)
        if number != 0:
            raise self.error(slice, number)

    def evict(self, layer: int, expert: int) -> None:
        """Drop a slice from this process, and in strict mode from the page cache. Does nothing to one that is not there.

        The store does not know who computes with what: experts that are cached by a LeaseTable are evicted by it alone.
        """
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        self._enter()
        with nogil:
            store_forget(&self.extents, slice)
            store_drop(&self.extents, slice)
            store_leave(&self.extents)

    def resident_pages(self, layer: int, expert: int) -> tuple[int, int]:
        """(pages of the slice in the page cache, pages of the slice), by mincore.

        Linux tells this only to a user who owns the file or may write it, and answers "all" to others.
        """
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        cdef size_t begin, end
        page_range(&self.extents, slice, &begin, &end)
        return self._cached(begin, end), (end - begin) // self.extents.page

    def resident_bytes(self) -> int:
        """Bytes of the whole file in the page cache, by mincore (see `resident_pages`)."""
        return self._cached(0, self.extents.file_bytes) * self.extents.page

    def _cached(self, size_t begin, size_t end) -> int:
        cdef Py_ssize_t pages
        self._enter()
        with nogil:
            pages = cached_pages(&self.extents, begin, end)
            store_leave(&self.extents)
        if pages < 0:
            raise StorageError(f"{self.path}: mincore failed: {os.strerror(last_errno)}")
        return pages

    def drop_page_cache(self) -> None:
        """Drop from the page cache all of the file that is not mapped by anyone: the next admissions come from the disk."""
        self._enter()
        try:
            os.fdatasync(self.extents.fd)       # a page that is not yet on the disk would stay
        except OSError:
            pass                                # read-only file systems refuse it, and have nothing to write
        with nogil:
            posix_fadvise(self.extents.fd, 0, 0, POSIX_FADV_DONTNEED)
            store_leave(&self.extents)

    def close(self) -> None:
        """Unmap the file and close it. Does nothing when closed already.

        Raises
            SparseFlowError: leases are out, or another thread is inside a call.
        """
        cdef Extents* extents = &self.extents
        cdef Py_ssize_t leases, calls
        pthread_mutex_lock(&extents.lock)
        leases, calls = extents.leases, extents.calls
        closing = not extents.closed and leases == 0 and calls == 0
        if closing:
            extents.closed = True
        pthread_mutex_unlock(&extents.lock)
        if closing:
            close_extents(&self.extents)
        elif leases or calls:
            what = f"{leases} lease(s) are out" if leases else "another thread is reading from it"
            raise SparseFlowError(f"{self.path}: cannot be closed: {what}; release them and close again")

    def __enter__(self) -> PackedStore:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PackedStore({self.path!r}, strict={self.strict}, {self.num_layers} x {self.num_experts} x {self.stride} bytes)"
