"""NaN and infinity in a forward: found in the logits always, and with check_finite where they began."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import sparseflow
from sparseflow.cli.main import main
from sparseflow.decoder import DecoderLayer
from sparseflow.errors import NonFiniteError, OptionError, SparseFlowError
from sparseflow.packfile import EXPERTS_FILE, HEADER_BYTES

LAYERS = 8


def scale_of_every_expert(folder: Path, layer: int, bits: int) -> None:
    """Damages the first scale of all experts of a layer, which opening a model does not look at."""
    with sparseflow.load(folder) as model:
        layout, experts = model.layout, model.geometry.num_experts
    assert layout.gate_up_scales is not None
    with open(folder / EXPERTS_FILE, "r+b") as file:
        for expert in range(experts):
            file.seek(HEADER_BYTES + (layer * experts + expert) * layout.stride + layout.gate_up_scales)
            file.write(bits.to_bytes(2, "little"))


@pytest.fixture
def pack(packed_demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed_demo, tmp_path / "pack"))


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize("bits", [0x7C00, 0x7E00], ids=["infinity", "NaN"])
def test_a_damaged_scale_is_found_and_its_layer_named(pack: Path, layer: int, bits: int) -> None:
    scale_of_every_expert(pack, layer, bits)
    with sparseflow.load(pack, threads=1) as model:
        session = model.session()
        with pytest.raises(NonFiniteError, match="the model gave the logit (nan|inf|-inf) for token"):
            session.forward([5, 6, 7])
        with pytest.raises(SparseFlowError, match="broken off"):
            session.forward([8])  # its state holds what is no number
        generation = model.generate("The red fox", max_new_tokens=4)
        with pytest.raises(NonFiniteError):
            list(generation)
        assert generation.ids == []
    with sparseflow.load(pack, threads=1, check_finite=True) as model:
        with pytest.raises(NonFiniteError, match=f"^layer {layer}: the residual stream holds (nan|inf|-inf) at position 0, "):
            model.session().forward([5, 6, 7])


def in_norm(layer: DecoderLayer) -> None:
    layer.input_layernorm.weight[3] = math.nan


def in_router(layer: DecoderLayer) -> None:
    layer.mlp.gate.tiles[:] = 0x7F80


def in_delta(layer: DecoderLayer) -> None:
    assert layer.linear_attn is not None
    layer.linear_attn.dt_bias[0] = math.nan


def in_beta(layer: DecoderLayer) -> None:
    assert layer.linear_attn is not None
    layer.linear_attn.in_proj_b.tiles[:] = 0x7FC0


def in_shared_gate(layer: DecoderLayer) -> None:
    layer.mlp.shared_expert_gate.tiles[:] = 0x7FC0


@pytest.mark.parametrize("damage", [in_norm, in_router, in_delta, in_beta, in_shared_gate])
def test_damage_in_memory_is_found_where_it_began(packed_demo: Path, damage: Callable[[DecoderLayer], None]) -> None:
    with sparseflow.load(packed_demo, threads=1, check_finite=True) as model:
        damage(model.decoder.layers[4])
        with pytest.raises(NonFiniteError, match="^layer 4: "):
            model.session().forward([1, 2])
        model.decoder.check_finite = False
        with pytest.raises(NonFiniteError, match="^the model gave the logit"):
            model.session().forward([1, 2])


def test_damage_to_keys_is_found(packed_demo: Path) -> None:
    with sparseflow.load(packed_demo, threads=1, check_finite=True) as model:
        attention = model.decoder.layers[3].self_attn
        assert attention is not None
        attention.k_norm[1] = math.nan
        with pytest.raises(NonFiniteError, match="^layer 3: "):
            model.session().forward([1, 2, 3])


def test_the_position_is_that_in_the_text(pack: Path) -> None:
    with open(pack / "embed.sfx", "r+b") as file:
        file.seek(HEADER_BYTES + 77 * 2 * 128 + 2 * 5)
        file.write(b"\xc0\x7f")
    with sparseflow.load(pack, threads=1, check_finite=True, prefill_chunk=2) as model:
        session = model.session()
        session.forward([1, 2, 3, 4, 5])
        with pytest.raises(NonFiniteError, match="^the embedding: the residual stream holds nan at position 8, channel 5, "):
            session.forward([6, 7, 8, 77])


def test_a_prompt_whose_logits_nobody_asks_for(pack: Path) -> None:
    """Only the last chunk of a prompt has logits; what began before still shows in them."""
    scale_of_every_expert(pack, 2, 0x7E00)
    with sparseflow.load(pack, threads=1, prefill_chunk=2) as model, pytest.raises(NonFiniteError):
        model.session().forward([1, 2, 3, 4, 5], last_only=True)


def test_logits_are_the_same_with_the_check(packed_demo: Path) -> None:
    ids = np.arange(40)
    logits = []
    for check in (False, True):
        with sparseflow.load(packed_demo, cache="1MiB", check_finite=check) as model:
            logits.append(model.session().forward(ids))
    assert np.array_equal(*logits)


def test_the_command_line(pack: Path) -> None:
    scale_of_every_expert(pack, 2, 0x7E00)
    for options, message in (([], "error: the model gave the logit nan"), (["--check-finite"], "error: layer 2: ")):
        result = CliRunner().invoke(main, ["run", str(pack), "The red fox", *options])
        assert result.exit_code == 7 and result.stderr.splitlines()[-1].startswith(message)
    result = CliRunner().invoke(main, ["chat", str(pack), "--check-finite"], input="Hello\n")
    assert result.exit_code == 7 and "error: layer 2: " in result.stderr


def test_check_finite_is_true_or_false(packed_demo: Path) -> None:
    with pytest.raises(OptionError, match="check_finite is 1"):
        sparseflow.load(packed_demo, check_finite=1)  # type: ignore[arg-type]
