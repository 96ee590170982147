# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""PackedStore: the only door to experts.sfx. It checks and explains; extents.pyx does the work.

Thread-safety
    All methods may be called from any thread; the GIL is released while pages are read or dropped. `close()` refuses while
    leases are out or another thread is inside a call.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import asdict

from posix.fcntl cimport POSIX_FADV_RANDOM, posix_fadvise
from posix.stat cimport fstat, struct_stat

from sparseflow.extents cimport (
    ASKED, Extents, extents_address, extents_admit, extents_cached, extents_cached_in_all, extents_close,
    extents_destroy, extents_drop, extents_drop_cache, extents_enter, extents_forget, extents_init, extents_kept,
    extents_leave, extents_map, extents_will_need, pthread_mutex_lock, pthread_mutex_unlock,
)

from sparseflow.errors import OptionError, PackedModelError, SparseFlowError, StorageError
from sparseflow.packfile import HEADER_BYTES, KIND_EXPERTS, Header


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


def open_direct(path: str) -> int:
    """A descriptor for reads past the page cache (O_DIRECT), or -1 where the file system refuses one such read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1
    try:
        with mmap.mmap(-1, HEADER_BYTES) as page:
            if os.preadv(descriptor, [page], 0) == HEADER_BYTES:
                return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return -1


cdef class PackedStore:
    """The routed experts of a packed model, mapped read-only; one slice is one expert of one layer.

    Parameters
        path: the experts.sfx file.
        strict: keep in the page cache no more of the file than what is admitted (extents.pyx says how). Opening drops
            what the page cache held of it.

    Attributes
        path, header (dict of the header's fields), num_layers, num_experts, file_bytes
        stride: bytes from one slice to the next, a multiple of 4096; the memory that one admitted expert takes.
        slice_bytes: bytes of a slice that mean something; the rest of the stride is zero.

    Raises
        PackedModelError: not an experts file, of a later version, truncated, or with numbers that contradict each other.
        StorageError: the system refused to open, read or map it.

    `address` may be used by anyone until `close()`; reading there is only cheap and safe from SIGBUS while the slice is
    admitted. The file must not be changed while it is open: packing replaces files by rename, and so should you. (One that was
    cut is an error to admit, and an error of the lease under which somebody reads.)
    """

    def __cinit__(self, *args, **kwargs):
        extents_init(&self.extents)

    def __init__(self, path: str | os.PathLike, strict: bool = False) -> None:
        if self.path is not None:
            raise SparseFlowError(f"{self.path}: a store is opened once; make another PackedStore")
        self.path = os.fspath(path)
        try:
            self.extents.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)   # a FIFO is not waited for
            status = os.fstat(self.extents.fd)
            if not stat.S_ISREG(status.st_mode):
                raise PackedModelError(f"{self.path}: not a regular file; give the experts.sfx of a packed model")
            # Without this, reading the header would bring in the first experts as readahead.
            posix_fadvise(self.extents.fd, 0, 0, POSIX_FADV_RANDOM)
            head = os.pread(self.extents.fd, HEADER_BYTES, 0)
            self.extents.direct = open_direct(self.path)
        except OSError as error:
            extents_close(&self.extents)
            raise StorageError(f"{self.path}: cannot be opened: {error.strerror}") from error
        except BaseException:
            extents_close(&self.extents)
            raise
        try:
            self._map(Header.unpack(head, self.path), status.st_size, read_ahead_bytes(status.st_dev), strict)
        except BaseException:
            extents_close(&self.extents)
            raise

    def _map(self, header, file_bytes: int, ahead: int, strict: bool) -> None:
        """Check the header against the file, in Python's integers (no overflow), and map."""
        if header.kind != KIND_EXPERTS:
            raise PackedModelError(
                f"{self.path}: holds no experts (its kind is {header.kind}); give the experts.sfx of a packed model")
        count = header.num_layers * header.num_experts
        if not 0 < count < 2**31:
            raise PackedModelError(
                f"{self.path}: the header counts {header.num_layers} layers of {header.num_experts} experts;"
                " pack the model again")
        if not 0 < header.slice_bytes <= header.stride or header.stride % 4096:
            raise PackedModelError(
                f"{self.path}: the header gives {header.slice_bytes} bytes an expert at a stride of {header.stride};"
                " pack the model again")
        expected = HEADER_BYTES + count * header.stride
        if header.file_bytes != expected:
            raise PackedModelError(
                f"{self.path}: the header gives {header.file_bytes} bytes where its experts take {expected};"
                " pack the model again")
        if file_bytes != expected:
            state = "truncated" if file_bytes < expected else "too long"
            raise PackedModelError(
                f"{self.path}: {state}: {file_bytes} bytes of {expected}; copy or pack the model again")
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
        number = extents_map(extents)
        if number != 0:
            raise StorageError(f"{self.path}: {expected} bytes cannot be mapped: {os.strerror(number)}")
        self.header = asdict(header)
        self.num_layers = header.num_layers
        self.num_experts = header.num_experts
        self.stride = header.stride
        self.slice_bytes = header.slice_bytes
        self.file_bytes = expected
        if strict:
            self.drop_page_cache()

    def __dealloc__(self):
        extents_destroy(&self.extents)

    cdef Py_ssize_t slice_number(self, layer, expert) except -1:
        if not (0 <= layer < self.num_layers and 0 <= expert < self.num_experts):
            raise OptionError(
                f"{self.path}: no expert {expert} of layer {layer};"
                f" there are {self.num_layers} layers of {self.num_experts} experts")
        return <Py_ssize_t>layer * self.num_experts + <Py_ssize_t>expert

    cdef object error(self, Py_ssize_t slice, int number):
        """The StorageError for an errno of `extents_admit`."""
        why = f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
        if number == errno.EFAULT:                              # all that MADV_POPULATE_READ says
            why = "the kernel's log tells why"
        reason = f"the disk could not read it ({why})"
        cdef struct_stat status
        if fstat(self.extents.fd, &status) == 0 and <size_t>status.st_size < self.extents.file_bytes:
            reason = (
                f"the file was cut to {status.st_size} bytes of {self.file_bytes} while open; copy or pack the model again")
        return StorageError(f"{self.path}: expert {slice % self.num_experts} of layer {slice // self.num_experts}: {reason}")

    def _enter(self) -> None:
        if not extents_enter(&self.extents):
            raise SparseFlowError(f"{self.path}: the store is closed; open it again with PackedStore")

    @property
    def closed(self) -> bool:
        """True once `close()` has unmapped the file."""
        return self.extents.closed

    @property
    def direct(self) -> bool:
        """Whether the file system reads past the page cache (O_DIRECT), as a LeaseTable may then do."""
        return self.extents.direct >= 0

    @property
    def strict(self) -> bool:
        """Whether evicting also drops the page cache copy."""
        return self.extents.strict

    def address(self, layer: int, expert: int) -> int:
        """The address of a slice in this process, valid until `close()`."""
        slice = self.slice_number(layer, expert)
        self._enter()
        result = extents_address(&self.extents, slice)
        extents_leave(&self.extents)
        return result

    def will_need(self, layer: int, expert: int) -> None:
        """Start reading a slice and return without waiting for it."""
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        self._enter()
        with nogil:
            extents_will_need(&self.extents, slice)
            extents_leave(&self.extents)

    def admit(self, layer: int, expert: int) -> None:
        """Bring all pages of a slice into memory and map them; returns when they are there.

        Raises
            StorageError: the disk failed or the file was truncated; nothing of the slice stays admitted.
        """
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        cdef int number
        self._enter()
        with nogil:
            if not extents_kept(&self.extents, slice):
                extents_will_need(&self.extents, slice)
            number = extents_admit(&self.extents, slice)
            if number != 0:
                extents_forget(&self.extents, slice)
                extents_drop(&self.extents, slice, True)
            extents_leave(&self.extents)
        if number != 0:
            raise self.error(slice, number)

    def evict(self, layer: int, expert: int) -> None:
        """Drop a slice from this process, and in strict mode from the page cache. Does nothing to one that is not there.

        The store does not know who computes with what: experts that are cached by a LeaseTable are evicted by it alone.
        """
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        cdef bint reading
        self._enter()
        with nogil:
            reading = extents_kept(&self.extents, slice) == ASKED
            extents_forget(&self.extents, slice)
            extents_drop(&self.extents, slice, reading)
            extents_leave(&self.extents)

    def resident_pages(self, layer: int, expert: int) -> tuple[int, int]:
        """(pages of the slice in the page cache, pages of the slice), by mincore.

        Linux tells this only to a user who owns the file or may write it, and answers "all" to others.
        """
        cdef Py_ssize_t slice = self.slice_number(layer, expert)
        cdef Py_ssize_t cached, pages = 0
        self._enter()
        with nogil:
            cached = extents_cached(&self.extents, slice, &pages)
            extents_leave(&self.extents)
        return self._pages(cached), pages

    def resident_bytes(self) -> int:
        """Bytes of the whole file in the page cache, by mincore (see `resident_pages`)."""
        cdef Py_ssize_t cached
        self._enter()
        with nogil:
            cached = extents_cached_in_all(&self.extents)
            extents_leave(&self.extents)
        return self._pages(cached) * self.extents.page

    def _pages(self, cached: int) -> int:
        if cached < 0:
            raise StorageError(f"{self.path}: the system does not tell what is in memory: {os.strerror(-cached)}")
        return cached

    def drop_page_cache(self) -> None:
        """Drop from the page cache all of the file that is not mapped by anyone: the next admissions come from the disk."""
        self._enter()
        try:
            os.fdatasync(self.extents.fd)       # a page that is not yet on the disk would stay
        except OSError:
            pass                                # read-only file systems refuse it, and have nothing to write
        with nogil:
            extents_drop_cache(&self.extents)
            extents_leave(&self.extents)

    def close(self) -> None:
        """Unmap the file and close it. Does nothing when closed already.

        Raises
            SparseFlowError: leases are out, or another thread is inside a call.
        """
        cdef Extents* extents = &self.extents
        cdef Py_ssize_t leases, calls
        pthread_mutex_lock(&extents.users)
        leases, calls = extents.leases, extents.calls
        closing = not extents.closed and leases == 0 and calls == 0
        if closing:
            extents.closed = True
        pthread_mutex_unlock(&extents.users)
        if closing:
            extents_close(&self.extents)
        elif leases or calls:
            what = f"leases are still out: {leases}" if leases else "another thread is inside a call"
            raise SparseFlowError(f"{self.path}: cannot be closed, {what}; let them end and close again")

    def __enter__(self) -> PackedStore:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = f"{self.num_layers} x {self.num_experts} x {self.stride} bytes"
        return f"PackedStore({self.path!r}, strict={self.strict}, {shape})"
