"""Fact sheets about tools, materials, the parts of things, the body, clothes and jobs."""

from __future__ import annotations

from draws import Draws
from english import with_article, with_possessive, without_article
from fact_sheet import FactSheet, facts
from people import BODY_PARTS, COUNTED_PARTS, GARMENT_PLACES, JOBS, MADE_THINGS, MATERIALS, TOOLS
from templates import Slots
from words import GIRLS, NAMES, NUMBERS

PARTS_INSIDE = ("days", "months", "sides", "things")
PARTS_WORN_AROUND = ("neck", "waist", "wrist")


def tool(draws: Draws) -> FactSheet:
    """What a tool is for."""
    tool = draws.pick(TOOLS)
    other = draws.pick_other(TOOLS, tool)
    name = draws.pick(NAMES)
    is_girl = name in GIRLS
    slots = Slots(
        tool=tool.name,
        task=tool.task,
        our_task=with_possessive(tool.task, "our"),
        my_task=with_possessive(tool.task, "my"),
        their_task=with_possessive(tool.task, "her" if is_girl else "his"),
        doing=tool.doing,
        doing_else=other.doing,
        name=name,
        he="she" if is_girl else "he",
    )
    return facts(slots, "tool")


def material(draws: Draws) -> FactSheet:
    """What a thing is made of."""
    thing, plural, material = draws.pick(MADE_THINGS)
    slots = Slots(
        thing=thing,
        bare_thing=without_article(thing),
        products=plural or thing,
        material=material,
        other_material=draws.pick_other(MATERIALS, material),
        is_are="are" if material == "eggs" else "is",
    )
    return facts(slots, "material", *(["material: countable"] if plural else []))


def parts(draws: Draws) -> FactSheet:
    """How many parts a thing has."""
    thing, plural, number, part = draws.pick(COUNTED_PARTS)
    slots = Slots(
        a_thing=thing,
        thing=without_article(thing),
        things=plural,
        number=NUMBERS[number],
        part=part,
        parts=part if number > 1 else f"{part}s",
        in_on="in" if part in PARTS_INSIDE else "on",
        counted=f"there are {NUMBERS[number]}" if number > 1 else "there is one",
    )
    return facts(slots, "parts")


def body(draws: Draws) -> FactSheet:
    """What a part of the body is for, or what is worn on it."""
    return _body_part(draws) if draws.chance(0.75) else _wearing(draws)


def job(draws: Draws) -> FactSheet:
    """What a job is about."""
    job = draws.pick(JOBS)
    other = draws.pick_other(JOBS, job)
    slots = Slots(
        job=job.name,
        does=job.does,
        do=job.do,
        place=job.place,
        do_else=other.do,
        name=draws.pick(NAMES),
    )
    return facts(slots, "job")


def _body_part(draws: Draws) -> FactSheet:
    part = draws.pick(BODY_PARTS)
    other = draws.pick_other(BODY_PARTS, part)
    slots = Slots(
        part=part.part,
        parts=part.part if part.is_plural else f"{part.part}s",
        one_part=part.part if part.is_plural else f"a {part.part}",
        is_are="are" if part.is_plural else "is",
        does="do" if part.is_plural else "does",
        helps="help" if part.is_plural else "helps",
        task=part.task,
        our_task=with_possessive(part.task, "our"),
        my_task=with_possessive(part.task, "my"),
        our_other_task=with_possessive(other.task, "our"),
        doing=part.doing,
        my_doing=with_possessive(part.doing, "my"),
    )
    if part.number is None:
        return facts(slots, "body")
    slots["number"] = part.number
    return facts(slots, "body", "body: counted")


def _wearing(draws: Draws) -> FactSheet:
    garment, part = draws.pick(GARMENT_PLACES)
    is_plural = garment == "glasses"
    slots = Slots(
        garment=garment,
        a_garment=garment if is_plural else with_article(garment),
        part=part,
        around="around" if part in PARTS_WORN_AROUND else "on",
        goes="go" if is_plural else "goes",
    )
    return facts(slots, "wearing")
