"""Ids of chat messages and prompts against the tokenizer and `apply_chat_template` of transformers."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from fake_model import DEMO
from sparseflow.chat import ChatTemplate
from sparseflow.tokenizer import Tokenizer

pytestmark = pytest.mark.oracle

CONVERSATIONS = [
    [{"role": "user", "content": "What do bees live in?"}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "naïve 🙂 if a < b and b > c: & 'x' \"y\""}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, {"role": "user", "content": "c"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "why < not"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2 > 1"}],
]


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.from_folder(DEMO, Tokenizer.from_folder(DEMO))


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("switches", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_ids(reference, template, messages, switches, add_generation_prompt):
    options = {"add_generation_prompt": add_generation_prompt, **switches}
    assert template.render(messages, **options) == reference.apply_chat_template(messages, tokenize=False, **options)
    want = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert template.encode(messages, **options) == list(want)


TEXTS = ["", "The red fox", "<|im_start|>user\nhi<|im_end|>", "<think>é e\u0301 \u0338🙂中文\n\n  x", "a\r\n\tb   "]


@pytest.mark.parametrize("text", TEXTS)
def test_prompt_ids_and_text(reference, template, text):
    tokenizer = Tokenizer.from_folder(DEMO)
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
