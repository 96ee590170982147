"""A packed folder (format version 1) -> tensors, parsed from the documented bytes.

    header      4096 bytes: <8sIIIIIIIIIIQQQ = magic, version, header_bytes, kind, weight_bits, num_layers, num_experts,
                hidden_size, intermediate_size, weight_group, activation_group, stride, slice_bytes, file_bytes; u32 crc32
    int8 tiles  [ceil(R/16)][Kp/4][16 rows][4 k] uint8, code + 128; Kp = K up to a multiple of 32
    scales      [ceil(R/16)][ceil(K/weight_group)][16 rows] float16
    bf16 tiles  [ceil(R/16)][Kp/2][16 rows][2 k] bfloat16
    expert      gate and up tile rows in turn; down tiles; (int8:) gate and up scales in turn; down scales;
                each section at a multiple of 64 bytes
    dense int8  tiles, up to a multiple of 64 bytes, scales
"""

from __future__ import annotations

import json
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.checkpoint import Linear, from_bf16, text_config
from reference.ops import Array, dequantize

HEADER = struct.Struct("<8sIIIIIIIIIIQQQ")
ROWS = 16


class Header(NamedTuple):
    """The fields of a .sfx header, in the order of its bytes."""

    magic: bytes
    version: int
    header_bytes: int
    kind: int
    weight_bits: int
    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    weight_group: int
    activation_group: int
    stride: int
    slice_bytes: int
    file_bytes: int


class Int8Matrix(NamedTuple):
    """A quantised matrix as stored."""

    codes: NDArray[np.int8]
    """[R, K]."""
    scales: NDArray[np.float16]
    """[R, ceil(K / weight_group)]."""


def read_header(data: bytes) -> Header:
    """The header of one .sfx file; its checksum, magic and size are asserted."""
    header = Header(*HEADER.unpack_from(data))
    (checksum,) = struct.unpack_from("<I", data, HEADER.size)
    assert header.magic == b"SPARSEFX" and header.version == 1
    assert checksum == zlib.crc32(data[: HEADER.size])
    assert header.file_bytes == len(data)
    return header


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def tile_bytes(K: int, bits: int) -> int:
    """Bytes of one tile row of 16 rows."""
    return up_to(K, 32) * ROWS * bits // 8


