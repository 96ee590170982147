# A unit of work: argument of the call, number of the unit, number of the worker (below `threads`).
ctypedef void (*unit_function)(void *argument, long unit, int worker) noexcept nogil

# Runs all units and returns when the last is done. Safe to call from several threads at once.
# `work`: multiply-adds (or the like) of all units together; a little work is done by the calling thread alone.
cdef void parallel_for(unit_function function, void *argument, long units, int threads, long work) noexcept nogil
