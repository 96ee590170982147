# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Matrix products with weights in tiles: int8 codes by quantised activations, bfloat16 by float32 activations.

The tile format is sparseflow.tiles'; the arithmetic and its order are csrc/tiles.body.h's.
"""

from libc.stdint cimport int8_t, int32_t, uint8_t, uint16_t

import numpy

from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport keep, locate_function, parallel_for, unit_function

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
        cdef int8_t[:, ::1] codes
        cdef float[:, ::1] scales
        cdef int32_t[:, ::1] corrections
        self.codes = codes = numpy.empty((tokens, padded), numpy.int8)
        self.scales = scales = numpy.empty((tokens, padded // 32), numpy.float32)
        self.corrections = corrections = numpy.empty((tokens, padded // 32), numpy.int32)
        self.tokens = tokens
        self.columns = columns
        self.view.codes = &codes[0, 0]
        self.view.scales = &scales[0, 0]
        self.view.corrections = &corrections[0, 0]
        self.view.padded = padded
        return 0


def quantize(const float[:, ::1] x, int threads=1):
    """Symmetric int8 codes of x float32 [tokens, columns]: per token and group of 32, scale = amax / 127 and
    code = round(x * (127 / amax)), half to even."""
    cdef Quantized result = Quantized.__new__(Quantized)
    cdef sf_linear call
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError("activations to quantise are empty")
    result.allocate(x.shape[0], x.shape[1])
    call.x = &x[0, 0]
    call.columns = x.shape[1]
    call.quantized = result.view
    keep((x.base, result))
    with nogil:
        parallel_for(sf_quantize_units[active_index()], &call, sizeof(call), x.shape[0], threads,
                     4 * x.shape[0] * x.shape[1])
    return result


cdef object output(float[:, ::1] onto, Py_ssize_t tokens, Py_ssize_t rows):
    if onto is None:
        return numpy.empty((tokens, rows), numpy.float32)
    if onto.shape[0] != tokens or onto.shape[1] != rows:
        raise ValueError(f"[{onto.shape[0]}, {onto.shape[1]}] to be added to, a product of [{tokens}, {rows}]")
    return onto.base


def matmul_int8(Quantized x not None, const uint8_t[::1] tiles, const uint16_t[::1] scales, Py_ssize_t rows,
                int threads=1, float[:, ::1] onto=None, bint joined=False):
    """y float32 [tokens, rows] = x W^T, W [rows, x.columns] as int8 tiles and their scales (float16 bits).

    y[r] = sum over groups of 128 of scale[r, g] * (sum over groups of 32 of x.scale * integer dot), groups ascending,
    by fused multiply-adds. With `onto` float32 [tokens, rows], y is added to it and it is returned; in a Step, `joined`
    says that nothing of the kernel before is needed."""
    cdef Py_ssize_t padded = x.view.padded, row_tiles = (rows + 15) // 16
    cdef float[:, ::1] y
    cdef sf_linear call
    if rows < 1 or tiles.shape[0] != row_tiles * 16 * padded or scales.shape[0] != row_tiles * 16 * ((padded + 127) // 128):
        raise ValueError(f"{tiles.shape[0]} bytes of tiles and {scales.shape[0]} scales do not make a matrix of "
                         f"{rows} rows and {x.columns} columns")
    result = output(onto, x.tokens, rows)
    y = result
    call.int8_tiles = &tiles[0]
    call.onto = onto is not None
    call.unit_tiles = sf_unit_tiles(padded * 16)
    call.int8_scales = &scales[0]
    call.quantized = x.view
    call.y = &y[0, 0]
    call.tokens = x.tokens
    call.rows = rows
    call.columns = x.columns
    call.padded = padded
    keep((x, tiles.base, scales.base, result))
    with nogil:
        parallel_for(sf_linear_int8_units[active_index()], &call, sizeof(call), units_of(rows, call.unit_tiles), threads,
                     x.tokens * rows * padded, sf_linear_weights, joined)
    return result


def matmul_bf16(const float[:, ::1] x, const uint16_t[::1] tiles, Py_ssize_t rows, int threads=1, float[:, ::1] onto=None,
                bint joined=False):
    """y float32 [tokens, rows] = x W^T, x float32 [tokens, columns], W [rows, columns] as bfloat16 tiles.

    Each y is four chains of fused multiply-adds over k (k mod 4), added as (0 + 1) + (2 + 3).
    `onto` and `joined` as for `matmul_int8`."""
    cdef Py_ssize_t padded = padded_columns(x.shape[1])
    cdef float[:, ::1] y
    cdef sf_linear call
    if rows < 1 or x.shape[0] == 0 or tiles.shape[0] != (rows + 15) // 16 * 16 * padded:
        raise ValueError(f"{tiles.shape[0]} tile elements do not make a matrix of {rows} rows and {x.shape[1]} columns")
    result = output(onto, x.shape[0], rows)
    y = result
    call.int8_tiles = NULL
    call.bf16_tiles = &tiles[0]
    call.onto = onto is not None
    call.unit_tiles = sf_unit_tiles(padded * 32)
    call.x = &x[0, 0]
    call.y = &y[0, 0]
    call.tokens = x.shape[0]
    call.rows = rows
    call.columns = x.shape[1]
    call.padded = padded
    keep((x.base, tiles.base, result))
    with nogil:
        parallel_for(sf_linear_bf16_units[active_index()], &call, sizeof(call), units_of(rows, call.unit_tiles), threads,
                     x.shape[0] * rows * padded, sf_linear_weights, joined)
    return result
