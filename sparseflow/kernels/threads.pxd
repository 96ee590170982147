# A unit of work: argument of the call, number of the unit, number of the worker (below `threads`).
ctypedef void (*unit_function)(void *argument, long unit, int worker) noexcept nogil

# Where the weights begin that a unit reads.
ctypedef const char *(*locate_function)(const void *argument, long unit) noexcept nogil

# Runs all units and returns when the last is done; within a Step, notes them down to be run by it. Safe to call from several
# threads at once. `argument` [size] is copied; what it points to must live until then: see `keep`.
# `work`: multiply-adds (or the like) of all units together; a little work is done by one thread alone.
# `locate`: for operations that stream weights, or NULL. `joined`: needs nothing of the call before it.
cdef void parallel_for(unit_function function, void *argument, size_t size, long units, int threads, long work,
                       locate_function locate=*, bint joined=*) noexcept nogil

# Within a Step, hold on to these objects until it has run.
cdef int keep(tuple objects) except -1

# Threads that a call within a Step, or outside of one, is shared by.
cdef int team(int threads) noexcept nogil

# An array for a kernel to fill. Within a Step, a large one that nobody refers to any more is used again: memory fresh from the
# system costs more than filling it.
cdef object empty(tuple shape, object dtype)
