"""Lease for leases.pyx, which makes one, lets pins.pyx reserve it, and has it tell."""

from sparseflow.route_record cimport RouteRecord
from sparseflow.slots cimport Pins, Table
from sparseflow.store cimport PackedStore


cdef class Lease:
    cdef object owner           # the LeaseTable, so that it lives
    cdef Table* table           # the owner's
    cdef PackedStore store
    cdef RouteRecord record     # or None
    cdef Pins pins
    cdef readonly int layer
    cdef readonly object ids
    cdef readonly object hit
    cdef readonly object order
    cdef readonly int num_ready
    cdef readonly int num_hits
    cdef readonly object addresses

    cdef int tell(self) except -1                                   # fills the arrays, once reserved
    cdef int check_held(self) except -1
    cdef int admit(self, Py_ssize_t position) except -1
    cdef int fail(self, Py_ssize_t i, int number) except -1         # releases, and raises for an errno of position i


cdef int check_process(PackedStore store, Table* table) except -1   # SparseFlowError in a forked child that may not touch it
