"""The decoder of Qwen3.5/3.6 mixture-of-experts models, top to bottom.

Shapes are written [tokens, width]; there is one sequence. Names are those of the checkpoint's tensors. The reference is
transformers' modeling_qwen3_5_moe.py. Every reduction runs in a kernel of sparseflow.kernels, in an order that does not
depend on how many tokens are fed at once, so a prompt may be cut into chunks anywhere.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparseflow.config import Geometry
from sparseflow.finite import require_finite_residual
from sparseflow.kernels.attention import gated_attention
from sparseflow.kernels.deltanet import causal_conv, gated_delta
from sparseflow.kernels.experts import ExpertBatch, combine, route
from sparseflow.kernels.norms import rms_norm
from sparseflow.layout import ExpertLayout
from sparseflow.leases import LeaseTable
from sparseflow.replay import RouteReplay
from sparseflow.rotary import Rotary
from sparseflow.state import DecoderState, KVCache, LinearState
from sparseflow.weights import Activations, DenseCore, Embedding, Linear, SharedExpert

Array = NDArray[np.float32]

EXPERTS_AT_ONCE = 4
"""Experts computed together as they arrive: fewer wait less, more share the cost of starting threads."""


class LayerTrace(Protocol):
    """Where a forward reports the routes of each layer."""

    def add_layer(
        self, layer: int, expert_ids: NDArray[np.int32], hit: NDArray[np.bool_], wait_seconds: float, bytes_asked: int
    ) -> None: ...


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (1 + weight): the checkpoint stores these weights centred on zero."""

    def __init__(self, weight: Array, eps: float, threads: int) -> None:
        self.weight = np.float32(1) + weight
        self.eps = eps
        self.threads = threads

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight, self.eps, threads=self.threads)


class GatedDeltaNet:
    """Linear attention with a gated delta rule: projections, causal convolution, recurrence, gated norm."""

    def __init__(self, core: DenseCore, name: str, geometry: Geometry, threads: int) -> None:
        self.in_proj_qkv = core.linears[name + "in_proj_qkv.weight"]
        self.in_proj_z = core.linears[name + "in_proj_z.weight"]
        self.in_proj_a = core.linears[name + "in_proj_a.weight"]
        self.in_proj_b = core.linears[name + "in_proj_b.weight"]
        self.out_proj = core.linears[name + "out_proj.weight"]
        self.conv1d = core.arrays[name + "conv1d.weight"]  # [kernel, conv_dim]
        self.dt_bias = core.arrays[name + "dt_bias"]
        self.decay_rate = (-np.exp(core.arrays[name + "A_log"].astype(np.float64))).astype(np.float32)
        self.norm = core.arrays[name + "norm.weight"]  # not centred on zero, unlike every other norm
        self.geometry = geometry
        self.threads = threads

    def __call__(self, x: Activations, state: LinearState) -> Array:
        g, threads = self.geometry, self.threads
        qkv = causal_conv(self.in_proj_qkv(x), self.conv1d, state.conv, threads)  # [tokens, conv_dim]
        z = self.in_proj_z(x)  # [tokens, value_dim]
        out = gated_delta(
            qkv,
            self.in_proj_a(x),
            self.in_proj_b(x),
            self.decay_rate,
            self.dt_bias,
            state.recurrent,
            g.linear_num_key_heads,
            g.linear_value_head_dim,
            threads,
        )  # [tokens, value_dim]
        heads = (-1, g.linear_value_head_dim)
        out = rms_norm(out.reshape(heads), self.norm, g.rms_norm_eps, z.reshape(heads), threads)
        return self.out_proj(Activations(out.reshape(z.shape), threads))


