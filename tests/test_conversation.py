from __future__ import annotations

import pytest

from fake_model import FakeModel, FakeSession, digest
from sparseflow.conversation import Conversation
from sparseflow.errors import CapacityError, OptionError
from sparseflow.generate import generate

CHATML = """{% for m in messages %}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
QUESTIONS = ["What do bees live in?", "And <foxes>?", "Say <|im_end|> again, a little longer than before.", "ok"]


@pytest.fixture(params=["thinking", "no thinking", "plain chatml"])
def case(request) -> tuple[FakeModel, bool | None]:
    """A model whose answers depend on every id it was fed, with a template that rewrites its history or one that does not."""
    thinks = request.param == "thinking"

    def answer_of(ids: list[int]) -> list[int]:
        thought = [*model.tokenizer.encode(f"I think of {digest(ids)} and of many more words than I shall say.\n"), 4095] if thinks else []
        return thought + model.tokenizer.encode(f"\n\nThe answer is {digest(ids[:-1])}." if thinks else f"It is {digest(ids)}.")

    plain = request.param == "plain chatml"
    model = FakeModel(answer_of, template=CHATML if plain else None)
    enable_thinking = None if plain else thinks
    hello = [{"role": "user", "content": "Hi"}]
    history = model.chat_template.encode(hello, add_generation_prompt=False, enable_thinking=enable_thinking)
    model.marker = model.chat_template.encode(hello, enable_thinking=enable_thinking)[len(history):]
    return model, enable_thinking


def fresh_answer(model: FakeModel, messages: list[dict], enable_thinking: bool | None) -> str:
    ids = model.chat_template.encode(messages, enable_thinking=enable_thinking)
    session = model.session()
    text = "".join(generate(session, ids, model.tokenizer, eos_token_ids=model.eos_token_ids))
    session.close()
    return text


def test_answers_are_those_of_a_fresh_session_and_only_what_is_new_is_fed(case):
    model, thinking = case
    with Conversation(model, messages=[{"role": "system", "content": "Be kind. " * 50}], enable_thinking=thinking) as conversation:
        for turn, question in enumerate(QUESTIONS):
            before = conversation.messages
            fed = model.fed
            generation = conversation.send(question)
            answer = "".join(generation)
            assert model.fed - fed == generation.prompt_tokens + len(generation.ids) - 1
            assert answer == fresh_answer(model, [*before, {"role": "user", "content": question}], thinking)
            if turn:
                new = len(model.tokenizer.encode_plain(before[-1]["content"])) + len(model.tokenizer.encode_plain(question))
                assert generation.prompt_tokens <= new + 16
            assert model.open_sessions <= 3
    assert model.open_sessions == 0


def test_messages_tell_the_conversation(case):
    model, thinking = case
    conversation = Conversation(model, enable_thinking=thinking)
    generation = conversation.send("Hi")
    assert conversation.messages == [{"role": "user", "content": "Hi"}]
    text = "".join(generation)
    thought, _, answer = text.rpartition("\n</think>\n\n")
    assert conversation.messages[1] == {"role": "assistant", "content": answer} | ({"reasoning_content": thought} if thinking else {})
    conversation.send("And?")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]


def test_reset_goes_back_to_the_first_messages(case):
    model, thinking = case
    start = [{"role": "system", "content": "Be kind."}]
    conversation = Conversation(model, messages=start, enable_thinking=thinking)
    first = "".join(conversation.send("Hi"))
    conversation.reset()
    assert conversation.messages == start and model.open_sessions == 0
    assert "".join(conversation.send("Hi")) == first


def test_an_answer_broken_off_stays_as_far_as_it_came(case):
    model, thinking = case
    conversation = Conversation(model, enable_thinking=thinking)
    generation = conversation.send("Hi")
    said = next(generation) + next(generation)
    fed = model.fed
    generation = conversation.send("Go on")
    broken_off = {"content": "", "reasoning_content": said} if thinking else {"content": said}
    assert conversation.messages[1] == {"role": "assistant"} | broken_off
    answer = "".join(generation)
    assert answer == fresh_answer(model, conversation.messages[:-1], thinking)
    assert model.fed > fed


@pytest.mark.parametrize("broken_forward", [1, 8, 16, 25])
def test_ctrl_c_inside_a_forward_does_not_spoil_the_next_turn(case, broken_forward):
    model, thinking = case
    conversation = Conversation(model, enable_thinking=thinking)
    "".join(conversation.send("Hi"))
    model.fail_at = model.fed + broken_forward
    generation = conversation.send("What do bees live in?")
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    generation = conversation.send("And foxes?")
    messages = conversation.messages
    assert "".join(generation) == fresh_answer(model, messages, thinking)
    conversation.close()
    assert model.open_sessions == 0


def test_a_turn_that_failed_before_its_first_token_is_taken_back(case):
    model, thinking = case
    conversation = Conversation(model, enable_thinking=thinking)
    "".join(conversation.send("Hi"))
    before = conversation.messages
    model.fail_at = model.fed + 2
    with pytest.raises(KeyboardInterrupt):
        next(conversation.send("What?"))
    conversation.close()
    assert conversation.messages == before


def test_a_turn_beyond_the_context_is_refused_and_taken_back(case):
    model, thinking = case
    model.context = 60
    conversation = Conversation(model, enable_thinking=thinking, max_new_tokens=4)
    "".join(conversation.send("Hi"))
    with pytest.raises(CapacityError, match="the context holds 60"):
        conversation.send("word " * 80)
    assert len(conversation.messages) == 2
    assert "".join(conversation.send("ok"))
    conversation.close()
    assert model.open_sessions == 0


def test_sampling_is_the_checkpoints_unless_given(case):
    model, thinking = case
    model.generation_config = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    conversation = Conversation(model, temperature=0.0, enable_thinking=thinking)
    assert (conversation._sampler.options.temperature, conversation._sampler.options.top_k) == (0.0, 20)


def test_a_refused_message_changes_nothing(case):
    model, thinking = case
    conversation = Conversation(model, enable_thinking=thinking)
    "".join(conversation.send("Hi"))
    with pytest.raises(OptionError, match="lone surrogate"):
        conversation.send("\udc80")
    assert len(conversation.messages) == 2


def test_an_empty_answer_is_an_answer():
    model = FakeModel(lambda ids: [])
    conversation = Conversation(model)
    assert "".join(conversation.send("Hi")) == ""
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert isinstance(conversation.send("Hello?").session, FakeSession)
