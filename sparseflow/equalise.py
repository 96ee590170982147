"""Outlier channels evened out before rounding: powers of two moved from a norm into the columns that meet its channels.

Where a channel of a norm is large and the columns behind it are small, both are rounded badly: the activations of its group take
their scale from it, and the columns lie far below the scale of their rows. Dividing the norm's 1 + w by 2^k and multiplying those
columns by 2^k changes no product of the two, so no answer but for what is rounded. (The idea is SmoothQuant's, Xiao et al. 2023;
here by weights alone, so that no text is needed, and exactly.)

The rule. With the norm's |1 + w| and the columns' largest magnitudes in parts of their medians over the channels,

    k = round(log2(min(norm / median, median / column)))    where that is at least LEAST_POWER, else 0

so that a channel gives only what it has too much of and its columns only take what they have too little of: neither is ever moved
past the typical size. A large channel whose columns are not small stays, since 2^k would only carry the harm from groups of 32
activations to groups of 128 weights; so does a small one, for its norm may be what tames a large residual. A factor below 8 costs
under three of eight bits, occurs without being an outlier, and is left alone: ordinary checkpoints are packed as they are.

k is lowered where a column would outgrow what it is stored in, and where 1 + w', formed in float32 as the engine does, would not be
(1 + w) / 2^k to the last bit. Norms stored in bfloat16 have bits to spare for that; those in float32 may not where 1 + w is negative
or the typical channel below 1/2, and such a channel then keeps part of its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from sparseflow.checkpoint import Checkpoint
from sparseflow.encode import as_float32
from sparseflow.layout import TensorEntry
from sparseflow.packfile import BITS
from sparseflow.quantize import require_finite
from sparseflow.shards import Rows, whole

LEAST_POWER = 3
"""Channels less than about 2^LEAST_POWER times the typical one are not outliers."""

SAMPLED_EXPERTS = 8
"""Experts of a layer, spread evenly, whose columns are looked at: they share the residual's channels, and reading all of them twice
would nearly double the time a pack takes."""

_INPUT, _POST_ATTENTION = "input_layernorm.weight", "post_attention_layernorm.weight"
_NORM_BEFORE = {
    "linear_attn.in_proj_qkv.weight": _INPUT,
    "linear_attn.in_proj_z.weight": _INPUT,
    "linear_attn.in_proj_a.weight": _INPUT,
    "linear_attn.in_proj_b.weight": _INPUT,
    "self_attn.q_proj.weight": _INPUT,
    "self_attn.k_proj.weight": _INPUT,
    "self_attn.v_proj.weight": _INPUT,
    "mlp.gate.weight": _POST_ATTENTION,
    "mlp.shared_expert_gate.weight": _POST_ATTENTION,
    "mlp.shared_expert.gate_proj.weight": _POST_ATTENTION,
    "mlp.shared_expert.up_proj.weight": _POST_ATTENTION,
}
# Columns may grow up to here: within float16 scales of int8, and within bfloat16.
_LARGEST = {8: 2.0**22, 16: 2.0**127}
_SMALLEST = 2.0**-126
_PIECE_WEIGHTS = 1024 * 1024


def norm_before(name: str) -> str | None:
    """The norm whose channels the columns of a tensor of dense.sfx meet; None for a tensor that follows no norm."""
    if name == "lm_head.weight":
        return "norm.weight"
    layer = ".".join(name.split(".")[:2]) + "."
    norm = _NORM_BEFORE.get(name.removeprefix(layer))
    return None if norm is None else layer + norm


def norm_before_experts(layer: int) -> str:
    """The norm whose channels the columns of a layer's routed gate and up projections meet."""
    return f"layers.{layer}.{_POST_ATTENTION}"


