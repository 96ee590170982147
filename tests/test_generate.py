from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import FakeModel
from sparseflow.errors import CapacityError, NonFiniteError, OptionError
from sparseflow.generate import StopStrings, generate, prepare_prompt
from sparseflow.sampling import Sampler, SamplingOptions

EOS = (4093, 4091)


def model_saying(text: str, **options) -> FakeModel:
    model = FakeModel(lambda ids: model.tokenizer.encode_plain(text), **options)
    return model


def run(text: str, prompt: str = "Tell me.", context: int = 4096, **options):
    model = model_saying(text, context=context)
    generation = generate(model.session(), model.tokenizer.encode(prompt), model.tokenizer, eos_token_ids=EOS, **options)
    return generation, list(generation)


def test_pieces_until_the_end_of_text():
    generation, pieces = run("The red fox 🙂 sleeps.")
    assert "".join(pieces) == generation.text == "The red fox 🙂 sleeps."
    assert all(pieces)
    assert generation.finish_reason == "stop" and generation.ids[-1] == 4093
    assert generation.prompt_tokens == generation.session.position - len(generation.ids) + 1
    assert generation.ttft_seconds > 0 and len(generation.token_seconds) == len(generation.ids) - 1
    assert generation.decode_seconds == sum(generation.token_seconds)


def test_every_eos_id_ends_the_text():
    model = FakeModel(lambda ids: [70, 4091, 71])
    generation = generate(model.session(), [1], model.tokenizer, eos_token_ids=EOS)
    assert "".join(generation) == model.tokenizer.decode([70]) and generation.ids == [70, 4091]


def test_max_new_tokens():
    generation, pieces = run("one two three four", max_new_tokens=2)
    assert generation.finish_reason == "length" and len(generation.ids) == 2
    assert generation.session.position == generation.prompt_tokens + 1  # the last token is not fed


def test_half_a_character_at_the_end_is_given_out_as_a_replacement():
    generation, pieces = run("🙂", max_new_tokens=1)
    assert pieces == ["\ufffd"]


def test_the_context_ends_the_text():
    generation, _ = run("one two three four", prompt="a b c", context=5)
    assert generation.finish_reason == "context"
    assert generation.prompt_tokens + len(generation.ids) == 5 + 1  # the last one needs no room
    assert generation.session.position == 5


def test_prompt_as_long_as_the_context():
    generation, _ = run("one two", prompt="a b c", context=3)
    assert len(generation.ids) == 1 and generation.finish_reason == "context"


@pytest.mark.parametrize("stop", [["fox"], ["zebra", " fox s"], [" fox sleeps.", "fox"], "fox", ["x", "fox"]])
def test_stop_strings(stop):
    generation, pieces = run("The red fox sleeps.", stop=stop)
    assert generation.finish_reason == "stop_string"
    assert "".join(pieces) == generation.text and generation.text.strip() in ("The red", "The red fo")
    assert not any(part in generation.text for part in ([stop] if isinstance(stop, str) else stop))


def test_what_only_resembles_a_stop_string_is_given_out():
    generation, pieces = run("The red fox", stop=["fox sleeps"])
    assert "".join(pieces) == "The red fox" and generation.finish_reason == "stop"


def test_end_of_text_ids_are_not_shown_and_other_control_tokens_are():
    model = FakeModel(lambda ids: [4094, 70, 4095])
    generation = generate(model.session(), [1], model.tokenizer, eos_token_ids=EOS)
    assert "".join(generation) == f"<think>{model.tokenizer.decode([70])}</think>"


