"""Matrix products against the float64 reference, in every instruction set, and equal bits between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops

from sparseflow.encode import as_bf16_bits, pack_matrix
from sparseflow.kernels import isa, linear
from sparseflow.quantize import from_bf16_bits

SHAPES = [(1, 1, 1), (16, 32, 1), (5, 40, 3), (33, 128, 2), (70, 129, 9), (64, 300, 17), (129, 512, 8)]
sizes = st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(1, 20))


def random_case(rows: int, columns: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, rows, columns, tokens])
    weight = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(0.02)
    return weight, rng.standard_normal((tokens, columns)).astype(np.float32)


def int8_product(weight: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    tiles, scales = pack_matrix(weight, 8, "w")
    return linear.Matrix(tiles, scales.view(np.uint16), *weight.shape).multiply(linear.quantize(x), threads)


def bf16_product(weight: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    tiles, _ = pack_matrix(weight, 16, "w")
    return linear.Matrix(tiles, np.empty(0, np.uint16), *weight.shape).multiply(x, threads)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_equals_the_reference(each_isa: str, shape: tuple[int, int, int]) -> None:
    weight, x = random_case(*shape)
    codes, scales = ops.quantize_weights(weight)
    quantized = linear.quantize(x)
    # the reference is given the engine's codes: its own, in float64, may round a tie the other way
    columns = x.shape[1]
    activations = ops.dequantize(quantized.codes[:, :columns], quantized.scales.astype(np.float64), 32)
    expected = activations @ ops.dequantize(codes, scales.astype(np.float64), 128).T
    size = np.abs(activations) @ np.abs(ops.dequantize(codes, scales.astype(np.float64), 128)).T
    assert np.abs(int8_product(weight, x) - expected).max() <= 4e-7 * size.max()


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_equals_the_reference(each_isa: str, shape: tuple[int, int, int]) -> None:
    weight, x = random_case(*shape)
    kept = from_bf16_bits(as_bf16_bits(weight, "w")).astype(np.float64)
    expected = x.astype(np.float64) @ kept.T
    assert np.abs(bf16_product(weight, x) - expected).max() <= 1e-6 * (np.abs(x) @ np.abs(kept).T).max()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 160])
def test_quantised_activations_follow_the_rule(each_isa: str, columns: int) -> None:
    x = np.random.default_rng(columns).standard_normal((7, columns)).astype(np.float32)
    x[3] = 0
    x[4, 0] = 1e-31
    ours, expected = linear.quantize(x), ops.quantize_activations(x)  # the reference in float32 here
    assert np.array_equal(ours.codes[:, :columns], expected.codes)
    assert not ours.codes[:, columns:].any()
    assert np.array_equal(ours.scales, expected.scales.astype(np.float32))
    sums = ours.codes.reshape(7, -1, 32).astype(np.int64).sum(-1)
    assert np.array_equal(ours.corrections, -128 * sums)


@given(shape=sizes, seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=40, deadline=None)
def test_bits_do_not_depend_on_isa_threads_or_rows(shape: tuple[int, int, int], seed: int, data: st.DataObject) -> None:
    weight, x = random_case(*shape, seed)
    token = data.draw(st.integers(0, len(x) - 1))
    before = isa.active()
    try:
        for product in (int8_product, bf16_product):
            results = {}
            for name in isa.available():
                isa.select(name)
                results[name] = product(weight, x)
                assert product(weight, x, threads=3).tobytes() == results[name].tobytes()
                assert product(weight, x[token : token + 1]).tobytes() == results[name][token].tobytes()
            assert len({result.tobytes() for result in results.values()}) == 1
    finally:
        isa.select(before)


def test_extreme_codes_do_not_saturate(each_isa: str) -> None:
    # 127 * 127 twice is past what the AVX2 byte product could hold if it were done carelessly
    weight = np.full((16, 128), 1, np.float32)
    x = np.full((1, 128), 3, np.float32)
    x[0, ::2] = -3
    scale = float(np.float16(np.float32(1) / 127))
    expected = sum(scale * 127 * value for value in x[0].tolist())
    assert int8_product(weight, np.abs(x))[0, 0] == pytest.approx(scale * 127 * 3 * 128, rel=1e-6)
    assert int8_product(weight, x)[0, 0] == pytest.approx(expected, abs=1e-4)
    assert int8_product(-weight, np.abs(x))[0, 0] == pytest.approx(-scale * 127 * 3 * 128, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 40])
def test_what_is_not_finite_is_not_hidden_by_codes(each_isa: str, value: float, place: int) -> None:
    weight, x = random_case(20, 48, 3)
    x[1, place] = value
    product = int8_product(weight, x)
    assert np.isnan(product[1]).all()
    assert np.isfinite(product[[0, 2]]).all()


def test_read_only_inputs_are_accepted(each_isa: str) -> None:
    weight, x = random_case(20, 64, 2)
    tiles, _ = pack_matrix(weight, 16, "w")
    for array in (tiles, x):
        array.setflags(write=False)
    assert linear.Matrix(tiles, np.empty(0, np.uint16), 20, 64).multiply(x).shape == (2, 20)


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="20 rows and 64 columns"):
        linear.Matrix(np.zeros(64, np.uint16), np.empty(0, np.uint16), 20, 64)
    with pytest.raises(ValueError, match="20 rows and 64 columns"):
        linear.Matrix(np.zeros(64, np.uint8), np.zeros(1, np.uint16), 20, 64)


def test_activations_that_do_not_fit_are_refused() -> None:
    matrix = linear.Matrix(np.zeros((32, 64), np.uint16).reshape(-1), np.empty(0, np.uint16), 20, 64)
    with pytest.raises(ValueError, match="32 activations, a matrix of 64 columns"):
        matrix.multiply(np.ones((1, 32), np.float32))
    with pytest.raises(ValueError, match="product of"):
        matrix.multiply(np.ones((1, 64), np.float32), onto=np.ones((1, 21), np.float32))
