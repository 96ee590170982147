"""Steps: kernels noted down give the bits of kernels run at once, in order, and arrays are used again only when nobody has them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from sparseflow.encode import pack_matrix
from sparseflow.errors import OptionError
from sparseflow.kernels import linear
from sparseflow.kernels.norms import rms_norm
from sparseflow.kernels.threads import Step

WIDTH = 256


def matrix(seed: int) -> linear.Matrix:
    weights = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    tiles, scales = pack_matrix(weights, 8, "w")
    return linear.Matrix(tiles, scales.view(np.uint16), WIDTH, WIDTH)


def chain(x: np.ndarray, matrices: list[linear.Matrix], threads: int) -> np.ndarray:
    """Each layer needs the one before: a norm, a product, and a second one beside it that is added to the stream."""
    stream = x.copy()
    for first, second in zip(matrices[::2], matrices[1::2], strict=True):
        quantized = linear.quantize(rms_norm(stream, np.ones(WIDTH, np.float32), 1e-6, threads=threads), threads)
        y = first.multiply(quantized, threads)
        z = second.multiply(quantized, threads, joined=True)
        linear.Matrix.multiply(first, linear.quantize(y, threads), threads, onto=stream)
        linear.Matrix.multiply(second, linear.quantize(z, threads), threads, onto=stream)
    return stream


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_step_gives_the_bits_of_kernels_run_at_once(threads: int, tokens: int) -> None:
    x = np.random.default_rng(7).standard_normal((tokens, WIDTH)).astype(np.float32)
    matrices = [matrix(seed) for seed in range(24)]  # some 100 kernels: more than a step holds at once
    expected = chain(x, matrices, 1).tobytes()
    for _ in range(5):
        with Step(threads):
            stream = chain(x, matrices, threads)
        assert stream.tobytes() == expected


def test_run_computes_what_was_noted_so_far() -> None:
    x, weights = np.ones((2, WIDTH), np.float32), matrix(1)
    expected = weights.multiply(linear.quantize(x))
    with Step(2) as step:
        stream = np.zeros((2, WIDTH), np.float32)
        weights.multiply(linear.quantize(x), onto=stream)
        assert not stream.any()
        step.run()
        assert np.array_equal(stream, expected)
        weights.multiply(linear.quantize(x), onto=stream)
    assert np.array_equal(stream, expected + expected)


def test_an_error_drops_what_has_not_run() -> None:
    stream, weights = np.zeros((1, WIDTH), np.float32), matrix(2)
    with pytest.raises(ZeroDivisionError), Step(2):
        weights.multiply(linear.quantize(np.ones((1, WIDTH), np.float32)), onto=stream)
        raise ZeroDivisionError
    assert not stream.any()
    assert weights.multiply(linear.quantize(np.ones((1, WIDTH), np.float32))).any()  # at once again


def test_large_arrays_are_used_again_once_nobody_has_them() -> None:
    x, weights = np.random.default_rng(3).standard_normal((70, WIDTH)).astype(np.float32), matrix(3)
    expected = weights.multiply(linear.quantize(x))
    with Step(2) as step:
        held = weights.multiply(linear.quantize(x))
        step.run()
        view = weights.multiply(linear.quantize(x))[1:]
        step.run()
        places = set()
        for _ in range(4):
            passing = weights.multiply(linear.quantize(-x))
            step.run()
            places.add(passing.ctypes.data)
            del passing
        assert len(places) == 1 and held.ctypes.data not in places and view.base.ctypes.data not in places
    assert np.array_equal(held, expected) and np.array_equal(view, expected[1:])


def test_a_step_takes_at_least_one_thread() -> None:
    with pytest.raises(OptionError, match="0 threads"):
        Step(0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_recording_computes_anew_what_lies_in_its_arrays(threads: int) -> None:
    matrices = [matrix(seed) for seed in range(4)]
    x = np.zeros((1, WIDTH), np.float32)
    with Step(threads) as step:
        stream, recording = step.record(lambda: chain_onto(x, matrices, threads))
    generator = np.random.default_rng(11)
    gc.collect()
    for _ in range(5):
        x[:] = generator.standard_normal(x.shape)
        expected = chain_onto(x, matrices, 1).tobytes()
        with Step(threads) as step:
            step.repeat(recording)
            other = matrices[0].multiply(linear.quantize(stream))  # what comes after sees the results
        assert stream.tobytes() == expected
        assert other.tobytes() == matrices[0].multiply(linear.quantize(stream)).tobytes()


def chain_onto(x: np.ndarray, matrices: list[linear.Matrix], threads: int) -> np.ndarray:
    """As `chain`, with all that it works on made by kernels."""
    stream = rms_norm(x, np.ones(WIDTH, np.float32), 1e-6, threads=threads)
    for each in matrices:
        stream = each.multiply(linear.quantize(stream, threads), threads)
    return stream


def test_many_repeats_are_more_than_a_step_holds_at_once() -> None:
    weights, x = matrix(5), np.ones((1, WIDTH), np.float32)
    once = weights.multiply(linear.quantize(x))
    stream = np.zeros((1, WIDTH), np.float32)
    with Step(2) as step:
        _, recording = step.record(lambda: weights.multiply(linear.quantize(x), onto=stream))
        for _ in range(99):
            step.repeat(recording)
    expected = np.zeros_like(once)
    for _ in range(100):
        expected += once
    assert np.array_equal(stream, expected)


def test_what_cannot_be_recorded_is_refused() -> None:
    weights, x = matrix(6), np.ones((1, WIDTH), np.float32)
    with Step(2) as step, pytest.raises(ValueError, match="64 kernels at most"):
        step.record(lambda: [linear.quantize(x) for _ in range(65)])
    with pytest.raises(ValueError, match="own with block"):
        step.record(lambda: weights.multiply(linear.quantize(x)))
    with Step(2) as outer, Step(2), pytest.raises(ValueError, match="own with block"):
        outer.record(lambda: weights.multiply(linear.quantize(x)))
