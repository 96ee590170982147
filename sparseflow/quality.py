"""Multiple-choice questions scored by the log-likelihood of each choice, and two sets of scores compared.

No template: the choice follows the context as it stands. Three ways to pick: the largest sum, or the largest mean per character or
per token, since a longer choice has the smaller sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.errors import CapacityError, OptionError
from sparseflow.likelihood import LanguageModel
from sparseflow.questions import Question
from sparseflow.tokenizer import Tokenizer

WAYS = ("sum", "character", "token")
"""How choices are compared."""

_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Score:
    """The choices of one question, in their order.

    Attributes: id: the question's; sums: log-likelihoods in nats; characters, tokens: lengths.
    """

    id: str
    sums: tuple[float, ...]
    characters: tuple[int, ...]
    tokens: tuple[int, ...]

    def lengths(self, way: str) -> tuple[int, ...]:
        """What each sum is divided by."""
        return {"sum": (1,) * len(self.sums), "character": self.characters, "token": self.tokens}[way]

    def pick(self, way: str) -> int:
        """The index of the best choice; of equals the lowest."""
        means = [total / length for total, length in zip(self.sums, self.lengths(way), strict=True)]
        return means.index(max(means))

    def nats_from_tie(self, way: str, choice: int) -> float:
        """How much larger the sum of `choice` would have to be for it to tie with the best."""
        lengths = self.lengths(way)
        best = self.pick(way)
        return self.sums[best] / lengths[best] * lengths[choice] - self.sums[choice]


def score_questions(
    model: LanguageModel,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    context: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Scores of all questions. `progress(done, total)` is called with questions.

    Raises CapacityError naming the question that is longer than the context, before any is scored.
    """
    encoded = [(tokenizer.encode(question.ctx), [tokenizer.encode(choice) for choice in question.choices]) for question in questions]
    for question, (prefix, endings) in zip(questions, encoded, strict=True):
        longest = len(prefix) + max(map(len, endings))
        if longest > context:
            raise CapacityError(f"question {question.id}: its {longest} tokens do not fit in the context of {context}")
    scores: list[Score] = []
    for question, (prefix, endings) in zip(questions, encoded, strict=True):
        if progress is not None:
            progress(len(scores), len(questions))
        found = model.continuations(prefix, endings)
        scores.append(
            Score(
                id=question.id,
                sums=tuple(float(tokens.sum()) for tokens in found),
                characters=tuple(map(len, question.choices)),
                tokens=tuple(map(len, endings)),
            )
        )
    return scores


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How many of `asked` questions were answered right, with the 95 % Wilson interval of the share."""

    right: int
    asked: int
    low: float
    high: float

    @classmethod
    def of(cls, right: int, asked: int) -> Accuracy:
        """Wilson (1927): the shares p with |p - right/asked| <= z sqrt(p (1 - p) / asked)."""
        z2 = _NORMAL_95**2
        share = right / asked
        center = (share + z2 / (2 * asked)) / (1 + z2 / asked)
        half = _NORMAL_95 / (1 + z2 / asked) * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked**2))
        return cls(right, asked, max(center - half, 0.0), min(center + half, 1.0))


def accuracies(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, dict[str, Accuracy]]:
    """Task -> way -> accuracy, the tasks in the order of the file and `all` last."""
    tasks: dict[str, list[tuple[Question, Score]]] = {}
    for pair in zip(questions, scores, strict=True):
        tasks.setdefault(pair[0].task, []).append(pair)
    groups = [*tasks.items(), ("all", list(zip(questions, scores, strict=True)))]
    return {
        task: {way: Accuracy.of(sum(score.pick(way) == question.gold for question, score in pairs), len(pairs)) for way in WAYS}
        for task, pairs in groups
    }


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A question that two models answer differently; `nats_from_tie` is what the reference would have to move by."""

    id: str
    pick: int
    reference_pick: int
    nats_from_tie: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of scores of the same questions.

    Attributes:
        questions: how many.
        disagreements: by way.
        identical: questions whose sums are the same to the last bit.
        largest_difference, mean_difference: of the sums of all choices, in nats.
    """

    questions: int
    disagreements: dict[str, tuple[Disagreement, ...]]
    identical: int
    largest_difference: float
    mean_difference: float

    def agreements(self, way: str) -> int:
        """Questions answered alike."""
        return self.questions - len(self.disagreements[way])

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name, and the agreements."""
        return asdict(self) | {"agreements": {way: self.agreements(way) for way in WAYS}}


def compare(scores: Sequence[Score], reference: Sequence[Score]) -> Comparison:
    """Scores against those of a reference. Raises OptionError when they are not of the same questions."""
    if [(score.id, score.characters) for score in scores] != [(score.id, score.characters) for score in reference]:
        raise OptionError("the two sets of scores are not of the same questions")
    pairs = list(zip(scores, reference, strict=True))
    differences = [abs(a - b) for score, other in pairs for a, b in zip(score.sums, other.sums, strict=True)]
    disagreements = {
        way: tuple(
            Disagreement(score.id, score.pick(way), other.pick(way), other.nats_from_tie(way, score.pick(way)))
            for score, other in pairs
            if score.pick(way) != other.pick(way)
        )
        for way in WAYS
    }
    identical = sum(score.sums == other.sums for score, other in pairs)
    return Comparison(len(pairs), disagreements, identical, max(differences), math.fsum(differences) / len(differences))
