"""The order of weights inside a packed matrix, to and fro (numpy).

A matrix [R, K] becomes ceil(R/16) tile rows of 16 rows each, K padded to a multiple of 32:

    int8   tile row t is [Kp/4][16 rows][4 k] uint8, code + 128; padding is 128 (a weight of zero)
           its scales are [G][16 rows] float16, G = ceil(K/128); the scales of padding rows are zero
    bf16   tile row t is [Kp/2][16 rows][2 k] uint16, bfloat16 bits; padding is zero

So 64 consecutive bytes hold the same few columns of 16 rows: one register, one output row per lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.quantize import groups

TILE_ROWS = 16
COLUMN_MULTIPLE = 32
CODE_OFFSET = 128


def row_tiles(rows: int) -> int:
    """Tile rows of a matrix with `rows` rows."""
    return -(-rows // TILE_ROWS)


def padded_columns(columns: int) -> int:
    """Columns of a tile row, padding included."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def tile_int8(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes [R, K] and scales [R, G] -> (tiles uint8 [Rt*16*Kp], scales float16 [Rt*G*16]), both flat in file order."""
    rows, columns = codes.shape
    count, padded = row_tiles(rows), padded_columns(columns)
    matrix = np.full((count * TILE_ROWS, padded), CODE_OFFSET, np.uint8)
    # Adding 128 to a two's complement byte is flipping its top bit.
    np.bitwise_xor(codes.view(np.uint8), CODE_OFFSET, out=matrix[:rows, :columns])
    # Four codes move as one word, which makes the transposition four times cheaper.
    words = matrix.view(np.uint32).reshape(count, TILE_ROWS, padded // 4)
    tiles = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(-1)
    spread = np.zeros((count * TILE_ROWS, scales.shape[1]), np.float16)
    spread[:rows] = scales
    return tiles, np.ascontiguousarray(spread.reshape(count, TILE_ROWS, -1).transpose(0, 2, 1)).reshape(-1)


def untile_int8(
    tiles: NDArray[np.uint8], scales: NDArray[np.float16], rows: int, columns: int
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Undo `tile_int8`: (codes int8 [R, K], scales float16 [R, G])."""
    count, padded = row_tiles(rows), padded_columns(columns)
    matrix = tiles.reshape(count, padded // 4, TILE_ROWS, 4).transpose(0, 2, 1, 3).reshape(count * TILE_ROWS, padded)
    codes = (matrix[:rows, :columns] ^ np.uint8(CODE_OFFSET)).view(np.int8)
    spread = scales.reshape(count, groups(columns), TILE_ROWS).transpose(0, 2, 1).reshape(count * TILE_ROWS, -1)
    return codes, spread[:rows].copy()


def tile_bf16(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Bfloat16 bits [R, K] -> tiles uint16 [Rt*16*Kp], flat in file order."""
    rows, columns = bits.shape
    count, padded = row_tiles(rows), padded_columns(columns)
    matrix = np.zeros((count * TILE_ROWS, padded), np.uint16)
    matrix[:rows, :columns] = bits
    words = matrix.view(np.uint32).reshape(count, TILE_ROWS, padded // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint16).reshape(-1)


def untile_bf16(tiles: NDArray[np.uint16], rows: int, columns: int) -> NDArray[np.uint16]:
    """Undo `tile_bf16`: bits uint16 [R, K]."""
    count, padded = row_tiles(rows), padded_columns(columns)
    matrix = tiles.reshape(count, padded // 2, TILE_ROWS, 2).transpose(0, 2, 1, 3).reshape(count * TILE_ROWS, padded)
    return matrix[:rows, :columns].copy()


def alternate(gate: NDArray[Any], up: NDArray[Any], count: int) -> NDArray[Any]:
    """Two flat runs of `count` tile rows (or their scales) -> one flat run: gate row 0, up row 0, gate row 1, ..."""
    return np.stack([gate.reshape(count, -1), up.reshape(count, -1)], axis=1).reshape(-1)
