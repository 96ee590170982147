"""A Hugging Face checkpoint folder -> config and tensors, for the unquantised reference.

Knows the safetensors layout (u64 header length, JSON header, data), nothing else of the library of that name, which has
no bfloat16 for numpy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.ops import Array

PREFIXES = ("model.language_model.", "model.")
LEFT_OUT = ("model.visual.", "mtp.")


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bit patterns -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_safetensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of one file (BF16, F16 or F32) as float32."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        stored = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[entry["dtype"]]
        array = np.frombuffer(data[start:end], stored).reshape(entry["shape"])
        tensors[name] = from_bf16(array) if entry["dtype"] == "BF16" else array.astype(np.float32)
    return tensors


def canonical(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Names without their prefix, vision and MTP left out, per-expert tensors stacked to the fused form."""
    plain = {}
    for name, tensor in tensors.items():
        if name.startswith(LEFT_OUT):
            continue
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        plain[name.removeprefix(prefix)] = tensor
    fused: dict[str, Any] = {}
    parts: dict[str, dict[int, dict[str, NDArray[np.float32]]]] = {}
    for name, tensor in plain.items():
        layer, found, rest = name.partition(".mlp.experts.")
        if found and rest[0].isdigit():
            expert, projection, _ = rest.split(".")
            parts.setdefault(layer, {}).setdefault(int(expert), {})[projection] = tensor
        else:
            fused[name] = tensor
    for layer, experts in parts.items():
        order = [experts[e] for e in range(len(experts))]
        fused[f"{layer}.mlp.experts.gate_up_proj"] = np.stack([np.concatenate([e["gate_proj"], e["up_proj"]]) for e in order])
        fused[f"{layer}.mlp.experts.down_proj"] = np.stack([e["down_proj"] for e in order])
    return fused


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a config.json, flat or nested, with tie_word_embeddings resolved."""
    text = dict(config.get("text_config", config))
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return text


@dataclass(frozen=True)
class Linear:
    """y = x W^T; x is rounded by the activation rule first if activation_group is not 0."""

    weight: Array
    """[R, K]."""
    activation_group: int = 0


class CheckpointTensors:
    """The unquantised model's tensors, by canonical name."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]], dtype: type = np.float64) -> None:
        self.config = text_config(config)
        self.dtype = dtype
        self.tensors = canonical(tensors)

    @classmethod
    def read(cls, folder: Path, dtype: type = np.float64) -> CheckpointTensors:
        """From a folder of config.json and *.safetensors."""
        tensors: dict[str, NDArray[np.float32]] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors.update(read_safetensors(shard))
        return cls(json.loads((folder / "config.json").read_text()), tensors, dtype)

    def array(self, name: str) -> Array:
        """A small tensor as stored; conv1d weights as [kernel, channels]."""
        tensor: Array = self.tensors[name].astype(self.dtype)
        return tensor[:, 0, :].T if name.endswith("conv1d.weight") else tensor

    def linear(self, name: str) -> Linear:
        """A matrix [R, K]."""
        if name == "lm_head.weight" and self.config["tie_word_embeddings"]:
            name = "embed_tokens.weight"
        return Linear(self.tensors[name].astype(self.dtype))

    def expert(self, layer: int, expert: int) -> tuple[Linear, Linear, Linear]:
        """gate [I, H], up [I, H], down [H, I] of one routed expert."""
        gate_up = self.tensors[f"layers.{layer}.mlp.experts.gate_up_proj"][expert].astype(self.dtype)
        gate, up = np.split(gate_up, 2)
        down = self.tensors[f"layers.{layer}.mlp.experts.down_proj"][expert].astype(self.dtype)
        return Linear(gate), Linear(up), Linear(down)

    def embedding(self, ids: NDArray[np.integer]) -> Array:
        """[n] ids -> [n, H]."""
        return self.tensors["embed_tokens.weight"][ids].astype(self.dtype)
