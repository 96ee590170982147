"""The random choices of the generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A seeded source of choices.

    The text is a function of the seed and of the order of these calls, so a change of that order anywhere gives
    another corpus. Each draw takes one number from `random.Random.random`, whose sequence Python keeps the same in
    all versions; `pick_other` takes one per rejected choice as well.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fraction(self) -> float:
        """A number in [0, 1)."""
        return self._random.random()

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return int(self.fraction() * bound)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.fraction() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def pick_other(self, options: Sequence[T], excluded: T) -> T:
        """One of the options that is not the excluded one."""
        while (option := self.pick(options)) == excluded:
            pass
        return option
