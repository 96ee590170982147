"""Checkpoints: every form leads to the same weights; what is left out and what has no place."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints import DEMO, SMALL, Stored, extra_tensors, random_tensors, split_experts, write_checkpoint
from sparseflow.checkpoint import Checkpoint, family
from sparseflow.errors import CheckpointError
from sparseflow.shards import Rows, whole

FORMS = {
    "fused": {},
    "split": {"experts": "split"},
    "sharded": {"shards": 7},
    "split and sharded": {"experts": "split", "shards": 3},
    "nested": {"nested": True, "prefix": "model.language_model."},
    "nested and split": {"nested": True, "prefix": "model.language_model.", "experts": "split", "shards": 2},
    "flat with the long prefix": {"prefix": "model.language_model."},
    "nested with the short prefix": {"nested": True},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_gives_the_same_weights(tmp_path, form):
    tensors = random_tensors()
    with Checkpoint(write_checkpoint(tmp_path / "source", tensors, **form)) as checkpoint:
        for name, tensor in checkpoint.dense.items():
            stored = tensors.get(f"model.{name}") or tensors[name]
            assert checkpoint.read(whole(tensor)).tobytes() == stored.data
        assert checkpoint.read(whole(checkpoint.embedding)).tobytes() == tensors["model.embed_tokens.weight"].data
        for layer in range(3):
            gate_up = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"].values()
            down = tensors[f"model.layers.{layer}.mlp.experts.down_proj"].values()
            for expert in range(5):
                gate, up, out = (as_values(checkpoint, rows) for rows in checkpoint.expert(layer, expert))
                assert np.array_equal(gate, gate_up[expert, :24])
                assert np.array_equal(up, gate_up[expert, 24:])
                assert np.array_equal(out, down[expert])


def as_values(checkpoint: Checkpoint, rows: Rows) -> np.ndarray:
    return (checkpoint.read(rows).astype(np.uint32) << 16).view(np.float32)


def test_the_dense_tensors_are_all_but_embedding_and_experts(tmp_path):
    tensors = random_tensors()
    with Checkpoint(write_checkpoint(tmp_path / "source", tensors, experts="split")) as checkpoint:
        expected = {name.removeprefix("model.") for name in tensors if "experts." not in name} - {"embed_tokens.weight"}
        assert set(checkpoint.dense) == expected
        assert len(checkpoint.expert_tensors()) == 3 * 5 * 3


def test_a_layer_may_be_fused_and_another_split(tmp_path):
    tensors = random_tensors()
    mixed = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts" not in name}
    mixed |= {name: tensor for name, tensor in split_experts(tensors).items() if "layers.1.mlp.experts" in name}
    with Checkpoint(write_checkpoint(tmp_path / "source", mixed)) as checkpoint:
        assert len(checkpoint.expert_tensors()) == 2 + 15 + 2


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_ranges_are_read_as_stored(tmp_path, dtype):
    tensors = random_tensors(dtype=dtype)
    with Checkpoint(write_checkpoint(tmp_path / "source", tensors)) as checkpoint:
        tensor = checkpoint.dense["lm_head.weight"]
        stored = checkpoint.read(Rows(tensor, 7, 20))
        item = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
        assert stored.shape == (13, 140) and stored.itemsize == item
        assert stored.tobytes() == tensors["lm_head.weight"].data[7 * 140 * item : 20 * 140 * item]


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_vision_and_mtp_are_left_out(tmp_path, prefix):
    with Checkpoint(write_checkpoint(tmp_path / "source", extra=extra_tensors(prefix))) as checkpoint:
        assert {kind: len(tensors) for kind, tensors in checkpoint.left_out.items()} == {"vision": 2, "mtp": 1}
        assert sum(tensor.bytes for tensor in checkpoint.left_out["vision"]) == 72


def test_a_tied_head_is_the_embedding(tmp_path):
    config = SMALL | {"tie_word_embeddings": True}
    with Checkpoint(write_checkpoint(tmp_path / "source", config=config)) as checkpoint:
        assert checkpoint.dense["lm_head.weight"] is checkpoint.embedding


def test_a_stored_head_counts_although_it_is_tied(tmp_path):
    tensors = random_tensors()
    config = SMALL | {"tie_word_embeddings": True}
    with Checkpoint(write_checkpoint(tmp_path / "source", tensors, config)) as checkpoint:
        assert checkpoint.read(whole(checkpoint.dense["lm_head.weight"])).tobytes() == tensors["lm_head.weight"].data


def test_the_single_file_wins_over_an_index(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    (source / "model.safetensors.index.json").write_text("{}")
    with Checkpoint(source) as checkpoint:
        assert list(checkpoint.shards) == ["model.safetensors"]


def test_an_unknown_tensor_is_an_error(tmp_path):
    extra = {"model.layers.0.self_attn.sinks": Stored.of(np.zeros(4)), "model.layers.3.mlp.gate.weight": Stored.of(np.zeros((5, 140)))}
    with pytest.raises(CheckpointError, match=r"tensor model.layers.0.self_attn.sinks \[4\] has no place in this model \(2 such\)"):
        Checkpoint(write_checkpoint(tmp_path / "source", extra=extra))


def test_a_tensor_under_both_prefixes_is_an_error(tmp_path):
    extra = {"model.language_model.norm.weight": Stored.of(np.zeros(140))}
    with pytest.raises(CheckpointError, match="tensor model.language_model.norm.weight is there twice, also as model.norm.weight"):
        Checkpoint(write_checkpoint(tmp_path / "source", extra=extra))


def test_a_shard_that_shrinks_while_it_is_read(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    with Checkpoint(source) as checkpoint:
        last = max(checkpoint.shards["model.safetensors"].tensors.values(), key=lambda tensor: tensor.offset)
        with open(source / "model.safetensors", "r+b") as file:
            file.truncate(last.offset + 10)
        with pytest.raises(CheckpointError, match=f"ends inside tensor {last.name}"):
            checkpoint.read(whole(last))


def test_the_demo_opens():
    with Checkpoint(DEMO) as checkpoint:
        assert len(checkpoint.dense) == 124
        assert checkpoint.left_out == {"vision": [], "mtp": []}


def test_family_hides_prefix_and_numbers():
    assert family("model.language_model.layers.12.mlp.experts.3.up_proj.weight") == "layers.*.mlp.experts.*.up_proj.weight"
    assert family("lm_head.weight") == "lm_head.weight"
