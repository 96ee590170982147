"""What can be told in a moment before a run: the packed model, the processor, the threads, and whether the memory suffices.

`sparseflow.load` makes these checks itself. `sparseflow doctor` shows them, and adds those that have to measure (doctor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sparseflow.evidence import rss_bytes
from sparseflow.footprint import PREFILL_CHUNK, Footprint, MemoryItem
from sparseflow.kernels import isa
from sparseflow.limits import MemoryLimit, memory_limits, processors
from sparseflow.memory import spare_memory
from sparseflow.packfile import Manifest
from sparseflow.sizes import format_bytes
from sparseflow.tokenizer import TOKENIZER_FILE

Status = Literal["ok", "warning", "fail", "unknown"]

_PROCESSORS = Path("/proc/cpuinfo")
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes
        name: what, the same in every version of the report.
        status: "ok"; "warning": it runs, but not well; "fail": it does not; "unknown": the system does not tell.
        value, unit: the number it comes down to; None where there is none.
        text: what was found. advice: what to do; None where nothing is.
    """

    name: str
    status: Status
    value: float | None
    unit: str | None
    text: str
    advice: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run would hold and what it may, in bytes.

    Attributes
        slots, context, prefill_chunk: the run.
        held_bytes: resident in this process already: Python, its imports, and whatever else a program has loaded.
        items: what the run adds. limits: all that bound it.
        mapped_bytes: of the files it maps.
    """

    slots: int
    context: int
    prefill_chunk: int
    held_bytes: int
    items: tuple[MemoryItem, ...]
    limits: tuple[MemoryLimit, ...]
    mapped_bytes: int

    @classmethod
    def of(cls, footprint: Footprint, slots: int, context: int, prefill_chunk: int = PREFILL_CHUNK) -> MemoryPlan:
        """The plan of a run that this process would make now."""
        items = footprint.memory_items(slots, context, prefill_chunk)
        return cls(slots, context, prefill_chunk, rss_bytes() or 0, items, tuple(memory_limits()), footprint.mapped_bytes)

    @property
    def added_bytes(self) -> int:
        """What the run takes beyond what the process holds."""
        return sum(item.bytes for item in self.items)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the resident set."""
        return self.held_bytes + self.added_bytes

    @property
    def tightest(self) -> MemoryLimit | None:
        """The limit that leaves the least."""
        return min(self.limits, key=lambda limit: limit.room(self.mapped_bytes), default=None)

    @property
    def available_bytes(self) -> int | None:
        """What this process may take beyond what it holds; None when the system does not tell."""
        return None if self.tightest is None else self.tightest.room(self.mapped_bytes)

    def to_json(self) -> dict[str, Any]:
        """The sum, item by item, and the limits."""
        return {
            "held_bytes": self.held_bytes,
            "items": [asdict(item) for item in self.items],
            "added_bytes": self.added_bytes,
            "peak_bytes": self.peak_bytes,
            "available_bytes": self.available_bytes,
            "limits": [asdict(limit) | {"room_bytes": limit.room(self.mapped_bytes)} for limit in self.limits],
        }


def check_memory(plan: MemoryPlan) -> Check:
    """Whether the run fits in what is available."""
    limit, available, added = plan.tightest, plan.available_bytes, plan.added_bytes
    parts = " + ".join(f"{item.name} {format_bytes(item.bytes)}" for item in plan.items)
    needs = f"a run needs {format_bytes(added)} more ({parts})"
    if limit is None or available is None:
        return Check("memory", "unknown", added, "bytes", f"{needs}; how much is available the system does not tell")
    text = f"{needs}; {limit.name} leaves {format_bytes(available)}"
    advice = "use a smaller --cache or --context, or close other programs"
    if added > available:
        return Check("memory", "fail", added, "bytes", text, advice)
    if added > available - spare_memory(available):
        return Check("memory", "warning", added, "bytes", f"{text}, which is close", advice)
    return Check("memory", "ok", added, "bytes", text)


def check_threads(threads: int) -> Check:
    """Threads against the processors that this process may use."""
    allowed = processors()
    text = f"{threads} of {allowed.usable}: affinity allows {allowed.affinity} processors"
    text += ", no cgroup quota" if allowed.quota is None else f", the cgroup quota is {allowed.quota:g}"
    if threads > allowed.usable:
        return Check("threads", "warning", threads, "threads", text, f"use --threads {allowed.usable}: more take time from each other")
    if threads < allowed.usable:
        return Check("threads", "ok", threads, "threads", text, f"--threads {allowed.usable} would use all of them")
    return Check("threads", "ok", threads, "threads", text)


def check_processor() -> Check:
    """Which kernels run here. Raises OptionError when SPARSEFLOW_ISA names an instruction set that cannot."""
    active, best = isa.active(), isa.available()[-1]
    flags = processor_flags()
    has = " ".join(name for name in _FEATURES if name in flags) or "none of the vector extensions that count"
    text = f"{active} kernels; the processor has {has}"
    number = isa.NAMES.index(active)
    if active != best:
        return Check("processor", "warning", number, "kernel set", text, f"unset SPARSEFLOW_ISA to use {best}")
    if active == isa.NAMES[0]:
        return Check("processor", "warning", number, "kernel set", text, "expect it to be very slow: it needs AVX2 with FMA and F16C")
    return Check("processor", "ok", number, "kernel set", text)


def processor_flags() -> frozenset[str]:
    """What the first processor can do, in the words of /proc/cpuinfo; empty where it does not tell."""
    try:
        lines = _PROCESSORS.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def check_model(manifest: Manifest) -> Check:
    """A model whose manifest, files and sizes were found right by `read_manifest`."""
    version = manifest.raw["format_version"]
    text = f"{manifest.folder}: complete, packed format version {version}"
    if not (manifest.folder / TOKENIZER_FILE).is_file():
        return Check("model", "warning", version, "version", f"{text}, without {TOKENIZER_FILE}",
                     "for text, copy the checkpoint's tokenizer files into the folder")
    return Check("model", "ok", version, "version", text)


def quick_checks(plan: MemoryPlan, threads: int) -> Sequence[Check]:
    """What `load` checks of the machine, once `read_manifest` has found the model complete: no measuring, a few small files read.

    Raises OptionError as `check_processor`.
    """
    return (check_processor(), check_threads(threads), check_memory(plan))
