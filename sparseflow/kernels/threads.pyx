# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""The seam between kernels and threads: nothing else in the package starts or names a thread of computation.

A kernel that is called on its own runs at once. Called within a Step it is noted down, and the step runs all that was noted in
one parallel region: starting one costs as much as reading a hundred KiB of weights, and a layer has some twenty kernels.
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import numbers

import numpy

from sparseflow.errors import CapacityError, OptionError
from sparseflow.limits import processors

cdef extern from "csrc/parallel.h":
    struct sf_operation:
        unit_function function
        void *argument
        long units
        locate_function locate
        int alone
        int joined

    struct sf_phase:
        pass

    struct sf_stretch:
        pass

    int sf_forked
    int sf_watch_forks() noexcept nogil
    int sf_startable(int threads) noexcept nogil
    void sf_run(const sf_operation *operations, int count, int threads, sf_phase *phases, sf_stretch *stretches) noexcept nogil

cdef extern from *:
    """
    static __thread void *sf_recording = 0; /* the Step of this thread, borrowed */
    """
    void *sf_recording

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object array)

cdef enum:
    LITTLE_WORK = 1 << 16       # about as long as waking another thread takes
    LITTLE_WORK_AWAKE = 1 << 13  # about as long as passing a barrier takes
    OPERATIONS = 64             # of a step: when there are more, it runs those it has
    ARGUMENT_BYTES = 256
    LARGE = 1 << 14             # elements


cdef class Recording:
    """Kernels noted down once, to be run again and again on the same arrays: made by `Step.record`, repeated by `Step.repeat`.

    It holds on to the arrays and weights, and to copies of the kernels' arguments.
    """

    cdef int count
    cdef sf_operation *operations
    cdef uint8_t *arguments
    cdef list kept

    def __dealloc__(self):
        free(self.operations)
        free(self.arguments)

    cdef int copy(self, const sf_operation *operations, const uint8_t *arguments, int count) except -1:
        cdef int i
        self.operations = <sf_operation *>malloc(count * sizeof(sf_operation))
        self.arguments = <uint8_t *>malloc(count * ARGUMENT_BYTES)
        if self.operations == NULL or self.arguments == NULL:
            raise MemoryError
        memcpy(self.operations, operations, count * sizeof(sf_operation))
        memcpy(self.arguments, arguments, count * ARGUMENT_BYTES)
        for i in range(count):
            self.operations[i].argument = self.arguments + i * ARGUMENT_BYTES
        self.count = count
        return 0