class Attention:
    """Full attention: q/k norms, rotary on the first rotary_dim of a head, grouped kv heads, sigmoid output gate."""

    def __init__(self, core: DenseCore, name: str, geometry: Geometry, threads: int) -> None:
        self.q_proj = core.linears[name + "q_proj.weight"]
        self.k_proj = core.linears[name + "k_proj.weight"]
        self.v_proj = core.linears[name + "v_proj.weight"]
        self.o_proj = core.linears[name + "o_proj.weight"]
        self.q_norm = np.float32(1) + core.arrays[name + "q_norm.weight"]
        self.k_norm = np.float32(1) + core.arrays[name + "k_norm.weight"]
        self.eps = geometry.rms_norm_eps
        self.threads = threads

    def __call__(self, x: Activations, cache: KVCache, position: int, cosine: Array, sine: Array) -> Array:
        cache.reserve(position + len(x.x))
        out = gated_attention(
            self.q_proj(x),  # [tokens, heads * 2 * head_dim], query and gate of each head in turn
            self.k_proj(x),
            self.v_proj(x),
            self.q_norm,
            self.k_norm,
            cosine,
            sine,
            cache.key_pages,
            cache.value_pages,
            position,
            self.eps,
            self.threads,
        )  # [tokens, heads * head_dim]
        return self.o_proj(Activations(out, self.threads))


class SparseMoe:
    """Router, leased experts, shared expert. Adds its result to the residual stream in place."""

    def __init__(
        self, core: DenseCore, layer: int, geometry: Geometry, experts: ExpertLayout, leases: LeaseTable, threads: int
    ) -> None:
        name = f"layers.{layer}.mlp."
        self.gate = core.linears[name + "gate.weight"]
        self.shared_expert_gate = core.linears[name + "shared_expert_gate.weight"]
        projections = (core.linears.pop(f"{name}shared_expert.{part}_proj.weight") for part in ("gate", "up", "down"))
        self.shared_expert = SharedExpert(*projections)
        self.layer = layer
        self.geometry = geometry
        self.layout = experts
        self.leases = leases
        self.threads = threads

    def __call__(
        self, x: Activations, residual: Array, position: int, trace: LayerTrace | None, replay: RouteReplay | None
    ) -> None:
        g = self.geometry
        logits = self.gate(x)  # [tokens, num_experts]
        if replay is None:
            ids, weights = route(logits, g.num_experts_per_tok, self.threads)  # [tokens, top_k], ascending ids
        else:
            ids, weights = replay.route(logits, self.layer, position, self.threads)
        self.leases.observe(self.layer, ids, weights)
        quantized = x.quantized if self.layout.bits == 8 else None
        batch = ExpertBatch(x.x, quantized, ids, g.num_experts, g.moe_intermediate_size, self.layout)
        shared: Array | None = None
        resident = np.zeros(g.num_experts, np.bool_)
        waited = 0.0
        # One wave, unless a chunk asks for more distinct experts than the table has slots.
        for first in range(0, len(batch.experts), self.leases.slots):
            wave = batch.experts[first : first + self.leases.slots]
            which = np.arange(first, first + len(wave), dtype=np.int32)
            with self.leases.acquire(self.layer, wave) as lease:
                hit, missed = lease.hit, ~lease.hit
                resident[wave] = hit
                started = time.perf_counter()
                for i in np.flatnonzero(hit):
                    lease.wait_one(int(i))  # another session may still be admitting it
                waited += time.perf_counter() - started
                # While the missing slices are on their way, compute what needs none of them.
                batch.compute(which[hit], lease.addresses[hit], self.threads)
                if shared is None:
                    shared = self._shared(x)
                # The rest as it arrives, a few at a time, while those behind are still being read.
                arriving = np.flatnonzero(missed)
                for start in range(0, len(arriving), EXPERTS_AT_ONCE):
                    part = arriving[start : start + EXPERTS_AT_ONCE]
                    started = time.perf_counter()
                    for i in part:
                        lease.wait_one(int(i))
                    waited += time.perf_counter() - started
                    batch.compute(which[part], lease.addresses[part], self.threads)
        assert shared is not None  # there was at least one wave
        combine(residual, batch.out, weights, shared, self.shared_expert_gate(x), self.threads)
        if trace is not None:
            trace.add_layer(self.layer, ids, resident[ids], waited, len(batch.experts) * self.layout.stride)

    def _shared(self, x: Activations) -> Array:
        """The shared expert's output, float32 [tokens, 1, hidden]: an expert that every token chooses."""
        expert = self.shared_expert
        ids = np.zeros((len(x.x), 1), np.int32)
        quantized = x.quantized if expert.layout.bits == 8 else None
        batch = ExpertBatch(x.x, quantized, ids, 1, expert.intermediate, expert.layout)
        batch.compute(batch.experts, expert.addresses, self.threads)
        return batch.out


