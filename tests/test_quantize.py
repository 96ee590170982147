"""The rounding rules: error bounds by hypothesis, special values by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparseflow.encode import as_bf16_bits, pack_matrix
from sparseflow.errors import CheckpointError
from sparseflow.quantize import dequantize_weights, from_bf16_bits, groups
from sparseflow.tiles import untile_int8

# Up to where amax / 127 still fits float16.
floats = st.floats(-8e6, 8e6, width=32)
matrices = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 300)), elements=floats)


def quantize_weights(weights: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [R, K] and scales float16 [R, G] as the packer makes them."""
    return untile_int8(*pack_matrix(weights, 8, name), *weights.shape)


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """A vector's bits as the packer makes them."""
    return as_bf16_bits(values[None], "w")[0]


def by_the_rule(row: np.ndarray) -> tuple[list[int], list[float]]:
    """The rule for one row, number by number, in float64 with float32 rounding where the rule says float32."""
    codes, scales = [], []
    for start in range(0, len(row), 128):
        group = [float(value) for value in row[start : start + 128]]
        amax = np.float32(max(abs(value) for value in group))
        scale = float(np.float16(np.float32(amax / np.float32(127))))
        scales.append(scale)
        for value in group:
            # Python rounds half to even.
            code = round(float(np.float32(np.float32(value) / np.float32(scale)))) if scale else 0
            codes.append(max(-127, min(127, code)))
    return codes, scales


@given(matrices)
def test_every_code_and_scale_follows_the_rule(weights):
    codes, scales = quantize_weights(weights, "w")
    assert codes.dtype == np.int8 and scales.dtype == np.float16
    assert scales.shape == (weights.shape[0], groups(weights.shape[1]))
    for row in range(weights.shape[0]):
        expected_codes, expected_scales = by_the_rule(weights[row])
        assert codes[row].tolist() == expected_codes
        assert scales[row].astype(float).tolist() == expected_scales


@given(matrices)
def test_the_error_is_half_a_step(weights):
    codes, scales = quantize_weights(weights, "w")
    error = np.abs(weights.astype(np.float64) - dequantize_weights(codes, scales))
    scale = np.repeat(scales.astype(np.float64), 128, axis=1)[:, : weights.shape[1]]
    # Rounding the scale down to float16 leaves the largest weight up to 127 * 2^-11 steps outside the codes,
    # and below the normal float16 numbers up to half a smallest step for each of the 127.
    assert (error <= scale * (0.5 + 127 * 2**-11) + 127 * 2**-25).all()


@given(matrices)
def test_codes_never_use_minus_128(weights):
    codes, _ = quantize_weights(weights, "w")
    assert codes.min() >= -127


def test_halves_go_to_even():
    row = np.zeros((1, 128), np.float32)
    row[0, :5] = [127, 0.5, 1.5, -2.5, 3.5]
    codes, scales = quantize_weights(row, "w")
    assert scales[0, 0] == 1
    assert codes[0, :5].tolist() == [127, 0, 2, -2, 4]


def test_zero_and_tiny_groups_have_no_scale():
    weights = np.zeros((1, 256), np.float32)
    weights[0, 128:] = 3e-6
    codes, scales = quantize_weights(weights, "w")
    assert not codes.any() and not scales.any()


def test_a_subnormal_scale_is_clipped():
    weights = np.full((1, 4), 2**-24 * 127 * 1.4, np.float32)
    codes, scales = quantize_weights(weights, "w")
    assert scales[0, 0] == np.float16(2**-24)
    assert (codes == 127).all()


def test_the_groups_of_a_row_are_independent():
    weights = np.concatenate([np.full((1, 128), 127.0), np.full((1, 128), 1.27), np.full((1, 3), -254.0)], axis=1).astype(np.float32)
    codes, scales = quantize_weights(weights, "w")
    assert scales.tolist() == [[1.0, float(np.float16(0.01)), 2.0]]
    assert codes[0, 0] == 127 and codes[0, -1] == -127


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 127, 130])
def test_not_a_number_is_named(value, column):
    weights = np.ones((3, 131), np.float32)
    weights[2, column] = value
    with pytest.raises(CheckpointError, match="tensor layers.0.up: holds NaN or infinite weights"):
        quantize_weights(weights, "layers.0.up")


def test_a_weight_beyond_the_scales_is_named():
    with pytest.raises(CheckpointError, match="tensor w: weight of magnitude 1e\\+07 is too large"):
        quantize_weights(np.full((1, 3), 1e7, np.float32), "w")


def test_bf16_bits_are_exact_both_ways():
    bits = np.arange(2**16, dtype=np.uint16)
    values = from_bf16_bits(bits)
    finite = np.isfinite(values)
    assert (to_bf16_bits(values[finite]) == bits[finite]).all()
    assert finite.sum() == 2**16 - 2 * 2**7


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_the_nearest(value):
    if abs(value) >= 2.0**127 * (2 - 2**-8):
        with pytest.raises(CheckpointError, match="tensor w: weight of magnitude .* is beyond bfloat16"):
            to_bf16_bits(np.array([value], np.float32))
        return
    (bits,) = to_bf16_bits(np.array([value], np.float32)).tolist()
    rounded = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    exact = np.float64(value)
    for neighbour in (bits - 1, bits + 1):
        other = np.float64(struct.unpack("<f", struct.pack("<I", (neighbour & 0xFFFF) << 16))[0])
        if np.isfinite(other):
            assert abs(exact - rounded) <= abs(exact - other)


def test_bf16_ties_go_to_even():
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    assert to_bf16_bits(ties).tolist() == [0x3F80, 0x3F82, 0xBF80]


def test_the_largest_bf16_and_what_lies_beyond():
    largest, beyond = np.array([0x7F7F7FFF, 0x7F7F8000], np.uint32).view(np.float32)
    assert to_bf16_bits(np.array([largest, -largest])).tolist() == [0x7F7F, 0xFF7F]
    with pytest.raises(CheckpointError, match="beyond bfloat16"):
        to_bf16_bits(np.array([beyond]))


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])
def test_bf16_specials_are_refused(bits):
    to_bf16_bits(np.array([0x7F7F, 0xFF7F, 0], np.uint16))
    for form in (8, 16):
        with pytest.raises(CheckpointError, match="tensor w: holds NaN or infinite"):
            pack_matrix(np.array([[0, bits]], np.uint16), form, "w")
    with pytest.raises(CheckpointError, match="tensor w: holds NaN or infinite"):
        to_bf16_bits(np.array([0, bits], np.uint16))
