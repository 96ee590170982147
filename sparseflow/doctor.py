"""What `sparseflow doctor` finds out: whether a model fits on this machine, what to run it with, and how fast that may be.

The report, version 1, is what `--json` prints. Sizes are in bytes, speeds in bytes per second; null is what the system does not
tell. Fields may be added within a version.

    schema, schema_version      "sparseflow-doctor", 1
    verdict, exit_status        "fits" 0; "does not fit" 1, when a check failed; "cannot tell" 2, when none failed but one is
                                unknown
    model                       as it was asked for
    checks                      a list of name, status (ok, warning, fail, unknown), value, unit, text, advice; the names are
                                model, processor, threads, limits, memory, cache, disk space, disk kind, disk speed, speed
    run                         slots, cache_bytes, context, prefill_chunk, threads: what was planned
    memory                      held_bytes (Python and imports), items (name, bytes, arithmetic), added_bytes (their sum),
                                peak_bytes (held and added: the predicted peak RSS), available_bytes, limits (name, limit_bytes,
                                used_bytes, maps, room_bytes)
    cache                       recommended_bytes, recommended_slots, smallest_bytes, all_bytes
    disk                        kind, free_bytes, total_bytes, rotational; bytes_per_second, extent_bytes
    memory_bytes_per_second     measured
    expectation                 slow, fast (tokens per second); slow_hits, fast_hits; memory_s, disk_s (expectation.py)

A model that cannot be opened has only the checks. Reading is all that is done to the model: some of its experts are read from the
disk, and leave the page cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparseflow.checks import Check, MemoryPlan, check_memory, check_model, check_processor, check_threads
from sparseflow.disk_speed import DiskSpeed, measure_disk
from sparseflow.errors import CapacityError, OptionError, PackedModelError, StorageError
from sparseflow.expectation import Expectation, expect
from sparseflow.filesystem import FileSystem, file_system
from sparseflow.footprint import Footprint
from sparseflow.memory import LEAST_CACHE
from sparseflow.memory_speed import MemorySpeed, measure_memory
from sparseflow.packfile import Manifest
from sparseflow.sizes import format_bytes

SCHEMA, SCHEMA_VERSION = "sparseflow-doctor", 1

FITS, DOES_NOT_FIT, CANNOT_TELL = 0, 1, 2
VERDICTS = ("fits", "does not fit", "cannot tell")
"""The verdict of each exit status."""

_LEAST_FREE = 1 << 30
_SLOW_DISK = 200e6
_DISK_PASS_BYTES = 256 << 20
_DISK_PASS_SECONDS = 0.4
_MEMORY_PASSES = 3


@dataclass(slots=True)
class Diagnosis:
    """All that was found. Only `model` and `checks` are there for a model that cannot be opened."""

    model: str
    checks: list[Check] = field(default_factory=list)
    threads: int | None = None
    footprint: Footprint | None = None
    plan: MemoryPlan | None = None
    recommended_slots: int | None = None
    disk: FileSystem | None = None
    disk_speed: DiskSpeed | None = None
    memory_speed: MemorySpeed | None = None
    expectation: Expectation | None = None

    @property
    def exit_status(self) -> int:
        """FITS, DOES_NOT_FIT or CANNOT_TELL."""
        statuses = {check.status for check in self.checks}
        return DOES_NOT_FIT if "fail" in statuses else CANNOT_TELL if "unknown" in statuses else FITS

    @property
    def verdict(self) -> str:
        """The same in words."""
        return VERDICTS[self.exit_status]

    def to_json(self) -> dict[str, Any]:
        """The report, as above."""
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "model": self.model,
            "checks": [check.to_json() for check in self.checks],
        }
        if self.footprint is None or self.plan is None:
            return report
        footprint, plan, slots = self.footprint, self.plan, self.recommended_slots
        speed = self.disk_speed
        return report | {
            "run": {
                "slots": plan.slots,
                "cache_bytes": plan.slots * footprint.expert_bytes,
                "context": plan.context,
                "prefill_chunk": plan.prefill_chunk,
                "threads": self.threads,
            },
            "memory": plan.to_json(),
            "cache": {
                "recommended_slots": slots,
                "recommended_bytes": None if slots is None else slots * footprint.expert_bytes,
                "smallest_bytes": footprint.smallest_cache_bytes,
                "all_bytes": footprint.all_experts_bytes,
            },
            "disk": ({} if self.disk is None else self.disk.to_json()) | {
                "bytes_per_second": None if speed is None else speed.bytes_per_second,
                "extent_bytes": footprint.expert_bytes,
            },
            "memory_bytes_per_second": None if self.memory_speed is None else self.memory_speed.best,
            "expectation": None if self.expectation is None else self.expectation.to_json(),
        }


def unreadable(model: str, error: PackedModelError | StorageError) -> Diagnosis:
    """The diagnosis of a model that `read_manifest` refuses."""
    return Diagnosis(model, [Check("model", "fail", None, None, str(error), "do as the message says, then ask again")])


def diagnose(
    model: str, manifest: Manifest, *, cache: str, context: int, threads: int, progress: Callable[[str], None] = lambda what: None
) -> Diagnosis:
    """Looks at everything, and measures memory and disk for a second or two.

    cache: as for `sparseflow.load`. context: tokens to plan for. `progress` is told what is being measured.
    Raises OptionError for a cache that is none, CapacityError for one below the smallest that works.
    """
    footprint = Footprint.of(manifest)
    found = Diagnosis(model, threads=threads, footprint=footprint)
    problem = None
    try:
        found.recommended_slots = footprint.recommended_slots(context)
    except CapacityError as error:
        problem = str(error)
    if cache == "auto":
        # With nothing to recommend, the least that would be of use shows what is missing.
        least = footprint.slots(max(LEAST_CACHE, footprint.smallest_cache_bytes))
        slots = least if found.recommended_slots is None else found.recommended_slots
    else:
        slots = footprint.cache_slots(cache, context)
    plan = found.plan = MemoryPlan.of(footprint, slots, context)
    found.checks += [check_model(manifest), _processor(), check_threads(threads), check_limits(plan), check_memory(plan),
                     check_cache(footprint, slots, found.recommended_slots, problem)]
    try:
        found.disk = file_system(manifest.folder)
        found.checks += [check_space(found.disk), check_kind(found.disk)]
    except OSError as error:
        text = f"{manifest.folder}: the file system does not tell: {error.strerror}"
        found.checks.append(Check("disk space", "warning", None, None, text))
    progress("measuring the disk")
    _measure_disk(found, manifest)
    progress("measuring memory")
    found.memory_speed = measure_memory(threads, passes=_MEMORY_PASSES)
    _expect(found, footprint, slots, manifest.geometry.num_hidden_layers)
    return found


def _processor() -> Check:
    try:
        return check_processor()
    except OptionError as error:
        return Check("processor", "fail", None, None, str(error), "unset SPARSEFLOW_ISA")


def check_limits(plan: MemoryPlan) -> Check:
    """What memory is available, limit by limit."""
    if plan.tightest is None:
        return Check("limits", "unknown", None, "bytes", "neither /proc/meminfo nor a cgroup tells how much memory is available",
                     "mount /proc, or see to it yourself that the memory suffices")
    rooms = ", ".join(f"{limit.name} {format_bytes(limit.room(plan.mapped_bytes))}" for limit in plan.limits)
    return Check("limits", "ok", plan.available_bytes, "bytes",
                 f"{format_bytes(plan.available_bytes)} available to this process, the smallest of: {rooms}")


def check_cache(footprint: Footprint, slots: int, recommended: int | None, problem: str | None) -> Check:
    """The cache that was asked for, beside the one to recommend."""
    if recommended is None:
        return Check("cache", "warning", None, "bytes", str(problem), "close other programs, or use a smaller --context")
    size = recommended * footprint.expert_bytes
    text = f"{format_bytes(size)} recommended, {recommended} of {footprint.num_experts} experts"
    if slots != recommended:
        text += f"; asked for {format_bytes(slots * footprint.expert_bytes)}, {slots} experts"
    advice = f"--cache {size} finds more experts in memory" if slots < recommended else None
    return Check("cache", "ok", size, "bytes", text, advice)


def check_space(disk: FileSystem) -> Check:
    """Room on the model's file system. A run needs none; traces and a second pack do."""
    text = f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"
    if disk.free_bytes < _LEAST_FREE:
        advice = "a run writes nothing there, but packing and traces would"
        return Check("disk space", "warning", disk.free_bytes, "bytes", text, advice)
    return Check("disk space", "ok", disk.free_bytes, "bytes", text)


