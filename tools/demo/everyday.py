"""Everyday sentences, mixed with facts so that facts are also met in plain prose."""

from __future__ import annotations

from cast import draw_cast
from draws import Draws
from facts import draw_facts
from nature import COLOURED_THINGS, FOOD_KINDS
from templates import Slots, read_sections

SENTENCES = read_sections("everyday.txt")["everyday"]
COLOUR_OF = {thing.thing: thing.colour for thing in COLOURED_THINGS}


def write_everyday(draws: Draws) -> str:
    """Three to eight sentences."""
    sentences = []
    cast = draw_cast(draws)
    for _ in range(3 + draws.below(6)):
        if draws.chance(0.4):
            sentences.append(draw_facts(draws).statement(draws))
            continue
        slots = _draw_things(draws, cast)
        sentences.append(draws.pick(SENTENCES).format_map(slots))
        if draws.chance(0.2):
            cast = draw_cast(draws)
    return " ".join(sentences)


def _draw_things(draws: Draws, cast: Slots) -> Slots:
    """The cast with the things that only everyday sentences speak of."""
    food = draws.pick(FOOD_KINDS)
    return Slots(
        cast,
        food=food.food,
        foods=food.plural,
        food_colour=COLOUR_OF.get(food.food, "big"),
        taste=draws.pick(("sweet", "good", "bitter")),
        shape=draws.pick(("triangle", "square", "circle", "hexagon")),
        material=draws.pick(("wood", "stone", "clay", "straw", "iron")),
        material2=draws.pick(("wood", "stone", "paper", "clay")),
    )
