"""A checkpoint with outlier channels, as trained models of the full size have them, that computes what another computes.

In every norm before a projection a few channels are `FACTOR` times larger, and the columns that meet them are as much smaller. The
factor is a power of two, so bfloat16 weights stay exact; the norms are stored in float32, where `FACTOR * (1 + w) - 1` is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from checkpoints import Stored, write_safetensors
from reference.checkpoint import read_safetensors

Tensors = dict[str, NDArray[np.float32]]

CHANNELS = (5, 52, 53, 111)
FACTOR = np.float32(64)

FOLLOWERS = {
    "input_layernorm.weight": (
        "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.in_proj_a.weight",
        "linear_attn.in_proj_b.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    ),
    "post_attention_layernorm.weight": (
        "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight",
        "mlp.shared_expert_gate.weight",
    ),
}  # fmt: skip
"""Norm -> the matrices of its layer that read what it gives."""


def followers(tensors: Tensors) -> dict[str, list[str]]:
    """Norm -> the matrices whose columns meet its channels, of a text checkpoint with fused experts."""
    found = {"model.norm.weight": ["lm_head.weight"]}
    for name in tensors:
        norm = name.rpartition("layers.")[2].partition(".")[2]
        if norm in FOLLOWERS:
            prefix = name.removesuffix(norm)
            found[name] = [prefix + follower for follower in FOLLOWERS[norm] if prefix + follower in tensors]
    return found


def with_outliers(tensors: Tensors) -> Tensors:
    """The same function with outlier channels: in every norm they are times FACTOR, and the columns divided by it."""
    changed = {name: tensor.copy() for name, tensor in tensors.items()}
    channels = list(CHANNELS)
    for norm, matrices in followers(tensors).items():
        changed[norm][channels] = FACTOR * (1 + changed[norm][channels]) - 1
        for matrix in matrices:
            changed[matrix][..., channels] /= FACTOR
    return changed


def write_outlier_checkpoint(source: Path, target: Path) -> Path:
    """The checkpoint of one shard in `source` with outlier channels, written to the new folder `target`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    tensors = with_outliers(read_safetensors(source / "model.safetensors"))
    stored = {
        name: Stored.of(tensor, "F32" if name.endswith(("layernorm.weight", "model.norm.weight")) else "BF16")
        for name, tensor in tensors.items()
    }
    write_safetensors(target / "model.safetensors", stored)
    return target
