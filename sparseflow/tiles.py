"""The order of weights inside a packed matrix, and back from it (numpy); `kernels.packing` writes it.

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


def untile_int8(
    tiles: NDArray[np.uint8], scales: NDArray[np.float16], rows: int, columns: int
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Tiles uint8 [Rt*16*Kp] and scales float16 [Rt*G*16] -> (codes int8 [R, K], scales float16 [R, G])."""
    count, padded = row_tiles(rows), padded_columns(columns)
    matrix = tiles.reshape(count, padded // 4, TILE_ROWS, 4).transpose(0, 2, 1, 3).reshape(count * TILE_ROWS, padded)
    codes = (matrix[:rows, :columns] ^ np.uint8(CODE_OFFSET)).view(np.int8)
    spread = scales.reshape(count, groups(columns), TILE_ROWS).transpose(0, 2, 1).reshape(count * TILE_ROWS, -1)
    return codes, spread[:rows].copy()


def untile_bf16(tiles: NDArray[np.uint16], rows: int, columns: int) -> NDArray[np.uint16]:
    """Tiles uint16 [Rt*16*Kp] -> bits uint16 [R, K]."""
    count, padded = row_tiles(rows), padded_columns(columns)
    matrix = tiles.reshape(count, padded // 2, TILE_ROWS, 2).transpose(0, 2, 1, 3).reshape(count * TILE_ROWS, padded)
    return matrix[:rows, :columns].copy()


def alternate(gate: NDArray[Any], up: NDArray[Any], count: int) -> NDArray[Any]:
    """Two flat runs of `count` tile rows (or their scales) -> one flat run: gate row 0, up row 0, gate row 1, ..."""
    return np.stack([gate.reshape(count, -1), up.reshape(count, -1)], axis=1).reshape(-1)