cdef class Step:
    """Kernels called within it run together: a context manager for the calling thread.

        with Step(threads) as step:
            y = kernel(x)       # noted down
            z = kernel(y)
            step.run()          # now y and z are computed
            ...
                                # leaving runs what was noted since

    Until then nothing may look at what the kernels return, except to give it to other kernels. An exception drops what has not
    run. `threads` holds for all kernels, whatever theirs say. Raises CapacityError when the system does not start that many.
    """

    cdef int threads
    cdef int count
    cdef long computed          # times that kernels ran
    cdef sf_operation *operations
    cdef uint8_t *arguments
    cdef sf_phase *phases
    cdef sf_stretch *stretches
    cdef list kept
    cdef dict arrays            # (shape, dtype) -> large arrays made for the kernels of this step
    cdef void *outer

    def __cinit__(self, int threads):
        if threads < 1:
            raise OptionError(f"a step of {threads} threads; it takes at least 1")
        startable = sf_startable(threads)
        if startable < threads and not sf_forked:
            raise CapacityError(
                f"the system starts {startable} of {threads} threads: use fewer --threads, or allow this process more memory")
        self.threads = threads
        self.kept = []
        self.arrays = {}
        self.operations = <sf_operation *>malloc(OPERATIONS * sizeof(sf_operation))
        self.arguments = <uint8_t *>malloc(OPERATIONS * ARGUMENT_BYTES)
        self.phases = <sf_phase *>malloc(OPERATIONS * sizeof(sf_phase))
        self.stretches = <sf_stretch *>malloc(<size_t>OPERATIONS * threads * sizeof(sf_stretch))
        if self.operations == NULL or self.arguments == NULL or self.phases == NULL or self.stretches == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.operations)
        free(self.arguments)
        free(self.phases)
        free(self.stretches)

    def __enter__(self) -> Step:
        global sf_recording
        self.outer = sf_recording
        sf_recording = <void *>self
        return self

    def __exit__(self, kind, *exception) -> None:
        global sf_recording
        sf_recording = self.outer
        if kind is None:
            self.run()
        self.count = 0
        self.kept.clear()

    def run(self) -> None:
        """Computes what was noted down. Releases the GIL."""
        with nogil:
            self.compute()
        self.kept.clear()

    def record(self, kernels):
        """Calls `kernels()`, which calls kernels, and notes them down as ever. Returns what it returns, and a Recording of them.

        Raises ValueError when they are too many for one parallel region, and outside of the step's own `with`.
        """
        cdef Recording recording = Recording.__new__(Recording)
        cdef long computed
        if sf_recording != <void *>self:
            raise ValueError("a step records within its own with block")
        self.run()
        computed = self.computed
        result = kernels()
        if self.computed != computed:
            raise ValueError(f"a recording holds {OPERATIONS} kernels at most")
        recording.copy(self.operations, self.arguments, self.count)
        recording.kept = list(self.kept)
        return result, recording

    def repeat(self, Recording recording not None) -> None:
        """Notes the kernels of a recording down again. They read and write what they did then; nothing of it is checked anew."""
        cdef int i
        self.kept.append(recording)
        for i in range(recording.count):
            self.place()[0] = recording.operations[i]
            self.count += 1

    cdef void compute(self) noexcept nogil:
        if self.count > 0:
            sf_run(self.operations, self.count, self.threads, self.phases, self.stretches)
            self.computed += 1
        self.count = 0

    cdef sf_operation *place(self) noexcept nogil:
        """Where the next operation goes: when there is no room left, what was noted is computed first."""
        if self.count == OPERATIONS:
            self.compute()
        return self.operations + self.count

    cdef void note(self, sf_operation operation, size_t size) noexcept nogil:
        cdef sf_operation *place = self.place()
        memcpy(self.arguments + self.count * ARGUMENT_BYTES, operation.argument, size)
        place[0] = operation
        place.argument = self.arguments + self.count * ARGUMENT_BYTES
        self.count += 1


cdef void parallel_for(unit_function function, void *argument, size_t size, long units, int threads, long work,
                       locate_function locate=NULL, bint joined=False) noexcept nogil:
    cdef sf_operation operation
    cdef sf_phase phase
    cdef sf_stretch *stretches
    operation.function = function
    operation.argument = argument
    operation.units = units
    operation.locate = locate
    operation.joined = joined
    operation.alone = work < LITTLE_WORK_AWAKE
    if sf_recording != NULL and size <= ARGUMENT_BYTES:
        (<Step>sf_recording).note(operation, size)
        return
    threads = threads if work >= LITTLE_WORK else 1
    stretches = <sf_stretch *>malloc(threads * sizeof(sf_stretch))
    sf_run(&operation, 1, threads if stretches != NULL else 1, &phase, stretches)
    free(stretches)


cdef int keep(tuple objects) except -1:
    if sf_recording != NULL:
        (<Step>sf_recording).kept.append(objects)
    return 0


cdef object empty(tuple shape, object dtype):
    cdef Py_ssize_t count = 1
    cdef list made
    for length in shape:
        count *= length
    if sf_recording == NULL or count < LARGE:
        return numpy.empty(shape, dtype)
    made = (<Step>sf_recording).arrays.setdefault((shape, dtype), [])
    for array in made:
        if Py_REFCNT(array) == 2:       # the list's, and this loop's
            return array
    array = numpy.empty(shape, dtype)
    made.append(array)
    return array


cdef int team(int threads) noexcept nogil:
    return threads if sf_recording == NULL else (<Step>sf_recording).threads


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
