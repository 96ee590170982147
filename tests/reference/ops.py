"""The operations of a `qwen3_5_moe` decoder in numpy, one function each.

Formulas follow `transformers` 5.24, models/qwen3_5_moe/modeling_qwen3_5_moe.py; the recurrent form of the gated delta rule
is the only one written here, since the chunked one computes the same thing. Arrays are float64 unless a test asks for
float32. Leading `n` is the number of tokens, oldest first; states are passed in and returned, never changed in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

L2_EPS = 1e-6
SILENT = 1e-30  # an activation group whose largest magnitude is under this has scale 0 and codes 0


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow for large negative x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Zero-centred RMSNorm: x / sqrt(mean(x^2) + eps) * (1 + weight). x [..., size], weight [size] -> [..., size]."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * (1 + weight)


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """DeltaNet's output norm, *not* zero-centred: x / rms(x) * weight * silu(gate). x, gate [..., size], weight [size]."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight * silu(gate)


def l2_norm(x: Array) -> Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + L2_EPS)


def causal_conv(x: Array, weight: Array, state: Array) -> tuple[Array, Array]:
    """Causal depthwise convolution, then silu.

    Args:
        x: [n, channels], the tokens of this call.
        weight: [kernel, channels]; weight[kernel - 1] meets the newest token.
        state: [kernel - 1, channels], the inputs before this call, oldest first; zeros at the start of a sequence.

    Returns:
        ([n, channels] outputs, [kernel - 1, channels] state after the call).
    """
    kernel = weight.shape[0]
    window = np.concatenate([state, x])
    out = np.zeros_like(x)
    for tap in range(kernel):
        out = out + weight[tap] * window[tap : tap + len(x)]
    return silu(out), window[len(window) - (kernel - 1) :]


def log_decay(a: Array, A_log: Array, dt_bias: Array) -> Array:
    """g = -exp(A_log) * softplus(a + dt_bias); the state is multiplied by exp(g). a [..., value_heads], others [value_heads]."""
    return -np.exp(A_log) * softplus(a + dt_bias)


def gated_delta_step(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """One token of the gated delta rule.

    Query and key are l2-normalised here, the query is scaled by 1/sqrt(key_dim), and key head h serves the *consecutive*
    value heads h * ratio ... h * ratio + ratio - 1.

        S <- exp(g) S;   S <- S + k (beta (v - k^T S))^T;   out = q^T S

    Args:
        query, key: [key_heads, key_dim].
        value: [value_heads, value_dim].
        g, beta: [value_heads]: log decay, and learning rate (after the sigmoid).
        state: [value_heads, key_dim, value_dim].

    Returns:
        (out [value_heads, value_dim], state after the token).
    """
    ratio = value.shape[0] // key.shape[0]
    query = np.repeat(l2_norm(query), ratio, axis=0) * query.shape[-1] ** -0.5
    key = np.repeat(l2_norm(key), ratio, axis=0)
    state = state * np.exp(g)[:, None, None]
    read = np.einsum("hk,hkv->hv", key, state)
    state = state + key[:, :, None] * (beta[:, None] * (value - read))[:, None, :]
    return np.einsum("hk,hkv->hv", query, state), state


def gated_delta_sequence(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """`gated_delta_step` over n tokens: every argument but the state has a leading axis n; out [n, value_heads, value_dim]."""
    out = np.zeros_like(value)
    for i in range(len(value)):
        out[i], state = gated_delta_step(query[i], key[i], value[i], g[i], beta[i], state)
    return out, state


def rotary(x: Array, positions: NDArray[np.integer], rotary_dim: int, theta: float) -> Array:
    """Rotary embedding of the first rotary_dim dimensions, in pairs (i, i + rotary_dim/2); the others pass through.

    Args:
        x: [n, heads, head_dim].
        positions: [n], counted from 0.
    """
    half = rotary_dim // 2
    frequency = 1.0 / theta ** (np.arange(half) * 2.0 / rotary_dim)
    angle = positions[:, None] * frequency  # float64 whatever x is: the angle's rounding is no part of the model
    cos = np.cos(angle).astype(x.dtype)[:, None, :]
    sin = np.sin(angle).astype(x.dtype)[:, None, :]
    first, second = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]], axis=-1)


