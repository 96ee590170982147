"""Outlier channels evened out: the rule, that it is exact, and that packs stay what they were in all other respects."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from random_checkpoint import to_bf16
from reference import ops
from reference.checkpoint import CheckpointTensors
from reference.packed import Int8Matrix, PackedTensors

from checkpoints import SMALL, Stored, Tensors, random_tensors, write_checkpoint
from outliers import followers
from sparseflow.checkpoint import Checkpoint
from sparseflow.cli.pack import main
from sparseflow.encode import as_float32, scale_columns
from sparseflow.equalise import LEAST_POWER, channel_powers, equalised_norm, exact_powers, norm_before
from sparseflow.errors import CheckpointError
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import BITS, dense_plan
from sparseflow.quantize import from_bf16_bits

CHANNELS = [3, 64, 130]
NORMS = [f"layers.{layer}.{kind}_layernorm.weight" for layer in range(3) for kind in ("input", "post_attention")] + ["norm.weight"]
SFX = ("experts.sfx", "dense.sfx", "embed.sfx")
OPTIONS = [(experts, dense) for experts in ("int8", "bf16") for dense in ("int8", "bf16")]


def outlier_tensors(dtype: str = "BF16", factor: float = 64, shrink: float | None = None) -> Tensors:
    """Random tensors with CHANNELS of every norm times `factor`, and the columns behind divided by `shrink`, else by as much."""
    values = {name: tensor.values().copy() for name, tensor in random_tensors().items()}
    for name, matrices in followers(values).items():
        values[name][CHANNELS] = factor * (1 + values[name][CHANNELS]) - 1
        for matrix in matrices:
            values[matrix][..., CHANNELS] /= shrink or factor
    return {name: Stored.of(value, dtype) for name, value in values.items()}


def powers_of(folder: Path, norm: str, experts: int = 8, dense: int = 8) -> np.ndarray:
    with Checkpoint(folder) as checkpoint:
        return channel_powers(checkpoint, dense_plan(checkpoint.geometry, dense)[0], experts, norm)


def moved(source: CheckpointTensors, packed: PackedTensors, norm: str) -> np.ndarray:
    """The power by which each channel of a packed norm is smaller than its source, which must be all the difference."""
    before, after = (np.float32(1) + tensors.array(norm) for tensors in (source, packed))
    powers = np.rint(np.log2(before / after)).astype(np.int32)
    assert np.array_equal(np.ldexp(after, powers), before)
    return powers


def assert_stored(stored: np.ndarray | Int8Matrix, weight: np.ndarray) -> None:
    """A packed matrix is what the rule makes of `weight`."""
    if isinstance(stored, Int8Matrix):
        codes, scales = ops.quantize_weights(weight)
        assert np.array_equal(stored.codes, codes) and np.array_equal(stored.scales, scales)
    else:
        assert np.array_equal(stored, from_bf16_bits(to_bf16(weight)))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("experts", "dense"), OPTIONS)
def test_all_that_reads_a_norm_is_scaled_exactly(tmp_path, experts, dense, dtype):
    folder = write_checkpoint(tmp_path / "source", outlier_tensors(dtype))
    report = pack_checkpoint(folder, tmp_path / "packed", experts=experts, dense=dense)["report"]
    source, packed = CheckpointTensors.read(folder, np.float32), PackedTensors(tmp_path / "packed", np.float32)
    powers = {norm: moved(source, packed, norm) for norm in NORMS}
    for norm, power in powers.items():
        rounded = dense == "int8" or (experts == "int8" and "post_attention" in norm)
        assert np.flatnonzero(power).tolist() == (CHANNELS if rounded else [])
        assert (power[CHANNELS] >= LEAST_POWER).all() == rounded
    assert report["equalised"] == {
        norm: {"channels": 3, "largest_factor": 2 ** int(power.max())} for norm, power in powers.items() if power.any()
    }
    for name, entry in packed.entries.items():
        if entry["kind"] != "f32":
            behind = norm_before(name)
            weight = source.linear(name).weight
            assert_stored(packed.stored(name), weight if behind is None else np.ldexp(weight, powers[behind]))
        elif name not in NORMS:
            assert np.array_equal(packed.stored(name), source.array(name))
    for layer in range(3):
        power = powers[f"layers.{layer}.post_attention_layernorm.weight"]
        for expert in range(5):
            gate, up, down = (linear.weight for linear in source.expert(layer, expert))
            for stored, weight in zip(packed.stored_expert(layer, expert), (np.ldexp(gate, power), np.ldexp(up, power), down), strict=True):
                assert_stored(stored, weight)
    every = np.arange(SMALL["vocab_size"])
    assert np.array_equal(packed.embedding(every), from_bf16_bits(to_bf16(source.embedding(every))))


def test_every_reader_of_a_norm_has_its_place():
    found: dict[str, list[str]] = {}
    values = {name: tensor.values() for name, tensor in random_tensors().items()}
    with_experts = {norm.removeprefix("model."): matrices for norm, matrices in followers(values).items()}
    for name in values:
        norm = norm_before(name.removeprefix("model."))
        if norm is not None:
            found.setdefault(norm, []).append(name)
    assert {norm: sorted(names) for norm, names in found.items()} == {
        norm: sorted(name for name in names if ".experts." not in name) for norm, names in with_experts.items()
    }


def test_what_is_no_outlier_is_left_alone(tmp_path, packed_demo):
    assert json.loads((packed_demo / "manifest.json").read_text())["report"]["equalised"] == {}
    cases = {
        "ordinary": random_tensors(),
        "a little larger": outlier_tensors(factor=4),
        "large, and its columns too": outlier_tensors(factor=64, shrink=1),
        "small, and its columns large": outlier_tensors(factor=1 / 64),
    }
    for name, tensors in cases.items():
        assert not powers_of(write_checkpoint(tmp_path / name, tensors), "norm.weight").any(), name


def test_a_channel_moves_no_further_than_its_columns_are_small(tmp_path):
    powers = powers_of(write_checkpoint(tmp_path / "source", outlier_tensors(factor=64, shrink=16)), "norm.weight")
    assert np.flatnonzero(powers).tolist() == CHANNELS
    assert set(powers[CHANNELS]) <= {3, 4, 5}


@pytest.mark.parametrize(("exponent", "expected"), [(100, 6), (122, 5), (126, 0)])
def test_no_column_outgrows_bfloat16(tmp_path, exponent, expected):
    tensors = outlier_tensors()
    router = tensors["model.layers.1.mlp.gate.weight"].values().copy()
    router[2, CHANNELS[0]] = 2.0**exponent
    tensors["model.layers.1.mlp.gate.weight"] = Stored.of(router)
    powers = powers_of(write_checkpoint(tmp_path / "source", tensors), "layers.1.post_attention_layernorm.weight")
    assert abs(powers[CHANNELS[0]] - expected) <= (exponent == 100) and powers[CHANNELS[1]] >= LEAST_POWER


def test_no_column_outgrows_its_scale(tmp_path):
    tensors = outlier_tensors()
    head = tensors["lm_head.weight"].values().copy() * 2.0**26
    tensors["lm_head.weight"] = Stored.of(head)
    powers = powers_of(write_checkpoint(tmp_path / "source", tensors), "norm.weight")
    largest = np.abs(np.ldexp(head, powers)).max(axis=0)[CHANNELS]
    assert (largest <= 2.0**22).all() and (2 * largest > 2.0**22).all()


def test_channels_without_weights_do_no_harm(tmp_path):
    tensors = outlier_tensors()
    head = tensors["lm_head.weight"].values().copy()
    head[:, CHANNELS] = 0
    source = write_checkpoint(tmp_path / "source", tensors | {"lm_head.weight": Stored.of(head)})
    assert (powers_of(source, "norm.weight")[CHANNELS] >= LEAST_POWER).all()
    nothing = {name: Stored.of(np.full(tensor.shape, -1 if "norm" in name else 0)) for name, tensor in tensors.items()}
    assert not powers_of(write_checkpoint(tmp_path / "nothing", nothing), "norm.weight").any()


def test_a_damaged_column_is_named_and_no_folder_stays(tmp_path):
    tensors = outlier_tensors()
    head = tensors["lm_head.weight"].values().copy()
    head[5, 7] = np.nan
    source = write_checkpoint(tmp_path / "source", tensors | {"lm_head.weight": Stored.of(head)})
    with pytest.raises(CheckpointError, match="tensor lm_head.weight: holds NaN"):
        pack_checkpoint(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


# --- exactness ---


@given(arrays(np.float32, 16, elements=st.floats(-1e4, 1e4, width=32)), arrays(np.int32, 16, elements=st.integers(0, 12)))
def test_a_norm_comes_back_to_the_last_bit(weight, wanted):
    gain = np.float32(1) + weight
    powers = exact_powers(gain, wanted)
    assert ((0 <= powers) & (powers <= wanted)).all()
    assert np.array_equal(np.float32(1) + equalised_norm(weight, powers), np.ldexp(gain, -powers))
    assert np.array_equal(equalised_norm(weight, powers)[powers == 0], weight[powers == 0])


@given(arrays(np.uint16, 16, elements=st.integers(0x3F80, 0x4480)), st.integers(0, 10))
def test_a_norm_in_bfloat16_gives_up_no_power(bits, power):
    powers = np.full(16, power, np.int32)
    for weight in (from_bf16_bits(bits), -from_bf16_bits(bits)):  # magnitudes of 1 to 1024
        assert np.array_equal(exact_powers(np.float32(1) + weight, powers), powers)


@given(st.sampled_from([np.uint16, np.float16, np.float32]), st.data())
def test_columns_are_scaled_exactly(kind, data):
    if kind == np.uint16:
        stored = data.draw(arrays(np.uint16, (3, 5), elements=st.integers(0, 0x7F7F) | st.integers(0x8000, 0xFF7F)))
    else:
        stored = data.draw(arrays(kind, (3, 5), elements=st.floats(-2.0**100, 2.0**100, width=32) if kind == np.float32
                                         else st.floats(width=16, allow_nan=False, allow_infinity=False)))
    powers = data.draw(arrays(np.int32, 5, elements=st.integers(0, 20)))
    exact = np.ldexp(as_float32(stored).astype(np.float64), powers)
    found = as_float32(scale_columns(stored.copy(), powers)).astype(np.float64)
    holds = np.abs(exact) <= np.finfo(np.float32).max
    assert np.array_equal(found[holds], exact[holds]) and np.isinf(found[~holds]).all()


# --- packing ---


def test_every_form_of_an_outlier_checkpoint_packs_to_the_same_bytes(tmp_path):
    forms = [{}, {"experts": "split"}, {"shards": 5}, {"nested": True, "prefix": "model.language_model.", "experts": "split", "shards": 3}]
    packed = []
    for index, form in enumerate(forms):
        pack_checkpoint(write_checkpoint(tmp_path / f"source{index}", outlier_tensors(), **form), tmp_path / f"packed{index}")
        packed.append({name: (tmp_path / f"packed{index}" / name).read_bytes() for name in SFX})
    assert all(other == packed[0] for other in packed)


@pytest.mark.parametrize("percent", [5, 35, 65, 95])
def test_an_interrupted_pack_with_outliers_is_completed_to_the_same_bytes(tmp_path, percent):
    source = write_checkpoint(tmp_path / "source", outlier_tensors("F32"))
    pack_checkpoint(source, tmp_path / "undisturbed")

    def interrupt(done: int, total: int) -> None:
        if done * 100 >= total * percent:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, tmp_path / "packed", progress=interrupt)
    pack_checkpoint(source, tmp_path / "packed")
    for path in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "packed" / path.name).read_bytes() == path.read_bytes()


def test_a_tied_head_is_scaled_and_the_embedding_is_not(tmp_path):
    tied = SMALL | {"tie_word_embeddings": True}
    tensors = outlier_tensors()
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    pack_checkpoint(write_checkpoint(tmp_path / "source", tensors, tied), tmp_path / "packed")
    packed = PackedTensors(tmp_path / "packed", np.float32)
    embedding = tensors["model.embed_tokens.weight"].values()
    assert np.array_equal(packed.embedding(np.arange(71)), embedding)
    power = powers_of(tmp_path / "source", "norm.weight")
    assert np.flatnonzero(power).tolist() == CHANNELS
    assert_stored(packed.stored("lm_head.weight"), np.ldexp(embedding, power))


def test_the_command_says_which_channels(tmp_path):
    source = write_checkpoint(tmp_path / "source", outlier_tensors())
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "packed")])
    lines = [line for line in result.stdout.splitlines() if line.startswith("outlier channels evened out: ")]
    assert [line.split(": ")[1].split(", by up to")[0] for line in lines] == [
        "layers.*.input_layernorm.weight of layers 0-2 (9 channels",
        "layers.*.post_attention_layernorm.weight of layers 0-2 (9 channels",
        "norm.weight (3 channels",
    ]


def test_bf16_packs_read_nothing_twice(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", outlier_tensors())
    with Checkpoint(source) as checkpoint:
        monkeypatch.setattr(checkpoint, "read", lambda rows: pytest.fail(f"{rows.tensor.name} was read"))
        for norm in NORMS:
            assert not channel_powers(checkpoint, dense_plan(checkpoint.geometry, BITS["bf16"])[0], BITS["bf16"], norm).any()
