"""These tests are read only when they are asked for: importing them takes torch, which the other tests do without."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder alone unless the mark expression selects `oracle`, or there is none."""
    expression = config.option.markexpr
    return True if expression and ("oracle" not in expression or "not oracle" in expression) else None
