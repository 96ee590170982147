"""Scenes: a sentence or two about two people, and questions whose answers stand in them."""

from __future__ import annotations

from dataclasses import dataclass

from draws import Draws
from fact_sheet import FactSheet
from people import REASONS
from templates import Slots, read_sections
from words import COLOURS, NAMES

TOYS = ("ball", "car", "boat", "doll", "train", "drum", "kite", "robot", "book", "hat", "cup", "bag", "box")
PLACES = ("the park", "the beach", "the farm", "the zoo", "the library", "the market", "school", "the lake")
SPOTS = (
    "under the bed", "on the table", "in the box", "behind the door", "on the shelf", "in the garden",
    "under the chair",
)
# (more, less)
COMPARATIVES = (("taller", "shorter"), ("older", "younger"), ("faster", "slower"), ("stronger", "weaker"))

_SECTIONS = read_sections("scenes.txt")


@dataclass(frozen=True, slots=True)
class Scene:
    """The text of a scene, and the sheet of the questions about it."""

    text: str
    questions: FactSheet


def set_scene(draws: Draws) -> Scene:
    """A scene about two people with a toy each."""
    kind = draws.pick((_holding, _going, _feeling, _lying, _comparing))
    name = draws.pick(NAMES)
    name2 = draws.pick_other(NAMES, name)
    colour = draws.pick(COLOURS)
    colour2 = draws.pick_other(COLOURS, colour)
    toy = draws.pick(TOYS)
    toy2 = draws.pick_other(TOYS, toy)
    return kind(draws, Slots(name=name, name2=name2, colour=colour, colour2=colour2, toy=toy, toy2=toy2))


def _holding(draws: Draws, slots: Slots) -> Scene:
    slots["has"] = draws.pick(("has", "has got", "is holding"))
    return _with_a_sequel(draws, _scene(slots, "holding"), "holding: more")


def _going(draws: Draws, slots: Slots) -> Scene:
    slots["place"] = draws.pick(PLACES)
    slots["place2"] = draws.pick_other(PLACES, slots["place"])
    return _with_a_sequel(draws, _scene(slots, "going"), "going: more")


def _feeling(draws: Draws, slots: Slots) -> Scene:
    feeling, reason, did = draws.pick(REASONS)
    # The recorded corpus leaves the open name of a reason as it is in the answer; the shipped weights have read it so.
    slots.update(feeling=feeling, reason=reason.replace("{n}", slots["name"]), reason_in_answer=reason, did=did)
    if draws.chance(0.7):
        return _scene(slots, "feeling", "feeling: more")
    return _scene(slots, "feeling")


def _lying(draws: Draws, slots: Slots) -> Scene:
    slots["where"] = draws.pick(SPOTS)
    slots["where2"] = draws.pick_other(SPOTS, slots["where"])
    return _scene(slots, "lying")


def _comparing(draws: Draws, slots: Slots) -> Scene:
    slots["more"], slots["less"] = draws.pick(COMPARATIVES)
    return _scene(slots, "comparing")


def _scene(slots: Slots, *names: str) -> Scene:
    sheet = FactSheet.fill(_SECTIONS, list(names), slots)
    return Scene(" ".join(sheet.statements).format_map(slots), sheet)


def _with_a_sequel(draws: Draws, scene: Scene, name: str) -> Scene:
    """The scene, half of the time followed by one of the lines of the named section."""
    if draws.chance(0.5):
        sequel = draws.pick(_SECTIONS[name]).format_map(scene.questions.slots)
        return Scene(f"{scene.text} {sequel}", scene.questions)
    return scene
