"""The settings of a training run."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any

from corpus import Mix

FINAL_RATE = 0.01


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run, by default those of the last stage of the shipped one.

    Fractions are of the steps of the run. A step is batch * seq tokens, whatever the length of its windows.
    """

    steps: int = _setting(3716, "steps of the whole run")
    batch: int = _setting(8, "windows in a step")
    seq: int = _setting(256, "tokens in a window")
    long_seq: int = _setting(1024, "tokens in a long window")
    long_frac: float = _setting(0.1, "fraction at the end of the run with long windows")
    lr: float = _setting(2.5e-3, "peak learning rate")
    warmup: int = _setting(100, "steps up to the peak")
    weight_decay: float = _setting(0.1, "weight decay of the matrices")
    balance: float = _setting(0.0015, "weight of the loss that balances the experts")
    novel: float = _setting(0.3, "share of the documents with made-up names")
    stories: float = _setting(0.18, "share of stories in the documents")
    facts: float = _setting(0.3, "share of passages of facts in the documents")
    everyday: float = _setting(0.07, "share of everyday sentences in the documents; the rest are chats")
    copy: int = _setting(1, "copying windows in a step")
    copy_stories: float = _setting(0.9, "share of documents with replaced names in the copying windows")
    copy_frac: float = _setting(0.75, "fraction at the start of the run with copying windows")
    seed: int = _setting(1, "seed of the weights and of the data")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for each setting."""
        group = parser.add_argument_group("settings")
        for setting in fields(cls):
            group.add_argument(
                "--" + setting.name.replace("_", "-"),
                type=type(setting.default),
                default=setting.default,
                help=setting.metadata["help"] + " (default: %(default)s)",
            )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """The settings among the parsed options."""
        return cls(**{setting.name: getattr(options, setting.name) for setting in fields(cls)})

    @property
    def mix(self) -> Mix:
        """The shares of the kinds of documents."""
        return Mix(self.stories, self.facts, self.everyday)

    @property
    def long_batch(self) -> int:
        """Windows in a step with long windows."""
        return max(1, self.batch * self.seq // self.long_seq)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to FINAL_RATE of the peak."""
        warm = min(1.0, (step + 1) / self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.lr * warm * (FINAL_RATE + (1 - FINAL_RATE) * cosine)

    def is_long(self, step: int) -> bool:
        """Whether a step is one of those with long windows."""
        return step >= (1 - self.long_frac) * self.steps

    def copies(self, step: int) -> int:
        """How many windows of a step are copying windows."""
        return self.copy if step < self.copy_frac * self.steps and not self.is_long(step) else 0
