"""The geometry of a model: every size the engine needs, read from `config.json` and checked once.

Sizes are named as in the configuration of `qwen3_5_moe`. Nothing else in the package reads `config.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparseflow.errors import CheckpointError, PackedModelError, SparseFlowError

LAYER_TYPES = ("linear_attention", "full_attention")
MODEL_TYPE_NESTED = "qwen3_5_moe"
MODEL_TYPE_TEXT = "qwen3_5_moe_text"

# Sizes travel as 32-bit integers in file headers and kernels; the two loops over layers and experts are bounded tighter,
# so that a damaged file cannot make us build a list of billions.
_LIMIT = 2**31 - 1
_LIMITS = {"num_hidden_layers": 4096, "num_experts": 65536, "linear_conv_kernel_dim": 64}

_INTEGERS = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one model. Every value is positive and in range; made by `from_config` or `from_json`.

    `rotary_dim` is the number of leading dimensions of each head that are rotated (head_dim * partial_rotary_factor).
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    tie_word_embeddings: bool

    @property
    def linear_key_dim(self) -> int:
        """Width of all DeltaNet key heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of all DeltaNet value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def attention_dim(self) -> int:
        """Width of all query heads together, without their output gates."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads of full attention together."""
        return self.num_key_value_heads * self.head_dim

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape in the checkpoint, of every tensor but the embedding and the routed experts.

        Names carry no prefix (`layers.0.input_layernorm.weight`); `lm_head.weight` is listed also when it is tied.
        """
        hidden = self.hidden_size
        shared = self.shared_expert_intermediate_size
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, layer_type in enumerate(self.layer_types):
            at = f"layers.{layer}."
            shapes[at + "input_layernorm.weight"] = (hidden,)
            if layer_type == "linear_attention":
                shapes[at + "linear_attn.in_proj_qkv.weight"] = (self.linear_conv_dim, hidden)
                shapes[at + "linear_attn.in_proj_z.weight"] = (self.linear_value_dim, hidden)
                shapes[at + "linear_attn.in_proj_b.weight"] = (self.linear_num_value_heads, hidden)
                shapes[at + "linear_attn.in_proj_a.weight"] = (self.linear_num_value_heads, hidden)
                shapes[at + "linear_attn.conv1d.weight"] = (self.linear_conv_dim, 1, self.linear_conv_kernel_dim)
                shapes[at + "linear_attn.A_log"] = (self.linear_num_value_heads,)
                shapes[at + "linear_attn.dt_bias"] = (self.linear_num_value_heads,)
                shapes[at + "linear_attn.norm.weight"] = (self.linear_value_head_dim,)
                shapes[at + "linear_attn.out_proj.weight"] = (hidden, self.linear_value_dim)
            else:
                # q_proj holds, head by head, the query and then its output gate.
                shapes[at + "self_attn.q_proj.weight"] = (2 * self.attention_dim, hidden)
                shapes[at + "self_attn.k_proj.weight"] = (self.kv_dim, hidden)
                shapes[at + "self_attn.v_proj.weight"] = (self.kv_dim, hidden)
                shapes[at + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[at + "self_attn.k_norm.weight"] = (self.head_dim,)
                shapes[at + "self_attn.o_proj.weight"] = (hidden, self.attention_dim)
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            shapes[at + "mlp.gate.weight"] = (self.num_experts, hidden)
            shapes[at + "mlp.shared_expert_gate.weight"] = (1, hidden)
            shapes[at + "mlp.shared_expert.gate_proj.weight"] = (shared, hidden)
            shapes[at + "mlp.shared_expert.up_proj.weight"] = (shared, hidden)
            shapes[at + "mlp.shared_expert.down_proj.weight"] = (hidden, shared)
        shapes["norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> Geometry:
        """Read a checkpoint's configuration, nested (`text_config`) or flat.

        `source` is the file's name for messages. Raises CheckpointError naming the field at fault.
        """
        outer = _Fields(config, source, CheckpointError)
        text = _text_fields(outer)
        for section in (outer, text):
            quantized = section.values.get("quantization_config")
            if quantized is not None:
                method = quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else quantized
                section.fail(
                    f"the checkpoint is already quantised (quantization_config, method {method!r}): "
                    "pack the original BF16 checkpoint instead"
                )
        _require_supported(text)
        values: dict[str, Any] = {name: text.integer(name) for name in _INTEGERS}
        values["rms_norm_eps"] = text.positive("rms_norm_eps")
        values["layer_types"] = _layer_types(text, values["num_hidden_layers"])
        theta, factor = _rope(text)
        values["rope_theta"] = theta
        values["rotary_dim"] = int(values["head_dim"] * factor)
        # transformers ties by the outer configuration when there are two.
        tied = outer if "tie_word_embeddings" in outer.values else text
        values["tie_word_embeddings"] = tied.flag("tie_word_embeddings", False)
        return _checked(cls(**values), text)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, for the manifest."""
        values = asdict(self)
        values["layer_types"] = list(self.layer_types)
        return values

    @classmethod
    def from_json(cls, values: Any, source: str) -> Geometry:
        """Read what `to_json` wrote. Raises PackedModelError naming the field at fault."""
        read = _Fields(values, source, PackedModelError)
        known = {field.name for field in fields(cls)}
        for name in sorted(set(read.values) - known):
            read.fail(f"unknown field {name!r}")
        result: dict[str, Any] = {name: read.integer(name) for name in (*_INTEGERS, "rotary_dim")}
        result["rms_norm_eps"] = read.positive("rms_norm_eps")
        result["rope_theta"] = read.positive("rope_theta")
        if "layer_types" not in read.values:
            read.fail("field 'layer_types' is missing")
        result["layer_types"] = _layer_types(read, result["num_hidden_layers"])
        result["tie_word_embeddings"] = read.flag("tie_word_embeddings", None)
        return _checked(cls(**result), read)


