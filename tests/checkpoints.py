"""Small random checkpoints in every Hugging Face form, and ways to damage them. Numpy and json only.

A checkpoint is a dict of `Stored` tensors under the names of the text-only form with fused experts; `write_checkpoint` turns
that into the form asked for. Nothing here uses the package, so that tests compare two accounts of the format.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

DEMO = Path(str(files("sparseflow") / "demo"))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

# Odd on purpose: no size is a multiple of 16, 32 or 128 where the model allows it, and K spans more than one group.
SMALL: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 140,
    "num_hidden_layers": 3,
    "vocab_size": 71,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}


@dataclass(frozen=True)
class Stored:
    """A tensor as a shard holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: np.ndarray, dtype: str = "BF16") -> Stored:
        """float32 values stored as `dtype`; bfloat16 cuts the lower half off."""
        values = np.asarray(values, np.float32)
        if dtype == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            data = values.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()
        return cls(dtype, values.shape, data)

    def values(self) -> np.ndarray:
        """The float32 values it stands for."""
        if self.dtype == "BF16":
            flat = (np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(self.data, {"F16": np.float16, "F32": np.float32}[self.dtype]).astype(np.float32)
        return flat.reshape(self.shape)


Tensors = dict[str, Stored]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a text-only checkpoint with fused experts."""
    c = config
    hidden, inner, shared, experts = (
        c["hidden_size"],
        c["moe_intermediate_size"],
        c["shared_expert_intermediate_size"],
        c["num_experts"],
    )
    heads, head_dim = c["num_attention_heads"], c["head_dim"]
    kv_dim = c["num_key_value_heads"] * head_dim
    value_heads = c["linear_num_value_heads"]
    value_dim = value_heads * c["linear_value_head_dim"]
    conv_dim = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + value_dim
    linear = {
        "in_proj_qkv.weight": (conv_dim, hidden),
        "in_proj_z.weight": (value_dim, hidden),
        "in_proj_a.weight": (value_heads, hidden),
        "in_proj_b.weight": (value_heads, hidden),
        "conv1d.weight": (conv_dim, 1, c["linear_conv_kernel_dim"]),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "norm.weight": (c["linear_value_head_dim"],),
        "out_proj.weight": (hidden, value_dim),
    }
    full = {
        "q_proj.weight": (2 * heads * head_dim, hidden),
        "k_proj.weight": (kv_dim, hidden),
        "v_proj.weight": (kv_dim, hidden),
        "o_proj.weight": (hidden, heads * head_dim),
        "q_norm.weight": (head_dim,),
        "k_norm.weight": (head_dim,),
    }
    mlp = {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * inner, hidden),
        "experts.down_proj": (experts, hidden, inner),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
        "shared_expert_gate.weight": (1, hidden),
    }
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        result["lm_head.weight"] = (c["vocab_size"], hidden)
    for layer, layer_type in enumerate(c["layer_types"]):
        at = f"model.layers.{layer}."
        result |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        mixer = ("linear_attn.", linear) if layer_type == "linear_attention" else ("self_attn.", full)
        for prefix, part in (mixer, ("mlp.", mlp)):
            result |= {at + prefix + name: shape for name, shape in part.items()}
    return result


def random_tensors(config: dict[str, Any] = SMALL, dtype: str = "BF16", seed: int = 0) -> Tensors:
    """Random weights of the geometry, all stored as `dtype`."""
    random = np.random.default_rng(seed)
    return {
        name: Stored.of(random.standard_normal(shape, np.float32) * 0.05, dtype) for name, shape in shapes(config).items()
    }


def extra_tensors(prefix: str = "model.") -> Tensors:
    """Vision and multi-token-prediction tensors, of dtypes and shapes that the text model never has."""
    return {
        f"{prefix}visual.patch_embed.proj.weight": Stored("F32", (3, 2, 2), bytes(48)),
        f"{prefix}visual.blocks.0.attn.qkv.bias": Stored("I32", (6,), bytes(24)),
        "mtp.layers.0.mlp.gate.weight": Stored("F8_E4M3", (5, 3), bytes(15)),
    }


def split_experts(tensors: Tensors) -> Tensors:
    """Fused experts -> one tensor per expert and projection, as transformers saves them."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        base, _, projection = name.rpartition(".")
        if projection not in ("gate_up_proj", "down_proj"):
            result[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else ["down_proj"]
        part = len(tensor.data) // (experts * len(names))
        for index in range(experts * len(names)):
            expert, which = divmod(index, len(names))
            data = tensor.data[index * part : (index + 1) * part]
            shape = (rows // len(names), columns)
            result[f"{base}.{expert}.{names[which]}.weight"] = Stored(tensor.dtype, shape, data)
    return result


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """One shard, byte for byte as the format describes it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values()))


def write_checkpoint(
    folder: Path,
    tensors: Tensors | None = None,
    config: dict[str, Any] = SMALL,
    *,
    shards: int = 1,
    experts: str = "fused",
    nested: bool = False,
    prefix: str = "model.",
    extra: Tensors | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a checkpoint folder and return it.

    tensors: as `random_tensors` makes them (the default); shards: above 1, tensors are dealt out in turn and an index names them;
    experts: "fused" or "split"; nested: the configuration inside `text_config`; prefix: "model." or "model.language_model.";
    extra: further tensors under their own names; tokenizer: copy the demo's tokenizer files.
    """
    folder.mkdir(parents=True)
    tensors = random_tensors(config) if tensors is None else tensors
    if experts == "split":
        tensors = split_experts(tensors)
    tensors = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor for name, tensor in tensors.items()
    } | (extra or {})
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        names = {
            name: f"model-{index % shards + 1:05d}-of-{shards:05d}.safetensors" for index, name in enumerate(sorted(tensors))
        }
        for shard in set(names.values()):
            write_safetensors(folder / shard, {name: tensors[name] for name in names if names[name] == shard})
        index = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder, config, nested=nested)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    if tokenizer:
        for name in TOKENIZER_FILES:
            shutil.copy(DEMO / name, folder / name)
    return folder


def write_config(folder: Path, config: dict[str, Any], *, nested: bool = False) -> None:
    """config.json, flat or as in the multimodal checkpoints."""
    if nested:
        config = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": {name: value for name, value in config.items() if name not in ("architectures", "tie_word_embeddings")},
            "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1},
        }
    (folder / "config.json").write_text(json.dumps(config))
