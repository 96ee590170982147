"""Stored weights -> packed bytes: the rounding kernels and the layout of an expert's slice put together.

Stored weights are what a shard holds: uint16 (the bits of bfloat16), float16 or float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import CheckpointError
from sparseflow.kernels import packing
from sparseflow.layout import SECTION, ExpertLayout, scale_bytes, tile_bytes
from sparseflow.quantize import CODE_MAX, from_bf16_bits, require_finite
from sparseflow.tiles import row_tiles

_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16)}
_BEYOND_BF16 = (2 - 2**-8) * 2.0**127  # the least magnitude that rounds to infinity


def as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Stored weights as float32: exact, whatever they are stored in."""
    return from_bf16_bits(stored) if stored.dtype == np.uint16 else stored.astype(np.float32, copy=False)


def as_bf16_bits(stored: NDArray[Any], name: str) -> NDArray[np.uint16]:
    """Stored [R, K] as bfloat16 bits, wider ones rounded. Raises CheckpointError with `name` for NaN, infinite, too large."""
    bits = np.empty(stored.shape, np.uint16)
    _require_in_bf16(packing.round_bf16(stored, bits), name)
    return bits


def values_changed(stored: NDArray[Any]) -> int:
    """How many stored weights bfloat16 cannot hold exactly: those with a bit below its upper half of float32."""
    return 0 if stored.dtype == np.uint16 else int(np.count_nonzero(as_float32(stored).view(np.uint32) & 0xFFFF))


def scale_columns(stored: NDArray[Any], powers: NDArray[np.int32]) -> NDArray[Any]:
    """Stored [R, K] with column c times 2^powers[c], powers [K] >= 0: exact, unless it overflows and becomes infinite.

    bfloat16 bits and float32 are changed in place; float16, which has no room, is given back as float32.
    """
    channels = np.flatnonzero(powers)
    if not channels.size:
        return stored
    with np.errstate(over="ignore"):
        scaled = np.ldexp(as_float32(stored[:, channels]), powers[channels])
    if stored.dtype == np.uint16:
        stored[:, channels] = scaled.view(np.uint32) >> 16  # their lower halves are zero
        return stored
    wide = as_float32(stored)
    wide[:, channels] = scaled
    return wide


def pack_matrix(
    stored: NDArray[Any], bits: int, name: str, powers: NDArray[np.int32] | None = None
) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Stored [R, K] -> (tiles, scales), both flat in file order; the scales of 16-bit weights are empty.

    With `powers` [K], column c is 2^powers[c] times what is stored, as `scale_columns` does it: `stored` may be changed.
    Raises CheckpointError with `name` for NaN, infinite and too large weights.
    """
    if powers is not None:
        stored = scale_columns(stored, powers)
    rows, columns = stored.shape
    tiles = np.empty(tile_bytes(rows, columns, bits), np.uint8).view(_TYPES[bits])
    scales = np.empty(scale_bytes(rows, columns) if bits == 8 else 0, np.uint8).view(np.float16)
    count = row_tiles(rows)
    _round_into(tiles.reshape(count, -1), scales.reshape(count, -1), stored, bits, name)
    return tiles, scales


def pack_expert(
    gate: NDArray[Any],
    up: NDArray[Any],
    down: NDArray[Any],
    bits: int,
    name: str | tuple[str, str, str] = "expert",
    powers: NDArray[np.int32] | None = None,
) -> NDArray[np.uint8]:
    """The slice of one expert: stored gate [I, H], up [I, H] and down [H, I] -> uint8 [slice_bytes].

    `name` (of all, or of each of the three) is for the messages of CheckpointError, raised as by `pack_matrix`; `powers` [H] are
    for the columns of gate and up, as there.
    """
    if powers is not None:
        gate, up = scale_columns(gate, powers), scale_columns(up, powers)
    names = (name, name, name) if isinstance(name, str) else name
    inner, hidden = gate.shape
    layout = ExpertLayout(hidden, inner, bits)
    packed = np.empty(layout.slice_bytes, np.uint8)

    def section(offset: int | None, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if offset is None:
            return np.empty(0, dtype)
        packed[offset + size :][: -size % SECTION] = 0  # up to the next section
        return packed[offset : offset + size].view(dtype)

    half = np.dtype(np.float16)
    turns = (row_tiles(inner), 2, -1)  # tile rows of gate and up take turns
    pairs = section(layout.gate_up_tiles, 2 * tile_bytes(inner, hidden, bits), _TYPES[bits]).reshape(turns)
    pair_scales = section(layout.gate_up_scales, 2 * scale_bytes(inner, hidden), half).reshape(turns)
    _round_into(pairs[:, 0], pair_scales[:, 0], gate, bits, names[0])
    _round_into(pairs[:, 1], pair_scales[:, 1], up, bits, names[1])
    tiles = section(layout.down_tiles, tile_bytes(hidden, inner, bits), _TYPES[bits]).reshape(row_tiles(hidden), -1)
    scales = section(layout.down_scales, scale_bytes(hidden, inner), half).reshape(row_tiles(hidden), -1)
    _round_into(tiles, scales, down, bits, names[2])
    return packed


def _round_into(tiles: NDArray[Any], scales: NDArray[np.float16], stored: NDArray[Any], bits: int, name: str) -> None:
    """Write stored [R, K] to its tile rows, tiles [Rt, 16 * Kp] and scales [Rt, 16 * G] (none for 16 bits)."""
    if bits == 16:
        _require_in_bf16(packing.pack_bf16(stored, tiles), name)
        return
    largest = packing.pack_int8(stored, tiles, scales.view(np.uint16))
    require_finite(largest, name)
    with np.errstate(over="ignore"):
        scale = np.float16(np.float32(largest) / np.float32(CODE_MAX))
    if np.isinf(scale):
        raise CheckpointError(f"tensor {name}: weight of magnitude {largest:.6g} is too large for a float16 scale")


def _require_in_bf16(largest: float, name: str) -> None:
    require_finite(largest, name)
    if largest >= _BEYOND_BF16:
        raise CheckpointError(f"tensor {name}: weight of magnitude {largest:.6g} is beyond bfloat16")