def channel_powers(checkpoint: Checkpoint, plan: Mapping[str, TensorEntry], expert_bits: int, norm: str) -> NDArray[np.int32]:
    """k of each channel of `norm`, int32 [hidden], by the rule above; all 0 if nothing behind the norm is stored in int8.

    `plan` says how each tensor of dense.sfx is stored. The norm is read, and the matrices behind it (of the routed experts some)
    only where a channel of it stands out. Raises CheckpointError for NaN and infinite weights.
    """
    source = checkpoint.dense[norm]
    matrices = list(_matrices_behind(checkpoint, plan, expert_bits, norm))
    nothing = np.zeros(source.shape, np.int32)
    if all(bits != 8 for _, bits in matrices):
        return nothing
    weight = as_float32(checkpoint.read(whole(source)))[0]
    require_finite(weight, source.name)
    gain = np.float32(1) + weight
    outstanding = _in_medians(np.abs(gain))
    if not (_nearest_power(outstanding) >= LEAST_POWER).any():
        return nothing
    columns = np.zeros(source.shape)
    room = np.full(source.shape, np.iinfo(np.int32).max)
    for rows, bits in matrices:
        sizes = np.maximum(_column_sizes(checkpoint, rows), _SMALLEST)
        room = np.minimum(room, _whole_power(_LARGEST[bits] / sizes))
        if bits == 8:  # bfloat16 is indifferent to the size of a column
            columns = np.maximum(columns, _in_medians(sizes))
    powers = np.minimum(_nearest_power(np.minimum(outstanding, 1 / _in_medians(columns))), room)
    powers = exact_powers(gain, np.maximum(powers, 0).astype(np.int32))
    return np.where(powers >= LEAST_POWER, powers, nothing)


def exact_powers(gain: NDArray[np.float32], powers: NDArray[np.int32]) -> NDArray[np.int32]:
    """The powers, lowered until gain / 2^k can be stored less 1 and formed again, both in float32, without a bit lost."""
    one = np.float32(1)
    while True:
        divided = np.ldexp(gain, -powers)
        lost = (powers > 0) & (one + (divided - one) != divided)
        if not lost.any():
            return powers
        powers = powers - lost.astype(np.int32)


def equalised_norm(weight: NDArray[np.float32], powers: NDArray[np.int32]) -> NDArray[np.float32]:
    """w' with 1 + w' = (1 + w) / 2^powers, both sums formed in float32; exact for the result of `channel_powers`."""
    divided = np.ldexp(np.float32(1) + weight, -powers)
    return np.where(powers > 0, divided - np.float32(1), weight)


def _matrices_behind(
    checkpoint: Checkpoint, plan: Mapping[str, TensorEntry], expert_bits: int, norm: str
) -> Iterator[tuple[Rows, int]]:
    """(matrix, bits it is stored in) of what reads a norm: all of the dense core, and some routed experts."""
    for name, entry in plan.items():
        if norm_before(name) == norm:
            yield whole(checkpoint.dense[name]), BITS[entry.kind]
    if norm.endswith(_POST_ATTENTION):
        layer, experts = int(norm.split(".")[1]), checkpoint.geometry.num_experts
        for expert in range(0, experts, -(-experts // SAMPLED_EXPERTS)):
            gate, up, _ = checkpoint.expert(layer, expert)
            yield gate, expert_bits
            yield up, expert_bits


def _column_sizes(checkpoint: Checkpoint, rows: Rows) -> NDArray[np.float64]:
    """Largest magnitude of each column, [K]."""
    columns = rows.shape[1]
    sizes = np.zeros(columns, np.float32)
    step = max(_PIECE_WEIGHTS // columns, 1)
    for start in range(rows.start, rows.stop, step):
        piece = as_float32(checkpoint.read(Rows(rows.tensor, start, min(start + step, rows.stop))))
        np.maximum(sizes, np.abs(piece).max(axis=0), out=sizes)
    require_finite(sizes, rows.tensor.name)
    return sizes.astype(np.float64)


def _in_medians(sizes: NDArray[np.floating]) -> NDArray[np.float64]:
    """Sizes in parts of their median; never 0."""
    floored = np.maximum(sizes.astype(np.float64), _SMALLEST)
    result: NDArray[np.float64] = floored / np.median(floored)
    return result


def _whole_power(ratio: NDArray[np.float64]) -> NDArray[np.int32]:
    """floor(log2(ratio)), by the exponent: the same on every machine, as a logarithm may not be."""
    return np.frexp(ratio)[1] - 1


def _nearest_power(ratio: NDArray[np.float64]) -> NDArray[np.int32]:
    """round(log2(ratio))."""
    return _whole_power(ratio * math.sqrt(2))
