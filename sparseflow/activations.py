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
    g = geometry
    dense = _quantized if dense_bits == 8 else _nothing
    routed = _quantized if expert_bits == 8 else _nothing
    hidden = _FLOAT * g.hidden_size
    stream = 2 * hidden + dense(g.hidden_size)
    queries = g.num_attention_heads * g.head_dim
    projected = _FLOAT * (2 * queries + 2 * g.kv_dim)  # queries with their gates, keys, values
    attention = projected + _FLOAT * queries + dense(queries)
    convolved, value = _FLOAT * g.linear_conv_dim, _FLOAT * g.linear_value_dim
    linear = 2 * convolved + 3 * value + dense(g.linear_value_dim)  # z, the result, its normed form
    top_k, width, shared = g.num_experts_per_tok, g.moe_intermediate_size, g.shared_expert_intermediate_size
    experts = (
        hidden + _quantized(g.hidden_size)  # normed once more
        + _FLOAT * g.num_experts + 4 * _FLOAT * top_k  # logits; ids, weights and where each pair belongs
        + top_k * (hidden + _FLOAT * width + routed(width))
        + hidden + _FLOAT * shared + dense(shared)
    )
    return stream + attention + linear + experts


def _quantized(columns: int) -> int:
    """A row of int8 codes, with a float32 scale and an int32 correction per group."""
    padded = align(columns, ACTIVATION_GROUP)
    return padded + 8 * (padded // ACTIVATION_GROUP)


def _nothing(columns: int) -> int:
    return 0
