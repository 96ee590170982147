"""The float64 reference itself: it gives what transformers gives, and the cases are such that each classic mistake shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packed_cases import BY_NAME, DEMO, NAMES
from random_checkpoint import bf16_values, random_weights
from reference import ops
from reference.agreement import agree
from reference.checkpoint import CheckpointTensors, Linear, read_safetensors
from reference.decoder import Reference
from reference.rounding import NEAR, Tie

GOLDEN = Path(__file__).parent / "golden"
FLOAT32 = 2e-5  # of the largest logit: what float32 transformers is off from float64; measured 5e-6 at most


def load(name: str) -> Reference:
    """The unquantised reference of a case."""
    if name == "demo":
        weights = read_safetensors(DEMO / "model.safetensors")
        return Reference(CheckpointTensors(json.loads((DEMO / "config.json").read_text()), weights))
    case = BY_NAME[name]
    return Reference(CheckpointTensors(case.config, random_weights(case)))


def error_on_golden(name: str, positions: int | None = None) -> float:
    """The largest difference from the golden logits over the first positions, in parts of the largest logit."""
    with np.load(GOLDEN / f"{name}.npz") as golden:
        logits, _ = load(name).forward(golden["ids"][:positions])
        return float(np.abs(logits[:, golden["columns"]] - golden["logits"][:positions]).max() / golden["scale"])


@pytest.mark.parametrize("name", NAMES)
def test_reference_gives_the_golden_logits(name: str) -> None:
    assert error_on_golden(name) < FLOAT32


# Each mistake takes the right operation and returns the wrong one. All of them give fluent text on a real model.


def norm_is_not_zero_centred(rms_norm: Any) -> Any:
    return lambda x, weight, eps: rms_norm(x, weight - 1, eps)


def gated_norm_is_zero_centred(gated_rms_norm: Any) -> Any:
    return lambda x, gate, weight, eps: gated_rms_norm(x, gate, weight + 1, eps)


def key_heads_are_strided(gated_delta_step: Any) -> Any:
    def step(query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any) -> Any:
        heads = np.arange(len(value)) % len(key)
        return gated_delta_step(query[heads], key[heads], value, g, beta, state)

    return step


def decay_comes_after_the_delta(gated_delta_step: Any) -> Any:
    def step(query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any) -> Any:
        out, state = gated_delta_step(query, key, value, np.zeros_like(g), beta, state)
        return out, state * np.exp(g)[:, None, None]

    return step


def kv_heads_are_strided(attention: Any) -> Any:
    def wrong(query: Any, keys: Any, values: Any) -> Any:
        heads = np.arange(query.shape[1]) % keys.shape[1]
        return attention(query, keys[:, heads], values[:, heads])

    return wrong


def rotary_pairs_are_adjacent(rotary: Any) -> Any:
    def wrong(x: Any, positions: Any, rotary_dim: int, theta: float) -> Any:
        order = np.arange(x.shape[-1])
        order[:rotary_dim] = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
        return rotary(x[..., order], positions, rotary_dim, theta)[..., np.argsort(order)]

    return wrong


def rotary_is_not_partial(rotary: Any) -> Any:
    return lambda x, positions, rotary_dim, theta: rotary(x, positions, x.shape[-1], theta)


def output_gate_is_behind_all_queries(gated_attention: Any) -> Any:
    def wrong(q_and_gate: Any, *rest: Any, **sizes: Any) -> Any:
        n, heads, _ = q_and_gate.shape
        query, gate = np.split(q_and_gate.reshape(n, -1), 2, axis=1)
        halves = [half.reshape(n, heads, -1) for half in (query, gate)]
        return gated_attention(np.concatenate(halves, axis=-1), *rest, **sizes)

    return wrong


def conv_runs_backwards(causal_conv: Any) -> Any:
    return lambda x, weight, state: causal_conv(x, weight[::-1], state)


def decay_is_rounded_to_bfloat16(log_decay: Any) -> Any:
    return lambda a, A_log, dt_bias: log_decay(a, bf16_values(A_log.astype(np.float32)), dt_bias)


def weights_of_experts_are_not_renormalised(router_top_k: Any) -> Any:
    def wrong(logits: Any, top_k: int) -> Any:
        routes = router_top_k(logits, top_k)
        chosen = np.take_along_axis(ops.softmax(logits), routes.ids, axis=-1)
        return routes._replace(weights=chosen)

    return wrong


def silu_is_left_out(silu: Any) -> Any:
    return lambda x: x


@pytest.mark.parametrize(
    "name, operation, mistake",
    [
        ("real_ratios", "rms_norm", norm_is_not_zero_centred),
        ("real_ratios", "gated_rms_norm", gated_norm_is_zero_centred),
        ("real_ratios", "gated_delta_step", key_heads_are_strided),
        ("real_ratios", "gated_delta_step", decay_comes_after_the_delta),
        ("real_ratios", "attention", kv_heads_are_strided),
        ("real_ratios", "rotary", rotary_pairs_are_adjacent),
        ("real_ratios", "rotary", rotary_is_not_partial),
        ("real_ratios", "gated_attention", output_gate_is_behind_all_queries),
        ("real_ratios", "causal_conv", conv_runs_backwards),
        ("real_ratios", "router_top_k", weights_of_experts_are_not_renormalised),
        ("real_ratios", "silu", silu_is_left_out),
        ("all_linear", "log_decay", decay_is_rounded_to_bfloat16),
    ],
)
def test_a_mistake_shows(
    name: str, operation: str, mistake: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, operation, mistake(getattr(ops, operation)))
    assert error_on_golden(name, positions=12) > 2e-3  # ten times what the parity tests allow


def test_states_continue_a_sequence() -> None:
    random = np.random.Generator(np.random.PCG64(1))
    n, cut = 9, 4
    x, weight = random.standard_normal((n, 6)), random.standard_normal((4, 6))
    state = np.zeros((3, 6))
    whole, end = ops.causal_conv(x, weight, state)
    first, state = ops.causal_conv(x[:cut], weight, state)
    second, state = ops.causal_conv(x[cut:], weight, state)
    assert np.array_equal(np.concatenate([first, second]), whole) and np.array_equal(state, end)

    query, key = random.standard_normal((2, n, 2, 5))
    value, (g, beta) = random.standard_normal((n, 4, 3)), random.random((2, n, 4))
    arguments = (query, key, value, -g, beta)
    whole, end = ops.gated_delta_sequence(*arguments, np.zeros((4, 5, 3)))
    first, state = ops.gated_delta_sequence(*(a[:cut] for a in arguments), np.zeros((4, 5, 3)))
    second, state = ops.gated_delta_sequence(*(a[cut:] for a in arguments), state)
    assert np.array_equal(np.concatenate([first, second]), whole) and np.array_equal(state, end)

    q_and_gate, (key, value) = random.standard_normal((n, 4, 16)), random.standard_normal((2, n, 2, 8))
    norms, sizes = (np.zeros(8), np.zeros(8)), {"rotary_dim": 4, "theta": 1e4, "eps": 1e-6}
    empty = np.zeros((0, 2, 8))
    whole, _, _ = ops.gated_attention(q_and_gate, key, value, *norms, empty, empty, **sizes)
    first, *cache = ops.gated_attention(q_and_gate[:cut], key[:cut], value[:cut], *norms, empty, empty, **sizes)
    second, *_ = ops.gated_attention(q_and_gate[cut:], key[cut:], value[cut:], *norms, *cache, **sizes)
    assert np.allclose(np.concatenate([first, second]), whole, rtol=0, atol=1e-14)


class RoundedActivations(CheckpointTensors):
    """The unquantised weights under the activation rule."""

    def linear(self, name: str) -> Linear:
        return replace(super().linear(name), activation_group=32)


def test_only_a_flip_at_a_tie_is_explained() -> None:
    case = BY_NAME["smallest"]
    reference = Reference(RoundedActivations(case.config, random_weights(case)))
    for token in range(case.config["vocab_size"]):
        logits, rounding = reference.forward([token])
        if rounding.ties:
            break
    tie, distance = max(rounding.ties.items(), key=lambda item: item[1])
    assert 0 < distance < NEAR
    flipped, _ = reference.forward([token], frozenset({tie}))
    tolerance = 1e-6 * np.abs(logits).max()
    assert np.abs(flipped - logits).max() > 100 * tolerance
    found = agree(reference, [token], flipped, tolerance)
    assert found.error.max() <= tolerance and found.flipped == {tie} and not found.plain.any()

    wrong = logits + 100 * tolerance
    assert agree(reference, [token], wrong, tolerance, passes=20).error.max() > tolerance
    elsewhere = frozenset({Tie(tie.label, tie.position, (tie.k + 1) % 8)})
    assert np.array_equal(reference.forward([token], elsewhere)[0], logits)  # not near a tie: rounded as ever
