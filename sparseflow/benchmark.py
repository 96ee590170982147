"""A model measured in several settings, each run in a process of its own: what `sf-bench` does and records.

Runs are interleaved: every cell once, then every cell again (`bench_plan.schedule`), so that a drift of the machine meets all
of them alike. The bandwidths of memory and disk are measured before the first run and after the last.

The page cache when a run starts
    cold: it was made to forget the model's files, and mincore confirmed that nothing of them is left. If it cannot, the cell is
    not run.
    warm: as the run before left it, after an unmeasured run of the same cell. A strict run drops the experts' file from it when
    it opens the model, so that a strict warm run finds no more than the dense core there.

The record is handed over after each run, so that a benchmark that ends early loses none: `complete` is false in it until all is
done. Ctrl-C ends the run that is on its way. bench/README.md describes the record.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sparseflow import page_cache
from sparseflow.bench_cell import Run
from sparseflow.bench_peers import Peer
from sparseflow.bench_plan import Cell, schedule
from sparseflow.bench_process import run_in_process
from sparseflow.bench_results import SCHEMA, SCHEMA_VERSION, measured_fields, without_folders
from sparseflow.errors import SparseFlowError, StorageError
from sparseflow.evidence import rss_bytes
from sparseflow.footprint import Footprint
from sparseflow.machine import describe_machine, describe_versions
from sparseflow.memory import available_memory
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, EXPERTS_FILE, Manifest
from sparseflow.sizes import format_bytes
from sparseflow.speed_of_light import Rates, SpeedOfLight

Progress = Callable[[str], None]
"""Told what is being done, over and over while it lasts."""

Save = Callable[[dict[str, Any]], None]
"""Given the record so far."""

_DROP_ATTEMPTS = 5
_DROP_PAUSE_SECONDS = 0.2


@dataclass(slots=True)
class _Record:
    """The runs of a cell so far, and why there are no more, if it cannot run."""

    cell: Cell
    not_run: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)


class Benchmark:
    """Some cells of one model, to be run `repeats` times each with so many threads. peers: the engine of each cell that names one.

    Attributes:
        failures: the error of each cell whose runs failed, once `run` is done. A cell that does not fit in memory is none.
    """

    def __init__(
        self, manifest: Manifest, cells: Sequence[Cell], repeats: int, threads: int, peers: Mapping[str, Peer] | None = None
    ) -> None:
        self.manifest = manifest
        self.footprint = Footprint.of(manifest)
        self.repeats = repeats
        self.threads = threads
        self.failures: list[SparseFlowError] = []
        self._peers = peers or {}
        self._records = {cell.name: _Record(cell) for cell in cells}
        self._experts = manifest.folder / EXPERTS_FILE
        self._files = [manifest.folder / name for name in (EXPERTS_FILE, DENSE_FILE, EMBED_FILE)]
        self._light: SpeedOfLight | None = None
        self._complete = False

    def run(self, progress: Progress, save: Save) -> dict[str, Any]:
        """Runs everything; the record, ready for JSON. `save` is given it after every measured run, and at the end."""
        self._started, self._clock = datetime.now(timezone.utc), time.monotonic()
        self._machine, self._versions = describe_machine(), describe_versions()
        progress("measuring memory and disk")
        self._light = SpeedOfLight.measure(self.manifest, self.threads)
        for record in self._records.values():
            record.not_run = self._misfit(record.cell)
        with ExitStack() as until_all_ran:
            if self._peers:
                folder = until_all_ran.enter_context(tempfile.TemporaryDirectory(prefix="sf-bench-"))
                for spec, peer in self._peers.items():
                    self._prepare(spec, peer, Path(folder), progress)
            self._run_all(progress, save)
        progress("measuring memory and disk again")
        self._light += SpeedOfLight.measure(self.manifest, self.threads)
        self._complete = True
        save(self.record())
        return self.record()

    def _prepare(self, spec: str, peer: Peer, folder: Path, progress: Progress) -> None:
        """Makes a peer ready, or says in its cells why it cannot be."""
        try:
            peer.prepare(folder, lambda: progress(f"making the weights ready for {peer.name}"))
        except SparseFlowError as error:
            for record in self._records.values():
                if record.cell.peer == spec:
                    record.not_run = str(error)

    def _run_all(self, progress: Progress, save: Save) -> None:
        runs = schedule([record.cell for record in self._records.values() if record.not_run is None], self.repeats)
        begun = time.monotonic()
        for done, (cell, repeat) in enumerate(runs):
            record = self._records[cell.name]
            if record.not_run is None:  # still
                what = f"repeat {repeat} of {self.repeats}" if repeat else "warming up"
                text = f"run {done + 1} of {len(runs)}{_left(begun, done, len(runs))}: {cell.name}, {what}"
                self._run_cell(record, repeat, lambda: progress(text))
                if repeat and record.not_run is None:
                    save(self.record())

    @property
    def measured(self) -> bool:
        """Whether any run was."""
        return any(record.runs for record in self._records.values())

    def record(self) -> dict[str, Any]:
        """What was measured so far. Not before `run`."""
        assert self._light is not None
        geometry = self.manifest.geometry
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "complete": self._complete,
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": time.monotonic() - self._clock,
            "repeats": self.repeats,
            "threads": self.threads,
            "machine": self._machine,
            "versions": self._versions,
            "bandwidths": self._bandwidths(self._light),
            "model": {
                "folder": self.manifest.folder.resolve().name,
                "format_version": self.manifest.raw["format_version"],
                "num_hidden_layers": geometry.num_hidden_layers,
                "num_experts": geometry.num_experts,
                "num_experts_per_tok": geometry.num_experts_per_tok,
                **self.footprint.to_json(),
            },
            "cells": [self._cell(record) for record in self._records.values()],
        }

    def _bandwidths(self, light: SpeedOfLight) -> dict[str, Any]:
        return light.to_json() | {"disk_error": self._told(light.disk_error)}

    def _told(self, message: str | None) -> str | None:
        """A message as the record tells it: without the machine's folders."""
        return None if message is None else without_folders(message, self.manifest.folder.parent)

    def _misfit(self, cell: Cell) -> str | None:
        """Why a cell would not fit in memory; what a peer needs is not known."""
        if cell.slots is None:
            return None
        needed = self.footprint.memory_bytes(cell.slots, cell.workload.context) + (rss_bytes() or 0)
        available = available_memory()
        if available is None or needed <= available:
            return None
        return f"needs {format_bytes(needed)} of memory, {format_bytes(available)} are available"

    def _run_cell(self, record: _Record, repeat: int, progress: Callable[[], None]) -> None:
        """One run; repeat 0 warms up and is not recorded."""
        cell = record.cell
        peer = None if cell.peer is None else self._peers[cell.peer]
        files = self._files if peer is None else peer.files
        try:
            progress()
            own = repeat > 0 and peer is None
            rates = Rates.measure(self.manifest, self.threads) if own else None
            if cell.cold:
                forget(files)
            before = self._cached(files)
            measured = self._own(cell, progress) if peer is None else peer.measure(cell.workload, self.threads, progress)
            after = self._cached(files)
            if rates is not None:
                measured["rates"] = rates.faster(Rates.measure(self.manifest, self.threads))
        except SparseFlowError as error:
            record.not_run = str(error)
            self.failures.append(error)
            return
        if repeat:
            record.runs.append(
                measured
                | {f"{name}_before_bytes": count for name, count in before.items()}
                | {f"{name}_after_bytes": count for name, count in after.items()}
            )

    def _own(self, cell: Cell, progress: Callable[[], None]) -> dict[str, Any]:
        """One run of SparseFlow."""
        run = Run(
            model=str(self.manifest.folder),
            cache="resident" if cell.mode == "resident" else cell.cache_bytes or 0,
            threads=self.threads,
            strict=cell.strict,
            prompt_ids=cell.workload.prompt_ids,
            new_tokens=cell.workload.new_tokens,
            replay=cell.workload.replay,
        )
        return run_in_process(run, progress)

    def _cached(self, files: Sequence[Path]) -> dict[str, int | None]:
        """What the page cache holds of all the weights, and of the experts where they are in a file of their own."""
        cached = {path: page_cache.cached_bytes(path) for path in files}
        return {"cached": sum(cached.values()), "experts_cached": cached.get(self._experts)}

    def _cell(self, record: _Record) -> dict[str, Any]:
        cell, reference = record.cell, self._reference(record.cell)
        peer = None if cell.peer is None else self._peers[cell.peer]
        return {
            "name": cell.name,
            "engine": "sparseflow" if peer is None else peer.name,
            "engine_details": None if peer is None else peer.details,
            "mode": cell.mode if peer is None else peer.mode,
            "cache": cell.cache,
            "cache_bytes": cell.cache_bytes,
            "slots": cell.slots,
            "state": cell.state,
            "strict": cell.strict,
            "prompt": cell.workload.prompt,
            "prompt_tokens": len(cell.workload.prompt_ids),
            "new_tokens": cell.workload.new_tokens,
            "replayed": cell.workload.replayed,
            "not_run": self._told(record.not_run),
            "tokens_match_with": None if reference is None else reference.cell.name,
            **measured_fields(record.runs, self.footprint, None if reference is None else reference.runs[0]["ids"]),
        }

    def _reference(self, cell: Cell) -> _Record | None:
        """Whose tokens those of a cell are compared with: the resident one of the same workload, else the first that ran."""
        ran = [
            record
            for record in self._records.values()
            if record.runs and record.cell.workload == cell.workload and record.cell.peer is None
        ]
        return min(ran, key=lambda record: record.cell.mode != "resident", default=None)


def forget(files: Sequence[Path]) -> None:
    """Makes the page cache forget some files, and has mincore confirm it. Raises StorageError when it does not."""
    for _ in range(_DROP_ATTEMPTS):
        for path in files:
            page_cache.drop(path)
        left = sum(page_cache.cached_bytes(path) for path in files)
        if left == 0:
            return
        time.sleep(_DROP_PAUSE_SECONDS)
    raise StorageError(
        f"{files[0].parent}: {format_bytes(left)} of the model stay in the page cache, so no run can be cold: another"
        " process uses the files, they are not yours, or their file system lives in memory"
    )


def _left(begun: float, done: int, total: int) -> str:
    """About how long the rest takes, once some runs are done."""
    if done < 2:
        return ""
    minutes = (time.monotonic() - begun) / done * (total - done) / 60
    return f" ({minutes:.0f} min left)" if minutes >= 1 else ""
