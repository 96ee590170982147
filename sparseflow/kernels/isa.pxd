# Raises OptionError when SPARSEFLOW_ISA names what cannot run here: on first use, not on import, and never a silent default.
cdef int active_index() except -1 nogil
