from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fake_model import DEMO
from sparseflow.errors import OptionError, PackedModelError
from sparseflow.tokenizer import StreamDecoder, Tokenizer

TOKENIZER = Tokenizer.from_folder(DEMO)
BACKEND = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
control_text = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|", "im_end|>", "a", " b", "\n", "é",
                                         "e\u0301", "\u0338", "🙂"])).map("".join)
any_ids = st.lists(st.integers(0, 4200), max_size=60)


def stream(ids: list[int]) -> list[str]:
    decoder = TOKENIZER.stream()
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


def test_ids_of_the_demo():
    assert TOKENIZER.vocab_size == 4096
    assert TOKENIZER.eos_token_ids == (4093, 4091)
    assert TOKENIZER.control_tokens == {"<|endoftext|>": 4091, "<|im_start|>": 4092, "<|im_end|>": 4093, "<think>": 4094, "</think>": 4095}
    assert TOKENIZER.special_tokens == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert TOKENIZER.token_id("<think>") == 4094 and TOKENIZER.token_id("no such token") is None


def test_control_tokens_are_parsed_in_a_raw_prompt_and_not_in_plain_text():
    assert TOKENIZER.encode("<|im_start|>user") == [4092, *TOKENIZER.encode("user")]
    plain = TOKENIZER.encode_plain("<|im_start|>user")
    assert not set(plain) & set(TOKENIZER.control_tokens.values())
    assert TOKENIZER.decode(plain) == "<|im_start|>user"


@settings(deadline=None)
@given(any_text | control_text)
def test_plain_text_survives(text):
    ids = TOKENIZER.encode_plain(text)
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)
    assert not set(ids) & set(TOKENIZER.control_tokens.values())


@settings(deadline=None)
@given(any_text)
def test_both_ways_in_agree_without_control_tokens(text):
    assert TOKENIZER.encode_plain(text) == TOKENIZER.encode(text) == BACKEND.encode(text).ids


@settings(deadline=None)
@given(control_text)
def test_stretches_between_control_tokens_encode_to_the_whole(text):
    ids = []
    for part in TOKENIZER.split_control_tokens(text):
        ids += [part] if isinstance(part, int) else TOKENIZER.encode_plain(part)
    assert ids == TOKENIZER.encode(text)


@settings(deadline=None)
@given(any_ids)
@example([4092, 136, 223, 5000])
def test_decode_is_the_librarys(ids):
    assert TOKENIZER.decode(ids) == BACKEND.decode([i for i in ids if i < 4096], skip_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(any_ids | any_text.map(TOKENIZER.encode))
def test_stream_gives_the_whole_text_in_the_end(ids):
    assert "".join(stream(ids)) == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(any_text)
@example("🙂👩‍👩‍👧 naïve e\u0301 中文 ‮\u0301")
def test_stream_never_gives_out_half_a_character(text):
    text = unicodedata.normalize("NFC", text).replace("\ufffd", "")
    pieces = stream(TOKENIZER.encode(text))
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def byte_id(byte: int) -> int:
    return next(i for i in range(4091) if TOKENIZER.token_bytes(i) == bytes([byte]))


def test_stream_gives_out_invalid_bytes_once_nothing_can_complete_them():
    decoder = TOKENIZER.stream()
    assert decoder.push(byte_id(0xF0)) == ""
    assert decoder.push(byte_id(0x9F)) == ""
    assert decoder.push(byte_id(ord("a"))) == "\ufffda"
    assert decoder.push(byte_id(0xFF)) == "\ufffd"
    assert decoder.push(byte_id(0xE4)) == ""
    assert decoder.flush() == "\ufffd"


def test_ids_beyond_the_vocabulary_are_no_text():
    assert TOKENIZER.decode([5000]) == ""
    assert StreamDecoder(TOKENIZER).push(248_319) == ""


@pytest.mark.parametrize("encode", [TOKENIZER.encode, TOKENIZER.encode_plain])
def test_lone_surrogate(encode):
    with pytest.raises(OptionError, match="U\\+DC80 at character 2"):
        encode("ab\udc80")


def folder_with(tmp_path: Path, **files: object) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        if content is None:
            path.unlink()
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_eos_from_either_config(tmp_path):
    assert Tokenizer.from_folder(folder_with(tmp_path, generation_config={"eos_token_id": 7})).eos_token_ids == (7,)
    assert Tokenizer.from_folder(folder_with(tmp_path, generation_config=None)).eos_token_ids == (4093,)
    assert Tokenizer.from_folder(folder_with(tmp_path, generation_config={}, tokenizer_config={"eos_token": {"content": "<|endoftext|>"}})
                                 ).eos_token_ids == (4091,)
    assert Tokenizer.from_folder(folder_with(tmp_path, generation_config=None, tokenizer_config=None)).eos_token_ids == ()


@pytest.mark.parametrize(("files", "message"), [
    ({"tokenizer": None}, "tokenizer.json is missing"),
    ({"tokenizer": "{"}, "tokenizer.json cannot be read as a tokenizer"),
    ({"tokenizer_config": "{"}, "tokenizer_config.json cannot be read as JSON"),
    ({"tokenizer_config": "[]"}, "tokenizer_config.json holds a list"),
    ({"generation_config": {"eos_token_id": "x"}}, "eos_token_id is 'x'"),
    ({"generation_config": {"eos_token_id": [1, -1]}}, "eos_token_id is \\[1, -1\\]"),
])
def test_damaged_folder(tmp_path, files, message):
    with pytest.raises(PackedModelError, match=message):
        Tokenizer.from_folder(folder_with(tmp_path, **files))


def test_other_decoders_are_refused(tmp_path):
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    with pytest.raises(PackedModelError, match="decoder Fuse is not supported"):
        Tokenizer.from_folder(folder_with(tmp_path, tokenizer=content))


def test_truncation_of_a_training_run_is_ignored(tmp_path):
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tokenizer=content))
    assert tokenizer.encode("one two three four") == TOKENIZER.encode("one two three four")
