"""The forward pass in numpy over the tensors of a checkpoint or of a packed folder."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reference import ops
from reference.checkpoint import Linear
from reference.ops import Array
from reference.rounding import Rounding, Tie


class Tensors(Protocol):
    """What the decoder needs of `CheckpointTensors` and `PackedTensors`."""

    config: dict[str, Any]
    dtype: type

    def array(self, name: str) -> Array: ...
    def linear(self, name: str) -> Linear: ...
    def expert(self, layer: int, expert: int) -> tuple[Linear, Linear, Linear]: ...
    def embedding(self, ids: NDArray[np.integer]) -> Array: ...


class Reference:
    """The decoder, for whole sequences from position 0."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        config = self.config = tensors.config
        interval = config.get("full_attention_interval", 4)
        self.layer_types = config.get("layer_types") or [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(config["num_hidden_layers"])
        ]
        rope = config["rope_parameters"]
        self.theta = rope["rope_theta"]
        self.rotary_dim = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        self.eps = config["rms_norm_eps"]

    def forward(self, ids: NDArray[np.integer] | list[int], flipped: frozenset[Tie] = frozenset()) -> tuple[Array, Rounding]:
        """[n] token ids -> (logits [n, vocab], how activations were rounded). `flipped`: see `Rounding`."""
        ids = np.asarray(ids)
        rounding = Rounding(len(ids), flipped)
        x = self.tensors.embedding(ids)
        for layer, layer_type in enumerate(self.layer_types):
            name = f"layers.{layer}"
            mixed = ops.rms_norm(x, self.tensors.array(f"{name}.input_layernorm.weight"), self.eps)
            mixer = self.gated_delta_net if layer_type == "linear_attention" else self.attention
            x = x + mixer(name, mixed, rounding)
            mixed = ops.rms_norm(x, self.tensors.array(f"{name}.post_attention_layernorm.weight"), self.eps)
            x = x + self.sparse_moe(layer, mixed, rounding)
        x = ops.rms_norm(x, self.tensors.array("norm.weight"), self.eps)
        return self.apply("lm_head.input", x, rounding, self.tensors.linear("lm_head.weight"))[0], rounding

    def apply(self, label: str, x: Array, rounding: Rounding, *linears: Linear, tokens: Any = slice(None)) -> list[Array]:
        """x [m, K] -> one [m, R] per linear; `label` names x, `tokens` says which positions its rows are."""
        rounded = {
            group: rounding.round(label, x, tokens, group) if group else x
            for group in {linear.activation_group for linear in linears}
        }
        return [rounded[linear.activation_group] @ linear.weight.T for linear in linears]

    def linears(self, name: str, *projections: str) -> list[Linear]:
        """The matrices `name.projection.weight`."""
        return [self.tensors.linear(f"{name}.{projection}.weight") for projection in projections]

    def attention(self, name: str, x: Array, rounding: Rounding) -> Array:
        """[n, H] -> [n, H]."""
        config, n = self.config, len(x)
        heads, kv_heads, head_dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        name += ".self_attn"
        query, key, value = self.apply(f"{name}.input", x, rounding, *self.linears(name, "q_proj", "k_proj", "v_proj"))
        empty = np.zeros((0, kv_heads, head_dim), x.dtype)
        out, _, _ = ops.gated_attention(
            query.reshape(n, heads, 2 * head_dim),
            key.reshape(n, kv_heads, head_dim),
            value.reshape(n, kv_heads, head_dim),
            self.tensors.array(f"{name}.q_norm.weight"),
            self.tensors.array(f"{name}.k_norm.weight"),
            empty,
            empty,
            rotary_dim=self.rotary_dim,
            theta=self.theta,
            eps=self.eps,
        )
        return self.apply(f"{name}.output", out, rounding, *self.linears(name, "o_proj"))[0]

    def gated_delta_net(self, name: str, x: Array, rounding: Rounding) -> Array:
        """[n, H] -> [n, H]."""
        config, n = self.config, len(x)
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        name += ".linear_attn"
        projections = self.linears(name, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
        qkv, z, a, b = self.apply(f"{name}.input", x, rounding, *projections)
        weight = self.tensors.array(f"{name}.conv1d.weight")
        qkv, _ = ops.causal_conv(qkv, weight, np.zeros((len(weight) - 1, qkv.shape[1]), x.dtype))
        query, key, value = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
        g = ops.log_decay(a, self.tensors.array(f"{name}.A_log"), self.tensors.array(f"{name}.dt_bias"))
        out, _ = ops.gated_delta_sequence(
            query.reshape(n, key_heads, key_dim),
            key.reshape(n, key_heads, key_dim),
            value.reshape(n, value_heads, value_dim),
            g,
            ops.sigmoid(b),
            np.zeros((value_heads, key_dim, value_dim), x.dtype),
        )
        out = ops.gated_rms_norm(out, z.reshape(out.shape), self.tensors.array(f"{name}.norm.weight"), self.eps)
        return self.apply(f"{name}.output", out.reshape(n, -1), rounding, *self.linears(name, "out_proj"))[0]

    def sparse_moe(self, layer: int, x: Array, rounding: Rounding) -> Array:
        """[n, H] -> [n, H]: the routed experts' weighted sum in ascending id, plus the gated shared expert."""
        name = f"layers.{layer}.mlp"
        everyone = slice(None)

        def swiglu(label: str, linears: tuple[Linear, Linear, Linear], tokens: Any) -> Array:
            gate, up, down = linears
            gate_out, up_out = self.apply(f"{name}.input", x[tokens], rounding, gate, up, tokens=tokens)
            return self.apply(label, ops.silu(gate_out) * up_out, rounding, down, tokens=tokens)[0]

        logits, shared_gate = self.apply(f"{name}.input", x, rounding, *self.linears(name, "gate", "shared_expert_gate"))
        routes = ops.router_top_k(logits, self.config["num_experts_per_tok"])
        rounding.route(routes.gap)
        out = np.zeros_like(x)
        for expert in np.unique(routes.ids):
            tokens, slot = np.nonzero(routes.ids == expert)
            routed = swiglu(f"{name}.experts.{expert}.hidden", self.tensors.expert(layer, int(expert)), tokens)
            out[tokens] += routes.weights[tokens, slot, None] * routed
        gate, up, down = self.linears(f"{name}.shared_expert", "gate_proj", "up_proj", "down_proj")
        return out + ops.sigmoid(shared_gate) * swiglu(f"{name}.shared_expert.hidden", (gate, up, down), everyone)
