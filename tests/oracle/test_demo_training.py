"""The training scripts of the demo checkpoint: the forward pass they train with, a short run, and the export."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "sparseflow" / "demo"
sys.path.insert(0, str(ROOT / "tools" / "demo"))

from corpus import DocumentSource  # noqa: E402
from export import export, flat_config, nested_config  # noqa: E402
from model import new_model  # noqa: E402
from settings import Settings  # noqa: E402
from train import Training  # noqa: E402
from training_forward import TrainingForward  # noqa: E402
from windows import CopyWindows, DocumentWindows  # noqa: E402

pytestmark = pytest.mark.oracle


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small are slower on several threads, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.mark.parametrize("chunk", [32, 64])
def test_forward_and_gradients_are_those_of_transformers(tokenizer: Tokenizer, chunk: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    inputs, targets = DocumentWindows(tokenizer, DocumentSource(31)).batch(2, 128)

    expected = model(input_ids=inputs).logits
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    expected_gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    forward = TrainingForward(model, chunk)
    with torch.no_grad():
        logits = forward.logits(inputs)
    assert (logits - expected).abs().max() < 5e-5
    forward.losses(inputs, targets).tokens.mean().backward()
    for name, weight in model.named_parameters():
        largest = expected_gradients[name].abs().max()
        assert (weight.grad - expected_gradients[name]).abs().max() <= 1e-4 * largest, name


def test_short_run_reduces_the_loss_and_uses_all_experts(tokenizer: Tokenizer) -> None:
    settings = Settings(steps=20, warmup=5, batch=4, seq=64, long_seq=128)
    training = Training(settings, tokenizer, compiled=False)
    reports = [training.take_step() for _ in range(settings.steps)]
    losses = [report.loss for report in reports]
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    assert reports[-1].loads.sum(-1).tolist() == pytest.approx([4.0] * 8)
    assert reports[-1].load_entropies().min() > 0.5


def test_resumed_run_goes_on_where_it_stopped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = Settings(steps=4, warmup=2, batch=2, seq=32, long_seq=64, copy=0)
    straight = Training(settings, tokenizer, compiled=False)
    straight.take_step()
    straight.save(tmp_path / "run.pt")
    resumed = Training(settings, tokenizer, compiled=False)
    resumed.resume(tmp_path / "run.pt")
    assert resumed.step == 1
    assert resumed.take_step().loss == pytest.approx(straight.take_step().loss, abs=1e-6)


def test_copying_windows_repeat_what_they_say(tokenizer: Tokenizer) -> None:
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    window = CopyWindows(tokenizer, seed=1, stories=0).window(500)
    assert len(window) == 501
    sequence = window[: window.index(end_of_text)]
    assert any(sequence == sequence[:period] * (len(sequence) // period) for period in range(3, 25))


def test_export_is_a_checkpoint_of_the_shipped_form(tmp_path: Path) -> None:
    model = new_model(seed=0)
    export(model.state_dict(), SHIPPED, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
    with safe_open(SHIPPED / "model.safetensors", "pt") as shipped, safe_open(
        tmp_path / "model.safetensors", "pt"
    ) as exported:
        assert set(exported.keys()) == set(shipped.keys())
        for name in shipped.keys():
            assert exported.get_tensor(name).shape == shipped.get_tensor(name).shape
            assert exported.get_tensor(name).dtype == torch.bfloat16

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(name).bfloat16().float()), name


def test_configuration_is_the_shipped_one() -> None:
    shipped = json.loads((SHIPPED / "config.json").read_text())
    assert {**flat_config(), "transformers_version": shipped["transformers_version"]} == shipped
    assert nested_config()["text_config"] == {
        key: value for key, value in shipped.items() if key not in ("architectures", "transformers_version")
    }


def test_transformers_renders_and_splits_chats_as_the_corpus_does(tokenizer: Tokenizer) -> None:
    chat_tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    messages = [
        {"role": "user", "content": "What does a cow say?"},
        {"role": "assistant", "content": "<think>\nThe sound.\n</think>\n\nA cow says \"moo\"."},
        {"role": "user", "content": "Thank you."},
    ]
    prompt = chat_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert prompt == (
        "<|im_start|>user\nWhat does a cow say?<|im_end|>\n"
        "<|im_start|>assistant\nA cow says \"moo\".<|im_end|>\n"
        "<|im_start|>user\nThank you.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert chat_tokenizer(prompt).input_ids == tokenizer.encode(prompt).ids
