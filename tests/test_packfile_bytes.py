"""Golden bytes of format version 1: these literals are the format, a change here is a new version."""

from __future__ import annotations

import hashlib
import struct
import zlib

import numpy as np
import pytest

from checkpoints import SMALL
from sparseflow.config import Geometry
from sparseflow.encode import pack_expert
from sparseflow.errors import PackedModelError
from sparseflow.layout import ExpertLayout, TensorEntry, tensor_bytes
from sparseflow.packfile import Header, dense_plan, headers

HEADER = Header(
    kind=1,
    weight_bits=8,
    num_layers=2,
    num_experts=3,
    hidden_size=4,
    intermediate_size=2,
    stride=4096,
    slice_bytes=1632,
    file_bytes=28672,
)
HEADER_HEX = (
    "5350415253454658 01000000 00100000 01000000 08000000 02000000 03000000 04000000 02000000 80000000 20000000"
    "0010000000000000 6006000000000000 0070000000000000"
)

GATE = np.array([[1, -2, 3, -4], [127, 0.5, 1.5, -127]], np.float32)
DOWN = np.array([[1, 2], [3, 4], [5, 6], [7, -8]], np.float32)


def with_checksum(fields: bytes) -> bytes:
    return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(4096, b"\0")


def test_header_bytes():
    fields = bytes.fromhex(HEADER_HEX.replace(" ", ""))
    assert HEADER.pack() == with_checksum(fields)
    assert Header.unpack(with_checksum(fields), "experts.sfx") == HEADER


@pytest.mark.parametrize("position", [*range(8, 76)])
def test_every_byte_of_a_header_is_guarded(position):
    data = bytearray(HEADER.pack())
    data[position] ^= 1
    with pytest.raises(PackedModelError, match="^experts.sfx: "):
        Header.unpack(bytes(data), "experts.sfx")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with a SparseFlow header"),
        (HEADER.pack()[:4095], "does not begin with a SparseFlow header"),
        (b"GGUF" + HEADER.pack()[4:], "does not begin with a SparseFlow header"),
        (HEADER.pack()[:8] + struct.pack("<I", 2) + HEADER.pack()[12:], "version 2 is newer than this SparseFlow reads"),
        (with_checksum(HEADER.pack()[:12] + struct.pack("<I", 512) + HEADER.pack()[16:72]), "the header is damaged"),
    ],
    ids=["empty", "short", "magic", "future", "header size"],
)
def test_a_wrong_header_is_explained(data, message):
    with pytest.raises(PackedModelError, match=message):
        Header.unpack(data, "experts.sfx")


def sections(data: bytes, filler: int) -> dict[int, str]:
    """Offset -> hex of the 16-byte pieces that hold something."""
    pieces = {offset: data[offset : offset + 16] for offset in range(0, len(data), 16)}
    return {offset: piece.hex() for offset, piece in pieces.items() if set(piece) != {filler}}


def test_int8_slice_bytes():
    data = pack_expert(GATE, -GATE, DOWN, 8).tobytes()
    assert len(data) == 1632
    # Tile row of gate, of up, of down: four codes of row 0, four of row 1, ...; the columns up to 32 are padding.
    assert sections(data[:1536], 128) == {
        0: "a040df01ff8082018080808080808080",
        512: "60c021ff01807eff8080808080808080",
        1024: "c0ff8080dfff8080eaff8080ef018080",
    }
    # Scales of gate, of up, of down: float16 of rows 0, 1, ...
    assert sections(data[1536:], 0) == {
        0: "0828003c000000000000000000000000",
        32: "0828003c000000000000000000000000",
        64: "082408280c2a082c0000000000000000",
    }
    assert hashlib.sha256(data).hexdigest() == "f106e771c10ee35838cb1250f115612028a7441c8042c6cb4fb0569b6171b10d"


def test_bf16_slice_bytes():
    data = pack_expert(GATE, -GATE, DOWN, 16).tobytes()
    assert len(data) == 3072
    assert sections(data, 0) == {
        0: "803f00c0fe42003f0000000000000000",
        64: "404080c0c03ffec20000000000000000",
        1024: "80bf0040fec200bf0000000000000000",
        1088: "40c08040c0bffe420000000000000000",
        2048: "803f004040408040a040c040e04000c1",
    }


