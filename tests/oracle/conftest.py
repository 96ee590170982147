"""These tests are read only when they are asked for: importing them takes torch, or llama.cpp, which the others do without."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file alone unless the mark expression selects its marker, `oracle` or for llama.cpp `peers`, or there is none."""
    marker = "peers" if collection_path.name == "test_llama_cpp.py" else "oracle"
    expression = config.option.markexpr
    ignored = expression and (marker not in expression or f"not {marker}" in expression)
    return True if ignored and collection_path.is_file() else None
