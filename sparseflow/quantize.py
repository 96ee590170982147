"""The rounding rules, what follows from them, and how packed weights are read back.

int8: symmetric, per row and per group of 128 along K (the last group may be shorter). With amax the largest magnitude of a
group, scale = float16(amax / 127) and code = round(w / float32(scale)), half to even, clipped to +-127. The codes are taken
against the *stored* scale, so its rounding costs no accuracy beyond the clip. All arithmetic is float32.

bf16: the upper half of a float32, rounded to nearest even.

`kernels.packing` rounds; the tests hold it to these rules bit by bit.
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


def dequantize_weights(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """The float32 [R, K] weights that codes [R, K] and scales [R, ceil(K/128)] stand for."""
    spread = np.repeat(scales.astype(np.float32), WEIGHT_GROUP, axis=1)[:, : codes.shape[1]]
    return codes.astype(np.float32) * spread


def from_bf16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits: exact."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def require_finite(values: NDArray[np.floating] | float, name: str) -> None:
    """Raise CheckpointError with `name` if a value is NaN or infinite."""
    if not np.all(np.isfinite(values)):
        raise CheckpointError(f"tensor {name}: holds NaN or infinite weights, the checkpoint is damaged")
