"""Geometry: what config.json may say, and what happens when it says something else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from safetensors import safe_open

from checkpoints import DEMO, SMALL
from sparseflow.config import Geometry
from sparseflow.errors import CheckpointError, PackedModelError

DEMO_CONFIG = json.loads((DEMO / "config.json").read_text())


def changed(**changes: Any) -> dict[str, Any]:
    """SMALL with fields replaced; a value of None takes the field away."""
    config = copy.deepcopy(SMALL) | changes
    return {name: value for name, value in config.items() if value is not None}


def nested(text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5_moe", "text_config": text} | outer


def test_the_demo_configuration():
    geometry = Geometry.from_config(DEMO_CONFIG, "config.json")
    assert (geometry.hidden_size, geometry.num_hidden_layers, geometry.vocab_size) == (128, 8, 4096)
    assert geometry.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert (geometry.rotary_dim, geometry.rope_theta, geometry.rms_norm_eps) == (16, 1e7, 1e-6)
    assert (geometry.num_experts, geometry.num_experts_per_tok, geometry.tie_word_embeddings) == (24, 4, False)
    assert (geometry.linear_key_dim, geometry.linear_value_dim, geometry.linear_conv_dim) == (128, 256, 512)
    assert (geometry.attention_dim, geometry.kv_dim) == (256, 64)


def test_dense_shapes_are_those_of_a_trained_checkpoint():
    expected = Geometry.from_config(DEMO_CONFIG, "config.json").dense_shapes()
    with safe_open(DEMO / "model.safetensors", framework="numpy") as shard:
        stored = {name.removeprefix("model."): tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}
    assert {name: shape for name, shape in stored.items() if ".experts." not in name and name != "embed_tokens.weight"} == expected


def test_nested_and_flat_configurations_mean_the_same():
    assert Geometry.from_config(nested(SMALL), "a") == Geometry.from_config(SMALL, "b")


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        (changed(tie_word_embeddings=True), True),
        (changed(tie_word_embeddings=None), False),
        (nested(changed(tie_word_embeddings=True)), True),
        (nested(changed(tie_word_embeddings=True), tie_word_embeddings=False), False),
    ],
    ids=["flat", "silent", "inner", "outer wins"],
)
def test_where_tied_embeddings_are_looked_up(config, tied):
    assert Geometry.from_config(config, "config.json").tie_word_embeddings is tied


@pytest.mark.parametrize(("interval", "full"), [(None, [3, 7]), (2, [1, 3, 5, 7]), (9, []), (1, list(range(8)))])
def test_layer_types_follow_from_the_interval(interval, full):
    config = changed(layer_types=None, num_hidden_layers=8, full_attention_interval=interval)
    layer_types = Geometry.from_config(config, "config.json").layer_types
    assert [layer for layer, kind in enumerate(layer_types) if kind == "full_attention"] == full


@pytest.mark.parametrize(
    ("rope", "rotary_dim"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}}, 8),
        ({"rope_parameters": {"rope_theta": 5e5}}, 2),
        ({"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 0.75}, 6),
        ({"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5}, 4),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 2),
    ],
    ids=["new", "a quarter by default", "factor beside", "old", "old scaling"],
)
def test_rotary_from_new_and_old_fields(rope, rotary_dim):
    geometry = Geometry.from_config(changed(**rope), "config.json")
    assert (geometry.rope_theta, geometry.rotary_dim) == (5e5, rotary_dim)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "config.json: expected a JSON object, found list"),
        (changed(model_type="llama"), "model_type is 'llama'"),
        (changed(model_type=None), "model_type is None"),
        ({"model_type": "qwen3_5_moe"}, "field 'text_config' is missing"),
        (nested(changed(model_type="qwen3_5_text")), "text_config: model_type is 'qwen3_5_text'"),
        (nested("text"), "text_config: expected a JSON object, found str"),
        (changed(quantization_config={"quant_method": "fp8"}), "already quantised (quantization_config, method 'fp8')"),
        (nested(SMALL, quantization_config={"quant_method": "awq"}), "method 'awq'"),
        (nested(changed(quantization_config={"bits": 4})), "method 'unnamed'"),
        (changed(hidden_size=None), "field 'hidden_size' is missing"),
        (changed(hidden_size="140"), "hidden_size is '140'"),
        (changed(hidden_size=140.0), "hidden_size is 140.0"),
        (changed(hidden_size=True), "hidden_size is True"),
        (changed(vocab_size=0), "vocab_size is 0"),
        (changed(vocab_size=2**31), "vocab_size is 2147483648"),
        (changed(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (changed(rms_norm_eps=0), "rms_norm_eps is 0"),
        (changed(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
        (changed(tie_word_embeddings="no"), "tie_word_embeddings is 'no'"),
        (changed(layer_types=["linear_attention"]), "layer_types has 1 entries, num_hidden_layers is 3"),
        (changed(layer_types="linear_attention"), "layer_types has str"),
        (changed(layer_types=["linear_attention"] * 2 + ["mamba"]), "layer_types[2] is 'mamba'"),
        (changed(layer_types=None, full_attention_interval=0), "full_attention_interval is 0"),
        (changed(rope_parameters=None), "field 'rope_theta' is missing"),
        (changed(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}), "rope_type is 'yarn', only 'default'"),
        (changed(rope_scaling={"type": "linear", "factor": 2}, rope_parameters=None, rope_theta=1e4), "rope_type is 'linear'"),
        (changed(rope_parameters=7), "rope_parameters: expected a JSON object, found int"),
        (changed(rope_parameters={"rope_theta": -1}), "rope_theta is -1"),
        (changed(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5"),
        (changed(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.4}), "rotary_dim is 3, it must be even"),
        (changed(attn_output_gate=False), "attn_output_gate is False, only True"),
        (changed(attention_bias=True), "attention_bias is True, only False"),
        (changed(hidden_act="gelu"), "hidden_act is 'gelu', only 'silu'"),
        (changed(num_key_value_heads=3), "num_attention_heads (4) is not a multiple of num_key_value_heads (3)"),
        (changed(linear_num_key_heads=3), "linear_num_value_heads (4) is not a multiple of linear_num_key_heads (3)"),
        (changed(num_experts_per_tok=6), "num_experts_per_tok (6) is more than num_experts (5)"),
        (changed(num_attention_heads=2**20, head_dim=2**20), "attention_dim is 1099511627776, too large"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_named(config, message):
    with pytest.raises(CheckpointError) as caught:
        Geometry.from_config(config, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_optional_switches_may_be_absent_or_explicit():
    explicit = changed(attn_output_gate=True, attention_bias=False, hidden_act="silu", quantization_config=None)
    silent = {name: value for name, value in SMALL.items() if name not in ("attention_bias", "hidden_act")}
    assert Geometry.from_config(explicit, "a") == Geometry.from_config(silent, "a")


def test_json_round_trip():
    geometry = Geometry.from_config(SMALL, "config.json")
    assert Geometry.from_json(json.loads(json.dumps(geometry.to_json())), "manifest.json") == geometry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": 2**62}, "num_hidden_layers is 4611686018427387904"),
        ({"rotary_dim": 9}, "rotary_dim is 9"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
        ({"layer_types": 3}, "layer_types has int"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_a_damaged_geometry_is_a_damaged_pack(changes, message):
    values = Geometry.from_config(SMALL, "config.json").to_json() | changes
    with pytest.raises(PackedModelError, match="^manifest.json: ") as caught:
        Geometry.from_json(values, "manifest.json")
    assert message in str(caught.value)


def test_a_geometry_needs_every_field():
    values = Geometry.from_config(SMALL, "config.json").to_json()
    for name in values:
        with pytest.raises(PackedModelError, match=name):
            Geometry.from_json({key: value for key, value in values.items() if key != name}, "manifest.json")
