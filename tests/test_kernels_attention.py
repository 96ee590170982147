"""Gated attention over a paged cache against the float64 reference, across page boundaries and in any chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops

from sparseflow.kernels import isa
from sparseflow.kernels.attention import PAGE_POSITIONS, gated_attention

DIMS = [(4, 1, 16, 4), (4, 4, 24, 24), (6, 2, 10, 6), (10, 2, 32, 8)]  # heads, kv heads, head_dim, rotary_dim
THETA, EPS = 10000.0, 1e-6


class Attention:
    """A random attention problem, with a cache for the kernel."""

    def __init__(self, dims: tuple[int, int, int, int], tokens: int, seed: int) -> None:
        self.heads, self.kv_heads, self.dim, self.rotary = dims
        rng = np.random.default_rng([seed, tokens, *dims])
        self.q = rng.standard_normal((tokens, self.heads * 2 * self.dim)).astype(np.float32) * 2
        self.k, self.v = rng.standard_normal((2, tokens, self.kv_heads * self.dim)).astype(np.float32)
        self.q_norm, self.k_norm = rng.standard_normal((2, self.dim)).astype(np.float32)
        angles = np.arange(tokens)[:, None] / THETA ** (np.arange(0, self.rotary, 2) / self.rotary)
        self.cosine, self.sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.tokens = tokens

    def kernel(self, cuts: list[int], threads: int = 1) -> np.ndarray:
        pages = -(-self.tokens // PAGE_POSITIONS)
        keys = np.zeros((pages, self.kv_heads, PAGE_POSITIONS // 16, self.dim, 16), np.float32)
        values = np.zeros((pages, self.kv_heads, PAGE_POSITIONS, self.dim), np.float32)
        addresses = [np.array([page.ctypes.data for page in part], np.uint64) for part in (keys, values)]
        edges = [0, *cuts, self.tokens]
        return np.concatenate([
            gated_attention(
                self.q[first:last].copy(), self.k[first:last].copy(), self.v[first:last], 1 + self.q_norm, 1 + self.k_norm,
                self.cosine[first:last], self.sine[first:last], *addresses, np.array([first]), EPS, threads,
            )
            for first, last in zip(edges, edges[1:])
            if first < last
        ])

    def reference(self) -> np.ndarray:
        q, k, v = (array.astype(np.float64) for array in (self.q, self.k, self.v))
        empty = np.zeros((0, self.kv_heads, self.dim))
        return ops.gated_attention(
            q.reshape(len(q), self.heads, 2 * self.dim), k.reshape(len(q), self.kv_heads, self.dim),
            v.reshape(len(q), self.kv_heads, self.dim), self.q_norm.astype(np.float64), self.k_norm.astype(np.float64),
            empty, empty, rotary_dim=self.rotary, theta=THETA, eps=EPS,
        )[0]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("tokens", [1, 17, PAGE_POSITIONS + 3])
def test_attention_equals_the_reference(each_isa: str, dims: tuple[int, int, int, int], tokens: int) -> None:
    problem = Attention(dims, tokens, 0)
    expected = problem.reference()
    np.testing.assert_allclose(problem.kernel([], threads=2), expected, atol=5e-6 * np.abs(expected).max())


@given(
    dims=st.sampled_from(DIMS),
    tokens=st.integers(1, 2 * PAGE_POSITIONS + 5),
    seed=st.integers(0, 999),
    cuts=st.lists(st.integers(0, 2 * PAGE_POSITIONS), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_bits_do_not_depend_on_chunks_threads_or_isa(
    dims: tuple[int, int, int, int], tokens: int, seed: int, cuts: list[int]
) -> None:
    problem = Attention(dims, tokens, seed)
    inside = sorted(min(cut, tokens) for cut in cuts)
    before = isa.active()
    try:
        seen = set()
        for name in isa.available():
            isa.select(name)
            seen |= {problem.kernel([]).tobytes(), problem.kernel(inside, threads=3).tobytes()}
    finally:
        isa.select(before)
    assert len(seen) == 1


def test_a_cache_too_small_is_refused() -> None:
    problem = Attention(DIMS[0], 2, 0)
    one = np.ones(1, np.uint64)
    with pytest.raises(ValueError, match="pages of cache"):
        gated_attention(
            problem.q, problem.k, problem.v, problem.q_norm, problem.k_norm, problem.cosine, problem.sine, one, one,
            np.array([PAGE_POSITIONS - 1]), EPS,
        )
