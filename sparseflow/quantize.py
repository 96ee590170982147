"""The rounding rules, in numpy: the only definition of them in Python.

int8: symmetric, per row and per group of 128 along K (the last group may be shorter). With amax the largest magnitude of a
group, scale = float16(amax / 127) and code = round(w / float32(scale)), half to even, clipped to +-127. The codes are taken
against the *stored* scale, so its rounding costs no accuracy beyond the clip. All arithmetic is float32.

bf16: the upper half of a float32, rounded to nearest even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import CheckpointError

WEIGHT_GROUP = 128
ACTIVATION_GROUP = 32
CODE_MAX = 127


def groups(columns: int) -> int:
    """Number of scales a row of `columns` weights has."""
    return -(-columns // WEIGHT_GROUP)


def quantize_weights(weights: NDArray[np.float32], name: str) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Round float32 [R, K] to (codes int8 [R, K], scales float16 [R, ceil(K/128)]).

    A scale that rounds to zero gives codes of zero. Raises CheckpointError with `name` for NaN, infinite and too large weights.
    """
    rows, columns = weights.shape
    codes = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, groups(columns)), np.float16)
    whole = columns // WEIGHT_GROUP
    if whole:
        split = whole * WEIGHT_GROUP
        blocks = weights[:, :split].reshape(rows, whole, WEIGHT_GROUP)
        codes[:, :split] = _quantize_blocks(blocks, scales[:, :whole], name).reshape(rows, split)
    if columns % WEIGHT_GROUP:
        tail = weights[:, whole * WEIGHT_GROUP :].reshape(rows, 1, -1)
        codes[:, whole * WEIGHT_GROUP :] = _quantize_blocks(tail, scales[:, whole:], name).reshape(rows, -1)
    return codes, scales


def _quantize_blocks(blocks: NDArray[np.float32], scales: NDArray[np.float16], name: str) -> NDArray[np.float32]:
    """Codes, still as float32 [R, G, n], of blocks [R, G, n]; their scales are written to `scales` [R, G]."""
    # NaN and infinity survive both reductions, so looking at amax is looking at every weight.
    amax = np.maximum(blocks.max(axis=2), -blocks.min(axis=2))
    require_finite(amax, name)
    with np.errstate(over="ignore", under="ignore"):
        scales[...] = amax / np.float32(CODE_MAX)
    if np.isinf(scales).any():
        raise CheckpointError(f"tensor {name}: weight of magnitude {float(amax.max()):.6g} is too large for a float16 scale")
    divisor = scales.astype(np.float32)
    # A zero scale means |w| < 4e-6: dividing by one rounds it to zero as well.
    divisor[divisor == 0] = 1
    codes = np.divide(blocks, divisor[:, :, None])
    np.rint(codes, out=codes)
    # Only a subnormal scale can be so coarse that the clip is needed.
    np.minimum(codes, CODE_MAX, out=codes)
    np.maximum(codes, -CODE_MAX, out=codes)
    return codes


def dequantize_weights(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """The float32 [R, K] weights that codes [R, K] and scales [R, ceil(K/128)] stand for."""
    spread = np.repeat(scales.astype(np.float32), WEIGHT_GROUP, axis=1)[:, : codes.shape[1]]
    return codes.astype(np.float32) * spread


def to_bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to bfloat16, nearest even; the result is its bits. Magnitudes beyond bfloat16 become infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_bf16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits: exact."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def require_finite(values: NDArray[np.floating], name: str) -> None:
    """Raise CheckpointError with `name` if any value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"tensor {name}: holds NaN or infinite weights, the checkpoint is damaged")


def require_finite_bf16(bits: NDArray[np.uint16], name: str) -> None:
    """Raise CheckpointError with `name` if any bfloat16 is NaN or infinite."""
    if ((bits & 0x7F80) == 0x7F80).any():
        raise CheckpointError(f"tensor {name}: holds NaN or infinite weights, or weights beyond bfloat16")
