"""The corpus and the tokenizer of the demo checkpoint are functions of a seed, to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools" / "demo"
SHIPPED = ROOT / "sparseflow" / "demo"
sys.path.insert(0, str(TOOLS))

from corpus import DEFAULT_MIX, DocumentSource, Mix, write_corpus  # noqa: E402
from draws import Draws  # noqa: E402
from english import past_tense, with_article, with_possessive, without_article  # noqa: E402
from facts import TOPICS  # noqa: E402
from special_tokens import ADDED_TOKENS, END_OF_TEXT  # noqa: E402
from stories import PLOTS, tell_story  # noqa: E402
from templates import Slots  # noqa: E402
from train_tokenizer import train_tokenizer, write_tokenizer  # noqa: E402
from words import NAMES  # noqa: E402

# (seed, size, novel) -> sha256 of the text, recorded from the generator that wrote the corpus of the shipped model.
GOLDEN = {
    (1, 200_000, 0.0): "acd33b63a68cb38cd6eac918a984d37e74483037049d85475b883d2c6f158b3f",
    (7, 100_000, 0.3): "7c314e8d824999d419c6efc2d6dbe8f416864759fe780f896dc69c613f4b594e",
}
FULL_CORPUS = "cdb4f429cf5e66f14fdb565e697e3bd4161798efeaaf453db50f99dd4d7cc11f"

CHAT_MESSAGE = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>\n", re.DOTALL)
ONLY_STORIES = Mix(stories=1, facts=0, everyday=0)
ONLY_CHATS = Mix(stories=0, facts=0, everyday=0)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("seed", "size", "novel"), GOLDEN)
def test_text_is_the_recorded_one(seed: int, size: int, novel: float) -> None:
    assert sha256(write_corpus(seed, size, novel)) == GOLDEN[seed, size, novel]


@pytest.mark.slow
def test_full_corpus_and_tokenizer_are_those_of_the_shipped_model() -> None:
    text = write_corpus(seed=1, size=30_000_000, novel=0)
    assert sha256(text) == FULL_CORPUS
    trained = json.loads(train_tokenizer(text).to_str())["model"]
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]
    assert trained["vocab"] == shipped["vocab"]
    assert trained["merges"] == shipped["merges"]


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_command_writes_the_same_bytes_in_any_process(tmp_path: Path, hash_seed: str) -> None:
    out = tmp_path / "corpus.txt"
    command = [sys.executable, str(TOOLS / "corpus.py"), "--seed", "7", "--mb", "0.1", "--novel", "0.3"]
    subprocess.run([*command, "--out", str(out)], check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    assert sha256(out.read_text(encoding="utf-8")) == GOLDEN[7, 100_000, 0.3]


def test_seeds_differ() -> None:
    assert write_corpus(2, 1000) != write_corpus(3, 1000)


def test_documents_end_with_the_end_of_text_token_and_fill_the_size() -> None:
    text = write_corpus(11, 20_000)
    *documents, rest = text.split(END_OF_TEXT)
    assert rest == ""
    assert all(document.strip() for document in documents)
    assert len(text.encode()) >= 20_000
    assert len(text.encode()) - len((documents[-1] + END_OF_TEXT).encode()) < 20_000


def test_text_has_no_open_slots_but_the_recorded_one() -> None:
    opened = set(re.findall(r"\{.*?\}.{11}", write_corpus(1, 200_000, novel=0)))
    assert opened == {"{n}'s birthday"}


def test_every_template_of_facts_can_be_filled() -> None:
    for topic in TOPICS:
        for seed in range(40):
            sheet = topic(Draws(seed))
            for line in [*sheet.statements, *sheet.questions, *sheet.thoughts]:
                assert "{" not in line.format_map(sheet.slots)


def test_every_plot_of_the_stories_is_told() -> None:
    stories = " ".join(tell_story(Draws(seed)) for seed in range(400))
    assert len(PLOTS) == 33
    assert "{" not in stories


def test_made_up_names_replace_all_names() -> None:
    names = re.compile(rf"\b({'|'.join(NAMES)})\b")
    assert any(names.search(story) for story in islice(DocumentSource(5, 0, ONLY_STORIES), 20))
    assert not any(names.search(story) for story in islice(DocumentSource(5, 1, ONLY_STORIES), 20))


def test_mix_chooses_the_kinds_of_documents() -> None:
    assert all("<|im_start|>" not in document for document in islice(DocumentSource(5, 0, ONLY_STORIES), 50))
    assert all("<|im_start|>" in document for document in islice(DocumentSource(5, 0, ONLY_CHATS), 50))
    kinds = ["<|im_start|>" in document for document in islice(DocumentSource(5, 0, DEFAULT_MIX), 200)]
    assert any(kinds) and not all(kinds)


def test_chats_are_turns_of_user_and_assistant() -> None:
    for chat in islice(DocumentSource(5, 0, ONLY_CHATS), 200):
        messages = CHAT_MESSAGE.findall(chat)
        assert "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages) == chat
        roles = [role for role, _ in messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        thoughts = ["<think>" in content for _, content in messages]
        assert thoughts == [False] * (len(messages) - 1) + [True]


def test_draws_count_one_number_each() -> None:
    draws, numbers = Draws(3), Draws(3)
    draws.pick("abc"), draws.below(7), draws.chance(0.5)
    for _ in range(3):
        numbers.fraction()
    assert draws.fraction() == numbers.fraction()
    assert all(draws.pick_other("ab", "a") == "b" for _ in range(20))


def test_slots_give_capitals_and_articles() -> None:
    slots = Slots(animal="owl", thing="a lemon")
    assert "{A_animal}, {animal}; {Thing}, {a_thing}".format_map(slots) == "An owl, owl; A lemon, a lemon"
    with pytest.raises(KeyError, match="missing"):
        "{Missing}".format_map(slots)


def test_english_forms() -> None:
    nouns = {"ant": "an ant", "unicycle": "a unicycle", "cow": "a cow", "the sky": "the sky"}
    assert {noun: with_article(noun) for noun in nouns} == nouns
    assert [without_article(noun) for noun in ("an axe", "glue")] == ["axe", "glue"]
    verbs = {"moos": "mooed", "hisses": "hissed", "gobbles": "gobbled", "sings": "sang"}
    assert {verb: past_tense(verb) for verb in verbs} == verbs
    assert with_possessive("dry yourself with your towel", "his") == "dry himself with his towel"


def test_tokenizer_is_a_function_of_the_text_and_keeps_it() -> None:
    text = write_corpus(1, 50_000, novel=0)
    tokenizer = train_tokenizer(text)
    assert train_tokenizer(text).to_str() == tokenizer.to_str()
    sample = text[:5000] + "Ünseen – 日本\n"
    assert tokenizer.decode(tokenizer.encode(sample).ids, skip_special_tokens=False) == sample


def test_tokenizer_folder_is_that_of_the_shipped_model_but_for_the_merges(tmp_path: Path) -> None:
    write_tokenizer(train_tokenizer(write_corpus(1, 1_000_000, novel=0)), tmp_path)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [saved.token_to_id(token) for token in ADDED_TOKENS] == [4091, 4092, 4093, 4094, 4095]
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
