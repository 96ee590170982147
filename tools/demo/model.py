"""The model of the demo checkpoint: its configuration, and a new one ready to be trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeAttention, Qwen3_5MoeGatedDeltaNet

# The keys and values of the checkpoint's config.json, but for its first and last line.
TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 4091,
    "dtype": "bfloat16",
    "eos_token_id": 4093,
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 4096,
}

_INPUT_PROJECTIONS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "experts.gate_up_proj",
)
_OUTPUT_PROJECTIONS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def new_model(seed: int) -> Qwen3_5MoeForCausalLM:
    """A model with initial weights drawn from the seed, in float32."""
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**TEXT_CONFIG)).float()
    with torch.no_grad():
        _initialize_projections(model)
        _initialize_recall(model)
    return model


def _initialize_projections(model: Qwen3_5MoeForCausalLM) -> None:
    """Projections keep the scale of what they read; those that write to the residual stream share it between them."""
    residual_scale = 1.5 / math.sqrt(2 * model.config.num_hidden_layers)
    for name, weight in model.named_parameters():
        scale = 0.8 / math.sqrt(weight.shape[-1])
        if name.endswith(_INPUT_PROJECTIONS):
            weight.normal_(0, scale)
        elif name.endswith(_OUTPUT_PROJECTIONS):
            weight.normal_(0, scale * residual_scale)


def _initialize_recall(model: Qwen3_5MoeForCausalLM) -> None:
    """Start near a circuit of associative recall (a "mimetic" initialisation).

    Queries match the keys of the same token, the keys of the linear layers look one token back through the
    convolution, values pass through, and the head reads what the embedding writes. It shortens the time until the model
    reads its context.
    """
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, 0.2)
    model.lm_head.weight.copy_(0.4 * embedding)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            _initialize_linear_recall(layer.linear_attn)
        else:
            _initialize_attention_recall(layer.self_attn)


def _initialize_linear_recall(delta_net: Qwen3_5MoeGatedDeltaNet) -> None:
    key_dim, value_dim = delta_net.key_dim, delta_net.value_dim
    queries, keys, values = slice(key_dim), slice(key_dim, 2 * key_dim), slice(2 * key_dim, 2 * key_dim + value_dim)
    in_proj, conv1d = delta_net.in_proj_qkv.weight, delta_net.conv1d.weight
    in_proj[keys] = in_proj[queries]
    conv1d.normal_(0, 0.1)
    conv1d[queries, 0, -1] += 1.0  # this token
    conv1d[keys, 0, -2] += 1.0  # the token before
    conv1d[values, 0, -1] += 1.0  # this token
    delta_net.dt_bias.copy_(_inverse_softplus(_draw_time_steps(len(delta_net.dt_bias))))
    delta_net.A_log.uniform_(1, 8).log_()
    delta_net.out_proj.weight.copy_(0.6 * in_proj[values].t() + 0.1 * delta_net.out_proj.weight)


def _draw_time_steps(heads: int) -> torch.Tensor:
    """Time steps [heads], log-uniform: of each pair of heads the first one remembers long."""
    long = torch.empty(heads).uniform_(math.log(1e-4), math.log(1e-3))
    short = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1))
    return torch.where(torch.arange(heads) % 2 == 0, long, short).exp()


def _inverse_softplus(value: torch.Tensor) -> torch.Tensor:
    return value + torch.log(-torch.expm1(-value))


def _initialize_attention_recall(attention: Qwen3_5MoeAttention) -> None:
    head_dim, group = attention.head_dim, attention.num_key_value_groups
    q_proj = attention.q_proj.weight.unflatten(0, (-1, 2 * head_dim))  # [heads, query and gate, hidden]
    k_proj = attention.k_proj.weight.unflatten(0, (-1, head_dim))  # [key value heads, head_dim, hidden]
    v_proj = attention.v_proj.weight.unflatten(0, (-1, head_dim))
    o_proj = attention.o_proj.weight.unflatten(1, (-1, head_dim))  # [hidden, heads, head_dim]
    for head in range(q_proj.shape[0]):
        key = k_proj[head // group]
        q_proj[head, :head_dim] = key + 0.5 * key.std() * torch.randn_like(key)
        o_proj[:, head] = 0.3 * v_proj[head // group].t() + 0.3 * o_proj[:, head]
