"""results.json: written whole or not at all, and read back."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from sparseflow.bench_results import MEASURED_FIELDS, SCHEMA, SCHEMA_VERSION
from sparseflow.errors import OptionError, StorageError

RESULTS_FILE = "results.json"
CELL_FIELDS = (
    "name", "engine", "engine_details", "mode", "cache", "cache_bytes", "slots", "state", "strict", "prompt", "prompt_tokens",
    "new_tokens", "replayed", "not_run", "tokens_match_with",
)  # fmt: skip
_NESTED_FIELDS = ("token_s", "ids", "phases")


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


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a results.json of this schema version. Raises StorageError when it cannot be read, OptionError when it is none."""
    name = os.fspath(path)
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise StorageError(f"{name}: the results cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name}: is not JSON, so no results of sf-bench") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise OptionError(f"{name}: holds no results of sf-bench (its schema is not {SCHEMA!r})")
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise OptionError(f"{name}: has version {version} of the schema, this program reads {SCHEMA_VERSION}; measure again")
    cells = record.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and cell.keys() >= set(CELL_FIELDS) for cell in cells):
        raise OptionError(f"{name}: its cells lack fields that the schema promises; the file is damaged")
    for cell in cells:
        if not isinstance(cell["name"], str) or cell.get("ttft_s") and not _is_measured(cell):
            raise OptionError(f"{name}: the cell {cell['name']} lacks measured fields; the file is damaged")
    speeds = record.get("bandwidths")
    if not isinstance(speeds, dict) or not all(_is_speed(speeds.get(f"{what}_bytes_per_second", 0)) for what in ("memory", "disk")):
        raise OptionError(f"{name}: its bandwidths are no speeds; the file is damaged")
    if not isinstance(record.get("complete"), bool):
        raise OptionError(f"{name}: does not tell whether it is complete; the file is damaged")
    return record


def _is_measured(cell: dict[str, Any]) -> bool:
    """Whether all measured fields are lists of as many values, and those that are numbers are finite."""
    if not all(isinstance(cell.get(field), list) and len(cell[field]) == len(cell["ttft_s"]) for field in MEASURED_FIELDS):
        return False
    return all(_is_number(value) for field in MEASURED_FIELDS if field not in _NESTED_FIELDS for value in cell[field])


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _is_speed(value: Any) -> bool:
    return value is None or bool(_is_number(value) and value > 0)
