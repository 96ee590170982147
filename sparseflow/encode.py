"""Stored weights -> packed bytes: the rounding rule, the tile order and the layout of an expert's slice put together.

Stored weights are what a shard holds: uint16 (the bits of bfloat16), float16 or float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.layout import ExpertLayout
from sparseflow.quantize import from_bf16_bits, quantize_weights, require_finite, require_finite_bf16, to_bf16_bits
from sparseflow.tiles import TILE_ROWS, alternate, row_tiles, tile_bf16, tile_int8

_CACHED_WEIGHTS = 2**18


def as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Stored weights as float32: exact, whatever they are stored in."""
    return from_bf16_bits(stored) if stored.dtype == np.uint16 else stored.astype(np.float32, copy=False)


def as_bf16_bits(stored: NDArray[Any], name: str) -> NDArray[np.uint16]:
    """Stored weights as bfloat16 bits, wider ones rounded. Raises CheckpointError with `name` for NaN, infinite, too large."""
    if stored.dtype != np.uint16:
        # NaN first: rounding could turn some of its bit patterns into numbers.
        require_finite(stored, name)
        stored = to_bf16_bits(as_float32(stored))
    require_finite_bf16(stored, name)
    return stored


def values_changed(stored: NDArray[Any]) -> int:
    """How many stored weights bfloat16 cannot hold exactly."""
    if stored.dtype == np.uint16:
        return 0
    exact = as_float32(stored)
    return int(np.count_nonzero(from_bf16_bits(to_bf16_bits(exact)) != exact))


def pack_matrix(stored: NDArray[Any], bits: int, name: str) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Stored [R, K] -> (tiles, scales), both flat in file order; the scales of 16-bit weights are empty."""
    rows, columns = stored.shape
    # Whole tile rows that stay in the processor's cache through all the steps: half again as fast as one large matrix.
    step = max(_CACHED_WEIGHTS // columns // TILE_ROWS, 1) * TILE_ROWS
    blocks = [stored[start : start + step] for start in range(0, rows, step)]
    if bits == 16:
        return np.concatenate([tile_bf16(as_bf16_bits(block, name)) for block in blocks]), np.empty(0, np.float16)
    packed = [tile_int8(*quantize_weights(as_float32(block), name)) for block in blocks]
    return np.concatenate([tiles for tiles, _ in packed]), np.concatenate([scales for _, scales in packed])


def pack_expert(
    gate: NDArray[Any], up: NDArray[Any], down: NDArray[Any], bits: int, name: str | tuple[str, str, str] = "expert"
) -> bytes:
    """The slice of one expert: stored gate [I, H], up [I, H] and down [H, I] -> `slice_bytes` bytes.

    `name` (of all, or of each of the three) is for the messages of CheckpointError.
    """
    names = (name, name, name) if isinstance(name, str) else name
    inner, hidden = gate.shape
    layout = ExpertLayout(hidden, inner, bits)
    gate_tiles, gate_scales = pack_matrix(gate, bits, names[0])
    up_tiles, up_scales = pack_matrix(up, bits, names[1])
    down_tiles, down_scales = pack_matrix(down, bits, names[2])
    count = row_tiles(inner)
    sections = [
        (layout.gate_up_tiles, alternate(gate_tiles, up_tiles, count)),
        (layout.down_tiles, down_tiles),
    ]
    if layout.gate_up_scales is not None and layout.down_scales is not None:
        sections += [(layout.gate_up_scales, alternate(gate_scales, up_scales, count)), (layout.down_scales, down_scales)]
    packed = np.zeros(layout.slice_bytes, np.uint8)
    for offset, section in sections:
        data = section.view(np.uint8)
        packed[offset : offset + data.size] = data
    return packed.tobytes()
