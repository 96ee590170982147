"""What a session remembers between forwards: KV cache, convolution inputs, recurrent state.

The model is a recurrence, so a state cannot be rewound by dropping tokens; it can be forked. A fork copies the convolution
and recurrent states and shares the full pages of the KV cache, which nobody writes again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseflow.config import Geometry
from sparseflow.kernels.attention import PAGE_POSITIONS
from sparseflow.recorded import RecordedToken


class KVPage(NamedTuple):
    """PAGE_POSITIONS positions of one attention layer, float32."""

    keys: NDArray[np.float32]  # [kv_heads, PAGE_POSITIONS / 16, head_dim, 16]
    values: NDArray[np.float32]  # [kv_heads, PAGE_POSITIONS, head_dim]


class KVCache:
    """Keys and values of one attention layer, in pages that are added as the text grows."""

    def __init__(self, geometry: Geometry) -> None:
        heads, dim = geometry.num_key_value_heads, geometry.head_dim
        self._key_shape = (heads, PAGE_POSITIONS // 16, dim, 16)
        self._value_shape = (heads, PAGE_POSITIONS, dim)
        self.pages: list[KVPage] = []
        self.key_pages = np.zeros(0, np.uint64)
        self.value_pages = np.zeros(0, np.uint64)

    def reserve(self, positions: int) -> bool:
        """Make room for positions 0 .. positions - 1; whether there was none."""
        missing = -(-positions // PAGE_POSITIONS) - len(self.pages)
        if missing > 0:
            for _ in range(missing):
                self.pages.append(
                    KVPage(np.zeros(self._key_shape, np.float32), np.zeros(self._value_shape, np.float32))
                )
            self._index()
        return missing > 0

    def fork(self, position: int) -> KVCache:
        """A cache of the first `position` positions: full pages shared, the last one copied if it is partly filled."""
        other = object.__new__(KVCache)
        other._key_shape, other._value_shape = self._key_shape, self._value_shape
        full, rest = divmod(position, PAGE_POSITIONS)
        other.pages = self.pages[:full]
        if rest:
            page = self.pages[full]
            other.pages.append(KVPage(page.keys.copy(), page.values.copy()))
        other._index()
        return other

    def _index(self) -> None:
        self.key_pages = np.array([page.keys.ctypes.data for page in self.pages], np.uint64)
        self.value_pages = np.array([page.values.ctypes.data for page in self.pages], np.uint64)


class LinearState:
    """State of one Gated DeltaNet layer, float32."""

    def __init__(self, geometry: Geometry) -> None:
        g = geometry
        self.conv = np.zeros((g.linear_conv_kernel_dim - 1, g.linear_conv_dim), np.float32)
        blocks = -(-g.linear_value_head_dim // 16)
        self.recurrent = np.zeros((g.linear_num_value_heads, blocks, g.linear_key_head_dim, 16), np.float32)

    def copy(self) -> LinearState:
        """An independent state with the same contents."""
        other = object.__new__(LinearState)
        other.conv, other.recurrent = self.conv.copy(), self.recurrent.copy()
        return other


class DecoderState:
    """One state per layer, and how many tokens they have seen.

    Attributes
        cached: int64 [1], the number of tokens, where kernels read it.
        token: what a single token's forward goes by again and again.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.cached = np.zeros(1, np.int64)
        self.token = RecordedToken(geometry)
        self._geometry = geometry
        self.layers: list[KVCache | LinearState] = [
            KVCache(geometry) if kind == "full_attention" else LinearState(geometry) for kind in geometry.layer_types
        ]

    @property
    def position(self) -> int:
        """Tokens seen so far."""
        return int(self.cached[0])

    def reserve(self, tokens: int) -> None:
        """Make room for so many more."""
        grown = [layer.reserve(self.position + tokens) for layer in self.layers if isinstance(layer, KVCache)]
        if any(grown):
            self.token.forget()

    def advance(self, tokens: int) -> None:
        """So many more have been seen."""
        self.cached += tokens

    def fork(self) -> DecoderState:
        """An independent continuation from here."""
        other = object.__new__(DecoderState)
        other.cached = self.cached.copy()
        other.token = RecordedToken(self._geometry)
        other._geometry = self._geometry
        other.layers = [
            layer.fork(self.position) if isinstance(layer, KVCache) else layer.copy() for layer in self.layers
        ]
        return other


def state_bytes(geometry: Geometry, positions: int) -> int:
    """Bytes of a session's state after `positions` tokens."""
    g = geometry
    pages = -(-positions // PAGE_POSITIONS)
    blocks = -(-g.linear_value_head_dim // 16)
    attention = pages * PAGE_POSITIONS * 2 * g.kv_dim * 4
    linear = (g.linear_conv_kernel_dim - 1) * g.linear_conv_dim * 4
    linear += g.linear_num_value_heads * blocks * 16 * g.linear_key_head_dim * 4
    return sum(attention if kind == "full_attention" else linear for kind in g.layer_types)
