"""results.json: written whole or not at all, and read back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sparseflow.errors import OptionError, StorageError

RESULTS_FILE = "results.json"


def check_writable(folder: str) -> None:
    """OptionError when DIR cannot be written; told before an hour of measuring rather than after."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OptionError(f"--out {folder}: {existing} is no folder that can be written to")


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Writes DIR/results.json whole or not at all. Raises StorageError."""
    path = folder / RESULTS_FILE
    partial = folder / f"{RESULTS_FILE}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(results, indent=2) + "\n")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: the results cannot be written: {error.strerror or error}") from error
