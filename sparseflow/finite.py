"""Numbers that are none: NaN and infinity in a forward are an error that says where they began, never an answer.

Rounding activations to int8 does not hide them: a group with one in it is NaN as a whole. So the logits tell whether a forward
was sound, and the residual stream between two layers tells where it stopped to be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import NonFiniteError


def require_finite_logits(logits: NDArray[np.float32]) -> None:
    """NonFiniteError when a logit [..., vocab] is NaN or infinite."""
    # NaN and infinity survive these reductions, which need no memory of the size of the logits.
    if logits.size and not (np.isfinite(logits.min()) and np.isfinite(logits.max())):
        place = np.argwhere(~np.isfinite(logits))[0]
        raise NonFiniteError(
            f"the model gave the logit {logits[tuple(place)]} for token {place[-1]}: its weights or its files are damaged;"
            " 'sparseflow verify' checks the files, --check-finite names the layer where it began"
        )


def require_finite_residual(x: NDArray[np.float32], after: str, position: int) -> None:
    """NonFiniteError when the residual stream x [tokens, hidden] holds NaN or infinity.

    `after` is what wrote it last, `position` that of the first row in its text.
    """
    if not (np.isfinite(x.min()) and np.isfinite(x.max())):
        row, channel = np.argwhere(~np.isfinite(x))[0]
        raise NonFiniteError(
            f"{after}: the residual stream holds {x[row, channel]} at position {position + row}, channel {channel}, and held none"
            " before; 'sparseflow verify' tells whether the files are damaged"
        )
