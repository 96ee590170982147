"""Benchmark results as the report needs them, read from the results.json that sf-bench writes."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from sparseflow.bench_results import SCHEMA, SCHEMA_VERSION
from sparseflow.errors import OptionError, StorageError

MODES = ("resident", "streaming", "offload")
STATES = ("warm", "cold")


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one measurement: their values, least, median and greatest."""

    values: tuple[float, ...]

    @property
    def low(self) -> float:
        """The least."""
        return min(self.values)

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. mode: one of MODES; state: one of STATES; not_run: why it did not run, or not to its end."""

    name: str
    mode: str
    state: str
    cache_bytes: int | None
    not_run: str | None
    compared_with: str | None
    tokens_match: tuple[bool | None, ...]
    measured: dict[str, Spread]

    def spread(self, name: str) -> Spread | None:
        """The repeats of a measured field; None where none was measured."""
        return self.measured.get(name)


@dataclass(frozen=True, slots=True)
class BenchmarkResults:
    """One results.json. source: the name of its file; replayed: labels of recorded routes, or None."""

    source: str
    model: str
    machine: str
    versions: str
    workload: str
    replayed: str | None
    bandwidths: dict[str, float]
    cells: tuple[Cell, ...]


def load_results(path: str | os.PathLike[str]) -> BenchmarkResults:
    """Reads a results.json. Raises StorageError if it cannot be read, OptionError if it is none or one of another version."""
    try:
        with open(path, "rb") as file:
            content = json.load(file)
    except OSError as error:
        raise StorageError(f"{path}: the results cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: neither a trace (.npz) nor JSON that sf-bench wrote, or damaged") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise OptionError(f"{path}: JSON, but not of sf-bench; give the results.json that sf-bench --out writes")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise OptionError(f"{path}: results of version {version!r}, this program reads version {SCHEMA_VERSION}; measure again with sf-bench")
    try:
        return _results(os.path.basename(os.fspath(path)), content)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise OptionError(f"{path}: results of sf-bench, but damaged: {error!r}; measure again with sf-bench") from error


def _results(source: str, content: dict[str, Any]) -> BenchmarkResults:
    machine, versions, speeds, cells = (content[name] for name in ("machine", "versions", "bandwidths", "cells"))
    given = {name: speeds[f"{name}_bytes_per_second"] for name in ("memory", "disk")}
    bandwidths = {name: float(speed) for name, speed in given.items() if speed is not None}
    if not all(0 < speed <= sys.float_info.max for speed in bandwidths.values()):
        raise ValueError(f"bandwidths are {given}")
    return BenchmarkResults(
        source=source,
        model=str(content["model"]["folder"]),
        machine=f"{machine['processor']}, {machine['processors']} processors, {machine['isa']}",
        versions=f"SparseFlow {versions['sparseflow']}" + (f" ({versions['revision']})" if versions.get("revision") else ""),
        workload=f"{_several(cells, 'prompt_tokens')} prompt tokens, {_several(cells, 'new_tokens')} new, {content['threads']} threads",
        replayed=_several(cells, "replayed") or None,
        bandwidths=bandwidths,
        cells=tuple(_cell(cell) for cell in cells),
    )


def _several(cells: list[dict[str, Any]], name: str) -> str:
    """What the cells say of themselves, each once, in words."""
    return ", ".join(dict.fromkeys(str(cell[name]) for cell in cells if cell[name] is not None))


def _cell(cell: dict[str, Any]) -> Cell:
    if cell["mode"] not in MODES or cell["state"] not in STATES:
        raise ValueError(f"mode {cell['mode']}, state {cell['state']}")
    measured = {}
    for name, values in cell.items():
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)] \
            if isinstance(values, list) else []
        if not all(0 <= number <= sys.float_info.max for number in numbers):
            raise ValueError(f"{name} is {values}")
        if numbers:
            measured[name] = Spread(tuple(float(number) for number in numbers))
    reason = cell.get("not_run")
    return Cell(
        name=str(cell["name"]),
        mode=cell["mode"],
        state=cell["state"],
        cache_bytes=None if cell["cache_bytes"] is None else int(cell["cache_bytes"]),
        not_run=None if reason is None else str(reason),
        compared_with=None if cell.get("tokens_match_with") is None else str(cell["tokens_match_with"]),
        tokens_match=tuple(None if match is None else bool(match) for match in cell.get("tokens_match") or ()),
        measured=measured,
    )
