"""A model measured in several settings, each run in a process of its own: what `sf-bench` does and records.

Runs are interleaved: every cell once, then every cell again, so that a drift of the machine meets all of them alike. The
bandwidths of memory and disk are measured before the first run and after the last.

The page cache when a run starts
    cold: it was made to forget the model's files, and mincore confirmed that nothing of them is left.
    warm: as the run before left it; each cell is run once beforehand, unrecorded. A strict run drops the experts' file from it
    when it opens the model, so that a strict warm run finds no more than the dense core there.

Ctrl-C ends the run that is on its way and leaves nothing behind. bench/README.md describes the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from sparseflow import page_cache
from sparseflow.bench_cell import Run
from sparseflow.bench_process import run_in_process
from sparseflow.bench_results import measured_fields
from sparseflow.errors import OptionError, SparseFlowError, StorageError
from sparseflow.evidence import rss_bytes
from sparseflow.footprint import Footprint
from sparseflow.machine import describe_machine, describe_versions
from sparseflow.memory import available_memory
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, EXPERTS_FILE, Manifest
from sparseflow.sizes import format_bytes
from sparseflow.speed_of_light import SpeedOfLight

SCHEMA = "sparseflow-bench"
SCHEMA_VERSION = 1

Progress = Callable[[str], None]
"""Told what is being done, over and over while it lasts."""

_DROP_ATTEMPTS = 5
_DROP_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. cache: as it was asked for; cache_bytes, slots: what that is for this model; cold: see the module's text."""

    cache: str
    cache_bytes: int
    slots: int
    cold: bool
    strict: bool

    @property
    def name(self) -> str:
        """Unique within a benchmark."""
        return f"{self.cache} {self.state}{' strict' if self.strict else ''}"

    @property
    def mode(self) -> str:
        """`resident`, where all experts are read before the first token, or `streaming`."""
        return "resident" if self.cache == "resident" else "streaming"

    @property
    def state(self) -> str:
        """`cold` or `warm`."""
        return "cold" if self.cold else "warm"


@dataclass(frozen=True, slots=True)
class Workload:
    """What every run does. prompt: where its ids come from; replay: FILE.npz:NAME, and replayed its label, or None."""

    prompt_ids: list[int]
    prompt: str
    new_tokens: int
    threads: int
    replay: str | None = None
    replayed: str | None = None


@dataclass(slots=True)
class _Record:
    """The runs of a cell so far, and why there are no more, if it cannot run."""

    cell: Cell
    not_run: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)


def plan_cells(footprint: Footprint, caches: Sequence[str], context: int, *, cold: bool, strict: bool) -> list[Cell]:
    """A cell for each cache: a size, "resident" or "auto". Raises OptionError for a bad one, CapacityError for one too small."""
    cells: list[Cell] = []
    for cache in caches:
        slots = footprint.cache_slots(cache, context)
        cell = Cell(cache, slots * footprint.expert_bytes, slots, cold, strict)
        if cell.name in [other.name for other in cells]:
            raise OptionError(f"cache {cache} is given twice; for more runs of it raise the repeats")
        cells.append(cell)
    return cells


