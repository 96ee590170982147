# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, embedsignature=True, freethreading_compatible=True
"""Stored weights to packed ones: rounding and tile order in one pass, as the packer needs them.

The rounding rules are sparseflow.quantize's, the tile format is sparseflow.tiles'; the arithmetic is csrc/packing.body.h's.
Stored weights are what a shard holds: uint16 (the bits of bfloat16), float16 or float32, [R, K].

Every function returns the largest magnitude among the weights, infinite if any of them is infinite or NaN: what was written is
then of no use, and it is for the caller to say so.
"""

from libc.stdint cimport uint8_t, uint16_t

import numpy

from sparseflow.kernels.isa cimport active_index
from sparseflow.kernels.threads cimport parallel_for, unit_function

cdef extern from "csrc/packing.h":
    struct sf_packing:
        const uint8_t *stored
        int kind
        long rows, columns, padded
        uint8_t *tiles
        long tile_stride
        uint8_t *scales
        long scale_stride
        float *largest

    enum: SF_STORED_BF16
    enum: SF_STORED_FLOAT16
    enum: SF_STORED_FLOAT32
    unit_function *sf_pack_int8_units
    unit_function *sf_pack_bf16_units
    unit_function *sf_round_bf16_units

KINDS = {numpy.dtype(numpy.uint16): SF_STORED_BF16, numpy.dtype(numpy.float16): SF_STORED_FLOAT16,
         numpy.dtype(numpy.float32): SF_STORED_FLOAT32}


cdef float run(unit_function function, sf_packing *call, stored, int threads) except -1:
    """Fills in what describes the stored weights and does all units."""
    cdef const uint8_t[:, ::1] weights
    cdef long units = (stored.shape[0] + 15) // 16
    cdef float[::1] largest
    if stored.ndim != 2 or stored.size == 0 or stored.dtype not in KINDS:
        raise ValueError(f"weights to pack are {stored.dtype} {list(stored.shape)}: a matrix of bfloat16 bits (uint16), "
                         "float16 or float32 is wanted")
    weights = stored.view(numpy.uint8)
    result = numpy.empty(units, numpy.float32)
    largest = result
    call.stored = &weights[0, 0]
    call.kind = KINDS[stored.dtype]
    call.rows = stored.shape[0]
    call.columns = stored.shape[1]
    call.padded = (call.columns + 31) // 32 * 32
    call.largest = &largest[0]
    with nogil:
        parallel_for(function, call, sizeof(call[0]), units, threads, call.rows * call.padded)
    return result.max()


cdef int check(stored, Py_ssize_t tiles, Py_ssize_t tile_size, Py_ssize_t scales, Py_ssize_t groups) except -1:
    """Raises ValueError unless there is a tile row for every 16 rows, and the right number of elements in each."""
    rows, columns = stored.shape
    if (tiles != (rows + 15) // 16 or tile_size != 16 * ((columns + 31) // 32 * 32)
            or scales != tiles or groups != 16 * ((columns + 127) // 128)):
        raise ValueError(f"{tiles} tile rows of {tile_size} weights and {scales} rows of {groups} scales do not hold a matrix of "
                         f"{rows} rows and {columns} columns")
    return 0


def pack_int8(stored, uint8_t[:, :] tiles, uint16_t[:, :] scales, int threads=1) -> float:
    """Rounds stored [R, K] to int8: writes tiles uint8 [ceil(R/16), 16 * Kp] and scales (the bits of float16)
    [ceil(R/16), 16 * ceil(K/128)], both with any distance between their rows. Returns the largest magnitude; codes and
    scales are of use if that over 127 is finite in float16."""
    cdef sf_packing call
    check(stored, tiles.shape[0], tiles.shape[1], scales.shape[0], scales.shape[1])
    if tiles.strides[1] != 1 or scales.strides[1] != 2:
        raise ValueError("the weights or the scales of a tile row do not lie side by side")
    call.tiles = &tiles[0, 0]
    call.tile_stride = tiles.strides[0]
    call.scales = <uint8_t *>&scales[0, 0]
    call.scale_stride = scales.strides[0]
    return run(sf_pack_int8_units[active_index()], &call, stored, threads)


def pack_bf16(stored, uint16_t[:, :] tiles, int threads=1) -> float:
    """Rounds stored [R, K] to bfloat16 and writes tiles, the bits of bfloat16 [ceil(R/16), 16 * Kp], with any distance between
    their rows. Returns the largest magnitude; above what bfloat16 holds the bits are those of infinity."""
    cdef sf_packing call
    check(stored, tiles.shape[0], tiles.shape[1], tiles.shape[0], 16 * ((stored.shape[1] + 127) // 128))
    if tiles.strides[1] != 2:
        raise ValueError("the weights of a tile row do not lie side by side")
    call.tiles = <uint8_t *>&tiles[0, 0]
    call.tile_stride = tiles.strides[0]
    return run(sf_pack_bf16_units[active_index()], &call, stored, threads)


def round_bf16(stored, uint16_t[:, ::1] out, int threads=1) -> float:
    """Rounds stored [R, K] to bfloat16 bits, out [R, K]. Returns the largest magnitude, as pack_bf16 does."""
    cdef sf_packing call
    if out.shape[0] != stored.shape[0] or out.shape[1] != stored.shape[1]:
        raise ValueError(f"{list(stored.shape)} weights do not go into [{out.shape[0]}, {out.shape[1]}]")
    call.tiles = <uint8_t *>&out[0, 0]
    return run(sf_round_bf16_units[active_index()], &call, stored, threads)
