"""Convolution and gated delta rule against the float64 reference: as a chunk, in steps, with state carried between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops

from sparseflow.kernels import isa
from sparseflow.kernels.deltanet import causal_conv, gated_delta

DIMS = [(1, 1, 4, 16), (2, 4, 16, 24), (2, 6, 7, 8), (3, 3, 32, 33)]  # key heads, value heads, key dim, value dim


class Delta:
    """A random gated delta problem and the same problem for the kernel."""

    def __init__(self, dims: tuple[int, int, int, int], tokens: int, seed: int) -> None:
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = dims
        rng = np.random.default_rng([seed, tokens, *dims])
        width = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        self.qkv = rng.standard_normal((tokens, width)).astype(np.float32)
        self.a, self.b = rng.standard_normal((2, tokens, self.value_heads)).astype(np.float32) * 3
        self.A_log = rng.uniform(-1, 2, self.value_heads).astype(np.float32)
        self.dt_bias = rng.standard_normal(self.value_heads).astype(np.float32)
        blocks = -(-self.value_dim // 16)
        self.state = np.zeros((self.value_heads, blocks, self.key_dim, 16), np.float32)

    def kernel(self, first: int, last: int, state: np.ndarray, threads: int = 1) -> np.ndarray:
        rate = -np.exp(self.A_log)
        part = (self.qkv[first:last].copy(), self.a[first:last], self.b[first:last], rate, self.dt_bias)
        return gated_delta(*part, state, self.key_heads, self.value_dim, threads)

    def reference(self) -> np.ndarray:
        qkv, a, b = (array.astype(np.float64) for array in (self.qkv, self.a, self.b))
        keys = self.key_heads * self.key_dim
        heads = (len(qkv), self.key_heads, self.key_dim)
        q, k = qkv[:, :keys].reshape(heads), qkv[:, keys : 2 * keys].reshape(heads)
        v = qkv[:, 2 * keys :].reshape(len(qkv), self.value_heads, self.value_dim)
        g = ops.log_decay(a, self.A_log.astype(np.float64), self.dt_bias.astype(np.float64))
        state = np.zeros((self.value_heads, self.key_dim, self.value_dim))
        return ops.gated_delta_sequence(q, k, v, g, ops.sigmoid(b), state)[0].reshape(len(qkv), -1)


@pytest.mark.parametrize("dims", DIMS)
def test_delta_equals_the_reference(each_isa: str, dims: tuple[int, int, int, int]) -> None:
    problem = Delta(dims, tokens=30, seed=0)
    expected = problem.reference()
    np.testing.assert_allclose(problem.kernel(0, 30, problem.state, threads=2), expected, atol=3e-6 * np.abs(expected).max())


@given(dims=st.sampled_from(DIMS), tokens=st.integers(1, 12), seed=st.integers(0, 999), data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_chunk_is_its_steps(dims: tuple[int, int, int, int], tokens: int, seed: int, data: st.DataObject) -> None:
    problem = Delta(dims, tokens, seed)
    cut = data.draw(st.integers(0, tokens))
    before = isa.active()
    seen = set()
    try:
        for name in isa.available():
            isa.select(name)
            whole, parts = problem.state.copy(), problem.state.copy()
            out = problem.kernel(0, tokens, whole, threads=3)
            pieces = [problem.kernel(*span, parts) for span in ((0, cut), (cut, tokens)) if span[0] < span[1]]
            assert np.concatenate(pieces).tobytes() == out.tobytes()
            assert parts.tobytes() == whole.tobytes()
            seen.add(out.tobytes() + whole.tobytes())
    finally:
        isa.select(before)
    assert len(seen) == 1


@pytest.mark.parametrize(("kernel", "channels"), [(4, 8), (2, 300), (3, 17), (1, 5)])
def test_conv_equals_the_reference(each_isa: str, kernel: int, channels: int) -> None:
    rng = np.random.default_rng(channels)
    x = rng.standard_normal((9, channels)).astype(np.float32)
    weight = rng.standard_normal((kernel, channels)).astype(np.float32)
    state = np.zeros((kernel - 1, channels), np.float32)
    expected, _ = ops.causal_conv(x.astype(np.float64), weight.astype(np.float64), state.astype(np.float64))
    pieces = [causal_conv(x[first:last], weight, state, threads=2) for first, last in ((0, 1), (1, 3), (3, 9))]
    np.testing.assert_allclose(np.concatenate(pieces), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(state, x[len(x) - (kernel - 1) :])
    fresh = np.zeros_like(state)
    assert causal_conv(x, weight, fresh).tobytes() == np.concatenate(pieces).tobytes()


def test_shapes_that_differ_are_refused() -> None:
    problem = Delta(DIMS[1], 2, 0)
    with pytest.raises(ValueError, match="do not fit"):
        gated_delta(problem.qkv[:, 1:].copy(), problem.a, problem.b, problem.A_log, problem.dt_bias, problem.state, 2, 24)
    with pytest.raises(ValueError, match="does not fit inputs"):
        causal_conv(np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.ones((2, 3), np.float32))
