# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""What the page cache holds of a file, and how to make it forget: the difference between a cold run and a warm one."""

from __future__ import annotations

import os

from libc.errno cimport errno
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, mincore, mmap, munmap

from sparseflow.errors import StorageError

cdef enum:
    PAGES_AT_ONCE = 16384       # so that the answer fits on the stack


cdef Py_ssize_t cached_pages(int fd, size_t begin, size_t end, size_t page) noexcept nogil:
    """Pages of [begin, end) that are in the page cache, or -errno; begin is a multiple of a page."""
    cdef unsigned char answer[PAGES_AT_ONCE]
    cdef Py_ssize_t total = 0
    cdef size_t pages = (end - begin + page - 1) / page, done = 0, count, i
    cdef void* base = mmap(NULL, end - begin, PROT_READ, MAP_SHARED, fd, begin)
    if base == MAP_FAILED:
        return -errno
    while done < pages:
        count = min(pages - done, <size_t>PAGES_AT_ONCE)
        if mincore(<char*>base + done * page, count * page, answer) != 0:
            total = -errno
            break
        for i in range(count):
            total += answer[i] & 1
        done += count
    munmap(base, end - begin)
    return total


def cached_bytes(path: str | os.PathLike, offset: int = 0, count: int | None = None) -> int:
    """Bytes of a file in the page cache, in whole pages, by mincore; of `count` bytes at `offset`, or of all.

    Linux tells this only to a user who owns the file or may write it, and answers "all" to others. Raises StorageError when
    the file cannot be opened or the system does not tell.
    """
    cdef size_t page = os.sysconf("SC_PAGESIZE"), begin, end
    cdef Py_ssize_t cached
    cdef int fd
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            begin = min(offset, size) // page * page
            end = size if count is None else min(offset + count, size)
            if begin >= end:
                return 0
            with nogil:
                cached = cached_pages(fd, begin, end, page)
        finally:
            os.close(fd)
        if cached < 0:
            raise OSError(-cached, os.strerror(-cached))
    except OSError as error:
        raise StorageError(f"{path}: what the page cache holds of it cannot be told: {error.strerror}") from error
    return cached * page


def drop(path: str | os.PathLike, extents=None) -> None:
    """Makes the page cache forget a file, or only `extents` [(offset, bytes)] of it. Needs no privileges.

    Pages that a process has mapped stay, and so does everything on a file system that lives in memory: `cached_bytes` tells.
    Raises StorageError when the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        try:
            os.fdatasync(fd)                    # a page that is not yet on the disk would stay
        except OSError:
            pass                                # read-only file systems refuse it, and have nothing to write
        for offset, count in [(0, 0)] if extents is None else extents:      # (0, 0) is the whole file
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
