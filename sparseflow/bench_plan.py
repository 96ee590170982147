"""From the entries of a matrix to the cells of a benchmark, and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparseflow.bench_matrix import Entry
from sparseflow.bench_prompt import bench_prompt
from sparseflow.errors import CapacityError, OptionError
from sparseflow.footprint import Footprint
from sparseflow.packfile import Manifest
from sparseflow.replay import RouteReplay
from sparseflow.tokenizer import TOKENIZER_FILE, Tokenizer

PROMPT_TOKENS = 41


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run does.

    Attributes
        prompt_ids: the prompt. prompt: where it comes from: "text" or "random ids", see `bench_prompt`, or "given".
        new_tokens: how many tokens are generated.
        replay: FILE.npz:NAME, and replayed: its label; None where the model's routers choose.
    """

    prompt_ids: tuple[int, ...]
    prompt: str
    new_tokens: int
    replay: str | None = None
    replayed: str | None = None

    @property
    def context(self) -> int:
        """Positions of a session."""
        return len(self.prompt_ids) + self.new_tokens

    def __str__(self) -> str:
        prompt = f"{len(self.prompt_ids)} + {self.new_tokens} tokens"
        return prompt if self.replayed is None else f"{self.replayed}, {prompt}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting.

    Attributes
        name: unique within a benchmark.
        cache: as it was asked for; cache_bytes, slots: what that is for this model; all None for a peer.
        state: "warm" or "cold", see `sparseflow.benchmark`.
        strict: evicted experts are kept out of the page cache.
        workload: what each run does.
        peer: the other engine, as NAME or NAME=WHERE; None for SparseFlow.
    """

    name: str
    cache: str | None
    cache_bytes: int | None
    slots: int | None
    state: str
    strict: bool
    workload: Workload
    peer: str | None = None

    @property
    def mode(self) -> str:
        """`resident`, where all experts are read before the first token, `streaming`, or `offload` for a peer."""
        return "resident" if self.cache == "resident" else "streaming" if self.peer is None else "offload"

    @property
    def cold(self) -> bool:
        """Whether the page cache has to forget the model before each run."""
        return self.state == "cold"


def plan_cells(manifest: Manifest, entries: Sequence[Entry]) -> list[Cell]:
    """The cells that the entries stand for, in their order.

    Raises OptionError for a bad cache, prompt or replay and for the same cell twice, CapacityError for a cache that is too small.
    """
    footprint = Footprint.of(manifest)
    workloads = [plan_workload(manifest, entry) for entry in entries]
    several = len(set(workloads)) > 1
    cells: dict[str, Cell] = {}
    for entry, workload in zip(entries, workloads, strict=True):
        for state in entry.states:
            for cache in entry.caches or (None,):
                size = slots = None
                if cache is not None:
                    slots = _slots(footprint, cache, workload.context, entry.where)
                    size = slots * footprint.expert_bytes
                what = cache or (entry.peer or "").partition("=")[0]
                parts = [what, state, "strict" if entry.strict else None, f"({workload})" if several else None, entry.name]
                name = " ".join(part for part in parts if part)
                if name in cells:
                    raise OptionError(f"{entry.where}: {name} is given twice; for more runs of it raise the repeats")
                cells[name] = Cell(name, cache, size, slots, state, entry.strict, workload, entry.peer)
    return list(cells.values())


def _slots(footprint: Footprint, cache: str, context: int, where: str) -> int:
    try:
        return footprint.cache_slots(cache, context)
    except (OptionError, CapacityError) as error:
        raise type(error)(f"{where}: {error}") from error


def plan_workload(manifest: Manifest, entry: Entry) -> Workload:
    """What each run of an entry's cells does. Raises OptionError when the replay is not for this model, or it or the model's
    context is too short."""
    routes = None if entry.replay is None else RouteReplay.load(entry.replay)
    length = entry.prompt_tokens or PROMPT_TOKENS
    if routes is not None:
        routes.check(manifest.geometry)
        length = routes.n_prefill
        if routes.n_prefill + entry.tokens - 1 > routes.tokens:  # the last token is not fed
            raise OptionError(
                f"{entry.where}: replay {routes.label} is over after {routes.tokens - routes.n_prefill + 1} new tokens,"
                f" {entry.tokens} are asked for"
            )
    if entry.prompt is None:
        ids, prompt = bench_prompt(manifest, length)
    elif (manifest.folder / TOKENIZER_FILE).is_file():
        ids, prompt = Tokenizer.from_folder(manifest.folder).encode_plain(entry.prompt), "given"
    else:
        raise OptionError(f"{entry.where}: the model has no tokenizer to read a prompt with, give prompt_tokens")
    limit = manifest.geometry.max_position_embeddings
    if len(ids) + entry.tokens > limit:
        raise OptionError(
            f"{entry.where}: a prompt of {len(ids)} and {entry.tokens} new tokens do not fit in the model's context of {limit}"
        )
    if routes is None or entry.peer is not None:  # another engine follows its own routers, from a prompt of that length
        return Workload(tuple(ids), prompt, entry.tokens)
    return Workload(tuple(ids), prompt, entry.tokens, entry.replay, routes.label)


def schedule(cells: Iterable[Cell], repeats: int) -> list[tuple[Cell, int]]:
    """All runs in order, each with the number of its repeat; 0 is a warm cell's run that is not measured.

    Every round runs each cell once, warm ones together; every second round runs backwards, so that who follows whom changes and a
    steady drift meets all alike. A warm cell warms up before its first run, and again when what it left in the page cache was
    dropped since.
    """
    order = sorted(cells, key=lambda cell: cell.cold)
    runs: list[tuple[Cell, int]] = []
    left = dict.fromkeys((cell.name for cell in order), False)  # whether the page cache is as it left it
    for repeat in range(1, repeats + 1):
        for cell in order if repeat % 2 else reversed(order):
            if not cell.cold and not left[cell.name]:
                runs.append((cell, 0))
            runs.append((cell, repeat))
            for other in order:
                left[other.name] &= not _drops(cell, other)
            left[cell.name] = True
    return runs


def _drops(cell: Cell, other: Cell) -> bool:
    """Whether a run of `cell` takes from the page cache what a run of `other` left there: a cold one drops all, a strict one the
    experts, which strict ones drop themselves, and another engine reads files of its own."""
    return cell.cold or cell.peer != other.peer or (cell.strict and not other.strict)
