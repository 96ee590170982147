"""llama.cpp as a second oracle: it runs the GGUF files that tools/export_gguf.py makes of our packs.

A bf16 pack exported with --float32 makes both engines compute in float32 on the same weights, so that their logits agree to
rounding: that checks every formula and every layout. An int8 pack exported as Q8_0 holds the same weights too, but llama.cpp
rounds the scales of its activations to float16: there tokens agree but where two are nearly as likely.

What these tests need is imported when they run, since the others in this folder do without it. One thread each: the
idle threads of one engine would spin in the way of the other.
"""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from random_checkpoint import random_prompt, random_weights, write_checkpoint

import sparseflow
from geometries import CASES, Case
from sparseflow.errors import OptionError, SparseFlowError, StorageError
from sparseflow.pack import pack_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

pytestmark = pytest.mark.peers

STEPS = 40
ROUNDING = 5e-5  # of the largest logit, when both compute in float32; 5e-6 was measured
NEARLY_AS_LIKELY = 1e-2  # of the largest logit, between our best two; disagreements were measured at up to 3e-3
PROMPTS = [
    "The red fox",
    "Bees live in",
    "Once upon a time",
    "Every winter the",
    "<|im_start|>user\nWhat do bees live in?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
]
TEXTS = [
    *PROMPTS,
    "it's 1234,5 or I'LL see",
    "Straße, naïve, 漢字 한글 हिन्दी 🦊",
    " \t two  spaces \n\n\r\n end ",
    "<|im_end|><think>x</think>",
]

# llama.cpp has one size for the keys and values of linear attention, and aborts on models with one kind of layer.
HELD = [
    replace(case, config=case.config | {"linear_value_head_dim": case.config["linear_key_head_dim"]})
    for case in CASES
    if case.name not in ("all_linear", "all_full")
]

Logits = NDArray[np.float32]


def export(folder: Path, destination: Path, *, float32: bool = False) -> Path:
    from export_gguf import export

    export(folder, destination, float32=float32)
    return destination


def load_llama(path: Path) -> Any:
    import llama_cpp

    return llama_cpp.Llama(
        str(path),
        n_ctx=512,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )


def side_by_side(model: sparseflow.Model, llama: Any, prompt: list[int]) -> tuple[Logits, Logits]:
    """Our logits and theirs [prompt + STEPS, vocab]: both are fed the prompt at once, then our greedy tokens."""
    llama.reset()
    with model.session() as session:
        ids, fed = list(prompt), list(prompt)
        ours = []
        for step in range(STEPS + 1):
            ours.append(session.forward(fed))
            llama.eval(fed)
            if step < STEPS:
                fed = [int(ours[-1][-1].argmax())]
                ids += fed
    return np.concatenate(ours), np.array(llama.scores[: len(ids)])


def gaps(logits: Logits) -> NDArray[np.float32]:
    """How far the best token is before the second, as a share of the largest logit."""
    ranked = np.sort(logits, axis=1)
    return (ranked[:, -1] - ranked[:, -2]) / np.abs(logits).max()


def check_float32(folder: Path, path: Path, prompt: list[int]) -> None:
    llama = load_llama(export(folder, path, float32=True))
    with sparseflow.load(folder, cache="resident", threads=1) as model:
        ours, theirs = side_by_side(model, llama, prompt)
    llama.close()
    assert np.abs(ours - theirs).max() <= ROUNDING * np.abs(ours).max()
    clear = gaps(ours) > 2 * ROUNDING
    assert clear.mean() > 0.9
    assert np.array_equal(ours.argmax(axis=1)[clear], theirs.argmax(axis=1)[clear])


def pack_case(case: Case, folder: Path, kind: str) -> Path:
    write_checkpoint(folder / "checkpoint", case.config, random_weights(case))
    pack_checkpoint(folder / "checkpoint", folder / "packed", experts=kind, dense=kind)
    return folder / "packed"