def check_kind(disk: FileSystem) -> Check:
    """Whether missed experts come from a disk that is fit for random reads."""
    kind = disk.kind or "unknown file system"
    if disk.is_network:
        text, advice = "a network file system, every missed expert crosses the network", "copy the model to a local disk"
    elif disk.is_memory:
        text, advice = "the file lives in memory, and a cache holds its experts twice", "keep the model on a disk"
    elif disk.rotational:
        text = "a disk that says it is rotational, where seeks between experts cost most"
        advice = "copy the model to an SSD, unless this is a virtual disk that knows no better"
    else:
        text = "kind of disk unknown" if disk.rotational is None else "no rotating disk"
        return Check("disk kind", "ok", None, None, f"{kind}: {text}")
    return Check("disk kind", "warning", None, None, f"{kind}: {text}", advice)


def _measure_disk(found: Diagnosis, manifest: Manifest) -> None:
    try:
        speed = found.disk_speed = measure_disk(manifest, passes=1, pass_bytes=_DISK_PASS_BYTES, pass_seconds=_DISK_PASS_SECONDS)
    except StorageError as error:
        advice = "the speed of a run that misses experts stays unknown"
        found.checks.append(Check("disk speed", "warning", None, "bytes/s", str(error), advice))
        return
    rate = speed.bytes_per_second
    text = f"{format_bytes(round(rate))}/s cold, on random experts of {format_bytes(speed.extent_bytes)}"
    if rate < _SLOW_DISK:
        advice = "a larger --cache or a faster disk would help most"
        found.checks.append(Check("disk speed", "warning", rate, "bytes/s", text, advice))
    else:
        found.checks.append(Check("disk speed", "ok", rate, "bytes/s", text))


def _expect(found: Diagnosis, footprint: Footprint, slots: int, layers: int) -> None:
    assert found.memory_speed is not None
    memory = found.memory_speed.best
    everything = slots == footprint.num_experts
    if found.disk_speed is None and not everything:
        text = f"memory {format_bytes(round(memory))}/s; without the disk's speed no more can be said"
        found.checks.append(Check("speed", "warning", None, "tokens/s", text))
        return
    disk = float("inf") if found.disk_speed is None else found.disk_speed.bytes_per_second
    told = found.expectation = expect(footprint, slots, layers, memory, disk)
    text = (
        f"{_rate(told.slow)} to {_rate(told.fast)} tokens/s expected once warm: a token reads {format_bytes(footprint.bytes_per_token)}"
        f" from memory at {format_bytes(round(memory))}/s, and finds {told.slow_hits:.0%} to {told.fast_hits:.0%} of its experts in the"
        " cache")
    found.checks.append(Check("speed", "ok", told.fast, "tokens/s", text))


def _rate(speed: float) -> str:
    """Two digits are all that an expectation is good for."""
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}" if speed >= 1 else f"{speed:.2f}"
