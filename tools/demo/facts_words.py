"""Fact sheets about opposites, plurals, the calendar and numbers."""

from __future__ import annotations

from draws import Draws
from fact_sheet import FactSheet, facts
from nature import SEASON_FACTS
from templates import Slots
from words import DAYS, GIRLS, MONTHS, NAMES, NUMBERS, OPPOSITES, ORDINALS, PLURALS, SEASONS

# Days and months are asked for more often than seasons.
CALENDARS = (("day", DAYS), ("day", DAYS), ("month", MONTHS), ("month", MONTHS), ("season", SEASONS))
# Words with two opposites are only asked for in the direction with one answer.
AMBIGUOUS_OPPOSITES = (("light", "dark"), ("light", "heavy"))
# (one, many)
SUM_THINGS = (
    ("apple", "apples"), ("ball", "balls"), ("pear", "pears"), ("coin", "coins"), ("egg", "eggs"), ("book", "books"),
    ("cake", "cakes"), ("stone", "stones"),
)


def opposite(draws: Draws) -> FactSheet:
    """The opposite of a word."""
    word, opposite = draws.pick(OPPOSITES)
    if draws.chance(0.5):
        word, opposite = opposite, word
    if (word, opposite) in AMBIGUOUS_OPPOSITES:
        word, opposite = opposite, word
    return facts(Slots(word=word, opposite=opposite), "opposite")


def plural(draws: Draws) -> FactSheet:
    """The plural of a noun."""
    one, many = draws.pick(PLURALS)
    return facts(Slots(one=one, many=many, number=draws.pick(NUMBERS[2:10])), "plural")


def calendar(draws: Draws) -> FactSheet:
    """The order of the days, the months or the seasons."""
    unit, names = draws.pick(CALENDARS)
    index = draws.below(len(names))
    slots = Slots(unit=unit, this=names[index], next=names[(index + 1) % len(names)], previous=names[index - 1])
    if unit == "month":
        slots.update(ordinal=ORDINALS[index], months=", ".join(MONTHS[:-1]) + f" and {MONTHS[-1]}")
    if unit == "season":
        told, asked = draws.pick(SEASON_FACTS), draws.pick(SEASON_FACTS)
        slots.update(told_season=told.season, told_weather=told.weather, told_event=told.event)
        slots.update(asked_season=asked.season, asked_weather=asked.weather, asked_event=asked.event)
    return facts(slots, "calendar", f"calendar: {unit}")


def counting(draws: Draws) -> FactSheet:
    """The order of the numbers up to twenty."""
    largest = len(NUMBERS) - 1
    this = draws.below(largest)
    last = min(largest, this + 3 + draws.below(7))
    slots = Slots(
        this=NUMBERS[this],
        next=NUMBERS[this + 1],
        last=NUMBERS[last],
        words=", ".join(NUMBERS[this : last + 1]),
        digits=", ".join(str(number) for number in range(this, last + 1)),
        this_digits=str(this),
        last_digits=str(last),
        this_and_next_digits=f"{this}, {this + 1}" + (", and so on" if this + 1 < largest else ""),
    )
    if this == 0:
        return facts(slots, "counting")
    another = draws.pick_other(range(1, largest + 1), this)
    slots.update(another=NUMBERS[another], more=NUMBERS[max(this, another)], less=NUMBERS[min(this, another)])
    return facts(slots, "counting", "counting: comparing")


def arithmetic(draws: Draws) -> FactSheet:
    """A sum or a difference of two numbers below ten."""
    a, b = draws.below(10), draws.below(10)
    thing, things = draws.pick(SUM_THINGS)
    name = draws.pick(NAMES)
    is_sum = draws.chance(0.6)
    if not is_sum:
        a, b = max(a, b), min(a, b)
    result = a + b if is_sum else a - b
    slots = Slots(
        a=str(a),
        b=str(b),
        result=str(result),
        first=NUMBERS[a],
        second=NUMBERS[b],
        result_word=NUMBERS[result],
        things=things,
        first_things=thing if a == 1 else things,
        result_things=thing if result == 1 else things,
        name=name,
        he="she" if name in GIRLS else "he",
    )
    return facts(slots, "adding" if is_sum else "subtracting")