@pytest.mark.parametrize("case", HELD, ids=str)
def test_random_models_in_float32(case: Case, tmp_path: Path) -> None:
    check_float32(pack_case(case, tmp_path, "bf16"), tmp_path / "model.gguf", random_prompt(case).tolist())


def test_demo_in_float32(packed_demo_bf16: Path, tmp_path: Path) -> None:
    with sparseflow.load(packed_demo_bf16) as model:
        prompt = model.tokenizer.encode(PROMPTS[-1])
    check_float32(packed_demo_bf16, tmp_path / "demo.gguf", prompt)


@pytest.fixture(scope="module")
def demo_gguf(packed_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(packed_demo, tmp_path_factory.mktemp("gguf") / "demo.gguf")


@pytest.fixture(scope="module")
def demo_llama(demo_gguf: Path) -> Iterator[Any]:
    llama = load_llama(demo_gguf)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def demo(packed_demo: Path) -> Iterator[sparseflow.Model]:
    with sparseflow.load(packed_demo, cache="resident", threads=1) as model:
        yield model


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_tokens_of_the_int8_demo(demo: sparseflow.Model, demo_llama: Any, text: str) -> None:
    prompt = demo.tokenizer.encode(text)
    ours, theirs = side_by_side(demo, demo_llama, prompt)
    new = slice(len(prompt) - 1, None)
    differ = ours[new].argmax(axis=1) != theirs[new].argmax(axis=1)
    assert differ.sum() <= 1
    assert (gaps(ours)[new][differ] < NEARLY_AS_LIKELY).all()
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer(demo: sparseflow.Model, demo_llama: Any, text: str) -> None:
    ids = demo.tokenizer.encode(text)
    assert demo_llama.tokenize(text.encode(), add_bos=False, special=True) == ids


def test_q8_0_holds_the_very_same_weights(packed_demo: Path, demo_gguf: Path, tmp_path: Path) -> None:
    import gguf

    exact = export(packed_demo, tmp_path / "exact.gguf", float32=True)
    kinds = set()
    for stored, wanted in zip(gguf.GGUFReader(demo_gguf).tensors, gguf.GGUFReader(exact).tensors, strict=True):
        kinds.add(stored.tensor_type.name)
        assert stored.name == wanted.name
        assert np.array_equal(gguf.quants.dequantize(stored.data, stored.tensor_type), wanted.data), stored.name
    assert kinds == {"Q8_0", "BF16", "F32"}


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"linear_value_head_dim": 24, "linear_key_head_dim": 16}, "bf16", "has one size for both"),
        ({"layer_types": ["linear_attention"] * 4}, "bf16", "all layers are linear_attention"),
        ({"layer_types": ["full_attention"] * 4}, "bf16", "all layers are full_attention"),
        ({}, "int8", "linear_value_head_dim is 16, no multiple of the 32 of Q8_0: export with --float32"),
    ],
)
def test_refuses_what_gguf_cannot_hold(change: dict[str, Any], kind: str, message: str, tmp_path: Path) -> None:
    case = next(case for case in HELD if case.name == "full_first")
    folder = pack_case(replace(case, config=case.config | change), tmp_path, kind)
    check_refusal(OptionError, message, lambda: export(folder, tmp_path / "model.gguf"))
    assert not list(tmp_path.glob("model.gguf*"))


def check_refusal(error: type[SparseFlowError], message: str, action: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        action()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_to_overwrite(packed_demo: Path, tmp_path: Path) -> None:
    target = tmp_path / "demo.gguf"
    target.write_text("mine")
    check_refusal(OptionError, f"{target}: exists", lambda: export(packed_demo, target))
    check_refusal(OptionError, "does not exist", lambda: export(packed_demo, tmp_path / "no" / "demo.gguf"))
    assert target.read_text() == "mine"


def test_refuses_a_full_disk(packed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 20))
    check_refusal(StorageError, "the disk has 1.0 MiB free", lambda: export(packed_demo, tmp_path / "demo.gguf"))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(packed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    check_refusal(StorageError, "No space left on device", lambda: export(packed_demo, tmp_path / "demo.gguf"))
    assert not list(tmp_path.iterdir())
