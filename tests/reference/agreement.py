"""Whether logits are the reference's, to float32 rounding, when codes near a tie may go either way.

For each position in turn: if the logits differ from the reference by more than the tolerance, activations of that position
that came within NEAR of a tie are rounded the other way, the likeliest sets first, until the reference gives the same
logits. A flipped code mostly shows a hundred times above the tolerance, and a position has a few candidates among thousands
of activations, so a set that explains all logits of a position is the one that the engine took; a wrong engine
finds none.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from reference.decoder import Reference
from reference.ops import Array
from reference.rounding import NEAR, Tie


@dataclass(frozen=True)
class Agreement:
    """How logits compare with the reference's.

    Attributes:
        reference: [n, vocab] the reference's logits, with `flipped` rounded the other way.
        error: [n] largest difference of a position.
        plain: [n] the position, and all before it, agreed without a flip.
        flipped: the activations that were rounded the other way.
        gap: the smallest relative gap of a router at its top-k boundary.
    """

    reference: Array
    error: Array
    plain: NDArray[np.bool_]
    flipped: frozenset[Tie]
    gap: float


def agree(
    reference: Reference, ids: NDArray[np.integer] | list[int], logits: Array, tolerance: float, passes: int = 150
) -> Agreement:
    """Compare logits [n, vocab] of the sequence ids [n] with the reference; `tolerance` is absolute.

    At most `passes` forward passes are spent on a position. One for which no set of flips is found keeps the error that it
    has without further flips.
    """
    ids = np.asarray(ids)
    taken: frozenset[Tie] = frozenset()
    plain = np.zeros(len(ids), bool)
    expected, rounding = reference.forward(ids)
    for position in range(len(ids)):
        if np.abs(expected[position] - logits[position]).max() > tolerance:
            explained = _explain(reference, ids[: position + 1], logits[position], tolerance, taken, passes)
            if explained is not None:
                taken = explained
                expected, rounding = reference.forward(ids, taken)
        plain[position] = not taken
    error = np.abs(expected - logits).max(axis=1)
    return Agreement(expected, error, plain & (error <= tolerance), taken, float(rounding.gap.min()))


def _explain(
    reference: Reference, ids: NDArray[np.integer], logits: Array, tolerance: float, taken: frozenset[Tie], passes: int
) -> frozenset[Tie] | None:
    """Flips that include `taken` and give the logits [vocab] of the last position of ids; None if none are found."""
    order = count()
    queue = [(0.0, next(order), taken)]
    seen = {taken}
    for _ in range(passes):
        if not queue:
            return None
        cost, _, flipped = heapq.heappop(queue)
        trial, rounding = reference.forward(ids, flipped)
        if np.abs(trial[-1] - logits).max() <= tolerance:
            return flipped
        for tie, distance in rounding.ties.items():
            larger = flipped | {tie}
            if tie.position == len(ids) - 1 and larger not in seen:
                seen.add(larger)
                # A flip is the less likely the farther the tie is; and two are less likely than one.
                heapq.heappush(queue, (cost + 0.2 + distance / NEAR, next(order), larger))
    return None
