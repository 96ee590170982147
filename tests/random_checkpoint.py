"""Random checkpoints of any geometry, the same bytes wherever and with whatever numpy they are made.

Numbers come from PCG64's raw output (numpy keeps that stream fixed, unlike its distributions), one stream per tensor name,
as sums of four 16-bit uniforms: near enough to normal, and exact to compute. Scales are chosen so that a token's hidden
state stays of order 1, every part of every layer contributes, and router logits lie well apart.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geometries import Case

Weights = dict[str, NDArray[np.float32]]

TINY_VISION = {
    "model_type": "qwen3_5_moe_vision",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
"""The part of a nested config that is left out of a pack, small enough for transformers to make."""


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 -> bfloat16 bit patterns, rounded to nearest even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 values rounded to what bfloat16 can hold."""
    return (to_bf16(values).astype(np.uint32) << 16).view(np.float32)


def _raw(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """[*shape, 4] uniform 16-bit integers of the tensor `name`."""
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    return stream.random_raw(int(np.prod(shape))).astype("<u8").view("<u2").reshape(*shape, 4)


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    """Near-normal values (Irwin-Hall of four) of mean 0."""
    total = _raw(seed, name, shape).astype(np.int64).sum(axis=-1) - 2 * 65535
    return (total * (std * 3**0.5 / 65536)).astype(np.float32)


def uniform(seed: int, name: str, shape: tuple[int, ...], low: float, high: float) -> NDArray[np.float64]:
    """Uniform values in (low, high)."""
    return low + (high - low) * (_raw(seed, name, shape)[..., 0] + 0.5) / 65536


def random_weights(case: Case) -> Weights:
    """Canonical text-model tensors (`model.layers.N...`, experts fused) of a case, as float32.

    Matrices, convolutions and embeddings hold bfloat16 values; so do the vectors, unless the case asks for float32 ones.
    """
    c, seed = case.config, case.seed
    H, I, S, E = (
        c[k] for k in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts")
    )
    heads, kv_heads, head_dim = (c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    value_heads = c["linear_num_value_heads"]
    key_size = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value_size = value_heads * c["linear_value_head_dim"]
    conv_size, kernel = 2 * key_size + value_size, c["linear_conv_kernel_dim"]
    weights: Weights = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        weights[name] = bf16_values(normal(seed, name, shape, gain * shape[-1] ** -0.5))

    def vector(name: str, values: NDArray[np.floating]) -> None:
        values = values.astype(np.float32)
        weights[name] = values if case.float32_vectors else bf16_values(values)

    weights["model.embed_tokens.weight"] = bf16_values(normal(seed, "model.embed_tokens.weight", (c["vocab_size"], H), 0.5))
    for layer, layer_type in enumerate(layer_types(c)):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            vector(prefix + norm, normal(seed, prefix + norm, (H,), 0.2))
        if layer_type == "full_attention":
            name = prefix + "self_attn."
            matrix(name + "q_proj.weight", heads * head_dim * 2, H)
            matrix(name + "k_proj.weight", kv_heads * head_dim, H)
            matrix(name + "v_proj.weight", kv_heads * head_dim, H)
            matrix(name + "o_proj.weight", H, heads * head_dim, gain=2.0)
            for norm in ("q_norm.weight", "k_norm.weight"):
                vector(name + norm, 0.4 + normal(seed, name + norm, (head_dim,), 0.2))
        else:
            name = prefix + "linear_attn."
            matrix(name + "in_proj_qkv.weight", conv_size, H)
            # Keys resemble their queries: the gated norm would blow up the rounding of a read that is nearly zero.
            query, key, _ = np.split(weights[name + "in_proj_qkv.weight"], [key_size, 2 * key_size])
            key[:] = bf16_values(np.float32(0.8) * query + np.float32(0.6) * key)
            matrix(name + "in_proj_z.weight", value_size, H)
            matrix(name + "in_proj_a.weight", value_heads, H)
            matrix(name + "in_proj_b.weight", value_heads, H)
            matrix(name + "out_proj.weight", H, value_size, gain=1.5)
            matrix(name + "conv1d.weight", conv_size, 1, kernel, gain=1.5)
            query, key, _ = np.split(weights[name + "conv1d.weight"], [key_size, 2 * key_size])
            key[:] = query
            decay = uniform(seed, name + "A_log", (value_heads,), 0.01, 16)
            # Small steps for the fast heads, so that every head remembers more than the last token.
            vector(name + "A_log", np.log(decay))
            vector(name + "dt_bias", np.log(np.expm1(uniform(seed, name + "dt_bias", (value_heads,), 0.02, 1.0) / decay)))
            vector(name + "norm.weight", 1 + normal(seed, name + "norm.weight", (c["linear_value_head_dim"],), 0.2))
        name = prefix + "mlp."
        matrix(name + "gate.weight", E, H, gain=2.0)
        matrix(name + "experts.gate_up_proj", E, 2 * I, H, gain=1.5)
        matrix(name + "experts.down_proj", E, H, I, gain=1.5)
        matrix(name + "shared_expert.gate_proj.weight", S, H, gain=1.5)
        matrix(name + "shared_expert.up_proj.weight", S, H, gain=1.5)
        matrix(name + "shared_expert.down_proj.weight", H, S, gain=1.5)
        matrix(name + "shared_expert_gate.weight", 1, H)
    vector("model.norm.weight", normal(seed, "model.norm.weight", (H,), 0.2))
    if not c["tie_word_embeddings"]:
        matrix("lm_head.weight", c["vocab_size"], H)
    return weights


def layer_types(config: dict[str, Any]) -> list[str]:
    """The kinds of the layers, given or after the interval."""
    interval = config.get("full_attention_interval", 4)
    return config.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(config["num_hidden_layers"])
    ]


def random_prompt(case: Case) -> NDArray[np.int64]:
    """[case.prompt] token ids."""
    return (uniform(case.seed, "prompt", (case.prompt,), 0, case.config["vocab_size"])).astype(np.int64)


def digest(weights: Weights) -> str:
    """SHA-256 over names, shapes and float32 values, in order of the names."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(f"{name} {weights[name].shape}\n".encode())
        sha.update(np.ascontiguousarray(weights[name], "<f4").tobytes())
    return sha.hexdigest()


def write_safetensors(path: Path, tensors: Weights) -> None:
    """One safetensors file: BF16 where bfloat16 holds every value of a tensor, F32 where it does not."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, tensor in tensors.items():
        bits = to_bf16(tensor)
        exact = np.array_equal((bits.astype(np.uint32) << 16).view(np.float32), tensor)
        chunks.append(bits.astype("<u2").tobytes() if exact else tensor.astype("<f4").tobytes())
        end = offset + len(chunks[-1])
        dtype = "BF16" if exact else "F32"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    weights: Weights,
    *,
    experts: str = "fused",
    nested: bool = False,
    shards: int = 1,
    extra: Weights | None = None,
) -> Path:
    """A checkpoint folder in one of the forms in which they are published.

    Args:
        config: flat text config.
        weights: as of `random_weights`.
        experts: "fused" (`gate_up_proj`, `down_proj`) or "separate" (one tensor per expert and projection).
        nested: config in `text_config` of a multimodal one, names under `model.language_model.`.
        shards: tensors are dealt to so many files in turn, with an index if there is more than one.
        extra: tensors to add under their own names (vision, MTP).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: Weights = {}
    for name, tensor in weights.items():
        if nested:
            name = name.replace("model.", "model.language_model.", 1)
        if experts == "separate" and name.endswith((".gate_up_proj", ".down_proj")):
            base, projection = name.rsplit(".", 1)
            for e, matrix in enumerate(tensor):
                if projection == "down_proj":
                    tensors[f"{base}.{e}.down_proj.weight"] = matrix
                else:
                    gate, up = np.split(matrix, 2)
                    tensors[f"{base}.{e}.gate_proj.weight"] = gate
                    tensors[f"{base}.{e}.up_proj.weight"] = up
        else:
            tensors[name] = tensor
    tensors |= extra or {}
    names = list(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in sorted(set(files.values())):
            write_safetensors(folder / file, {name: tensors[name] for name in names if files[name] == file})
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if nested:
        config = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {k: v for k, v in config.items() if k != "architectures"},
            "vision_config": TINY_VISION | {"out_hidden_size": config["hidden_size"]},
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    text = config.get("text_config", config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": text["eos_token_id"]}))
    (folder / "tokenizer.json").write_text(json.dumps(counting_tokenizer(text["vocab_size"])))
    return folder


def counting_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json whose tokens are the decimal numbers of their ids."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {str(i): i for i in range(vocab_size)}, "unk_token": "0"},
    }
