# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Which instruction set the kernels use: the best the processor has, or the one named by SPARSEFLOW_ISA."""

import os

from sparseflow.errors import OptionError

cdef extern from *:
    r"""
    static int sf_best_isa(void)
    {
    #if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
            return 2;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
            return 1;
    #endif
        return 0;
    }
    """
    int sf_best_isa() noexcept nogil

NAMES = ("generic", "avx2", "avx512vnni")
"""All instruction sets, in the order of csrc/each_target.h."""

cdef enum:
    UNDECIDED = -1

cdef int selected = UNDECIDED


cdef int active_index() except -1 nogil:
    if selected == UNDECIDED:
        with gil:
            select(os.environ.get("SPARSEFLOW_ISA") or NAMES[sf_best_isa()])
    return selected


def available() -> tuple:
    """Names of the instruction sets this processor can run, slowest first."""
    return NAMES[:sf_best_isa() + 1]


def active() -> str:
    """Name of the instruction set in use. Raises OptionError when SPARSEFLOW_ISA names one that cannot run here."""
    return NAMES[active_index()]


def select(name: str) -> None:
    """Use the instruction set `name` from now on, for the whole process. Raises OptionError when it cannot run here."""
    global selected
    if name not in available():
        raise OptionError(f"instruction set {name!r} is not one this processor can run: SPARSEFLOW_ISA may be one of "
                          f"{', '.join(available())}, or unset for the best of them")
    selected = NAMES.index(name)

