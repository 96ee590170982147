"""Rotary position embedding: the angles. (The rotation itself is part of the attention kernel.)"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseflow.config import Geometry


class Rotary:
    """Cosine and sine of position * theta^(-2 i / rotary_dim), i < rotary_dim / 2.

    Frequencies and their products with the position are float32, as in transformers' Qwen3_5MoeTextRotaryEmbedding: far out the
    rounding of the product is larger than that of the cosine. For text the three m-rope positions are equal, so its sections
    make no difference.
    """

    def __init__(self, geometry: Geometry) -> None:
        # numpy's float32 power has other bits with AVX-512 than without; float64 rounded once has not.
        exponent = np.arange(0, geometry.rotary_dim, 2, dtype=np.float32) / np.float32(geometry.rotary_dim)
        power = (geometry.rope_theta ** exponent.astype(np.float64)).astype(np.float32)
        self.frequencies = np.float32(1) / power

    def __call__(self, position: int, tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosine and sine for positions position .. position + tokens - 1, float32 [tokens, rotary_dim / 2] each."""
        positions = np.arange(position, position + tokens, dtype=np.float32)
        angles = (positions[:, None] * self.frequencies).astype(np.float64)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
