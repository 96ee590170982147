# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The seam between kernels and threads: nothing else in the package starts or names a thread of computation."""

import numbers

from sparseflow.errors import OptionError
from sparseflow.limits import processors

cdef extern from "csrc/parallel.h":
    ctypedef void (*sf_unit)(void *, long, int) noexcept nogil
    int sf_watch_forks() noexcept nogil
    void sf_parallel_for(sf_unit function, void *argument, long units, int threads) noexcept nogil


cdef enum:
    LITTLE_WORK = 1 << 16  # about as long as waking another thread takes


cdef void parallel_for(unit_function function, void *argument, long units, int threads, long work) noexcept nogil:
    sf_parallel_for(function, argument, units, threads if work >= LITTLE_WORK else 1)


if sf_watch_forks() != 0:
    raise MemoryError


def default_threads() -> int:
    """The processors this process may use: by its affinity and the time its cgroups grant."""
    return processors().usable


def check_threads(threads):
    """`threads`, or the default for None. Raises OptionError unless it is a whole number from 1 to 1024."""
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, numbers.Integral) or not 1 <= threads <= 1024:
        raise OptionError(f"threads is {threads!r}: give a whole number from 1 to 1024 (this process may use "
                          f"{default_threads()} processors)")
    return int(threads)
