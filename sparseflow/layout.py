"""Where things lie inside a packed expert and a packed tensor: sizes and offsets that follow from shapes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparseflow.quantize import groups
from sparseflow.tiles import TILE_ROWS, padded_columns, row_tiles

PAGE = 4096
SECTION = 64


def align(offset: int, multiple: int) -> int:
    """`offset` rounded up to a multiple."""
    return -(-offset // multiple) * multiple


def tile_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of the tiles of a matrix [rows, columns]."""
    return row_tiles(rows) * TILE_ROWS * padded_columns(columns) * bits // 8


def scale_bytes(rows: int, columns: int) -> int:
    """Bytes of the float16 scales of an int8 matrix [rows, columns]."""
    return row_tiles(rows) * TILE_ROWS * groups(columns) * 2


class ExpertLayout:
    """Where the sections of one expert lie inside its slice. Offsets in bytes from the slice's start, multiples of 64.

    Attributes: gate_up_tiles, down_tiles, gate_up_scales, down_scales (the last two None for bf16), slice_bytes, stride.
    """

    def __init__(self, hidden_size: int, moe_intermediate_size: int, bits: int) -> None:
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        self.bits = bits
        self.gate_up_tiles = 0
        self.down_tiles = align(2 * tile_bytes(moe_intermediate_size, hidden_size, bits), SECTION)
        end = self.down_tiles + tile_bytes(hidden_size, moe_intermediate_size, bits)
        self.gate_up_scales: int | None = None
        self.down_scales: int | None = None
        if bits == 8:
            self.gate_up_scales = align(end, SECTION)
            self.down_scales = align(self.gate_up_scales + 2 * scale_bytes(moe_intermediate_size, hidden_size), SECTION)
            end = self.down_scales + scale_bytes(hidden_size, moe_intermediate_size)
        self.slice_bytes = end
        self.stride = align(end, PAGE)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of dense.sfx. kind "int8": tiles, padding to 64, scales; "bf16": tiles; "f32": a row-major array."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    crc32: int

    def to_json(self, name: str) -> dict[str, Any]:
        """The entry as the manifest lists it."""
        return {
            "name": name,
            "kind": self.kind,
            "shape": list(self.shape),
            "offset": self.offset,
            "bytes": self.bytes,
            "crc32": self.crc32,
        }

    @property
    def scales_offset(self) -> int:
        """Offset of an int8 tensor's scales from the tensor's start."""
        return scales_offset(self.shape)


def scales_offset(shape: tuple[int, ...]) -> int:
    """Offset of the scales inside an int8 tensor of dense.sfx."""
    rows, columns = shape
    return align(tile_bytes(rows, columns, 8), SECTION)


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor of dense.sfx takes, without the padding to the next page."""
    if kind == "f32":
        return 4 * math.prod(shape)
    rows, columns = shape
    if kind == "bf16":
        return tile_bytes(rows, columns, 16)
    return scales_offset(shape) + scale_bytes(rows, columns)
