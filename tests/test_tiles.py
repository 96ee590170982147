"""The tile order: round trips by hypothesis, and where each number lies, by the formula of the format."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.encode import pack_matrix
from sparseflow.quantize import groups
from sparseflow.tiles import alternate, padded_columns, row_tiles, untile_bf16, untile_int8

rows = st.integers(1, 50)
columns = st.integers(1, 300)


def random_codes(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes that every group has a 127 among, and scales: as weights, they are rounded to themselves."""
    random = np.random.default_rng(seed)
    codes = random.integers(-127, 128, (rows, columns)).astype(np.int8)
    codes[:, ::128] = 127
    return codes, 2.0 ** random.integers(-10, 10, (rows, groups(columns))).astype(np.float16)


def packed_codes(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = codes * np.repeat(scales.astype(np.float32), 128, axis=1)[:, : codes.shape[1]]
    return pack_matrix(weights, 8, "w")


def random_bits(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bits of finite numbers."""
    return np.random.default_rng(seed).integers(0, 2**16, (rows, columns)).astype(np.uint16) & 0xBFFF


@given(rows, columns)
def test_int8_round_trip(rows, columns):
    codes, scales = random_codes(rows, columns)
    tiles, flat = packed_codes(codes, scales)
    assert tiles.shape == (row_tiles(rows) * 16 * padded_columns(columns),)
    assert flat.shape == (row_tiles(rows) * 16 * groups(columns),)
    again, scales_again = untile_int8(tiles, flat, rows, columns)
    assert np.array_equal(again, codes) and np.array_equal(scales_again, scales)


@given(rows, columns)
def test_bf16_round_trip(rows, columns):
    bits = random_bits(rows, columns)
    tiles, _ = pack_matrix(bits, 16, "w")
    assert tiles.shape == (row_tiles(rows) * 16 * padded_columns(columns),)
    assert np.array_equal(untile_bf16(tiles, rows, columns), bits)


def test_int8_places():
    rows, columns = 35, 150
    codes, scales = random_codes(rows, columns)
    tiles, flat = packed_codes(codes, scales)
    for tile in range(3):
        for row in range(16):
            r = tile * 16 + row
            for k in range(padded_columns(columns)):
                code = int(codes[r, k]) if r < rows and k < columns else 0
                assert tiles[tile * 16 * 160 + (k // 4) * 64 + row * 4 + k % 4] == code + 128
            for group in range(2):
                scale = scales[r, group] if r < rows else 0
                assert flat[tile * 32 + group * 16 + row] == scale


def test_bf16_places():
    rows, columns = 19, 33
    bits = random_bits(rows, columns)
    tiles, _ = pack_matrix(bits, 16, "w")
    for r in range(32):
        for k in range(64):
            expected = bits[r, k] if r < rows and k < columns else 0
            assert tiles[r // 16 * 16 * 64 + (k // 2) * 32 + r % 16 * 2 + k % 2] == expected


def test_inputs_may_be_read_only():
    codes, scales = random_codes(4, 40)
    bits = random_bits(4, 40)
    bits.flags.writeable = False
    tiles, flat = packed_codes(codes, scales)
    tiles16, _ = pack_matrix(bits, 16, "w")
    for array in (tiles, flat, tiles16):
        array.flags.writeable = False
    untile_int8(tiles, flat, 4, 40)
    untile_bf16(tiles16, 4, 40)


def test_alternate():
    gate, up = np.arange(6), np.arange(6) + 10
    assert alternate(gate, up, 3).tolist() == [0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]