def scale_bytes(K: int, group: int) -> int:
    """Bytes of the scales of one tile row."""
    return -(-K // group) * ROWS * 2


def int8_matrix(tiles: NDArray[np.uint8], scales: NDArray[np.uint8], R: int, K: int, group: int) -> Int8Matrix:
    """Tile rows [Rt, bytes] and scale rows [Rt, bytes] -> the matrix; padding is asserted to be zero."""
    Rt, Kp = -(-R // ROWS), up_to(K, 32)
    codes = tiles.reshape(Rt, Kp // 4, ROWS, 4).transpose(0, 2, 1, 3).reshape(Rt * ROWS, Kp).astype(np.int16) - 128
    halves = np.ascontiguousarray(scales).view("<f2").reshape(Rt, -1, ROWS).transpose(0, 2, 1).reshape(Rt * ROWS, -1)
    assert not codes[R:].any() and not codes[:, K:].any() and not halves[R:].any()
    return Int8Matrix(codes[:R, :K].astype(np.int8), halves[:R])


def bf16_matrix(tiles: NDArray[np.uint8], R: int, K: int) -> NDArray[np.float32]:
    """Tile rows [Rt, bytes] -> [R, K]; padding is asserted to be zero."""
    Rt, Kp = -(-R // ROWS), up_to(K, 32)
    bits = np.ascontiguousarray(tiles).view("<u2").reshape(Rt, Kp // 2, ROWS, 2).transpose(0, 2, 1, 3).reshape(Rt * ROWS, Kp)
    assert not bits[R:].any() and not bits[:, K:].any()
    return from_bf16(bits[:R, :K])


class PackedTensors:
    """The packed model's tensors, by canonical name.

    Args:
        folder: the packed folder.
        dtype: of the arrays handed out.
        activation_group: round activations by another group than the header says (to show that it matters).
    """

    def __init__(self, folder: Path, dtype: type = np.float64, *, activation_group: int | None = None) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        self.config: dict[str, Any] = text_config(json.loads((folder / "config.json").read_text()))
        self.dtype = dtype
        self.experts = (folder / "experts.sfx").read_bytes()
        self.dense = (folder / "dense.sfx").read_bytes()
        self.embed = (folder / "embed.sfx").read_bytes()
        self.header = read_header(self.experts)
        assert read_header(self.dense).weight_group == self.header.weight_group
        self.embed_header = read_header(self.embed)
        self.activation_group = activation_group or self.header.activation_group
        self.entries = {entry["name"]: entry for entry in manifest["dense"]["tensors"]}

    def stored(self, name: str) -> NDArray[np.float32] | Int8Matrix:
        """A dense tensor as stored: float32 for the kinds f32 and bf16, codes and scales for int8."""
        entry = self.entries[name]
        data = np.frombuffer(self.dense, np.uint8, entry["bytes"], entry["offset"])
        if entry["kind"] == "f32":
            return data.view("<f4").reshape(entry["shape"])
        R, K = entry["shape"]
        Rt = -(-R // ROWS)
        bits = {"int8": 8, "bf16": 16}[entry["kind"]]
        size = Rt * tile_bytes(K, bits)
        tiles = data[:size].reshape(Rt, -1)
        if entry["kind"] == "bf16":
            return bf16_matrix(tiles, R, K)
        start = up_to(size, 64)
        group = self.header.weight_group
        return int8_matrix(tiles, data[start : start + Rt * scale_bytes(K, group)].reshape(Rt, -1), R, K, group)

    def stored_expert(self, layer: int, expert: int) -> list[NDArray[np.float32] | Int8Matrix]:
        """gate [I, H], up [I, H], down [H, I] of one routed expert, as stored."""
        head = self.header
        H, I, group = head.hidden_size, head.intermediate_size, head.weight_group
        start = head.header_bytes + (layer * head.num_experts + expert) * head.stride
        data = np.frombuffer(self.experts, np.uint8, head.slice_bytes, start)
        It, Ht = -(-I // ROWS), -(-H // ROWS)
        sections, offset = [], 0
        sizes = [(2 * It, tile_bytes(H, head.weight_bits)), (Ht, tile_bytes(I, head.weight_bits))]
        if head.weight_bits == 8:
            sizes += [(2 * It, scale_bytes(H, group)), (Ht, scale_bytes(I, group))]
        for rows, size in sizes:
            sections.append(data[offset : offset + rows * size].reshape(rows, size))
            offset = up_to(offset + rows * size, 64)
        gate_up, down = sections[:2]
        if head.weight_bits == 16:
            return [bf16_matrix(gate_up[0::2], I, H), bf16_matrix(gate_up[1::2], I, H), bf16_matrix(down, H, I)]
        gate_up_scales, down_scales = sections[2:]
        return [
            int8_matrix(gate_up[0::2], gate_up_scales[0::2], I, H, group),
            int8_matrix(gate_up[1::2], gate_up_scales[1::2], I, H, group),
            int8_matrix(down, down_scales, H, I, group),
        ]

    def _linear(self, stored: NDArray[np.float32] | Int8Matrix) -> Linear:
        if isinstance(stored, Int8Matrix):
            weight = dequantize(stored.codes, stored.scales.astype(self.dtype), self.header.weight_group)
            return Linear(weight, self.activation_group)
        return Linear(stored.astype(self.dtype))

    def array(self, name: str) -> Array:
        """A small tensor; conv1d weights are stored [kernel, channels]."""
        stored = self.stored(name)
        assert not isinstance(stored, Int8Matrix)
        return stored.astype(self.dtype)

    @lru_cache(maxsize=None)
    def linear(self, name: str) -> Linear:
        """A matrix [R, K], dequantised; activation_group is 0 for the kind bf16."""
        return self._linear(self.stored(name))

    @lru_cache(maxsize=None)
    def expert(self, layer: int, expert: int) -> tuple[Linear, Linear, Linear]:
        """gate [I, H], up [I, H], down [H, I] of one routed expert."""
        gate, up, down = (self._linear(stored) for stored in self.stored_expert(layer, expert))
        return gate, up, down

    def embedding(self, ids: NDArray[np.integer]) -> Array:
        """[n] ids -> [n, H]."""
        head = self.embed_header
        rows = np.frombuffer(self.embed, "<u2", offset=head.header_bytes).reshape(head.num_experts, head.hidden_size)
        return from_bf16(rows[ids]).astype(self.dtype)
