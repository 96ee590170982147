"""Packing against the numpy definition in the reference, bit by bit, in every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoint import bf16_values, to_bf16
from reference import ops
from reference.checkpoint import from_bf16
from reference.packed import bf16_matrix, int8_matrix

from sparseflow.encode import pack_expert, values_changed
from sparseflow.kernels import isa, packing
from sparseflow.layout import ExpertLayout

KINDS = ("bf16", "float16", "float32")
SHAPES = st.tuples(st.integers(1, 50), st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 160, 255, 256, 512])))
LEFT = 0xA5
"""What lies between the tile rows, and has to stay."""


def each_isa_and_threads() -> Iterator[int]:
    """Every instruction set in turn, with one thread and with three."""
    before = isa.active()
    try:
        for name in isa.available():
            isa.select(name)
            yield from (1, 3)
    finally:
        isa.select(before)


def stored_as(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return to_bf16(values)
    return np.clip(values, -65504, 65504).astype(np.float16) if kind == "float16" else values


def as_float32(stored: np.ndarray) -> np.ndarray:
    return from_bf16(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def random_weights(shape: tuple[int, int], kind: str, seed: int) -> np.ndarray:
    """Stored weights of all sizes: groups whose scales are normal, subnormal or zero, with ties between codes."""
    rows, columns = shape
    rng = np.random.default_rng([seed, rows, columns])
    groups = -(-columns // 128)
    size = 10.0 ** rng.uniform(-9, 7, (rows, groups))
    size[rng.random((rows, groups)) < 0.1] = 0
    spread = np.repeat(size, 128, axis=1)[:, :columns]
    values = np.clip(rng.standard_normal(shape) * spread, -8e6, 8e6)  # beyond, no float16 scale is large enough
    # Halves of a scale that float16 holds, the largest of them 127 scales.
    ties = rng.integers(-254, 255, shape) * np.repeat(2.0 ** rng.integers(-24, 10, (rows, groups)), 128, axis=1)[:, :columns] / 2
    ties[:, ::128] = np.abs(ties[:, ::128]).max(axis=1, keepdims=True)
    return stored_as(np.where(rng.random((rows, 1)) < 0.5, values, ties).astype(np.float32), kind)


def packed_int8(stored: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales read back from tile rows that lie apart."""
    rows, columns = stored.shape
    count = -(-rows // 16)
    tiles = np.full((count, 2, -(-columns // 32) * 32 * 16), LEFT, np.uint8)
    scales = np.full((count, 3, -(-columns // 128) * 16), LEFT, np.uint16)
    packing.pack_int8(stored, tiles[:, 1], scales[:, 1], threads)
    assert (tiles[:, 0] == LEFT).all() and (scales[:, ::2] == LEFT).all()
    matrix = int8_matrix(tiles[:, 1], scales[:, 1].copy().view(np.uint8), rows, columns, 128)
    return matrix.codes, matrix.scales


@given(SHAPES, st.sampled_from(KINDS), st.integers(0, 2**32))
@settings(deadline=None)
def test_int8_is_the_definition_bit_by_bit(shape: tuple[int, int], kind: str, seed: int) -> None:
    stored = random_weights(shape, kind, seed)
    codes, scales = ops.quantize_weights(as_float32(stored))
    for threads in each_isa_and_threads():
        found_codes, found_scales = packed_int8(stored, threads)
        assert np.array_equal(found_codes, codes)
        assert np.array_equal(found_scales.view(np.uint16), scales.view(np.uint16))


def test_every_scale_is_rounded_as_numpy_does() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:] + halves[:-1]) / 2
    near = between.view(np.uint32)[:, None] + np.array([-64, -1, 0, 1, 64], np.int64)  # in units of the last place
    weights = np.concatenate([halves, near.astype(np.uint32).view(np.float32).reshape(-1)])[:, None] * np.float32(127)
    codes, scales = ops.quantize_weights(weights)
    assert len(np.unique(scales)) == 0x7C00
    for threads in each_isa_and_threads():
        found_codes, found_scales = packed_int8(weights, threads)
        assert np.array_equal(found_scales.view(np.uint16), scales.view(np.uint16)) and np.array_equal(found_codes, codes)


@given(SHAPES, st.sampled_from(KINDS), st.integers(0, 2**32))
@settings(deadline=None)
def test_bf16_is_the_definition_bit_by_bit(shape: tuple[int, int], kind: str, seed: int) -> None:
    rows, columns = shape
    stored = random_weights(shape, kind, seed)
    expected = bf16_values(as_float32(stored))
    assert values_changed(stored) == (expected != as_float32(stored)).sum()
    for threads in each_isa_and_threads():
        tiles = np.full((-(-rows // 16), 2, -(-columns // 32) * 32 * 16), LEFT, np.uint16)
        packing.pack_bf16(stored, tiles[:, 0], threads)
        assert (tiles[:, 1] == LEFT).all()
        found = bf16_matrix(tiles[:, 0].copy().view(np.uint8), rows, columns)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
        bits = np.empty(shape, np.uint16)
        packing.round_bf16(stored, bits, threads)
        assert np.array_equal(bits, to_bf16(as_float32(stored)))


@given(SHAPES, st.sampled_from(KINDS), st.integers(0, 2**32), st.data())
@settings(deadline=None)
def test_the_largest_magnitude_is_returned(shape: tuple[int, int], kind: str, seed: int, data: st.DataObject) -> None:
    rows, columns = shape
    stored = random_weights(shape, kind, seed)
    count = -(-rows // 16)
    outputs = np.empty((count, -(-columns // 32) * 512), np.uint8), np.empty((count, -(-columns // 128) * 16), np.uint16)
    tiles, bits = np.empty(outputs[0].shape, np.uint16), np.empty(shape, np.uint16)
    place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    damaged = as_float32(stored)
    damaged[place] = data.draw(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]))
    damaged = damaged.astype(stored.dtype) if kind != "bf16" else (damaged.view(np.uint32) >> 16).astype(np.uint16)
    for threads in each_isa_and_threads():
        for weights, largest in ((stored, np.abs(as_float32(stored)).max()), (damaged, np.inf)):
            assert packing.pack_int8(weights, *outputs, threads) == largest
            assert packing.pack_bf16(weights, tiles, threads) == largest
            assert packing.round_bf16(weights, bits, threads) == largest


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(140, 24), (33, 17), (256, 128)])  # hidden, inner
def test_an_expert_lies_as_its_layout_says(each_isa: str, bits: int, shape: tuple[int, int]) -> None:
    hidden, inner = shape
    gate, up, down = (random_weights(size, "bf16", seed) for seed, size in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)]))
    packed = pack_expert(gate, up, down, bits)
    layout = ExpertLayout(hidden, inner, bits)
    assert packed.shape == (layout.slice_bytes,)
    width, Rt, down_Rt = bits // 8, -(-inner // 16), -(-hidden // 16)
    pair = packed[: 2 * Rt * 16 * -(-hidden // 32) * 32 * width].reshape(Rt, 2, -1)
    rest = packed[layout.down_tiles :][: down_Rt * 16 * -(-inner // 32) * 32 * width].reshape(down_Rt, -1)
    if layout.gate_up_scales is None or layout.down_scales is None:
        for tiles, stored in ((pair[:, 0], gate), (pair[:, 1], up), (rest, down)):
            assert np.array_equal(bf16_matrix(tiles, *stored.shape), from_bf16(stored))
        return
    pair_scales = packed[layout.gate_up_scales :][: 2 * Rt * 32 * -(-hidden // 128)].reshape(Rt, 2, -1)
    rest_scales = packed[layout.down_scales :].reshape(down_Rt, -1)
    parts = ((pair[:, 0], pair_scales[:, 0], gate), (pair[:, 1], pair_scales[:, 1], up), (rest, rest_scales, down))
    for tiles, scales, stored in parts:
        found = int8_matrix(tiles, scales, *stored.shape, 128)
        codes, expected = ops.quantize_weights(from_bf16(stored))
        assert np.array_equal(found.codes, codes) and np.array_equal(found.scales, expected)


def test_read_only_weights_are_accepted() -> None:
    stored = random_weights((5, 40), "bf16", 0)
    stored.setflags(write=False)
    packing.round_bf16(stored, np.empty((5, 40), np.uint16))


@pytest.mark.parametrize(
    "stored", [np.zeros((4, 0), np.uint16), np.zeros((4, 8)), np.zeros((4, 8), ">f4"), np.zeros((4, 8), np.int16)], ids=str
)
def test_weights_of_no_known_kind_are_refused(stored: np.ndarray) -> None:
    with pytest.raises(ValueError, match="weights to pack are"):
        packing.round_bf16(stored, np.empty(stored.shape, np.uint16))


def test_places_that_do_not_fit_are_refused() -> None:
    stored, scales = np.zeros((17, 40), np.uint16), np.zeros((2, 16), np.uint16)
    packing.pack_int8(stored, np.zeros((2, 1024), np.uint8), scales)
    for shape in ((1, 1024), (2, 1023), (3, 1024)):
        with pytest.raises(ValueError, match="17 rows and 40 columns"):
            packing.pack_int8(stored, np.zeros(shape, np.uint8), scales)
        with pytest.raises(ValueError, match="17 rows and 40 columns"):
            packing.pack_bf16(stored, np.zeros(shape, np.uint16))
    with pytest.raises(ValueError, match="17 rows and 40 columns"):
        packing.pack_int8(stored, np.zeros((2, 1024), np.uint8), scales[:1])
    with pytest.raises(ValueError, match="side by side"):
        packing.pack_int8(stored, np.zeros((2, 2048), np.uint8)[:, ::2], scales)
    with pytest.raises(ValueError, match="side by side"):
        packing.pack_bf16(stored, np.zeros((2, 2048), np.uint16)[:, ::2])
    with pytest.raises(ValueError, match="do not go into"):
        packing.round_bf16(stored, np.zeros((17, 41), np.uint16))
