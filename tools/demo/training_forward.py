"""The forward pass used for training: the arithmetic of transformers' Qwen3_5MoeForCausalLM, in fewer and larger steps.

The layers are functions of tensors, so that torch.compile compiles each of them once for all layers. Shapes in the
comments: B sequences, S tokens each, H hidden_size; for the linear layers K key heads and V value heads of dimension
D_k and D_v; N chunks of C tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from expert_mlp import ExpertMlp
from layer_weights import AttentionWeights, DeltaNetWeights, MoeWeights

EPSILON = 1e-6


class Routing(NamedTuple):
    """What the router makes of the tokens, and the output of the shared expert."""

    x: Tensor  # [B * S, H], normalised
    probabilities: Tensor  # [B * S, num_experts]
    weights: Tensor  # [B * S, top_k]
    experts: Tensor  # [B * S, top_k]
    shared: Tensor  # [B * S, H]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with a zero-centred weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * (1.0 + weight)


def gated_delta_net(x: Tensor, weights: DeltaNetWeights, key_heads: int, chunk: int) -> Tensor:
    """x [B, S, H] plus the output of a linear attention layer; S is a multiple of `chunk`."""
    B, S, _ = x.shape
    value_heads, value_head_dim = len(weights.A_log), len(weights.norm)
    value_dim = value_heads * value_head_dim
    key_dim = (len(weights.in_proj_qkv) - value_dim) // 2
    x_norm = rms_norm(x, weights.input_layernorm)
    in_proj = torch.cat([weights.in_proj_qkv, weights.in_proj_z, weights.in_proj_b, weights.in_proj_a])
    qkv, z, b, a = (x_norm @ in_proj.t()).split([2 * key_dim + value_dim, value_dim, value_heads, value_heads], -1)
    qkv = F.silu(_causal_conv(qkv, weights.conv1d.squeeze(1)))

    def by_chunk(t: Tensor, heads: int) -> Tensor:  # [B, S, heads * D] -> [B, heads, N, C, D]
        return t.reshape(B, S // chunk, chunk, heads, -1).permute(0, 3, 1, 2, 4)

    query, key, value = qkv.split([key_dim, key_dim, value_dim], -1)
    query, key, value = by_chunk(query, key_heads), by_chunk(key, key_heads), by_chunk(value, value_heads)
    query = _l2_norm(query) * query.shape[-1] ** -0.5
    key = _l2_norm(key)
    beta = by_chunk(b.sigmoid(), value_heads).squeeze(-1)
    log_decay = by_chunk(-weights.A_log.exp() * F.softplus(a + weights.dt_bias), value_heads).squeeze(-1)

    output = _chunked_delta_rule(query, key, value, beta, log_decay)
    output = output.permute(0, 2, 3, 1, 4).reshape(B, S, value_heads, value_head_dim)
    output = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + EPSILON) * weights.norm
    return x + (output.flatten(2) * F.silu(z)) @ weights.out_proj.t()


def _causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution over the token and those before it; x [B, S, channels], weight [channels, kernel]."""
    S, kernel = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    output = padded[:, :S] * weight[:, 0]
    for tap in range(1, kernel):
        output = output + padded[:, tap : tap + S] * weight[:, tap]
    return output


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """The gated delta rule (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024), a chunk at a time.

    query and key [B, K, N, C, D_k], value [B, V, N, C, D_v], beta and log_decay [B, V, N, C] -> [B, V, N, C, D_v].
    Within a chunk the updates of the tokens depend on each other through a triangular system, solved at once; the
    state [D_k, D_v] goes from chunk to chunk.
    """
    B, key_heads, chunks, C, _ = key.shape
    value_heads, value_head_dim = value.shape[1], value.shape[-1]

    def per_value_head(t: Tensor) -> Tensor:  # [B, K, ...] -> [B, V, ...]
        return t.repeat_interleave(value_heads // key_heads, dim=1)

    # The products of keys and queries are made once a key head, before they are repeated.
    key_key = per_value_head(key @ key.transpose(-1, -2))
    query_key = per_value_head(query @ key.transpose(-1, -2))
    query, key = per_value_head(query), per_value_head(key)

    log_decay = log_decay.cumsum(-1)  # from the start of the chunk
    future = torch.ones(C, C, dtype=torch.bool).triu(1)
    decay = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    decay_from_start = log_decay.exp().unsqueeze(-1)
    decay_to_end = (log_decay[..., -1:] - log_decay).exp().unsqueeze(-1)
    decay_of_chunk = log_decay[..., -1].exp()[..., None, None]
    beta = beta.unsqueeze(-1)

    # unitriangular: the solver takes the diagonal as 1, whatever stands there
    system = key_key * decay * beta
    right_side = torch.cat([value * beta, key * beta * decay_from_start], -1)
    solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    update, state_correction = solution.split([value_head_dim, key.shape[-1]], -1)
    attention = query_key * decay
    query = query * decay_from_start
    key = (key * decay_to_end).transpose(-1, -2)

    state = value.new_zeros(B, value_heads, key.shape[-2], value_head_dim)
    outputs = []
    for n in range(chunks):
        new_value = update[:, :, n] - state_correction[:, :, n] @ state
        outputs.append(query[:, :, n] @ state + attention[:, :, n] @ new_value)
        state = state * decay_of_chunk[:, :, n] + key[:, :, n] @ new_value
    return torch.stack(outputs, 2)


def gated_attention(x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H] plus the output of a full attention layer; cos and sin are [S, rotary_dim / 2]."""
    B, S, _ = x.shape
    head_dim = len(weights.q_norm)
    heads, key_value_heads = len(weights.q_proj) // (2 * head_dim), len(weights.k_proj) // head_dim
    x_norm = rms_norm(x, weights.input_layernorm)
    in_proj = torch.cat([weights.q_proj, weights.k_proj, weights.v_proj])
    sizes = [heads * 2 * head_dim, key_value_heads * head_dim, key_value_heads * head_dim]
    query_gate, key, value = (x_norm @ in_proj.t()).split(sizes, -1)
    query, gate = query_gate.reshape(B, S, heads, 2 * head_dim).chunk(2, -1)
    query = rms_norm(query, weights.q_norm).transpose(1, 2)  # [B, heads, S, head_dim]
    key = rms_norm(key.reshape(B, S, key_value_heads, head_dim), weights.k_norm).transpose(1, 2)
    value = value.reshape(B, S, key_value_heads, head_dim).transpose(1, 2)
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    key, value = (t.repeat_interleave(heads // key_value_heads, dim=1) for t in (key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    output = output.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2))
    return x + output @ weights.o_proj.t()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the first dimensions of the heads."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def route(x: Tensor, weights: MoeWeights, top_k: int) -> Routing:
    """The choice of experts for x [B, S, H], and the output of the shared expert."""
    x = rms_norm(x, weights.post_attention_layernorm).flatten(0, 1)
    num_experts, intermediate = len(weights.gate), len(weights.shared_gate_proj)
    in_proj = torch.cat([weights.shared_gate_proj, weights.shared_up_proj, weights.gate, weights.shared_expert_gate])
    shared_gate, shared_up, logits, gate = (x @ in_proj.t()).split([intermediate, intermediate, num_experts, 1], -1)
    shared = (F.silu(shared_gate) * shared_up) @ weights.shared_down_proj.t() * torch.sigmoid(gate)
    probabilities = torch.softmax(logits, -1)
    top_probabilities, experts = torch.topk(probabilities, top_k, -1)
    return Routing(x, probabilities, top_probabilities / top_probabilities.sum(-1, keepdim=True), experts, shared)


def token_loss(x: Tensor, norm: Tensor, lm_head: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy [B, S] of the targets [B, S] after the last layer's output x [B, S, H]."""
    logits = rms_norm(x, norm) @ lm_head.t()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


class Losses(NamedTuple):
    """The losses of a batch, and the share of its tokens each expert of each layer got."""

    tokens: Tensor  # [B, S]
    balance: Tensor
    loads: Tensor  # [layers, num_experts], each row sums to top_k


class TrainingForward:
    """The training forward of a model, for sequences whose length is a multiple of `chunk`."""

    def __init__(self, model: Qwen3_5MoeForCausalLM, chunk: int, compiled: bool = False) -> None:
        self.model = model
        self.chunk = chunk
        self._cos, self._sin = _rotary_tables(model)
        self._gated_delta_net = torch.compile(gated_delta_net, dynamic=False, disable=not compiled)
        self._gated_attention = torch.compile(gated_attention, dynamic=False, disable=not compiled)
        self._route = torch.compile(route, dynamic=False, disable=not compiled)
        self._token_loss = torch.compile(token_loss, dynamic=False, disable=not compiled)

    def losses(self, inputs: Tensor, targets: Tensor) -> Losses:
        """The losses of token ids `inputs` [B, S] followed by `targets` [B, S]."""
        x, balance, loads = self._layers(inputs)
        tokens = self._token_loss(x, self.model.model.norm.weight, self.model.lm_head.weight, targets)
        return Losses(tokens, balance, loads)

    def logits(self, inputs: Tensor) -> Tensor:
        """The logits [B, S, vocab_size] of token ids [B, S]."""
        x, _, _ = self._layers(inputs)
        return rms_norm(x, self.model.model.norm.weight) @ self.model.lm_head.weight.t()

    def _layers(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.embedding(inputs, self.model.model.embed_tokens.weight)
        balances, loads = [], []
        for layer in self.model.model.layers:
            x = self._mix_tokens(x, layer)
            routing = self._route(x, MoeWeights.of(layer), self.model.config.num_experts_per_tok)
            experts = layer.mlp.experts
            output = ExpertMlp.apply(
                routing.x, routing.experts, routing.weights, experts.gate_up_proj, experts.down_proj
            )
            x = x + (output + routing.shared).view_as(x)
            load = _expert_load(routing)
            balances.append(len(load) * (load * routing.probabilities.mean(0)).sum())
            loads.append(load)
        return x, torch.stack(balances).mean(), torch.stack(loads)

    def _mix_tokens(self, x: Tensor, layer: Qwen3_5MoeDecoderLayer) -> Tensor:
        if layer.block_type == "linear_attention":
            key_heads = self.model.config.linear_num_key_heads
            return self._gated_delta_net(x, DeltaNetWeights.of(layer), key_heads, self.chunk)
        S = x.shape[1]
        return self._gated_attention(x, AttentionWeights.of(layer), self._cos[:S], self._sin[:S])


def _expert_load(routing: Routing) -> Tensor:
    """The share of the tokens that chose each expert [num_experts]."""
    num_experts = routing.probabilities.shape[-1]
    return torch.bincount(routing.experts.flatten(), minlength=num_experts) / len(routing.experts)


def _rotary_tables(model: Qwen3_5MoeForCausalLM) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position_embeddings, rotary_dim / 2]; for text the three position axes of the model agree."""
    config = model.config
    rope: Any = config.rope_parameters
    rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
    exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    angles = torch.arange(config.max_position_embeddings).float().unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()
