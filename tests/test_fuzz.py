"""Whatever is read, only errors of this package come out, and soon. `pytest -m slow tests/test_fuzz.py` runs more than 50,000 cases."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from alarm import alarm
from fuzz_cases import TARGETS, Target

from sparseflow import template_sandbox
from sparseflow.errors import SparseFlowError

SECONDS_A_CASE = 20
NEVER_REFUSED = "pack.journal"
"""What is damaged there is dropped, and done again."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here has to survive a power cut, and no template is worth waiting for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)


def feed(target: Target, folder: Path, seed: str, cases: int) -> tuple[int, int]:
    """(cases that were read, cases that were refused); fails with the number of the first that went otherwise."""
    case = target.make(folder)
    read = refused = 0
    for number in range(cases):
        try:
            with alarm(SECONDS_A_CASE):
                case(random.Random(f"{target.name} {seed} {number}"))
            read += 1
        except SparseFlowError as error:
            assert str(error).strip()
            refused += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"{target.name}, seed {seed!r}, case {number}: {type(error).__name__}: {error}") from error
    return read, refused


@pytest.mark.parametrize("target", TARGETS, ids=[target.name.replace(" ", "-") for target in TARGETS])
def test_damaged_input_is_an_error_of_ours_or_harmless(target: Target, tmp_path: Path) -> None:
    read, refused = feed(target, tmp_path, "fast", target.fast)
    assert read + refused == target.fast
    assert (refused > 0) == (target.name != NEVER_REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=[target.name.replace(" ", "-") for target in TARGETS])
def test_much_damaged_input_is_an_error_of_ours_or_harmless(target: Target, tmp_path: Path) -> None:
    read, refused = feed(target, tmp_path, "slow", target.slow)
    assert read + refused == target.slow and read > 0
    assert (refused > 0) == (target.name != NEVER_REFUSED)


def test_there_are_fifty_thousand_cases() -> None:
    assert sum(target.slow for target in TARGETS) >= 50_000
