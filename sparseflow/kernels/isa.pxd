cdef int active_index() noexcept nogil
