"""The decoder of Qwen3.5/3.6 mixture-of-experts models, top to bottom.

Shapes are written [tokens, width]; there is one sequence. Names are those of the checkpoint's tensors. The reference is
transformers' modeling_qwen3_5_moe.py. Every reduction runs in a kernel of sparseflow.kernels, in an order that does not
depend on how many tokens are fed at once, so a prompt may be cut into chunks anywhere. Kernels are noted down in a Step and computed
when it runs: where the router's choice is looked at, after experts, and at the end.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sparseflow.config import Geometry
from sparseflow.finite import require_finite_residual
from sparseflow.kernels.attention import gated_attention
from sparseflow.kernels.deltanet import causal_conv, gated_delta
from sparseflow.kernels.experts import ExpertBatch, combine, compute_together, route
from sparseflow.kernels.norms import rms_norm
from sparseflow.kernels.threads import Step
from sparseflow.layout import ExpertLayout
from sparseflow.leases import LeaseTable
from sparseflow.lookahead import GuessRecord, Guesses, NextRouter
from sparseflow.recorded import Routing
from sparseflow.replay import RouteReplay
from sparseflow.rotary import Rotary
from sparseflow.route_record import RouteRecord
from sparseflow.state import DecoderState, KVCache, LinearState
from sparseflow.weights import Activations, DenseCore, Embedding, Linear, SharedExpert, project

Array = NDArray[np.float32]

EXPERTS_AT_ONCE = 4
"""Experts computed together as they arrive: fewer wait less, more share the cost of starting threads."""


class LeaseCount:
    """What forwards asked of the experts: leases, and those of them that were in memory."""

    def __init__(self) -> None:
        self.requests = self.hits = 0


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

    def __call__(self, x: Activations, state: LinearState, residual: Array) -> None:
        """Adds its result to the residual stream in place."""
        g, threads = self.geometry, self.threads
        # [tokens, conv_dim], [tokens, value_dim], and [tokens, value_heads] twice
        qkv, z, a, b = project(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        out = gated_delta(
            causal_conv(qkv, self.conv1d, state.conv, threads),
            a,
            b,
            self.decay_rate,
            self.dt_bias,
            state.recurrent,
            g.linear_num_key_heads,
            g.linear_value_head_dim,
            threads,
        )  # [tokens, value_dim]
        heads = (-1, g.linear_value_head_dim)
        out = rms_norm(out.reshape(heads), self.norm, g.rms_norm_eps, z.reshape(heads), threads)
        self.out_proj(Activations(out.reshape(z.shape), threads), onto=residual)


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

    def __call__(
        self, x: Activations, cache: KVCache, cached: NDArray[np.int64], cosine: Array, sine: Array, residual: Array
    ) -> None:
        """Adds its result to the residual stream in place. The cache has room; cached int64 [1] is how many positions it holds."""
        # q: [tokens, heads * 2 * head_dim], query and gate of each head in turn
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        out = gated_attention(
            q,
            k,
            v,
            self.q_norm,
            self.k_norm,
            cosine,
            sine,
            cache.key_pages,
            cache.value_pages,
            cached,
            self.eps,
            self.threads,
        )  # [tokens, heads * head_dim]
        self.o_proj(Activations(out, self.threads), onto=residual)


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
        self.next_router: NextRouter | None = None
        self.layer = layer
        self.geometry = geometry
        self.layout = experts
        self.leases = leases
        self.threads = threads

    def routing(self, x: Activations) -> Routing:
        """What there is to do before the experts are known."""
        g = self.geometry
        logits, shared_gate = project(x, self.gate, self.shared_expert_gate)
        batch = self._batch(x, g.num_experts_per_tok, g.num_experts, g.moe_intermediate_size, self.layout)
        shared = self._batch(x, 1, 1, self.shared_expert.intermediate, self.shared_expert.layout)
        shared.choose(np.zeros((len(x.x), 1), np.int32))  # one expert, which every token chooses
        return Routing(logits, shared_gate, batch, shared)

    def _batch(self, x: Activations, top_k: int, num_experts: int, intermediate: int, layout: ExpertLayout) -> ExpertBatch:
        return ExpertBatch(x.x, x.quantized if layout.bits == 8 else None, top_k, num_experts, intermediate, layout)

    def __call__(
        self,
        routing: Routing,
        residual: Array,
        position: int,
        step: Step,
        guesses: Guesses | None,
        usage: LeaseCount,
        trace: RouteRecord | None,
        replay: RouteReplay | None,
    ) -> None:
        g = self.geometry
        logits, shared_gate, batch, shared = routing
        if replay is None:
            ids, weights = route(logits, g.num_experts_per_tok, self.threads)  # [tokens, top_k], ascending ids
        else:
            ids, weights = replay.route(logits, self.layer, position, self.threads)
        step.run()
        self.leases.observe(self.layer, ids, weights)
        if guesses is not None:
            guesses.judge(ids)
        batch.choose(ids)
        beside = [(shared, shared.experts, self.shared_expert.addresses)]
        # One wave, unless a chunk asks for more distinct experts than the table has slots.
        for first in range(0, len(batch.experts), self.leases.slots):
            wave = batch.experts[first : first + self.leases.slots]
            with self.leases.acquire(self.layer, wave, trace) as lease:
                usage.hits += lease.num_hits
                order, addresses = lease.order, lease.addresses[lease.order]
                which = order + first if first else order
                ready = lease.num_ready
                # While the missing slices are on their way, compute what needs none of them.
                lease.wait_for(0, ready)
                compute_together([(batch, which[:ready], addresses[:ready]), *beside], self.threads)
                beside = []
                if guesses is not None and self.next_router is not None:
                    guesses.predict(self.next_router, residual)
                step.run()
                if guesses is not None:
                    guesses.begin()
                # The rest as it arrives, a few at a time, while those behind are still being read.
                for start in range(ready, len(lease), EXPERTS_AT_ONCE):
                    part = slice(start, min(start + EXPERTS_AT_ONCE, len(lease)))
                    lease.wait_for(part.start, part.stop)
                    batch.compute(which[part], addresses[part], self.threads)
                    step.run()
        combine(residual, batch.out, weights, shared.out, shared_gate, self.threads)
        usage.requests += len(batch.experts)
        if trace is not None and len(ids) > 1:
            trace.share_out(self.layer, ids)


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
        self, x: Array, state: KVCache | LinearState, cached: NDArray[np.int64], cosine: Array, sine: Array
    ) -> Routing:
        """One layer up to its experts, in place on the residual stream x [tokens, hidden]; `mlp` does the rest."""
        normed = Activations(self.input_layernorm(x), self.threads)
        if isinstance(state, KVCache):
            assert self.self_attn is not None
            self.self_attn(normed, state, cached, cosine, sine, x)
        else:
            assert self.linear_attn is not None
            self.linear_attn(normed, state, x)
        return self.mlp.routing(Activations(self.post_attention_layernorm(x), self.threads))


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
        prefetch: bool,
        check_finite: bool,
    ) -> None:
        self.check_finite = check_finite
        self.embed_tokens = embed_tokens
        self.layers = [
            DecoderLayer(core, layer, geometry, experts, leases, threads) for layer in range(geometry.num_hidden_layers)
        ]
        self.norm = RMSNorm(core.arrays["norm.weight"], geometry.rms_norm_eps, threads)
        self.lm_head: Linear = core.linears["lm_head.weight"]
        self.rotary = Rotary(geometry)
        self.leases = leases
        self.top_k = geometry.num_experts_per_tok
        self.threads = threads
        # Only where something is evicted, and the disk can be told what is more urgent.
        self.guess_record: GuessRecord | None = None
        if prefetch and leases.direct and leases.slots < geometry.num_hidden_layers * geometry.num_experts:
            self.guess_record = GuessRecord(self.top_k)
            for layer, after in pairwise(self.layers):
                layer.mlp.next_router = NextRouter(after.mlp.layer, after.post_attention_layernorm, after.mlp.gate)

    def __call__(
        self,
        ids: NDArray[np.int64],
        state: DecoderState,
        *,
        logits: int,
        usage: LeaseCount,
        trace: RouteRecord | None = None,
        replay: RouteReplay | None = None,
    ) -> Array:
        """Feeds a chunk of tokens and moves the state on; returns logits float32 [rows, vocab].

        usage: is added to.
        logits: how many of the last tokens to give logits for, at most len(ids).
        replay: experts chosen beforehand, which the routers then only weight.
        """
        x = self.embed_tokens(ids)
        position = state.position
        if self.check_finite:
            require_finite_residual(x, "the embedding", position)
        cosine, sine = self.rotary(position, len(ids))
        state.reserve(len(ids))
        recorded = state.token if len(ids) == 1 else None
        if recorded is not None:
            x, cosine, sine = recorded.begin(x, cosine, sine)
        result = np.empty((0, self.lm_head.rows), np.float32)
        guesses: Guesses | None = None
        if self.guess_record is not None and len(ids) == 1 and self.guess_record.begin_token():
            guesses = Guesses(self.guess_record, self.leases, self.top_k, self.threads)
        with Step(self.threads) as step:
            for number, (layer, layer_state) in enumerate(zip(self.layers, state.layers, strict=True)):
                kernels = partial(layer, x, layer_state, state.cached, cosine, sine)
                routing = kernels() if recorded is None else recorded.note(step, number, kernels)
                layer.mlp(routing, x, position, step, guesses, usage, trace, replay)
                if self.check_finite:
                    step.run()
                    require_finite_residual(x, f"layer {layer.mlp.layer}", position)
            if logits > 0:
                result = self.lm_head(Activations(self.norm(x[-logits:]), self.threads))
        state.advance(len(ids))
        return result
