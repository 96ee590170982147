"""What the arrays of one forward take while a chunk of tokens passes through a layer. Arithmetic alone; decoder.py makes them."""

from __future__ import annotations

from sparseflow.config import Geometry
from sparseflow.layout import align
from sparseflow.quantize import ACTIVATION_GROUP

_FLOAT = 4


def activation_bytes_per_token(geometry: Geometry, expert_bits: int, dense_bits: int) -> int:
    """Bytes a token of a chunk takes in the three parts of a layer: an attention of either kind, and the experts.

    Every part has the residual stream and its normed form beside it. A forward keeps the arrays of each part, and uses them again in
    the next layer (kernels/threads.pyx), so all parts count.
    """
    return (
        _stream(geometry, dense_bits) + _attention(geometry, dense_bits) + _linear(geometry, dense_bits)
        + _experts(geometry, expert_bits, dense_bits)
    )


def recorded_bytes(geometry: Geometry, expert_bits: int, dense_bits: int) -> int:
    """Bytes of the arrays that a session keeps for its one token at a time: those of every layer (recorded.py)."""
    parts = {"full_attention": _attention(geometry, dense_bits), "linear_attention": _linear(geometry, dense_bits)}
    rest = _stream(geometry, dense_bits) + _experts(geometry, expert_bits, dense_bits)
    return sum(parts[kind] + rest for kind in geometry.layer_types)


def _stream(g: Geometry, dense_bits: int) -> int:
    return 2 * _FLOAT * g.hidden_size + _codes(g.hidden_size, dense_bits)


def _attention(g: Geometry, dense_bits: int) -> int:
    queries = g.num_attention_heads * g.head_dim
    projected = _FLOAT * (2 * queries + 2 * g.kv_dim)  # queries with their gates, keys, values
    return projected + _FLOAT * queries + _codes(queries, dense_bits)


def _linear(g: Geometry, dense_bits: int) -> int:
    convolved, value = _FLOAT * g.linear_conv_dim, _FLOAT * g.linear_value_dim
    return 2 * convolved + 3 * value + _codes(g.linear_value_dim, dense_bits)  # z, the result, its normed form


def _experts(g: Geometry, expert_bits: int, dense_bits: int) -> int:
    hidden = _FLOAT * g.hidden_size
    top_k, width, shared = g.num_experts_per_tok, g.moe_intermediate_size, g.shared_expert_intermediate_size
    return (
        hidden + _codes(g.hidden_size, 8)  # normed once more
        + _FLOAT * g.num_experts + 4 * _FLOAT * top_k  # logits; ids, weights and where each pair belongs
        + top_k * (hidden + _FLOAT * width + _codes(width, expert_bits))
        + hidden + _FLOAT * shared + _codes(shared, dense_bits)
    )


def _codes(columns: int, bits: int) -> int:
    """A row of int8 codes, with a float32 scale and an int32 correction per group; nothing for bfloat16 weights."""
    padded = align(columns, ACTIVATION_GROUP)
    return padded + 8 * (padded // ACTIVATION_GROUP) if bits == 8 else 0
