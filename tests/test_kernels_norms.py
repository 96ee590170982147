"""RMSNorm against the float64 reference, in every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from reference import ops

from sparseflow.kernels.norms import rms_norm


@pytest.mark.parametrize("columns", [1, 15, 16, 24, 130])
def test_zero_centred(each_isa: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x, weight = rng.standard_normal((5, columns)).astype(np.float32), rng.standard_normal(columns).astype(np.float32)
    expected = ops.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
    np.testing.assert_allclose(rms_norm(x, np.float32(1) + weight, 1e-6, threads=2), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 15, 16, 24, 130])
def test_gated(each_isa: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x, gate = rng.standard_normal((2, 5, columns)).astype(np.float32)
    gate[0] *= 50  # far into both ends of the sigmoid
    weight = rng.standard_normal(columns).astype(np.float32)
    expected = ops.gated_rms_norm(*(array.astype(np.float64) for array in (x, gate, weight)), 1e-6)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6, gate), expected, rtol=2e-6, atol=1e-7)


def test_a_row_of_zeros_stays_zero(each_isa: str) -> None:
    assert not rms_norm(np.zeros((1, 20), np.float32), np.ones(20, np.float32), 1e-6).any()


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="norm of 3 weights"):
        rms_norm(np.ones((2, 4), np.float32), np.ones(3, np.float32), 1e-6)
    with pytest.raises(ValueError, match="gate"):
        rms_norm(np.ones((2, 4), np.float32), np.ones(4, np.float32), 1e-6, np.ones((2, 3), np.float32))