def whole_text_rule(text: str, stops: list[str]) -> str:
    """The first stop string to be complete, read character by character; the longest of those complete at once."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[:min(starts)]
    return text


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_the_pieces(pieces, stops):
    matcher = StopStrings(stops)
    given_out = []
    for piece in pieces:
        given_out.append(matcher.push(piece))
        assert not any(stop in "".join(given_out) for stop in stops)
    assert "".join(given_out) + matcher.flush() == whole_text_rule("".join(pieces), stops)
    assert matcher.found == any(stop in "".join(pieces) for stop in stops)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"max_new_tokens": 0}, OptionError, "max_new_tokens is 0"),
    ({"max_new_tokens": 1.5}, OptionError, "max_new_tokens is 1.5"),
    ({"stop": ["a", ""]}, OptionError, "stop holds ''"),
    ({"prompt": ""}, OptionError, "the prompt is empty"),
    ({"prompt": "a b c d e", "context": 4}, CapacityError, "needs 5 tokens but the context holds 4"),
])
def test_refused_before_anything_is_computed(options, error, message):
    with pytest.raises(error, match=message):
        run("x", **options)


def test_a_session_that_holds_tokens_goes_on():
    model = model_saying("one two", marker=[8, 9])
    session = model.session()
    session.forward([5, 6, 7])
    generation = generate(session, [8, 9], model.tokenizer, eos_token_ids=EOS)
    assert "".join(generation) == "one two" and generation.prompt_tokens == 2
    session.context = session.position
    with pytest.raises(CapacityError):
        generate(session, [8], model.tokenizer)


def test_fork_at_is_a_fork_inside_the_prompt():
    model = model_saying("one", marker=[4])
    generation = generate(model.session(), [1, 2, 3, 4], model.tokenizer, eos_token_ids=EOS, fork_at=3)
    assert "".join(generation) == "one"
    assert generation.fork.ids == [1, 2, 3] and generation.session.ids[:4] == [1, 2, 3, 4]


def test_the_repetition_penalty_sees_prompt_past_and_answer():
    seen = []

    class Watching(Sampler):
        def next(self, logits, history=()):
            seen.append(list(history))
            return super().next(logits, history)

    model = model_saying("one two")
    generation = generate(model.session(), [8, 9], model.tokenizer, sampler=Watching(), past_ids=[5], max_new_tokens=2)
    list(generation)
    assert seen == [[5, 8, 9], [5, 8, 9, generation.ids[0]]]


def test_closing_leaves_the_session_usable():
    model = model_saying("one two three")
    generation = generate(model.session(), [1, 2], model.tokenizer)
    next(generation)
    generation.close()
    assert list(generation) == [] and generation.finish_reason is None and generation.intact
    assert generation.session.ids == [1, 2, *generation.ids[:-1]]


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_an_interrupted_forward_is_known(fail_at):
    model = model_saying("one two three four five")
    model.fail_at = fail_at
    generation = generate(model.session(), [1, 2], model.tokenizer)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert not generation.intact and generation.finish_reason is None
    assert len(generation.ids) == max(0, fail_at - 2)


def test_logits_that_are_not_finite_end_it_between_forwards():
    class Broken:
        position, context, ids = 0, 10, ()

        def forward(self, ids, *, last_only=False):
            return np.full((1, 4), np.nan, dtype=np.float32)

    generation = generate(Broken(), [1], model_saying("x").tokenizer)
    with pytest.raises(NonFiniteError, match="nan"):
        next(generation)
    assert generation.intact and generation.ids == []


def test_prompts_of_each_kind():
    model = model_saying("x")
    model.generation_config = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    raw = prepare_prompt(model, "The <think>")
    assert raw.ids == [*model.tokenizer.encode("The "), 4094] and raw.sampling == SamplingOptions() and raw.opening == ""
    ids = prepare_prompt(model, np.array([3, 4]), temperature=0.5)
    assert ids.ids == [3, 4] and ids.sampling == SamplingOptions(temperature=0.5)
    chat = prepare_prompt(model, [{"role": "user", "content": "a"}], top_k=5, min_p=None, enable_thinking=True)
    assert chat.sampling == SamplingOptions(temperature=0.7, top_k=5, top_p=0.8)
    assert chat.ids == model.chat_template.encode([{"role": "user", "content": "a"}]) and chat.opening == "<think>\n"


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ("", {}, "the prompt is empty"), ([], {}, "the prompt is empty"),
    (3, {}, "the prompt is a int"), (b"abc", {}, "the prompt is a bytes"), ({"role": "user"}, {}, "the prompt is a dict"),
    ([1, -2], {}, "token 1 is -2"), ([1, "a"], {}, "token 1 is 'a'"), ([True], {}, "token 0 is True"),
    ("a\udc80", {}, "lone surrogate"),
    ("a", {"enable_thinking": False}, "enable_thinking is False"),
    ("a", {"temperature": -1}, "temperature is -1"),
])
def test_prompts_are_checked(prompt, options, message):
    with pytest.raises(OptionError, match=message):
        prepare_prompt(model_saying("x"), prompt, **options)