class Benchmark:
    """Some cells of one model and one workload, to be run `repeats` times each.

    Attributes:
        failures: the error of each cell whose runs failed, once `run` is done. A cell that does not fit in memory is none.
    """

    def __init__(self, manifest: Manifest, cells: Sequence[Cell], workload: Workload, repeats: int) -> None:
        self.manifest = manifest
        self.footprint = Footprint.of(manifest)
        self.workload = workload
        self.repeats = repeats
        self.failures: list[SparseFlowError] = []
        self._records = [_Record(cell) for cell in cells]
        self._experts = manifest.folder / EXPERTS_FILE
        self._files = [manifest.folder / name for name in (EXPERTS_FILE, DENSE_FILE, EMBED_FILE)]

    def run(self, progress: Progress) -> dict[str, Any]:
        """Runs everything; the record, ready for JSON."""
        started, clock = datetime.now(timezone.utc), time.monotonic()
        machine = describe_machine()
        progress("measuring memory and disk")
        light = SpeedOfLight.measure(self.manifest, self.workload.threads)
        for record in self._records:
            record.not_run = self._misfit(record.cell)
        rounds = [
            (record, repeat)
            for repeat in range(self.repeats + 1)
            for record in self._records
            if record.not_run is None and (repeat > 0 or not record.cell.cold)
        ]
        for number, (record, repeat) in enumerate(rounds, start=1):
            if record.not_run is None:  # still
                what = f"repeat {repeat} of {self.repeats}" if repeat else "warming up"
                self._run_cell(record, repeat, lambda: progress(f"run {number} of {len(rounds)}: {record.cell.name}, {what}"))
        progress("measuring memory and disk again")
        light += SpeedOfLight.measure(self.manifest, self.workload.threads)
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "started": started.isoformat(timespec="seconds"),
            "seconds": time.monotonic() - clock,
            "machine": machine,
            "versions": describe_versions(),
            "bandwidths": light.to_json(),
            **self._described(),
            "cells": self._cells(light),
        }

    def _misfit(self, cell: Cell) -> str | None:
        """Why a cell would not fit in memory."""
        workload = self.workload
        needed = self.footprint.memory_bytes(cell.slots, len(workload.prompt_ids) + workload.new_tokens) + (rss_bytes() or 0)
        available = available_memory()
        if available is None or needed <= available:
            return None
        return f"needs {format_bytes(needed)} of memory, {format_bytes(available)} are available"

    def _run_cell(self, record: _Record, repeat: int, progress: Callable[[], None]) -> None:
        """One run; repeat 0 warms up and is not recorded."""
        cell, workload = record.cell, self.workload
        run = Run(
            model=str(self.manifest.folder),
            cache="resident" if cell.mode == "resident" else cell.cache_bytes,
            threads=workload.threads,
            strict=cell.strict,
            prompt_ids=workload.prompt_ids,
            new_tokens=workload.new_tokens,
            replay=workload.replay,
        )
        try:
            progress()
            if cell.cold:
                self._forget()
            before = page_cache.cached_bytes(self._experts)
            measured = run_in_process(run, progress)
            after = page_cache.cached_bytes(self._experts)
        except SparseFlowError as error:
            record.not_run = str(error)
            self.failures.append(error)
            return
        if repeat:
            record.runs.append(measured | {"experts_cached_before_bytes": before, "experts_cached_after_bytes": after})

    def _forget(self) -> None:
        """Makes the page cache forget the model, and has mincore confirm it. Raises StorageError when it does not."""
        for _ in range(_DROP_ATTEMPTS):
            for path in self._files:
                page_cache.drop(path)
            left = sum(page_cache.cached_bytes(path) for path in self._files)
            if left == 0:
                return
            time.sleep(_DROP_PAUSE_SECONDS)
        raise StorageError(
            f"{self.manifest.folder}: {format_bytes(left)} of the model stay in the page cache, so no run can be cold: another"
            " process uses the files, they are not yours, or their file system lives in memory"
        )

    def _described(self) -> dict[str, Any]:
        """Model and workload, as the record tells them."""
        workload, geometry, footprint = self.workload, self.manifest.geometry, self.footprint
        return {
            "model": {
                "folder": self.manifest.folder.resolve().name,
                "format_version": self.manifest.raw["format_version"],
                "num_hidden_layers": geometry.num_hidden_layers,
                "num_experts": geometry.num_experts,
                "num_experts_per_tok": geometry.num_experts_per_tok,
                **footprint.to_json(),
            },
            "workload": {
                "prompt": workload.prompt,
                "prompt_tokens": len(workload.prompt_ids),
                "new_tokens": workload.new_tokens,
                "replayed": workload.replayed,
                "threads": workload.threads,
                "repeats": self.repeats,
            },
        }

    def _cells(self, light: SpeedOfLight) -> list[dict[str, Any]]:
        # Tokens are compared with those of the resident cell; without one, with the first that ran.
        ran = sorted((record for record in self._records if record.runs), key=lambda record: record.cell.mode != "resident")
        reference = ran[0] if ran else None
        return [
            {
                "name": record.cell.name,
                "mode": record.cell.mode,
                "cache": record.cell.cache,
                "cache_bytes": record.cell.cache_bytes,
                "slots": record.cell.slots,
                "state": record.cell.state,
                "strict": record.cell.strict,
                "replayed": self.workload.replayed,
                "not_run": record.not_run,
                "tokens_match_with": None if reference is None else reference.cell.name,
                **measured_fields(record.runs, self.footprint, light, None if reference is None else reference.runs[0]["ids"]),
            }
            for record in self._records
        ]
