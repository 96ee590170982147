"""Router, expert MLPs in any order and their sum against the float64 reference, in every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoint import bf16_values
from reference import ops

from sparseflow.encode import pack_expert
from sparseflow.kernels import isa
from sparseflow.kernels.experts import ExpertBatch, combine, route, route_given
from sparseflow.kernels.linear import quantize
from sparseflow.layout import ExpertLayout

SHAPES = [(32, 16, 4, 2, 1), (40, 24, 5, 3, 7), (130, 33, 9, 4, 12), (64, 144, 3, 1, 20)]  # hidden, inner, E, top_k, T


class Layer:
    """Random experts of one layer, packed, with ids and weights for some tokens."""

    def __init__(self, shape: tuple[int, int, int, int, int], bits: int, seed: int = 0) -> None:
        self.hidden, self.inner, self.experts, self.top_k, tokens = shape
        rng = np.random.default_rng([seed, bits, *shape])
        self.layout = ExpertLayout(self.hidden, self.inner, bits)
        draw = lambda *size: bf16_values(rng.standard_normal(size).astype(np.float32) * np.float32(0.1))
        self.matrices = [
            (draw(self.inner, self.hidden), draw(self.inner, self.hidden), draw(self.hidden, self.inner))
            for _ in range(self.experts)
        ]
        self.slices = [pack_expert(*parts, bits) for parts in self.matrices]
        self.x = rng.standard_normal((tokens, self.hidden)).astype(np.float32)
        self.ids, self.weights = route(rng.standard_normal((tokens, self.experts)).astype(np.float32), self.top_k)

    def batch(self) -> ExpertBatch:
        quantized = quantize(self.x) if self.layout.bits == 8 else None
        batch = ExpertBatch(self.x, quantized, self.ids.shape[1], self.experts, self.inner, self.layout)
        batch.choose(self.ids)
        return batch

    def compute(self, batch: ExpertBatch, which: list[int], threads: int = 1) -> None:
        addresses = [self.slices[batch.experts[i]].ctypes.data for i in which]
        batch.compute(np.array(which, np.int32), np.array(addresses, np.uint64), threads)

    def reference(self) -> np.ndarray:
        out = np.zeros((len(self.x), self.top_k, self.hidden))
        for token, k in np.ndindex(*self.ids.shape):
            parts = self.matrices[self.ids[token, k]]
            x = self.x[token : token + 1].astype(np.float64)
            if self.layout.bits == 16:
                out[token, k] = ops.swiglu_expert(x, *(part.astype(np.float64) for part in parts))[0]
            else:
                gate, up, down = (ops.quantize_weights(part) for part in parts)
                h = ops.silu(ops.quantized_matvec(x, *gate)) * ops.quantized_matvec(x, *up)
                out[token, k] = ops.quantized_matvec(h, *down)[0]
        return out


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_experts_equal_the_reference(each_isa: str, shape: tuple[int, int, int, int, int]) -> None:
    layer = Layer(shape, 16)
    batch = layer.batch()
    layer.compute(batch, list(range(len(batch.experts))), threads=2)
    expected = layer.reference()
    assert np.abs(batch.out - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_experts_equal_the_reference(each_isa: str, shape: tuple[int, int, int, int, int]) -> None:
    layer = Layer(shape, 8)
    batch = layer.batch()
    layer.compute(batch, list(range(len(batch.experts))), threads=2)
    expected = layer.reference()
    error = np.abs(batch.out - expected).max(axis=-1) / np.abs(expected).max()
    # An activation within float32 rounding of a tie may take the neighbouring code, which moves a whole output row.
    assert np.median(error) <= 2e-6
    assert np.mean(error > 2e-6) <= 0.1
    assert error.max() <= 1e-2


@given(shape=st.sampled_from(SHAPES), bits=st.sampled_from([8, 16]), seed=st.integers(0, 999), data=st.data())
@settings(max_examples=25, deadline=None)
def test_order_of_arrival_threads_and_isa_leave_no_trace(
    shape: tuple[int, int, int, int, int], bits: int, seed: int, data: st.DataObject
) -> None:
    layer = Layer(shape, bits, seed)
    order = data.draw(st.permutations(range(len(layer.batch().experts))))
    cut = data.draw(st.integers(0, len(order)))
    before = isa.active()
    try:
        seen = set()
        for name in isa.available():
            isa.select(name)
            whole, parts = layer.batch(), layer.batch()
            layer.compute(whole, list(range(len(order))))
            layer.compute(parts, order[:cut], threads=3)
            layer.compute(parts, order[cut:])
            seen |= {whole.out.tobytes(), parts.out.tobytes()}
            for token in range(min(3, len(layer.x))):
                alone = Layer(shape, bits, seed)
                alone.x, alone.ids = layer.x[token : token + 1].copy(), layer.ids[token : token + 1].copy()
                batch = alone.batch()
                alone.compute(batch, list(range(len(batch.experts))))
                assert batch.out.tobytes() == whole.out[token].tobytes()
    finally:
        isa.select(before)
    assert len(seen) == 1


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (24, 4), (256, 8), (40, 20)])
def test_router_equals_the_reference(each_isa: str, experts: int, top_k: int) -> None:
    logits = np.random.default_rng(experts).standard_normal((50, experts)).astype(np.float32) * 4
    expected = ops.router_top_k(logits.astype(np.float64), top_k)
    ids, weights = route(logits, top_k, threads=2)
    assert np.array_equal(ids, expected.ids)
    np.testing.assert_allclose(weights, expected.weights, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("expert", [0, 6, 8])
def test_a_router_that_is_not_finite_is_not_hidden(each_isa: str, value: float, expert: int) -> None:
    logits = np.tile(np.arange(9, dtype=np.float32)[::-1], (2, 1))
    logits[1, expert] = value
    _, weights = route(logits, 4)
    assert np.isfinite(weights[0]).all() and np.isnan(weights[1]).all()


def test_router_takes_the_lowest_ids_of_a_tie(each_isa: str) -> None:
    ids, weights = route(np.zeros((1, 9), np.float32), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights.tolist() == [[0.25] * 4]


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (24, 4), (256, 8), (40, 20)])
def test_given_experts_are_weighted_as_the_reference_does(each_isa: str, experts: int, top_k: int) -> None:
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((50, experts)).astype(np.float32) * 4
    given = np.argsort(rng.random((50, experts)), axis=-1)[:, :top_k].astype(np.int32)
    ascending = np.sort(given, axis=-1)
    expected = ops.softmax(np.take_along_axis(logits.astype(np.float64), ascending, axis=-1))

    ids, weights = route_given(logits, ascending, threads=2)
    assert np.array_equal(ids, ascending)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-9)

    ids, ranked = route_given(logits, given, ranked=True, threads=2)
    assert np.array_equal(ids, ascending)
    in_given_order = np.take_along_axis(ranked, np.argsort(np.argsort(given, axis=-1), axis=-1), axis=-1)
    assert np.array_equal(in_given_order, -np.sort(-weights, axis=-1))


def test_weights_of_given_experts_have_the_same_bits_everywhere() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((80, 64)).astype(np.float32) * 6
    given = np.argsort(rng.random((80, 64)), axis=-1)[:, :8].astype(np.int32)
    before, seen = isa.active(), set()
    try:
        for name in isa.available():
            isa.select(name)
            for threads in (1, 3):
                parts = [route_given(logits[i : i + 1], given[i : i + 1], ranked=True, threads=threads)[1] for i in range(80)]
                seen |= {route_given(logits, given, ranked=True, threads=threads)[1].tobytes(), np.concatenate(parts).tobytes()}
    finally:
        isa.select(before)
    assert len(seen) == 1


def test_experts_that_the_router_would_choose_get_its_bits(each_isa: str) -> None:
    logits = np.random.default_rng(2).integers(-3, 3, (60, 40)).astype(np.float32)  # many ties
    ids, weights = route(logits, 8)
    assert route_given(logits, ids)[1].tobytes() == weights.tobytes()


def test_given_experts_out_of_range_are_refused() -> None:
    logits = np.zeros((2, 4), np.float32)
    for given, message in (([[0, 4], [0, 1]], "expert id 4"), ([[-1, 0], [0, 1]], "expert id -1"), ([[0, 1]], "for 1 tokens")):
        with pytest.raises(ValueError, match=message):
            route_given(logits, np.array(given, np.int32))


def test_combine_equals_the_reference(each_isa: str) -> None:
    rng = np.random.default_rng(0)
    residual, shared = rng.standard_normal((2, 6, 50)).astype(np.float32)
    out = rng.standard_normal((6, 3, 50)).astype(np.float32)
    weights = rng.random((6, 3)).astype(np.float32)
    gate = rng.standard_normal((6, 1)).astype(np.float32)
    expected = residual + np.einsum("tk,tkh->th", weights.astype(np.float64), out) + ops.sigmoid(gate.astype(np.float64)) * shared
    combine(residual, out, weights, shared[:, None].copy(), gate, threads=2)
    np.testing.assert_allclose(residual, expected, rtol=1e-5, atol=2e-6)


def test_ids_and_selections_out_of_range_are_refused() -> None:
    layer = Layer(SHAPES[0], 16)
    layer.ids = np.full_like(layer.ids, 4)
    with pytest.raises(ValueError, match="expert id 4"):
        layer.batch()
    batch = Layer(SHAPES[0], 16).batch()
    with pytest.raises(ValueError, match="expert 9"):
        batch.compute(np.array([9], np.int32), np.array([1], np.uint64))
