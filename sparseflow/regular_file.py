"""Opening a file that must be a regular one: a FIFO in its place would be waited for until somebody writes to it."""

from __future__ import annotations

import errno
import os
import stat


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor for reading a regular file, opened with further `flags`. Raises OSError, also for all that is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file. Raises OSError, also for all that is none."""
    with open(open_regular(path), "rb") as file:
        return file.read()
