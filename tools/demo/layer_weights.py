"""The weights of a decoder layer as plain tuples of tensors, named as in the checkpoint.

torch.compile makes one function of them for all layers; given the modules it would make one a layer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer


class DeltaNetWeights(NamedTuple):
    """The weights of a linear attention layer."""

    input_layernorm: Tensor
    in_proj_qkv: Tensor
    in_proj_z: Tensor
    in_proj_b: Tensor
    in_proj_a: Tensor
    conv1d: Tensor
    dt_bias: Tensor
    A_log: Tensor
    norm: Tensor
    out_proj: Tensor

    @classmethod
    def of(cls, layer: Qwen3_5MoeDecoderLayer) -> DeltaNetWeights:
        """Those of a decoder layer."""
        delta_net = layer.linear_attn
        return cls(
            input_layernorm=layer.input_layernorm.weight,
            in_proj_qkv=delta_net.in_proj_qkv.weight,
            in_proj_z=delta_net.in_proj_z.weight,
            in_proj_b=delta_net.in_proj_b.weight,
            in_proj_a=delta_net.in_proj_a.weight,
            conv1d=delta_net.conv1d.weight,
            dt_bias=delta_net.dt_bias,
            A_log=delta_net.A_log,
            norm=delta_net.norm.weight,
            out_proj=delta_net.out_proj.weight,
        )


class AttentionWeights(NamedTuple):
    """The weights of a full attention layer."""

    input_layernorm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor

    @classmethod
    def of(cls, layer: Qwen3_5MoeDecoderLayer) -> AttentionWeights:
        """Those of a decoder layer."""
        attention = layer.self_attn
        return cls(
            input_layernorm=layer.input_layernorm.weight,
            q_proj=attention.q_proj.weight,
            k_proj=attention.k_proj.weight,
            v_proj=attention.v_proj.weight,
            o_proj=attention.o_proj.weight,
            q_norm=attention.q_norm.weight,
            k_norm=attention.k_norm.weight,
        )


class MoeWeights(NamedTuple):
    """The weights of a mixture of experts but for the routed experts."""

    post_attention_layernorm: Tensor
    gate: Tensor
    shared_gate_proj: Tensor
    shared_up_proj: Tensor
    shared_down_proj: Tensor
    shared_expert_gate: Tensor

    @classmethod
    def of(cls, layer: Qwen3_5MoeDecoderLayer) -> MoeWeights:
        """Those of a decoder layer."""
        moe = layer.mlp
        return cls(
            post_attention_layernorm=layer.post_attention_layernorm.weight,
            gate=moe.gate.weight,
            shared_gate_proj=moe.shared_expert.gate_proj.weight,
            shared_up_proj=moe.shared_expert.up_proj.weight,
            shared_down_proj=moe.shared_expert.down_proj.weight,
            shared_expert_gate=moe.shared_expert_gate.weight,
        )
