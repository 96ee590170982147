"""Memory of arrays that a kernel has just made: their type and shape need no checking, which a typed memoryview would do."""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer


cdef inline void *data_of(object array) except NULL:
    """Where the elements of a fresh array begin; valid while the array lives."""
    cdef Py_buffer buffer
    PyObject_GetBuffer(array, &buffer, PyBUF_WRITABLE)
    PyBuffer_Release(&buffer)
    return buffer.buf
