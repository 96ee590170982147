"""Channels evened out before packing: what would make INT8 hold on a checkpoint with outlier channels. Not part of sf-pack (yet).

Where a norm's channel is large and the columns that meet it are small, both are rounded badly: the activation's group takes its
scale from the outlier, and the column's weights lie far below the scale of their row. Moving a power of two from the norm into the
columns changes no bit of the BF16 function. The factor is that of SmoothQuant (Xiao et al. 2023) with exponent 1/2, by the norm's
weight in place of measured activations, so no text is needed:

    t = 2 ^ round(log2( (gain / median gain) / (column / median column) ) / 2)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from outliers import Tensors, scaled


def equalised(tensors: Tensors) -> Tensors:
    """The same function, its channels evened out."""

    def factor(norm: str, matrices: list[str]) -> NDArray[np.float32]:
        gain = relative(np.abs(1 + tensors[norm]))
        columns = [np.abs(tensors[name]).reshape(-1, tensors[name].shape[-1]).max(axis=0) for name in matrices]
        column = relative(np.max([relative(each) for each in columns], axis=0))
        powers = np.rint(np.log2(gain / column) / 2)
        return np.exp2(-powers).astype(np.float32)

    return scaled(tensors, factor)


def relative(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """In parts of the median, and not zero."""
    small = np.float32(1e-6)
    result: NDArray[np.float32] = np.maximum(values / max(np.median(values), small), small)
    return result
