"""Chats in ChatML: questions about facts and scenes, requests for stories, greetings."""

from __future__ import annotations

from typing import NamedTuple

from draws import Draws
from english import decapitalized, without_article
from facts import draw_facts
from nature import ANIMALS, FOOD_KINDS
from people import MADE_THINGS
from scenes import set_scene
from special_tokens import IM_END, IM_START, THINK_END, THINK_START
from stories import tell_story
from templates import Slots, read_sections, split_question
from words import BOYS, COLOURS, DAYS, GIRLS, MONTHS, NAMES, NUMBERS

WORD_LISTS = (
    GIRLS,
    BOYS,
    COLOURS,
    DAYS,
    MONTHS,
    NUMBERS,
    tuple(animal.name for animal in ANIMALS),
    tuple(food.plural for food in FOOD_KINDS),
    tuple(without_article(made.thing) for made in MADE_THINGS),
)

_SECTIONS = read_sections("chats.txt")


class Turn(NamedTuple):
    """What the user says, what the assistant answers, and what it thinks before that."""

    user: str
    assistant: str
    thought: str


def write_chat(draws: Draws) -> str:
    """A chat of one to three turns, as the chat template renders it.

    Only the last answer has a think block, as the template drops those of earlier ones; it is mostly empty.
    """
    text = ""
    if draws.chance(0.2):
        text += _message("system", draws.pick(_SECTIONS["system"]))
    turns = 1 + draws.chance(0.35) + draws.chance(0.15)
    for _ in range(turns - 1):
        turn = _draw_turn(draws)
        text += _message("user", turn.user) + _message("assistant", turn.assistant)
    turn = _draw_turn(draws)
    thought = turn.thought if draws.chance(0.15) else ""
    answer = f"{THINK_START}\n{thought}\n{THINK_END}\n\n{turn.assistant}"
    return text + _message("user", turn.user) + _message("assistant", answer)


def _message(role: str, content: str) -> str:
    return f"{IM_START}{role}\n{content}{IM_END}\n"


def _draw_turn(draws: Draws) -> Turn:
    if draws.chance(0.05):
        return _repeating(draws)
    kind = draws.fraction()
    if kind < 0.66:
        return _question_of_fact(draws)
    if kind < 0.84:
        return _question_about_a_scene(draws)
    if kind < 0.93:
        return _story_about_an_animal(draws) if draws.chance(0.6) else _any_story(draws)
    if kind < 0.97:
        return Turn(*split_question(draws.pick(_SECTIONS["greeting"])), "I should be friendly.")
    question = draws.pick(_SECTIONS["out of this world"])
    return Turn(question, draws.pick(_SECTIONS["not knowing"]), "I do not know this.")


def _repeating(draws: Draws) -> Turn:
    words = ", ".join(draws.pick(draws.pick(WORD_LISTS)) for _ in range(2 + draws.below(7)))
    request = draws.pick(_SECTIONS["repeating"]).format(words=words)
    return Turn(request, f"{words}.", "I must say the same words.")


def _question_of_fact(draws: Draws) -> Turn:
    sheet = draw_facts(draws)
    question, answer = sheet.question(draws)
    if draws.chance(0.12):
        answer = f"{answer} {sheet.statement(draws)}"
    asking = draws.pick(_SECTIONS["asking"])
    begins_with_a_name = question.split()[0] in NAMES
    slots = Slots(question=question, lower_question=question if begins_with_a_name else decapitalized(question))
    return Turn(asking.format_map(slots), answer, sheet.thought())


def _question_about_a_scene(draws: Draws) -> Turn:
    scene = set_scene(draws)
    question, answer = scene.questions.question(draws)
    return Turn(f"{scene.text} {question}", answer, "The answer is in the text.")


def _story_about_an_animal(draws: Draws) -> Turn:
    animal = draws.pick(ANIMALS)
    slots = Slots(animal=animal.name)
    request = draws.pick(_SECTIONS["asking for a story about an animal"]).format_map(slots)
    story = _told_in_a_chat(tell_story(draws, animal, is_long=False))
    return Turn(request, story, "I will tell a short story about {a_animal}.".format_map(slots))


def _any_story(draws: Draws) -> Turn:
    request = draws.pick(_SECTIONS["asking for a story"])
    return Turn(request, _told_in_a_chat(tell_story(draws, is_long=False)), "I will tell a short story.")


def _told_in_a_chat(story: str) -> str:
    """The story in one paragraph."""
    return story.replace("\n\n", " ")
