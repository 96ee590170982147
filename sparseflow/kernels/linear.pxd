from libc.stdint cimport int8_t, int32_t

cdef extern from "csrc/quantized.h":
    struct sf_quantized:
        int8_t *codes
        float *scales
        int32_t *corrections
        long padded

# Owns its arrays; `view` points into them and is valid while this object lives.
cdef class Quantized:
    cdef readonly object codes, scales, corrections
    cdef sf_quantized view
    cdef readonly Py_ssize_t tokens, columns
    cdef int allocate(self, Py_ssize_t tokens, Py_ssize_t columns) except -1

cdef Py_ssize_t padded_columns(Py_ssize_t columns) noexcept nogil