class DecoderLayer:
    """Norm, attention of one kind or the other, norm, mixture of experts; a residual around each."""

    def __init__(
        self, core: DenseCore, layer: int, geometry: Geometry, experts: ExpertLayout, leases: LeaseTable, threads: int
    ) -> None:
        name = f"layers.{layer}."
        eps = geometry.rms_norm_eps
        self.input_layernorm = RMSNorm(core.arrays[name + "input_layernorm.weight"], eps, threads)
        self.post_attention_layernorm = RMSNorm(core.arrays[name + "post_attention_layernorm.weight"], eps, threads)
        self.self_attn: Attention | None = None
        self.linear_attn: GatedDeltaNet | None = None
        if geometry.layer_types[layer] == "full_attention":
            self.self_attn = Attention(core, name + "self_attn.", geometry, threads)
        else:
            self.linear_attn = GatedDeltaNet(core, name + "linear_attn.", geometry, threads)
        self.mlp = SparseMoe(core, layer, geometry, experts, leases, threads)
        self.threads = threads

    def __call__(
        self,
        x: Array,
        state: KVCache | LinearState,
        position: int,
        cosine: Array,
        sine: Array,
        trace: LayerTrace | None,
        replay: RouteReplay | None,
    ) -> None:
        """One layer, in place on the residual stream x [tokens, hidden]."""
        normed = Activations(self.input_layernorm(x), self.threads)
        if isinstance(state, KVCache):
            assert self.self_attn is not None
            x += self.self_attn(normed, state, position, cosine, sine)
        else:
            assert self.linear_attn is not None
            x += self.linear_attn(normed, state)
        self.mlp(Activations(self.post_attention_layernorm(x), self.threads), x, position, trace, replay)


class Decoder:
    """Embedding, layers, final norm, head."""

    def __init__(
        self,
        core: DenseCore,
        embed_tokens: Embedding,
        geometry: Geometry,
        experts: ExpertLayout,
        leases: LeaseTable,
        threads: int,
        check_finite: bool = False,
    ) -> None:
        self.check_finite = check_finite
        self.embed_tokens = embed_tokens
        self.layers = [
            DecoderLayer(core, layer, geometry, experts, leases, threads) for layer in range(geometry.num_hidden_layers)
        ]
        self.norm = RMSNorm(core.arrays["norm.weight"], geometry.rms_norm_eps, threads)
        self.lm_head: Linear = core.linears["lm_head.weight"]
        self.rotary = Rotary(geometry)
        self.threads = threads

    def __call__(
        self,
        ids: NDArray[np.int64],
        state: DecoderState,
        *,
        logits: int,
        trace: LayerTrace | None,
        replay: RouteReplay | None = None,
    ) -> Array:
        """Feeds a chunk of tokens and moves the state on; returns logits float32 [rows, vocab].

        logits: how many of the last tokens to give logits for, at most len(ids).
        replay: experts chosen beforehand, which the routers then only weight.
        """
        x = self.embed_tokens(ids)
        if self.check_finite:
            require_finite_residual(x, "the embedding", state.position)
        cosine, sine = self.rotary(state.position, len(ids))
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            layer(x, layer_state, state.position, cosine, sine, trace, replay)
            if self.check_finite:
                require_finite_residual(x, f"layer {layer.mlp.layer}", state.position)
        state.position += len(ids)
        if logits == 0:
            return np.empty((0, self.lm_head.rows), np.float32)
        return self.lm_head(Activations(self.norm(x[-logits:]), self.threads))
