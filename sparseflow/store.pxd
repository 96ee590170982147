"""PackedStore for leases.pyx: the mapping (extents.pxd says who may do what with it), and the two things that need Python."""

from sparseflow.extents cimport Extents


cdef class PackedStore:
    cdef Extents extents
    cdef readonly str path
    cdef readonly dict header
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly Py_ssize_t stride
    cdef readonly Py_ssize_t slice_bytes
    cdef readonly Py_ssize_t file_bytes

    cdef Py_ssize_t slice_number(self, layer, expert) except -1     # OptionError when there is no such expert
    cdef object error(self, Py_ssize_t slice, int number)           # the StorageError for an errno of extents_admit
