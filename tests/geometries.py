"""The small random geometries that parity is shown over, as Hugging Face text configs.

Between them: head ratios 1, 2, 3, 4 and one kv head; 2 to 40 experts, top-k 1 to 8; layers all linear, all full, full first,
intervals 2, 3 and 4; tied and untied heads; sizes that are multiples of neither 16, 32 nor 128; linear value heads 1 to 4
times the key heads, key and value dims apart; conv kernels 2, 3 and 4; rotary on a quarter, a half or all of a head. Prompts of
1 to 130 tokens cross the chunks of 64 in which transformers prefills the gated delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

L, F = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Case:
    """One random checkpoint and the tokens it is shown.

    Attributes:
        name: of the case and of its golden file.
        config: flat Hugging Face text config.
        seed: of weights and prompt.
        prompt: number of prompt tokens.
        experts: "fused" or "separate": how the checkpoint holds the routed experts.
        nested: whether config and tensor names take the multimodal form.
        shards: number of safetensors files.
        float32_vectors: A_log, dt_bias and the norms are float32 values that bfloat16 cannot hold.
    """

    name: str
    config: dict[str, Any]
    seed: int
    prompt: int
    experts: str = "fused"
    nested: bool = False
    shards: int = 1
    float32_vectors: bool = False

    def __str__(self) -> str:
        return self.name


def text_config(
    *,
    hidden: int,
    layers: int,
    vocab: int,
    heads: tuple[int, int, int],
    rotary: tuple[float, float],
    linear: tuple[int, int, int, int],
    experts: tuple[int, int, int, int],
    tied: bool = False,
    conv: int = 4,
    eps: float = 1e-6,
    interval: int = 4,
    layer_types: list[str] | None = None,
) -> dict[str, Any]:
    """A config.json of model type qwen3_5_moe_text.

    Args:
        heads: query heads, kv heads, head_dim.
        rotary: share of head_dim that is rotated, theta.
        linear: key heads, value heads, key dim, value dim.
        experts: experts, top-k, their intermediate size, the shared expert's intermediate size.
        interval: of full attention, if layer_types is not given.
    """
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rope_parameters": {"rope_type": "default", "rope_theta": rotary[1], "partial_rotary_factor": rotary[0]},
        "partial_rotary_factor": rotary[0],
        "linear_num_key_heads": linear[0],
        "linear_num_value_heads": linear[1],
        "linear_key_head_dim": linear[2],
        "linear_value_head_dim": linear[3],
        "linear_conv_kernel_dim": conv,
        "num_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "moe_intermediate_size": experts[2],
        "shared_expert_intermediate_size": experts[3],
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": vocab - 1,
        "pad_token_id": None,
    }
    if layer_types is None:
        return config | {"full_attention_interval": interval}
    return config | {"layer_types": layer_types}


CASES = [
    Case(
        "interval4",
        text_config(
            hidden=96,
            layers=5,
            vocab=131,
            heads=(4, 2, 24),
            rotary=(0.5, 10_000.0),
            linear=(2, 4, 16, 24),
            experts=(8, 2, 40, 24),
        ),
        seed=1,
        prompt=70,
        experts="separate",
    ),
    Case(
        "all_linear",
        text_config(
            hidden=64,
            layers=3,
            vocab=101,
            heads=(2, 1, 16),
            rotary=(0.25, 10_000.0),
            linear=(1, 3, 24, 16),
            experts=(5, 1, 32, 32),
            tied=True,
            layer_types=[L, L, L],
        ),
        seed=2,
        prompt=130,
        float32_vectors=True,
    ),
    Case(
        "full_first",
        text_config(
            hidden=160,
            layers=4,
            vocab=203,
            heads=(8, 2, 16),
            rotary=(1.0, 1_000_000.0),
            linear=(2, 8, 16, 16),
            experts=(16, 4, 136, 48),
            conv=3,
            layer_types=[F, L, L, F],
        ),
        seed=13,
        prompt=33,
        nested=True,
        shards=3,
    ),
    Case(
        "mqa_interval2",
        text_config(
            hidden=128,
            layers=4,
            vocab=259,
            heads=(6, 1, 40),
            rotary=(0.25, 5_000_000.0),
            linear=(4, 4, 32, 16),
            experts=(24, 3, 72, 96),
            tied=True,
            eps=1e-5,
            interval=2,
        ),
        seed=4,
        prompt=64,
        nested=True,
        experts="separate",
    ),
    Case(
        "mha_interval3",
        text_config(
            hidden=112,
            layers=4,
            vocab=150,
            heads=(3, 3, 32),
            rotary=(0.25, 10_000.0),
            linear=(3, 6, 8, 40),
            experts=(40, 8, 56, 56),
            interval=3,
        ),
        seed=15,
        prompt=17,
        float32_vectors=True,
    ),
    Case(
        "real_ratios",
        text_config(
            hidden=128,
            layers=4,
            vocab=333,
            heads=(16, 2, 16),
            rotary=(0.25, 10_000_000.0),
            linear=(4, 8, 32, 32),
            experts=(32, 8, 64, 64),
        ),
        seed=6,
        prompt=40,
        nested=True,
        shards=2,
    ),
    Case(
        "wide_experts",
        text_config(
            hidden=144,
            layers=2,
            vocab=97,
            heads=(4, 4, 20),
            rotary=(0.5, 100_000.0),
            linear=(2, 6, 20, 24),
            experts=(8, 3, 264, 140),
            interval=2,
        ),
        seed=7,
        prompt=9,
        shards=2,
        experts="separate",
    ),
    Case(
        "all_full",
        text_config(
            hidden=80,
            layers=2,
            vocab=111,
            heads=(5, 1, 16),
            rotary=(0.5, 10_000.0),
            linear=(1, 1, 16, 16),
            experts=(6, 2, 16, 48),
            tied=True,
            layer_types=[F, F],
        ),
        seed=8,
        prompt=50,
    ),
    Case(
        "smallest",
        text_config(
            hidden=32,
            layers=2,
            vocab=17,
            heads=(1, 1, 8),
            rotary=(0.5, 10_000.0),
            linear=(1, 1, 8, 8),
            experts=(2, 2, 16, 8),
            conv=2,
            layer_types=[F, L],
        ),
        seed=9,
        prompt=1,
    ),
]
