"""The cast of a story: who takes part, where it happens, and what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draws import Draws
from english import past_tense
from nature import ANIMALS, CALLING_ANIMALS, COLOURED_THINGS, Animal
from people import JOBS
from templates import Slots
from words import BOYS, COLOURS, DAYS, GIRLS, MONTHS, NUMBERS, OPPOSITES


class Pet(NamedTuple):
    """A pet, its sound, and what its feet leave on paper."""

    name: str
    sound: str
    feet: str


class Present(NamedTuple):
    """A home-made present and its material."""

    name: str
    material: str


class Choice(NamedTuple):
    """A slot filled with one of the options, unlike the value of another slot if one is named."""

    slot: str
    options: Sequence[str]
    unlike: str | None = None


GROWN_UPS = ("mum", "dad", "grandma", "grandpa", "aunt", "uncle", "mum", "dad")
GROWN_UP_WOMEN = ("mum", "grandma", "aunt")

COUNTABLE_THINGS = tuple(thing for thing in COLOURED_THINGS if thing.plural)
# Too general to be met in a story.
VAGUE_ANIMALS = ("bird", "fish")

PETS = (
    Pet("dog", "woof", "muddy"),
    Pet("cat", "meow", "little"),
    Pet("puppy", "woof", "dirty"),
    Pet("kitten", "meow", "tiny"),
    Pet("dog", "woof", "big"),
)
PRESENTS = (
    Present("necklace", "shells"),
    Present("hat", "paper"),
    Present("boat", "wood"),
    Present("scarf", "wool"),
    Present("cup", "clay"),
    Present("doll", "straw"),
    Present("box", "wood"),
    Present("picture", "leaves"),
    Present("crown", "paper"),
    Present("basket", "straw"),
)
TOYS = (
    "ball", "car", "boat", "doll", "train", "teddy bear", "drum", "robot", "spinning top", "toy horse", "kite",
    "truck", "whistle", "scooter",
)
HIDING_PLACES = (
    "under the bed", "behind the door", "in the garden", "under the table", "in the box", "behind the tree",
    "on the roof", "in the bath", "under the chair", "behind the sofa", "in the shed", "in the long grass",
    "next to the gate", "on the shelf",
)
PLACES = (
    "the park", "the beach", "the farm", "the lake", "the forest", "the playground", "the market", "school",
    "the river", "the garden", "the zoo", "the library", "the hill",
)

PROPS = (
    Choice("colour", COLOURS),
    Choice("colour2", COLOURS, unlike="colour"),
    Choice("toy", TOYS),
    Choice("toy2", TOYS, unlike="toy"),
    Choice("hiding_place", HIDING_PLACES),
)
CIRCUMSTANCES = (
    Choice("stranger_he", ("he", "she")),
    Choice("pet_adjective", ("small", "big", "funny", "clever", "fat", "sleepy", "brown", "white", "black")),
    Choice("pet_name", ("Spot", "Fluffy", "Biscuit", "Socks", "Pepper", "Ginger", "Button")),
    Choice(
        "adjective",
        ("little", "kind", "brave", "clever", "shy", "happy", "quiet", "funny", "curious", "young"),
    ),
    Choice("weather", ("sunny", "rainy", "cold", "windy", "warm", "foggy", "bright", "grey")),
    Choice("time_of_day", ("morning", "afternoon", "evening", "day")),
    Choice(
        "home",
        (
            "near the sea", "in the forest", "on a hill", "by the river", "in the city", "at the edge of the town",
            "next to a farm", "in a small village",
        ),
    ),
    Choice(
        "hobby",
        (
            "drawing pictures", "playing football", "reading books", "singing songs", "climbing trees",
            "riding a bicycle", "looking at the stars", "helping in the kitchen", "collecting stones",
            "feeding the ducks",
        ),
    ),
    Choice("day", DAYS),
    Choice("month", MONTHS),
    Choice("place", PLACES),
    Choice("feeling", ("happy", "bored", "excited", "tired", "hungry", "lonely", "well")),
    Choice("number", NUMBERS[2:11]),
    Choice("happy", ("happy", "glad", "very happy", "cheerful", "full of joy")),
    Choice("sad", ("sad", "very sad", "unhappy", "upset")),
    Choice("good", ("good", "wonderful", "lovely", "great", "happy", "long")),
    Choice("meal", ("breakfast", "lunch", "dinner")),
    Choice(
        "lesson",
        (
            "share", "be kind", "tell the truth", "be brave", "wait", "help others", "listen", "say sorry",
            "try again",
        ),
    ),
    Choice("box_colour", COLOURS),
    Choice("hiding_place2", HIDING_PLACES, unlike="hiding_place"),
    Choice(
        "fruit",
        ("apples", "pears", "cherries", "plums", "bananas", "oranges", "grapes", "strawberries", "berries"),
    ),
    Choice("furniture", ("chair", "table", "gate", "shelf", "toy boat", "stool", "bed", "fence", "door")),
    Choice("cake_result", ("black and burnt", "golden and soft", "big and sweet", "flat", "warm and brown")),
    Choice(
        "flower",
        ("yellow sunflower", "red rose", "pink flower", "purple flower", "white flower", "sunflower"),
    ),
    Choice("farm_baby", ("lamb", "calf", "piglet", "foal", "duckling", "chick")),
    Choice("magic_thing", ("stone", "thing", "present")),
    Choice(
        "wish",
        (
            "a new toy", "a big cake", "a pony", "a boat", "a hundred sweets", "a puppy", "a friend", "warm boots",
            "a flying horse",
        ),
    ),
    Choice("vehicle", ("train", "bus", "boat")),
    Choice(
        "city_place",
        (
            "the zoo", "the big library", "the old castle", "the toy shop", "the museum", "the airport",
            "the clock tower",
        ),
    ),
)


def draw_cast(draws: Draws) -> Slots:
    """Draw a cast: the values of all slots of templates/stories.txt."""
    slots = Slots()
    hero_is_girl = draws.chance(0.5)
    hero = draws.pick(GIRLS if hero_is_girl else BOYS)
    friend_is_girl = draws.chance(0.5)
    friend = draws.pick_other(GIRLS if friend_is_girl else BOYS, hero)
    grown_up = draws.pick(GROWN_UPS)
    slots.update(hero=hero, friend=friend, friend_kid="girl" if friend_is_girl else "boy", grown_up=grown_up)
    slots.update(_pronouns("", hero_is_girl))
    slots.update(_pronouns("friend_", friend_is_girl))
    slots.update(_pronouns("grown_up_", grown_up in GROWN_UP_WOMEN))

    animal, other_animal = _draw_animals(draws)
    slots.update(animal_slots(animal))
    slots.update(animal2=other_animal.name, animal2_home=other_animal.home, animal2_food=other_animal.food)
    pet = draws.pick(PETS)
    slots.update(pet=pet.name, pet_sound=pet.sound, pet_feet=pet.feet)
    job = draws.pick(JOBS)
    slots.update(job=job.name, job_does=job.does, job_place=job.place)
    _make_choices(draws, PROPS, slots)
    _draw_subjects(draws, slots)

    slots["kid"] = draws.pick(("girl" if hero_is_girl else "boy", "child"))
    _make_choices(draws, CIRCUMSTANCES, slots)
    return slots


def animal_slots(animal: Animal) -> dict[str, str]:
    """The values of the slots about the animal of a story."""
    return {
        "animal": animal.name,
        "animal_home": animal.home,
        "animal_food": animal.food,
        "animal_sound": animal.sound or "sniff",
        "animal_sounded": past_tense(animal.calls) if animal.calls else "looked up and moved",
    }


def _pronouns(prefix: str, is_female: bool) -> dict[str, str]:
    he, him, his = ("she", "her", "her") if is_female else ("he", "him", "his")
    return {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}


def _draw_animals(draws: Draws) -> tuple[Animal, Animal]:
    """Two different animals; the first one is more often than not one with a sound."""
    animal = draws.pick(ANIMALS)
    while animal.name in VAGUE_ANIMALS:
        animal = draws.pick(ANIMALS)
    other = draws.pick_other(ANIMALS, animal)
    if draws.chance(0.6):
        animal = draws.pick(CALLING_ANIMALS)
        other = draws.pick_other(ANIMALS, animal)
    return animal, other


def _draw_subjects(draws: Draws, slots: Slots) -> None:
    """What is counted, asked at school, painted and given in the stories that do so."""
    count, count2 = 1 + draws.below(9), 1 + draws.below(9)
    slots.update(count=NUMBERS[count], count2=NUMBERS[count2], total=NUMBERS[count + count2])
    word, opposite = draws.pick(OPPOSITES)
    if draws.chance(0.5):
        word, opposite = opposite, word
    slots.update(word=word, opposite=opposite)
    subject = draws.pick(COUNTABLE_THINGS)
    subject2 = draws.pick_other(COUNTABLE_THINGS, subject)
    slots.update(subject=subject.thing, subject_colour=subject.colour)
    slots.update(subject2=subject2.thing, subject2_colour=subject2.colour)
    present = draws.pick(PRESENTS)
    slots.update(present=present.name, present_material=present.material)


def _make_choices(draws: Draws, choices: Sequence[Choice], slots: Slots) -> None:
    for choice in choices:
        if choice.unlike is None:
            slots[choice.slot] = draws.pick(choice.options)
        else:
            slots[choice.slot] = draws.pick_other(choice.options, slots[choice.unlike])