def attention(query: Array, keys: Array, values: Array) -> Array:
    """Causal softmax attention with grouped key/value heads; query head h reads kv head h // (heads / kv_heads).

    Args:
        query: [n, heads, head_dim], the last n positions, rotated.
        keys, values: [m, kv_heads, head_dim], all m >= n positions so far, keys rotated.

    Returns:
        [n, heads, head_dim].
    """
    n, heads, head_dim = query.shape
    m, kv_heads, _ = keys.shape
    keys = np.repeat(keys, heads // kv_heads, axis=1)
    values = np.repeat(values, heads // kv_heads, axis=1)
    scores = np.einsum("nhd,mhd->hnm", query, keys) * head_dim**-0.5
    future = np.arange(m)[None, :] > np.arange(m - n, m)[:, None]
    scores = np.where(future, -np.inf, scores)
    return np.einsum("hnm,mhd->nhd", softmax(scores), values)


def gated_attention(
    q_and_gate: Array,
    key: Array,
    value: Array,
    q_norm: Array,
    k_norm: Array,
    cached_keys: Array,
    cached_values: Array,
    *,
    rotary_dim: int,
    theta: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Gated attention between its projections: norms, rotary, cache append, attention, output gate.

    Args:
        q_and_gate: [n, heads, 2 * head_dim], the output of q_proj: per head, the query then its gate.
        key, value: [n, kv_heads, head_dim].
        q_norm, k_norm: [head_dim], zero-centred.
        cached_keys, cached_values: [past, kv_heads, head_dim]; past = 0 at the start of a sequence.

    Returns:
        (out [n, heads * head_dim] ready for o_proj, keys [past + n, ...], values [past + n, ...]).
    """
    n, heads, double = q_and_gate.shape
    query, gate = q_and_gate[..., : double // 2], q_and_gate[..., double // 2 :]
    positions = np.arange(len(cached_keys), len(cached_keys) + n)
    query = rotary(rms_norm(query, q_norm, eps), positions, rotary_dim, theta)
    key = rotary(rms_norm(key, k_norm, eps), positions, rotary_dim, theta)
    keys = np.concatenate([cached_keys, key])
    values = np.concatenate([cached_values, value])
    out = attention(query, keys, values) * sigmoid(gate)
    return out.reshape(n, -1), keys, values


class Routes(NamedTuple):
    """What a router decided for n tokens."""

    ids: NDArray[np.int64]
    """[n, top_k], ascending within a token."""
    weights: Array
    """[n, top_k], renormalised to sum 1, in the order of ids."""
    gap: Array
    """[n], (p_k - p_k+1) / p_k at the boundary of the selection; 1 if every expert is selected."""


def router_top_k(logits: Array, top_k: int) -> Routes:
    """Softmax over all experts, the top_k most probable (ties: the lowest id), renormalised. logits [n, experts]."""
    probabilities = softmax(logits)
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=-1)
    ids = np.sort(order[:, :top_k], axis=-1)
    chosen = np.take_along_axis(probabilities, ids, axis=-1)
    if top_k < logits.shape[-1]:
        gap = 1 - ranked[:, top_k] / ranked[:, top_k - 1]
    else:
        gap = np.ones_like(ranked[:, 0])
    return Routes(ids, chosen / chosen.sum(axis=-1, keepdims=True), gap)


def swiglu_expert(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """down(silu(gate(x)) * up(x)). x [n, hidden], gate and up [intermediate, hidden], down [hidden, intermediate]."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


class Quantized(NamedTuple):
    """Activations of n tokens under the rounding rule."""

    codes: NDArray[np.int64]
    """[n, K], -127 ... 127."""
    scales: Array
    """[n, ceil(K / group)]."""
    quanta: Array
    """[n, K], what was rounded to the codes."""


def quantize_activations(x: Array, group: int = 32) -> Quantized:
    """Symmetric, per token and group: scale = amax / 127, codes = rint(x * (127 / amax)), halves to even.

    x [n, K]; the last group may be shorter. A group with amax < 1e-30 has scale 0 and codes 0.
    """
    n, K = x.shape
    groups = -(-K // group)
    padded = np.zeros((n, groups * group), x.dtype)
    padded[:, :K] = x
    padded = padded.reshape(n, groups, group)
    amax = np.abs(padded).max(axis=-1)
    heard = amax >= SILENT
    inverse = np.where(heard, 127 / np.where(heard, amax, 1), 0)
    quanta = padded * inverse[..., None]
    quanta = quanta.reshape(n, -1)[:, :K]
    return Quantized(np.rint(quanta).astype(np.int64), np.where(heard, amax / 127, 0), quanta)


def quantize_weights(weight: NDArray[np.float32], group: int = 128) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """The packer's rule: per row and group along K, scale = float16(amax / 127), codes = rint(w / scale) within +-127.

    weight [R, K] float32 -> (codes [R, K], scales [R, ceil(K / group)]). A scale of 0 has codes 0.
    """
    rows, K = weight.shape
    codes = np.zeros((rows, K), np.int8)
    scales = np.zeros((rows, -(-K // group)), np.float16)
    for g, start in enumerate(range(0, K, group)):
        part = weight[:, start : start + group]
        scales[:, g] = np.abs(part).max(axis=1) / np.float32(127)
        scale = scales[:, g].astype(np.float32)[:, None]
        quanta = np.divide(part, scale, out=np.zeros_like(part), where=scale > 0)
        codes[:, start : start + group] = np.clip(np.rint(quanta), -127, 127)
    return codes, scales


def dequantize(codes: NDArray[np.integer], scales: Array, group: int) -> Array:
    """codes [R, K] times the scale of their group, scales [R, ceil(K / group)] -> [R, K], in the dtype of the scales."""
    return codes.astype(scales.dtype) * np.repeat(scales, group, axis=1)[:, : codes.shape[1]]


def quantized_matvec(
    x: Array,
    codes: NDArray[np.int8],
    scales: NDArray[np.float16],
    *,
    weight_group: int = 128,
    activation_group: int = 32,
) -> Array:
    """INT8 linear layer by the rule: integer dots per 32 activations, scaled by both scales, summed. x [n, K] -> [n, R].

    codes [R, K], scales [R, ceil(K / 128)]. The sums are taken in float64 without an order: they are exact to 1e-15,
    which is what an engine's own order is measured against.
    """
    quantized = quantize_activations(x, activation_group)
    a = dequantize(quantized.codes, quantized.scales, activation_group)
    return a @ dequantize(codes, scales.astype(x.dtype), weight_group).T