@pytest.mark.parametrize("bits", [8, 16])
def test_a_slice_is_the_same_from_any_stored_type(bits):
    half = [(matrix.view(np.uint32) >> 16).astype(np.uint16) for matrix in (GATE, -GATE, DOWN)]
    expected = pack_expert(GATE, -GATE, DOWN, bits)
    assert np.array_equal(pack_expert(*half, bits), expected)
    assert np.array_equal(pack_expert(*(matrix.astype(np.float16) for matrix in (GATE, -GATE, DOWN)), bits), expected)


def test_layout_of_the_full_size_expert():
    int8, bf16 = ExpertLayout(2048, 512, 8), ExpertLayout(2048, 512, 16)
    assert vars(int8) | vars(bf16) == vars(bf16)
    assert (int8.gate_up_tiles, int8.down_tiles, int8.gate_up_scales, int8.down_scales) == (0, 2097152, 3145728, 3178496)
    assert (int8.slice_bytes, int8.stride) == (3194880, 3194880)
    assert (bf16.gate_up_tiles, bf16.down_tiles, bf16.gate_up_scales, bf16.down_scales) == (0, 4194304, None, None)
    assert (bf16.slice_bytes, bf16.stride) == (6291456, 6291456)


def test_layout_of_an_odd_expert():
    # hidden 140: padded to 160, 2 groups, 9 tile rows; intermediate 24: padded to 32, 1 group, 2 tile rows.
    layout = ExpertLayout(140, 24, 8)
    gate_up, down = 2 * 2 * 16 * 160, 9 * 16 * 32
    assert layout.down_tiles == gate_up
    assert layout.gate_up_scales == gate_up + down
    assert layout.down_scales == gate_up + down + 2 * 2 * 16 * 2 * 2
    assert layout.slice_bytes == layout.down_scales + 9 * 16 * 2
    assert layout.stride == 16384


def test_the_sizes_of_dense_tensors():
    assert tensor_bytes("f32", (4, 76)) == 4 * 76 * 4
    assert tensor_bytes("bf16", (5, 140)) == 16 * 160 * 2
    assert tensor_bytes("int8", (17, 140)) == 2 * 16 * 160 + 2 * 16 * 2 * 2
    assert TensorEntry("int8", (17, 140), 0, 0, 0).scales_offset == 2 * 16 * 160


def test_the_plan_of_dense_tensors():
    geometry = Geometry.from_config(SMALL, "config.json")
    plan, size = dense_plan(geometry, 8)
    end = 4096
    for entry in plan.values():
        assert entry.offset % 4096 == 0
        assert end <= entry.offset < end + 4096
        end = entry.offset + entry.bytes
    assert end <= size < end + 4096
    kinds = {name: (entry.kind, entry.shape) for name, entry in plan.items()}
    assert kinds["layers.0.linear_attn.conv1d.weight"] == ("f32", (4, 64))
    assert kinds["layers.0.linear_attn.A_log"] == ("f32", (4,))
    assert kinds["layers.0.linear_attn.in_proj_qkv.weight"] == ("int8", (64, 140))
    assert kinds["layers.1.self_attn.q_proj.weight"] == ("int8", (64, 140))
    assert kinds["layers.1.self_attn.q_norm.weight"] == ("f32", (8,))
    assert kinds["layers.2.mlp.shared_expert.down_proj.weight"] == ("int8", (140, 20))
    assert kinds["norm.weight"] == ("f32", (140,))
    assert kinds["lm_head.weight"] == ("int8", (71, 140))
    always = {name for name, entry in plan.items() if entry.kind == "bf16"}
    suffixes = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight")
    assert always == {name for name in plan if name.endswith(suffixes)}
    assert {entry.kind for entry in dense_plan(geometry, 16)[0].values()} == {"bf16", "f32"}


def test_the_headers_of_a_geometry():
    geometry = Geometry.from_config(SMALL, "config.json")
    found = headers(geometry, 8, 16)
    assert list(found) == ["experts.sfx", "dense.sfx", "embed.sfx"]
    experts, dense, embed = found.values()
    assert (experts.kind, experts.weight_bits, experts.num_layers, experts.num_experts) == (1, 8, 3, 5)
    assert experts.file_bytes == 4096 + 3 * 5 * 16384
    assert (dense.kind, dense.weight_bits, dense.num_layers, dense.num_experts, dense.stride) == (2, 16, 0, 0, 0)
    assert (embed.kind, embed.weight_bits, embed.num_experts, embed.stride, embed.slice_bytes) == (3, 16, 71, 280, 280)
    assert embed.file_bytes == 4096 + 71 * 280
    assert {header.weight_group for header in found.values()} == {128}
    assert {header.activation_group for header in found.values()} == {32}
