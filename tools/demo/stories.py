"""Short stories about a child, a friend, a grown-up and an animal."""

from __future__ import annotations

from cast import animal_slots, draw_cast
from draws import Draws
from nature import Animal
from templates import read_blocks

_SECTIONS = read_blocks("stories.txt")
OPENINGS = _SECTIONS["opening"][0]
ENDINGS = _SECTIONS["ending"][0]
PLOTS = [beats for section, beats in _SECTIONS.items() if section.startswith("plot: ")]
ANIMAL_PLOTS = [_SECTIONS["plot: animal at home"], _SECTIONS["plot: talking animals"]]


def tell_story(draws: Draws, animal: Animal | None = None, is_long: bool = True) -> str:
    """A story, about the given animal if there is one; a short story leaves out some of the beats in the middle."""
    slots = draw_cast(draws)
    if animal:
        slots.update(animal_slots(animal))
    plot = draws.pick(ANIMAL_PLOTS if animal else PLOTS)
    lines = []
    if not animal or draws.chance(0.5):
        lines.append(draws.pick(OPENINGS))
    for index, beat in enumerate(plot):
        is_in_the_middle = 0 < index < len(plot) - 1
        if is_in_the_middle and not is_long and draws.chance(0.3):
            continue
        lines.append(draws.pick(beat))
    if draws.chance(0.75):
        lines.append(draws.pick(ENDINGS))
    told = [line.format_map(slots) for line in lines]
    if draws.chance(0.35):
        parting = 1 + draws.below(len(told) - 2)
        return " ".join(told[:parting]) + "\n\n" + " ".join(told[parting:])
    return " ".join(told)
