"""The kernels of a token that come before each layer's experts, noted down once per session.

One token after another runs the same kernels on the same weights and, if the residual stream and the angles lie where they lay, on
the same arrays; calling them one by one from Python would cost a twentieth of a step. What depends on the token is read when
they run: its angles, its position, the experts that are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseflow.config import Geometry
from sparseflow.kernels.experts import ExpertBatch
from sparseflow.kernels.threads import Recording, Step

Array = NDArray[np.float32]


class Routing(NamedTuple):
    """What a layer's experts are chosen by, and computed on."""

    logits: Array  # the router's [tokens, num_experts]
    shared_gate: Array  # [tokens, 1]
    batch: ExpertBatch  # the routed experts, yet to be chosen
    shared: ExpertBatch  # the shared one


class RecordedToken:
    """The residual stream and the angles of a session's one token at a time, where they lie, and a recording per layer.

    Attributes: x float32 [1, hidden]; cosine, sine float32 [1, rotary_dim / 2].
    """

    def __init__(self, geometry: Geometry) -> None:
        self.x = np.empty((1, geometry.hidden_size), np.float32)
        self.cosine = np.empty((1, geometry.rotary_dim // 2), np.float32)
        self.sine = np.empty_like(self.cosine)
        self._layers: list[tuple[Routing, Recording]] = []

    def begin(self, x: Array, cosine: Array, sine: Array) -> tuple[Array, Array, Array]:
        """Moves a token in; returns the arrays it is in now."""
        self.x[:], self.cosine[:], self.sine[:] = x, cosine, sine
        return self.x, self.cosine, self.sine

    def note(self, step: Step, layer: int, kernels: Callable[[], Routing]) -> Routing:
        """Notes down a layer's kernels: by calling them, the first time, layer after layer; as recorded from then on."""
        if layer < len(self._layers):
            routing, recording = self._layers[layer]
            step.repeat(recording)
            return routing
        self._layers.append(step.record(kernels))
        return self._layers[layer][0]

    def forget(self) -> None:
        """Drops the recordings: the state they work on has moved."""
        self._layers.clear()
