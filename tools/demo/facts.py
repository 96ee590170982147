"""Passages of facts."""

from __future__ import annotations

from collections.abc import Callable

import facts_nature
import facts_people
import facts_words
from draws import Draws
from fact_sheet import FactSheet
from scenes import set_scene

Topic = Callable[[Draws], FactSheet]


def _parts_or_counting(draws: Draws) -> FactSheet:
    return facts_people.parts(draws) if draws.chance(0.55) else facts_words.counting(draws)


TOPICS: tuple[Topic, ...] = (
    facts_nature.colour,
    facts_nature.sound,
    facts_nature.home,
    facts_nature.eating,
    facts_nature.baby,
    facts_people.tool,
    facts_words.opposite,
    facts_words.plural,
    facts_words.calendar,
    _parts_or_counting,
    facts_words.arithmetic,
    facts_words.arithmetic,
    facts_people.material,
    facts_nature.food,
    facts_nature.weather,
    facts_people.body,
    facts_people.job,
)


def draw_facts(draws: Draws) -> FactSheet:
    """The fact sheet of a random topic."""
    return draws.pick(TOPICS)(draws)


def write_facts(draws: Draws) -> str:
    """A passage of three to nine facts, half of the passages mostly about one topic."""
    theme = draws.pick(TOPICS) if draws.chance(0.5) else None
    lines = []
    for _ in range(3 + draws.below(7)):
        is_on_theme = draws.chance(0.8)
        sheet = theme(draws) if theme and is_on_theme else draw_facts(draws)
        if draws.chance(0.12):
            lines.append(" ".join(sheet.question(draws)))
            continue
        lines.append(sheet.statement(draws))
        if draws.chance(0.25):
            lines.append(sheet.statement(draws))
    if draws.chance(0.12):
        lines.append(set_scene(draws).text)
    return ("\n" if draws.chance(0.3) else " ").join(lines)
