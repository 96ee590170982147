"""Which settings a benchmark measures: the matrix of `sf-bench`, built in, from options, or from a file.

A matrix file is JSON:

    {
      "version": 1,
      "repeats": 5,                        measured runs of each cell; optional, as is "threads"
      "defaults": {"strict": true},        fields of the cells that do not give them themselves; optional
      "cells": [
        {"cache": ["resident", "4GiB"], "state": ["warm", "cold"], "tokens": 32},
        {"cache": "4GiB", "state": "cold", "replay": "routes.npz:en"},
        {"peer": "llama.cpp=build/bin/llama-bench", "state": "cold"}
      ]
    }

Each entry of `cells` stands for one cell for every cache and state that it names. bench/README.md describes the fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparseflow.errors import OptionError

MATRIX_VERSION = 1
STATES = ("warm", "cold")
PUBLISHED_CACHES = ("resident", "256MiB", "1GiB", "2GiB", "4GiB", "8GiB")
NEW_TOKENS = 32
QUICK_TOKENS = 16
REPEATS = 5

_ENTRY_FIELDS = ("cache", "state", "strict", "prompt", "prompt_tokens", "tokens", "replay", "name", "peer")
_PROMPT_FIELDS = ("prompt", "prompt_tokens", "replay")
_MATRIX_FIELDS = ("version", "repeats", "threads", "defaults", "cells")


@dataclass(frozen=True, slots=True)
class Entry:
    """Some cells that differ in cache and state only.

    Attributes
        where: what an error about it names, such as "--cache" or "matrix.json: cells[0]".
        caches: sizes, "resident" or "auto"; none for a peer. states: of "warm" and "cold".
        strict: evicted experts are kept out of the page cache.
        prompt: a text, or prompt_tokens: how much of the benchmark's own text, or replay: FILE.npz:NAME; None where not given.
        tokens: how many to generate, at least 2.
        name: what is added to the cells' names; peer: another engine instead, as NAME or NAME=WHERE.
    """

    where: str
    caches: tuple[str, ...] = ()
    states: tuple[str, ...] = ("warm",)
    strict: bool = False
    prompt: str | None = None
    prompt_tokens: int | None = None
    tokens: int = NEW_TOKENS
    replay: str | None = None
    name: str | None = None
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """Entries, and how they are run: `repeats` measured runs of each cell, with `threads` (None for the default)."""

    entries: tuple[Entry, ...]
    repeats: int = REPEATS
    threads: int | None = None


def quick_caches(all_experts_bytes: int, smallest_bytes: int) -> tuple[str, ...]:
    """The caches of the quick matrix: resident, and the power of two of bytes at or below a quarter of all experts."""
    size = max(all_experts_bytes // 4, smallest_bytes, 1)
    size = 1 << (size.bit_length() - 1)
    if size < smallest_bytes:
        size *= 2
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >> bits:
            return ("resident", f"{size >> bits}{unit}")
    return ("resident", f"{size}B")


def read_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Reads a matrix file. A replay's file is looked for beside it. Raises OptionError that names the field at fault."""
    name = os.fspath(path)
    try:
        raw = json.loads(Path(path).read_text(), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise OptionError(f"{name}: the matrix cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{name}: is not JSON: {error.msg}, line {error.lineno}, column {error.colno}") from error
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name}: is not JSON") from error
    return _matrix(raw, name, Path(path).parent)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise OptionError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice in one object")
    return fields


def _matrix(raw: Any, name: str, folder: Path) -> Matrix:
    matrix = _fields(raw, _MATRIX_FIELDS, name)
    if matrix.get("version") != MATRIX_VERSION:
        raise OptionError(f"{name}: version is {_shown(matrix.get('version'))}, this program reads version {MATRIX_VERSION}")
    defaults = _fields(matrix.get("defaults", {}), _ENTRY_FIELDS, f"{name}: defaults")
    cells = matrix.get("cells")
    if not isinstance(cells, list) or not cells:
        raise OptionError(f"{name}: cells is {_shown(cells)}, expected a list of at least one")
    entries = [_entry(cell, defaults, f"{name}: cells[{number}]", folder) for number, cell in enumerate(cells)]
    threads = matrix.get("threads")
    return Matrix(
        tuple(entries),
        _number(matrix.get("repeats", REPEATS), 1, f"{name}: repeats"),
        None if threads is None else _number(threads, 1, f"{name}: threads"),
    )


def _entry(raw: Any, defaults: Mapping[str, Any], where: str, folder: Path) -> Entry:
    own = _fields(raw, _ENTRY_FIELDS, where)
    # An entry's own kind of prompt takes the place of the default one; a peer has no cache, and what it cannot do is no default.
    left_out = set(_PROMPT_FIELDS) if own.keys() & set(_PROMPT_FIELDS) else set()
    if "peer" in own:
        left_out |= {"cache", "strict"}
    fields = {name: value for name, value in defaults.items() if name not in left_out} | own
    prompts = [name for name in _PROMPT_FIELDS if name in fields]
    if len(prompts) > 1:
        raise OptionError(f"{where}: {prompts[0]} and {prompts[1]} do not go together, each tells the prompt")
    if ("cache" in fields) == ("peer" in fields):
        raise OptionError(f"{where}: give either cache, a size or a list of them, or peer")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        here = f"{where}.{name}"
        if name in ("cache", "state"):
            values[f"{name}s"] = _texts(value, here)
        elif name in ("prompt_tokens", "tokens"):
            values[name] = _number(value, 2 if name == "tokens" else 1, here)
        else:
            values[name] = _flag(value, here) if name == "strict" else _text(value, here)
    entry = Entry(where, **values)
    for state in entry.states:
        if state not in STATES:
            raise OptionError(f"{where}.state: {state!r} is none of {', '.join(STATES)}")
    if entry.peer is not None and entry.strict:
        raise OptionError(f"{where}.strict: does not go with peer")
    if entry.replay is not None:
        entry = replace(entry, replay=os.fspath(folder / entry.replay))
    return entry


def _fields(raw: Any, allowed: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise OptionError(f"{where}: is {_shown(raw)}, expected an object of {', '.join(allowed)}")
    unknown = [name for name in raw if name not in allowed]
    if unknown:
        raise OptionError(f"{where}: unknown field {unknown[0]!r}, known are {', '.join(allowed)}")
    return raw


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"{where}: is {_shown(value)}, expected text")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise OptionError(f"{where}: is empty, expected at least one")
    return tuple(_text(each, where) for each in values)


def _number(value: Any, least: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{where}: is {_shown(value)}, expected a whole number of at least {least}")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{where}: is {_shown(value)}, expected true or false")
    return value


def _shown(value: Any) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
