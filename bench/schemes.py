"""Rounding schemes simulated in float32 numpy: what other groups and fewer bits would do to the demo, next to the engine's own.

The forward pass is the tests' reference; only how matrices and activations are rounded is changed. The matrices that the engine
keeps in bfloat16 are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference.checkpoint import CheckpointTensors, Linear  # noqa: E402
from reference.decoder import Reference  # noqa: E402

ALWAYS_BF16 = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "shared_expert_gate.weight")
WHOLE_ROW = 1 << 20


@dataclass(frozen=True)
class Scheme:
    """How to round. A group is as many neighbours along K as share a scale; 0 leaves them as they are.

    Attributes: weight_group, activation_group; expert_bits: of routed experts, in groups of expert_group.
    """

    name: str
    weight_group: int = 128
    activation_group: int = 32
    expert_bits: int = 8
    expert_group: int = 0

    def bytes_per_weight(self) -> float:
        """Of the routed experts: codes, and a float16 scale a group."""
        group = self.expert_group or self.weight_group
        return self.expert_bits / 8 + (2 / group if group else 0) if self.weight_group else 2.0


SCHEMES = (
    Scheme("weights 128, activations not rounded", 128, 0),
    Scheme("weights 128, activations 32 (the engine's)", 128, 32),
    Scheme("weights 128, activations 64", 128, 64),
    Scheme("weights 128, activations 128", 128, 128),
    Scheme("weights 128, activations per token", 128, WHOLE_ROW),
    Scheme("weights 64, activations 32", 64, 32),
    Scheme("weights 32, activations 32 (as Q8_0)", 32, 32),
    Scheme("experts 4 bits in 64, the rest as the engine", 128, 32, 4, 64),
)


def round_weights(weight: NDArray[np.float32], group: int, bits: int) -> NDArray[np.float32]:
    """Symmetric rounding per row and group with a float16 scale, as the packer does it."""
    if not group:
        return weight
    limit = np.float32(2 ** (bits - 1) - 1)
    rounded = np.empty_like(weight)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start : start + group]
        scale = (np.abs(part).max(axis=1, keepdims=True) / limit).astype(np.float16).astype(np.float32)
        codes = np.rint(np.divide(part, scale, out=np.zeros_like(part), where=scale > 0))
        rounded[:, start : start + group] = np.clip(codes, -limit, limit) * scale
    return rounded


class RoundedTensors(CheckpointTensors):
    """A checkpoint's tensors in float32 under a scheme; None rounds nothing."""

    scheme: Scheme | None = None

    @lru_cache(maxsize=None)  # noqa: B019
    def linear(self, name: str) -> Linear:
        plain = super().linear(name)
        return plain if name.endswith(ALWAYS_BF16) else self._rounded(plain)

    @lru_cache(maxsize=None)  # noqa: B019
    def expert(self, layer: int, expert: int) -> tuple[Linear, Linear, Linear]:
        gate, up, down = (self._rounded(part, routed=True) for part in super().expert(layer, expert))
        return gate, up, down

    def _rounded(self, plain: Linear, routed: bool = False) -> Linear:
        scheme = self.scheme
        if scheme is None:
            return plain
        bits, group = (scheme.expert_bits, scheme.expert_group or scheme.weight_group) if routed else (8, scheme.weight_group)
        columns = plain.weight.shape[1]
        return Linear(round_weights(plain.weight, group, bits), min(scheme.activation_group, columns))


def round_activations(x: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """Symmetric rounding of x [tokens, K] to 8 bits per token and group."""
    if not group:
        return x
    rounded = np.empty_like(x)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        rounded[:, start : start + group] = np.rint(np.divide(part, scale, out=np.zeros_like(part), where=scale > 0)) * scale
    return rounded


class RoundedReference(Reference):
    """The reference without its account of ties, which takes most of its time."""

    def apply(self, label: str, x: Any, rounding: Any, *linears: Linear, tokens: Any = slice(None)) -> list[Any]:
        rounded = {group: round_activations(x, group) for group in {linear.activation_group for linear in linears}}
        return [rounded[linear.activation_group] @ linear.weight.T for linear in linears]


def rounded_logits(
    folder: Path, scheme: Scheme | None, windows: Sequence[Sequence[int]]
) -> Iterator[NDArray[np.float32]]:
    """Logits [window, vocab] of each window under a scheme."""
    tensors = RoundedTensors.read(folder, np.float32)
    tensors.scheme = scheme
    reference = RoundedReference(tensors)
    for window in windows:
        logits, _ = reference.forward(list(window))
        yield logits.astype(np.float32)
