"""Fact sheets about colours, animals, food and weather."""

from __future__ import annotations

from draws import Draws
from english import base_form, decapitalized
from fact_sheet import FactSheet, facts
from nature import (
    ANIMALS,
    CALLING_ANIMALS,
    COLOURED_THINGS,
    FOOD_KINDS,
    FOOD_SOURCES,
    MEAL_DISHES,
    MEAL_TIMES,
    TASTES,
    WEATHER_CLOTHES,
    WEATHER_FACTS,
    Animal,
)
from templates import Slots
from words import COLOURS, NAMES

ANIMALS_WITH_BABIES = tuple(animal for animal in ANIMALS if animal.baby)
THINGS_ON_TABLES = ("banana", "lemon", "tomato", "plum", "lime", "pea", "cucumber")
PLACES_OF_FOOD = ("the sea", "under the ground", "wheat")


def colour(draws: Draws) -> FactSheet:
    """The colour of a thing."""
    thing = draws.pick(COLOURED_THINGS)
    other_colour = draws.pick_other(COLOURS, thing.colour)
    slots = Slots(thing=thing.thing, colour=thing.colour, other_colour=other_colour)
    if thing.plural is None:
        slots["a_thing"] = thing.thing
        return facts(slots, "colour")
    slots["things"] = thing.plural
    lies = "colour: lies on a table" if thing.thing in THINGS_ON_TABLES else "colour: lies anywhere"
    return facts(slots, "colour", "colour: countable", lies)


def sound(draws: Draws) -> FactSheet:
    """The sound of an animal."""
    animal = draws.pick(CALLING_ANIMALS)
    other = draws.pick_other(CALLING_ANIMALS, animal)
    slots = _animal_slots(animal)
    slots.update(sound=animal.sound, makes=animal.calls, make=base_form(animal.calls))
    if other.calls == animal.calls:
        return facts(slots, "sound")
    slots["other_make"] = base_form(other.calls)
    return facts(slots, "sound", "sound: another")


def home(draws: Draws) -> FactSheet:
    """Where an animal lives."""
    animal = draws.pick(ANIMALS)
    other = draws.pick_other(ANIMALS, animal)
    slots = _animal_slots(animal)
    slots["home"] = animal.home
    if other.home == animal.home:
        return facts(slots, "home")
    slots["other_home"] = other.home
    return facts(slots, "home", "home: another")


def eating(draws: Draws) -> FactSheet:
    """What an animal eats."""
    animal = draws.pick(ANIMALS)
    slots = _animal_slots(animal)
    is_plural = animal.food.endswith("s") and animal.food != "grass"
    slots.update(food=animal.food, is_are="are" if is_plural else "is")
    return facts(slots, "eating")


def baby(draws: Draws) -> FactSheet:
    """What the baby of an animal is called."""
    animal = draws.pick(ANIMALS_WITH_BABIES)
    slots = _animal_slots(animal)
    slots["baby"] = animal.baby
    return facts(slots, "baby")


def food(draws: Draws) -> FactSheet:
    """A meal, a taste, a fruit or vegetable, or where a food comes from."""
    about = draws.pick((_meal, _taste, _fruit_or_vegetable, _source_of_food))
    return about(draws, draws.pick(NAMES))


def weather(draws: Draws) -> FactSheet:
    """What to wear in some weather, or what the weather does."""
    name = draws.pick(NAMES)
    return _clothes_for_the_weather(draws, name) if draws.chance(0.5) else _weather_fact(draws, name)


def _animal_slots(animal: Animal) -> Slots:
    return Slots(animal=animal.name, animals=animal.plural)


def _meal(draws: Draws, name: str) -> FactSheet:
    dish = draws.pick(MEAL_DISHES)
    slots = Slots(
        name=name,
        food=dish.food,
        is_are="are" if dish.is_plural else "is",
        meal=dish.meal,
        time=MEAL_TIMES[dish.meal],
    )
    return facts(slots, "meal", "meal: pudding" if dish.meal == "pudding" else "meal: at its hour")


def _taste(draws: Draws, name: str) -> FactSheet:
    food, is_plural, taste = draws.pick(TASTES)
    slots = Slots(
        name=name,
        food=food,
        taste=taste,
        is_are="are" if is_plural else "is",
        tastes="taste" if is_plural else "tastes",
        does="do" if is_plural else "does",
        they_are="they are" if is_plural else "it is",
    )
    return facts(slots, "taste")


def _fruit_or_vegetable(draws: Draws, name: str) -> FactSheet:
    food, foods, kind = draws.pick(FOOD_KINDS)
    other_kind = "fruit" if kind == "vegetable" else "vegetable"
    return facts(Slots(food=food, foods=foods, kind=kind, other_kind=other_kind), "fruit or vegetable")


def _source_of_food(draws: Draws, name: str) -> FactSheet:
    food, source = draws.pick(FOOD_SOURCES)
    is_plural = food.endswith("s")
    slots = Slots(
        food=food,
        source=source,
        comes="come" if is_plural else "comes",
        does="do" if is_plural else "does",
    )
    detail = "source of food: place" if source in PLACES_OF_FOOD else "source of food: giver"
    return facts(slots, "source of food", detail)


def _clothes_for_the_weather(draws: Draws, name: str) -> FactSheet:
    condition, garments = draws.pick(WEATHER_CLOTHES)
    garment = draws.pick(garments)
    is_worn = garment != "an umbrella"
    is_plural = garment.endswith("s") and not garment.startswith("a ")
    slots = Slots(
        name=name,
        condition=condition,
        was_so={"it rains": "it rained", "it snows": "it snowed"}.get(condition, condition.replace("it is", "it was")),
        garment=garment,
        is_are="are" if is_plural else "is",
        wear="wear" if is_worn else "take",
        put_on="put on" if is_worn else "took",
    )
    return facts(slots, "clothes for the weather")


def _weather_fact(draws: Draws, name: str) -> FactSheet:
    fact, question, answer = draws.pick(WEATHER_FACTS)
    slots = Slots(
        name=name,
        fact=fact,
        lower_fact=decapitalized(fact),
        fact_as_speech=fact.removesuffix(".") + ",",
        question=question,
        answer=answer,
    )
    return facts(slots, "weather")
