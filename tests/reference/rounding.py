"""The activation rule inside one forward pass, and the decisions in it that single precision may take otherwise.

Rounding is discontinuous at a tie: an activation that float64 puts at 17.49999 quanta and float32 at 17.50001 gets another
code, and the logits move by what one quantum is worth, however exact everything else is. So a pass records which
activations came near to a tie, and can be run again with chosen ones rounded the other way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reference import ops
from reference.ops import Array

NEAR = 5e-4
"""Quanta from a tie within which either code is right. See test_int8_reference.py for the measured float32 error."""


class Tie(NamedTuple):
    """One activation: the k-th of a named vector, at a position of the sequence."""

    label: str
    position: int
    k: int


class Rounding:
    """The rounding of one pass over n positions.

    Args:
        n: number of positions.
        flipped: activations to give the code on the other side of their tie.

    Attributes:
        ties: distance in quanta of every activation that came within NEAR of a tie.
        gap: [n] smallest relative gap of a router at its top-k boundary.
    """

    def __init__(self, n: int, flipped: frozenset[Tie] = frozenset()) -> None:
        self.positions = np.arange(n)
        self.flipped = flipped
        self.ties: dict[Tie, float] = {}
        self.gap = np.ones(n)

    def round(self, label: str, x: Array, tokens: Any, group: int) -> Array:
        """x [m, K] -> [m, K], codes times scales; `tokens` says which positions the rows are."""
        codes, scales, quanta = ops.quantize_activations(x, group)
        codes = codes.copy()
        distance = 0.5 - np.abs(quanta - codes)
        for row, k in zip(*np.nonzero(distance < NEAR), strict=True):
            tie = Tie(label, int(self.positions[tokens][row]), int(k))
            self.ties[tie] = float(distance[row, k])
            if tie in self.flipped:
                codes[row, k] += int(np.sign(quanta[row, k] - codes[row, k]))
        return ops.dequantize(codes, scales, group)

    def route(self, gap: Array) -> None:
        """Take note of a router's gaps [n]."""
        self.gap = np.minimum(self.gap, gap)
