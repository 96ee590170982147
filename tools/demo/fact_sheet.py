"""A fact sheet: everything that can be said and asked about one thing."""

from __future__ import annotations

from dataclasses import dataclass

from draws import Draws
from templates import Slots, read_sections, split_question

_THOUGHT = "thought: "


@dataclass(frozen=True, slots=True)
class FactSheet:
    """Templates of statements, of questions with their answers, of a thought, and the values of their slots."""

    statements: list[str]
    questions: list[str]
    thoughts: list[str]
    slots: Slots

    @classmethod
    def fill(cls, sections: dict[str, list[str]], names: list[str], slots: Slots) -> FactSheet:
        """The lines of the named sections, in that order, with these values for their slots."""
        sheet = cls([], [], [], slots)
        for line in (line for name in names for line in sections[name]):
            if line.startswith(_THOUGHT):
                sheet.thoughts.append(line.removeprefix(_THOUGHT))
            elif " => " in line:
                sheet.questions.append(line)
            else:
                sheet.statements.append(line)
        return sheet

    def statement(self, draws: Draws) -> str:
        """One of the statements."""
        return draws.pick(self.statements).format_map(self.slots)

    def question(self, draws: Draws) -> tuple[str, str]:
        """One of the questions, with its answer."""
        return split_question(draws.pick(self.questions).format_map(self.slots))

    def thought(self) -> str:
        """What to think before an answer."""
        return self.thoughts[0].format_map(self.slots)


_FACTS = read_sections("facts.txt")


def facts(slots: Slots, *names: str) -> FactSheet:
    """The fact sheet of the named sections of templates/facts.txt."""
    return FactSheet.fill(_FACTS, list(names), slots)
