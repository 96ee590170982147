"""The live comparison with float32 transformers: other weights than the goldens', every form in which checkpoints come."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers_model
from packed_cases import DEMO, forward
from random_checkpoint import Weights, counting_tokenizer, normal, random_prompt, random_weights, write_checkpoint
from tokenizers import Tokenizer
from transformers import Qwen3_5MoeTextConfig

import sparseflow
from geometries import CASES, Case
from reference.checkpoint import CheckpointTensors
from reference.decoder import Reference
from sparseflow.config import Geometry
from sparseflow.pack import pack_checkpoint
from sparseflow.rotary import Rotary

pytestmark = pytest.mark.oracle

TOLERANCE = 2e-4  # of the largest logit
STEPS = 40
CLEAR_GAP = 2e-5  # a router's selection that hangs on less is nobody's to check; the seeds have none
FRESH = [replace(case, seed=case.seed + 100) for case in CASES]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def packed(source: Path, destination: Path) -> Path:
    pack_checkpoint(source, destination, experts="bf16", dense="bf16")
    return destination


def check_parity(folder: Path, run: transformers_model.Run, prompt: int) -> None:
    """The packed folder gives the run's logits and greedy tokens, fed as a chunk, in odd chunks and token by token."""
    n, scale = len(run.ids), np.abs(run.logits).max()
    odd = [min(11, n - start) for start in range(0, n, 11)]
    ranked = np.sort(run.logits, axis=1)
    clear = ranked[:, -1] - ranked[:, -2] > 2 * TOLERANCE * scale
    assert clear.mean() > 0.9
    with sparseflow.load(folder, cache="resident", threads=2) as model:
        for chunks in ([prompt] + [1] * (n - prompt), odd, [1] * n):
            logits = forward(model, run.ids, chunks)
            assert np.abs(logits - run.logits).max() <= TOLERANCE * scale
            assert np.array_equal(logits.argmax(axis=1)[clear], run.logits.argmax(axis=1)[clear])


def saved(model: transformers_model.PreTrainedModel, folder: Path, vocab: int) -> Path:
    """What save_pretrained writes, with a tokenizer."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(counting_tokenizer(vocab)))
    return folder


def left_out(case: Case) -> Weights:
    """Tensors of the kinds that a text model leaves out."""
    hidden = case.config["hidden_size"]
    return {
        "model.visual.merger.norm.weight": normal(case.seed, "visual", (16,), 1.0),
        "model.visual.blocks.0.attn.proj.weight": normal(case.seed, "proj", (16, 16), 1.0),
        "mtp.fc.weight": normal(case.seed, "mtp", (hidden, 2 * hidden), 1.0),
        "mtp.layers.0.mlp.experts.gate_up_proj": normal(case.seed, "mtp experts", (2, 32, hidden), 1.0),
    }


@pytest.mark.parametrize("case", FRESH, ids=str)
def test_random_checkpoints(case: Case, tmp_path: Path) -> None:
    weights, vocab = random_weights(case), case.config["vocab_size"]
    fused = write_checkpoint(tmp_path / "fused", case.config, weights)
    model = transformers_model.load(fused)
    run = transformers_model.greedy(model, random_prompt(case), STEPS)
    _, rounding = Reference(CheckpointTensors(case.config, weights)).forward(run.ids)
    assert rounding.gap.min() > CLEAR_GAP
    pack = packed(fused, tmp_path / "packed")
    check_parity(pack, run, case.prompt)

    # As current transformers saves it: one tensor per expert and projection, in float32 or in bfloat16.
    if not case.float32_vectors:
        model = model.bfloat16()
    forms = [saved(model, tmp_path / "saved", vocab)]
    names = CheckpointTensors.read(forms[0]).tensors
    assert names.keys() == CheckpointTensors.read(fused).tensors.keys()
    for experts in ("fused", "separate"):
        folder = tmp_path / f"nested-{experts}"
        extra = left_out(case)
        forms.append(write_checkpoint(folder, case.config, weights, experts=experts, nested=True, shards=3, extra=extra))
    for form in forms:
        other = packed(form, tmp_path / f"packed-{form.name}")
        for file in ("experts.sfx", "dense.sfx", "embed.sfx"):
            assert (other / file).read_bytes() == (pack / file).read_bytes(), (form.name, file)
        shutil.rmtree(other)


@pytest.mark.parametrize("case", [FRESH[2], FRESH[3]], ids=str)
def test_multimodal_checkpoint(case: Case, tmp_path: Path) -> None:
    """Saved by the multimodal class, with its own vision tensors and nested config."""
    source = write_checkpoint(tmp_path / "source", case.config, random_weights(case), nested=True)
    model = transformers_model.load(source)
    assert type(model).__name__ == "Qwen3_5MoeForConditionalGeneration"
    run = transformers_model.greedy(model, random_prompt(case), STEPS)
    folder = saved(model.bfloat16(), tmp_path / "saved", case.config["vocab_size"])
    manifest = pack_checkpoint(folder, tmp_path / "packed", experts="bf16", dense="bf16")
    assert manifest["geometry"]["num_hidden_layers"] == case.config["num_hidden_layers"]
    check_parity(tmp_path / "packed", run, case.prompt)


def test_demo(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompt = np.array(tokenizer.encode("<|im_start|>user\nWhat do bees live in?<|im_end|>\n<|im_start|>assistant\n").ids)
    run = transformers_model.greedy(transformers_model.load(DEMO), prompt, STEPS)
    check_parity(packed(DEMO, tmp_path / "packed"), run, len(prompt))


@pytest.mark.parametrize("case", FRESH, ids=str)
def test_float64_reference_is_transformers_in_float64(case: Case, tmp_path: Path) -> None:
    """Both of its forms: the chunked delta rule over everything, and the recurrent one after the prompt."""
    source = write_checkpoint(tmp_path / "source", case.config, random_weights(case))
    with transformers_model.everything_float64():
        model = transformers_model.load(source, torch.float64)
        run = transformers_model.greedy(model, random_prompt(case), STEPS)
        uncached = transformers_model.whole(model, run.ids)
    reference, _ = Reference(CheckpointTensors.read(source)).forward(run.ids)
    for logits in (run.logits, uncached):
        assert logits.dtype == np.float64
        assert np.abs(logits - reference).max() < 1e-10 * np.abs(reference).max()


@pytest.mark.parametrize("head_dim, theta", [(256, 1e7), (64, 1e7), (24, 1e4), (64, 1e6)])
def test_rotary_angles(head_dim: int, theta: float) -> None:
    """Further out than the prompts of the other tests; at 262,143 float32 itself rounds an angle by up to 0.016."""
    config = CASES[0].config | {"head_dim": head_dim, "max_position_embeddings": 262_144}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25}
    theirs = transformers_model.modeling.Qwen3_5MoeTextRotaryEmbedding(Qwen3_5MoeTextConfig(**config))
    ours = Rotary(Geometry.from_config(config, "config.json"))
    half = len(ours.frequencies)
    np.testing.assert_allclose(ours.frequencies, theirs.inv_freq.numpy(), rtol=2e-7)
    for position, allowed in ((0, 0), (1_000, 1e-4), (32_767, 2e-3), (262_143, 2e-2)):
        tables = theirs(torch.zeros(1, 1), torch.full((3, 1, 1), position))
        for mine, table in zip(ours(position, 1), tables, strict=True):
            assert np.abs(mine - table[0, :, :half].numpy()).max() <= allowed