class _Fields:
    """One JSON object, read field by field; every complaint names the file and the field."""

    def __init__(self, values: Any, source: str, error: type[SparseFlowError]) -> None:
        self.source = source
        self.error = error
        if not isinstance(values, Mapping):
            self.fail(f"expected a JSON object, found {type(values).__name__}")
        self.values: Mapping[str, Any] = values

    def fail(self, problem: str) -> None:
        raise self.error(f"{self.source}: {problem}")

    def integer(self, name: str) -> int:
        value = self._present(name)
        limit = _LIMITS.get(name, _LIMIT)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            self.fail(f"{name} is {value!r}, it must be a whole number from 1 to {limit}")
        return int(value)

    def positive(self, name: str) -> float:
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            self.fail(f"{name} is {value!r}, it must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool | None) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.fail(f"{name} is {value!r}, it must be true or false")
        return bool(value)

    def _present(self, name: str) -> Any:
        if name not in self.values:
            self.fail(f"field {name!r} is missing")
        return self.values[name]


def _text_fields(outer: _Fields) -> _Fields:
    """The section that describes the language model. Raises unless the model type is one we run."""
    model_type = outer.values.get("model_type")
    if model_type == MODEL_TYPE_TEXT:
        return outer
    if model_type != MODEL_TYPE_NESTED:
        outer.fail(
            f"model_type is {model_type!r}, only {MODEL_TYPE_NESTED!r} and {MODEL_TYPE_TEXT!r} "
            "(Qwen3.5 and Qwen3.6 mixture-of-experts models) can be packed"
        )
    if "text_config" not in outer.values:
        outer.fail(f"field 'text_config' is missing from a {MODEL_TYPE_NESTED!r} configuration")
    text = _Fields(outer.values["text_config"], f"{outer.source}: text_config", outer.error)
    inner_type = text.values.get("model_type", MODEL_TYPE_TEXT)
    if inner_type != MODEL_TYPE_TEXT:
        text.fail(f"model_type is {inner_type!r}, expected {MODEL_TYPE_TEXT!r}")
    return text


def _require_supported(text: _Fields) -> None:
    """Raise for options of the architecture that change the arithmetic and that the engine does not do."""
    required = {"attn_output_gate": True, "attention_bias": False, "hidden_act": "silu"}
    for name, only in required.items():
        value = text.values.get(name, only)
        if value != only or type(value) is not type(only):
            text.fail(f"{name} is {value!r}, only {only!r} is supported")


def _layer_types(text: _Fields, num_hidden_layers: int) -> tuple[str, ...]:
    given = text.values.get("layer_types")
    if given is None:
        interval = text.integer("full_attention_interval") if "full_attention_interval" in text.values else 4
        return tuple(LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(num_hidden_layers))
    if not isinstance(given, (list, tuple)) or len(given) != num_hidden_layers:
        found = f"{len(given)} entries" if isinstance(given, (list, tuple)) else type(given).__name__
        text.fail(f"layer_types has {found}, num_hidden_layers is {num_hidden_layers}")
    for layer, kind in enumerate(given):
        if kind not in LAYER_TYPES:
            text.fail(f"layer_types[{layer}] is {kind!r}, expected one of {', '.join(LAYER_TYPES)}")
    return tuple(given)


def _rope(text: _Fields) -> tuple[float, float]:
    """(rope_theta, partial_rotary_factor), from `rope_parameters` or from the top-level fields of older configurations."""
    merged = {key: text.values[key] for key in ("rope_theta", "partial_rotary_factor") if key in text.values}
    # transformers takes a quarter when the configuration is silent.
    merged.setdefault("partial_rotary_factor", 0.25)
    for key in ("rope_scaling", "rope_parameters"):
        given = text.values.get(key)
        if given is not None:
            merged |= _Fields(given, f"{text.source}: {key}", text.error).values
    rope_type = merged.get("rope_type", merged.get("type", "default"))
    if rope_type != "default":
        text.fail(f"rope_type is {rope_type!r}, only 'default' is supported: remove the rope scaling from the configuration")
    rope = _Fields(merged, text.source, text.error)
    factor = rope.positive("partial_rotary_factor")
    if factor > 1:
        rope.fail(f"partial_rotary_factor is {factor}, it must be at most 1")
    return rope.positive("rope_theta"), factor


def _checked(geometry: Geometry, where: _Fields) -> Geometry:
    """Check the relations between sizes that the kernels rely on."""
    g = geometry
    if g.num_attention_heads % g.num_key_value_heads:
        where.fail(
            f"num_attention_heads ({g.num_attention_heads}) is not a multiple of num_key_value_heads ({g.num_key_value_heads})"
        )
    if g.linear_num_value_heads % g.linear_num_key_heads:
        where.fail(
            f"linear_num_value_heads ({g.linear_num_value_heads}) is not a multiple of "
            f"linear_num_key_heads ({g.linear_num_key_heads})"
        )
    if g.rotary_dim < 2 or g.rotary_dim % 2 or g.rotary_dim > g.head_dim:
        where.fail(f"rotary_dim is {g.rotary_dim}, it must be even, at least 2 and at most head_dim ({g.head_dim})")
    if g.num_experts_per_tok > g.num_experts:
        where.fail(f"num_experts_per_tok ({g.num_experts_per_tok}) is more than num_experts ({g.num_experts})")
    # Products of two sizes become matrix dimensions, which travel as 32-bit integers too.
    for name in ("linear_conv_dim", "attention_dim", "kv_dim"):
        if getattr(g, name) > _LIMIT // 2:
            where.fail(f"{name} is {getattr(g, name)}, too large")
    return g
