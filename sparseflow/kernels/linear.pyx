# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Matrix products with weights in tiles: int8 codes by quantised activations, bfloat16 by float32 activations.

The tile format is sparseflow.tiles'; the arithmetic and its order are csrc/tiles.body.h's.
"""

from libc.stdint cimport int8_t, int32_t, uint8_t, uint16_t

import numpy

from sparseflow.kernels.arrays cimport data_of
from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport empty, keep, locate_function, parallel_for, unit_function

cdef extern from "csrc/linear.h":
    struct sf_linear:
        const uint8_t *int8_tiles
        const uint16_t *int8_scales
        const uint16_t *bf16_tiles
        sf_quantized quantized
        const float *x
        float *y
        long tokens, rows, columns, padded, unit_tiles
        int onto

    long sf_unit_tiles(long tile_bytes) noexcept nogil
    const char *sf_linear_weights(const void *argument, long unit) noexcept nogil
    unit_function *sf_quantize_units
    unit_function *sf_linear_int8_units
    unit_function *sf_linear_bf16_units

cdef object _float32 = numpy.dtype(numpy.float32)
cdef object _int8 = numpy.dtype(numpy.int8)
cdef object _int32 = numpy.dtype(numpy.int32)


cdef Py_ssize_t padded_columns(Py_ssize_t columns) noexcept nogil:
    return (columns + 31) // 32 * 32


cdef long units_of(Py_ssize_t rows, long unit_tiles) noexcept nogil:
    return ((rows + 15) // 16 + unit_tiles - 1) // unit_tiles


cdef class Quantized:
    """Activations as int8 codes, per token and group of 32: codes int8 [tokens, padded], scales float32 and
    corrections int32 [tokens, padded / 32], where correction = -128 * sum of the group's codes. `padded` is the number
    of columns rounded up to 32; padding codes are 0."""

    cdef int allocate(self, Py_ssize_t tokens, Py_ssize_t columns) except -1:
        cdef Py_ssize_t padded = padded_columns(columns)
        self.codes = empty((tokens, padded), _int8)
        self.scales = empty((tokens, padded // 32), _float32)
        self.corrections = empty((tokens, padded // 32), _int32)
        self.tokens = tokens
        self.columns = columns
        self.view.codes = <int8_t *>data_of(self.codes)
        self.view.scales = <float *>data_of(self.scales)
        self.view.corrections = <int32_t *>data_of(self.corrections)
        self.view.padded = padded
        return 0


def quantize(x, int threads=1):
    """Symmetric int8 codes of x float32 [tokens, columns]: per token and group of 32, scale = amax / 127 and
    code = round(x * (127 / amax)), half to even."""
    cdef const float[:, ::1] rows = x
    cdef Quantized result = Quantized.__new__(Quantized)
    cdef sf_linear call
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        raise ValueError("activations to quantise are empty")
    result.allocate(rows.shape[0], rows.shape[1])
    call.x = &rows[0, 0]
    call.columns = rows.shape[1]
    call.quantized = result.view
    keep((x, result))
    with nogil:
        parallel_for(sf_quantize_units[active_index()], &call, sizeof(call), rows.shape[0], threads,
                     4 * rows.shape[0] * rows.shape[1])
    return result


cdef class Matrix:
    """A weight matrix [rows, columns] in tiles, to be multiplied with again and again.

    Parameters
        tiles: uint8 for int8 weights (code + 128), uint16 (the bits of bfloat16) otherwise; in the order of sparseflow.tiles.
        scales: uint16, the bits of float16, per row and group of 128; empty for bfloat16.
        rows, columns

    Attributes
        rows, columns, bits (8 or 16), tiles, scales

    Raises ValueError for tiles or scales of another size.
    """

    cdef readonly Py_ssize_t rows, columns
    cdef readonly int bits
    cdef readonly object tiles, scales
    cdef sf_linear call

    def __init__(self, tiles, const uint16_t[::1] scales, Py_ssize_t rows, Py_ssize_t columns):
        cdef Py_ssize_t padded = padded_columns(columns), count = (rows + 15) // 16 * 16 * padded
        cdef const uint8_t[::1] codes
        cdef const uint16_t[::1] halves
        self.bits = 8 if tiles.dtype == numpy.uint8 else 16
        if rows < 1 or columns < 1 or tiles.size != count or (
                self.bits == 8 and scales.shape[0] != count // padded * ((padded + 127) // 128)):
            raise ValueError(f"{tiles.size} tile elements and {scales.shape[0]} scales do not make a matrix of {rows} rows and "
                             f"{columns} columns")
        self.rows, self.columns = rows, columns
        self.tiles, self.scales = tiles, scales.base
        if self.bits == 8:
            codes = tiles
            self.call.int8_tiles = &codes[0]
            self.call.int8_scales = &scales[0]
        else:
            halves = tiles
            self.call.int8_tiles = NULL
            self.call.bf16_tiles = &halves[0]
        self.call.rows = rows
        self.call.columns = columns
        self.call.padded = padded
        self.call.unit_tiles = sf_unit_tiles(padded * 2 * self.bits)

    def multiply(self, x, int threads=1, onto=None, bint joined=False):
        """y float32 [tokens, rows] = x W^T, for x Quantized (int8 weights) or float32 [tokens, columns] (bfloat16).

        int8: y[r] = sum over groups of 128 of scale[r, g] * (sum over groups of 32 of x.scale * integer dot), groups
        ascending, by fused multiply-adds. bfloat16: four chains of fused multiply-adds over k (k mod 4), added as
        (0 + 1) + (2 + 3).

        With `onto` float32 [tokens, rows], y is added to it and it is returned. In a Step, `joined` says that nothing of the kernel
        before is needed. Raises ValueError when the shapes differ.
        """
        cdef sf_linear call = self.call
        cdef Quantized quantized
        cdef const float[:, ::1] activations
        cdef float[:, ::1] sums
        if self.bits == 8:
            quantized = x
            call.tokens = quantized.tokens
            call.quantized = quantized.view
            columns = quantized.columns
        else:
            activations = x
            call.tokens = activations.shape[0]
            columns = activations.shape[1]
        if columns != self.columns or call.tokens == 0:
            raise ValueError(f"{call.tokens} rows of {columns} activations, a matrix of {self.columns} columns")
        if self.bits == 16:
            call.x = &activations[0, 0]
        if onto is None:
            result = empty((call.tokens, self.rows), _float32)
            call.y = <float *>data_of(result)
            call.onto = False
        else:
            sums = result = onto
            if sums.shape[0] != call.tokens or sums.shape[1] != self.rows:
                raise ValueError(f"[{sums.shape[0]}, {sums.shape[1]}] to be added to, a product of [{call.tokens}, {self.rows}]")
            call.y = &sums[0, 0]
            call.onto = True
        keep((self, x, result))
        with nogil:
            parallel_for((sf_linear_int8_units if self.bits == 8 else sf_linear_bf16_units)[active_index()], &call, sizeof(call),
                         units_of(self.rows, call.unit_tiles), threads, call.tokens * self.rows * call.padded,
                         sf_linear_weights, joined)
        return result
