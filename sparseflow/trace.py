"""RouteTrace: which experts each token asked for in each layer, which were in memory, and what that cost.

The file is a compressed .npz. Version 2 holds, with F forwards, T tokens in them, L layers and K experts a token:

    version         int64, 2
    num_experts     int64, routed experts of a layer
    expert_bytes    int64, bytes one expert takes in the file and in the cache
    slots           int64, experts that the cache held at most
    replayed        str [0 or 1], label of the recording that was followed instead of the routers
    expert_ids      int16 [T, L, K], ascending along the last axis
    hit             bool [T, L, K], whether that expert was in memory when it was asked for
    forward_tokens  int64 [F], tokens of each forward; their sum is T
    seconds         float32 [F], how long each forward took
    asked_at        float32 [F, L], when each layer asked for its experts, in seconds since its forward began
    arrived_at      float32 [F, L], when the last of them was there
    ended_at        float32 [F, L], when the layer was done; the next one began there
    wait_seconds    float32 [F, L], how long the layer stood still for the disk
    bytes_asked     int64 [F, L], its distinct experts times expert_bytes
    layer_read      int64 [F, L], bytes the disk moved since the count before; -1 where none was taken (see SAMPLE_SECONDS)
    bytes_read      int64 [F], bytes the disk moved for the process during the forward; -1 where the system did not tell
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import OptionError, StorageError
from sparseflow.evidence import disk_bytes_read

TRACE_VERSION = 2

SAMPLE_SECONDS = 0.002
"""The system is asked what the disk moved at the end of a layer, unless it was asked less than this ago: a question takes up
to 10 microseconds, and tracing may cost no more than a hundredth. Layers of a full-sized model take longer and are all counted."""

_BY_FORWARD = {"seconds": np.float32, "bytes_read": np.int64}
_BY_LAYER = {
    "asked_at": np.float32,
    "arrived_at": np.float32,
    "ended_at": np.float32,
    "wait_seconds": np.float32,
    "bytes_asked": np.int64,
    "layer_read": np.int64,
}


class _Forward:
    """One pass of some tokens through all layers; its fields are those of the file, without the leading axis F."""

    def __init__(self, tokens: int, num_layers: int, top_k: int) -> None:
        self.expert_ids = np.zeros((tokens, num_layers, top_k), np.int16)
        self.hit = np.zeros((tokens, num_layers, top_k), np.bool_)
        self.asked_at, self.arrived_at, self.ended_at, self.wait_seconds = np.zeros((4, num_layers), np.float32)
        self.bytes_asked = np.zeros(num_layers, np.int64)
        self.layer_read = np.full(num_layers, -1, np.int64)
        self.seconds = 0.0
        self.bytes_read = -1


class RouteTrace:
    """The routes of one session, forward by forward.

    A forward is one pass of some tokens through all layers: a chunk of the prompt, or one token of decode. In it, each
    distinct expert of a layer is leased once, however many of the tokens chose it. So `hit` belongs to the lease: all
    tokens of a forward that chose the same expert carry the same flag, and one read from the disk can show as many
    misses. `bytes_asked` counts each lease once. For decode the two views agree.

    Parameters
        num_layers: layers of the model, each with num_experts routed experts (at most 32767), top_k of them a token.
        expert_bytes: bytes of one expert; slots: experts that the cache holds.
        replayed: label of the recording, when the session followed a RouteReplay and not its own routers; else None.

    The session writes with `begin_forward`, `add_layer` once for every layer in ascending order, `end_forward`. A forward that
    was begun and not ended (it failed) is not part of the trace. Memory: 3 bytes per token, layer and chosen expert, and 32 per
    forward and layer.
    """

    def __init__(
        self, num_layers: int, num_experts: int, top_k: int, *, expert_bytes: int, slots: int, replayed: str | None = None
    ) -> None:
        if num_experts > np.iinfo(np.int16).max:
            raise OptionError(f"a trace holds expert ids up to {np.iinfo(np.int16).max}, not {num_experts} experts")
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.top_k = top_k
        self.expert_bytes = expert_bytes
        self.slots = slots
        self.replayed = replayed
        self._forwards: list[_Forward] = []
        self._next = _Forward(0, num_layers, top_k)
        self._begun = self._sampled = 0.0
        self._counted_first: int | None = None
        self._counted: int | None = None

    # --- written by the session ---

    def begin_forward(self, tokens: int, disk_bytes: int | None) -> None:
        """Begin a forward of some tokens. Drops one that was begun and never ended.

        disk_bytes: `evidence.disk_bytes_read()` now.
        """
        self._next = _Forward(tokens, self.num_layers, self.top_k)
        self._counted_first = self._counted = disk_bytes
        self._begun = self._sampled = time.perf_counter()

    def add_layer(
        self,
        layer: int,
        expert_ids: NDArray[np.int32],
        hit: NDArray[np.bool_],
        wait_seconds: float,
        bytes_asked: int,
        asked_at: float,
        arrived_at: float,
    ) -> None:
        """Add one layer of the forward that was begun, as soon as it is done.

        Parameters
            expert_ids: int32 [tokens, top_k], each row ascending.
            hit: bool [tokens, top_k], whether that expert was in memory when its wave of leases was acquired.
            wait_seconds: how long this layer stood still for the disk.
            bytes_asked: distinct experts of the layer times expert_bytes.
            asked_at, arrived_at: time.perf_counter() when the experts were asked for, and when the last was there.
        """
        now, forward = time.perf_counter(), self._next
        forward.expert_ids[:, layer] = expert_ids
        forward.hit[:, layer] = hit
        forward.wait_seconds[layer] = wait_seconds
        forward.bytes_asked[layer] = bytes_asked
        forward.asked_at[layer] = asked_at - self._begun
        forward.arrived_at[layer] = arrived_at - self._begun
        forward.ended_at[layer] = now - self._begun
        if now - self._sampled >= SAMPLE_SECONDS and self._counted is not None:
            counted = disk_bytes_read()
            if counted is not None:
                forward.layer_read[layer] = counted - self._counted
            self._sampled, self._counted = now, counted

    def end_forward(self, disk_bytes: int | None) -> None:
        """End the forward. disk_bytes: `evidence.disk_bytes_read()` now."""
        self._next.seconds = time.perf_counter() - self._begun
        if disk_bytes is not None and self._counted_first is not None:
            self._next.bytes_read = disk_bytes - self._counted_first
        self._forwards.append(self._next)
        self._next = _Forward(0, self.num_layers, self.top_k)

    # --- totals ---

    @property
    def forwards(self) -> int:
        """Forwards that ended."""
        return len(self._forwards)

    @property
    def tokens(self) -> int:
        """Tokens fed in them."""
        return sum(len(forward.hit) for forward in self._forwards)

    @property
    def requests(self) -> int:
        """Experts chosen: tokens x layers x top_k."""
        return self.tokens * self.num_layers * self.top_k

    @property
    def hits(self) -> int:
        """Choices that met an expert in memory; see the class's text about forwards of several tokens."""
        return sum(int(np.count_nonzero(forward.hit)) for forward in self._forwards)

    @property
    def misses(self) -> int:
        """Choices that did not."""
        return self.requests - self.hits

    @property
    def hit_rate(self) -> float | None:
        """hits / requests; None before the first forward."""
        return self.hits / self.requests if self.requests else None

    @property
    def bytes_asked(self) -> int:
        """Bytes of all leased experts, in memory or not: each distinct expert of a forward's layer once."""
        return sum(int(forward.bytes_asked.sum()) for forward in self._forwards)

    @property
    def bytes_read(self) -> int | None:
        """Bytes that the disk moved for this process during the forwards; None where the system did not tell."""
        read = [forward.bytes_read for forward in self._forwards]
        return None if -1 in read else sum(read)

    # --- the record itself, as in the file; each call makes a new array ---

    @property
    def expert_ids(self) -> NDArray[np.int16]:
        """int16 [tokens, layers, top_k], ascending along the last axis."""
        return np.concatenate([self._next.expert_ids[:0], *(forward.expert_ids for forward in self._forwards)])

    @property
    def hit(self) -> NDArray[np.bool_]:
        """bool [tokens, layers, top_k], for the expert at the same place in `expert_ids`."""
        return np.concatenate([self._next.hit[:0], *(forward.hit for forward in self._forwards)])

    @property
    def forward_tokens(self) -> NDArray[np.int64]:
        """int64 [forwards]: how many tokens each fed."""
        return np.array([len(forward.hit) for forward in self._forwards], np.int64)

    @property
    def forward_of_token(self) -> NDArray[np.int32]:
        """int32 [tokens], ascending: the forward that fed each token."""
        return np.repeat(np.arange(self.forwards, dtype=np.int32), self.forward_tokens)

    @property
    def seconds(self) -> NDArray[np.float32]:
        """float32 [forwards]: how long each took."""
        return np.array([forward.seconds for forward in self._forwards], np.float32)

    @property
    def asked_at(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: when each layer asked for its experts, in seconds since its forward began."""
        return self._by_layer("asked_at")

    @property
    def arrived_at(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: when the last of them was there."""
        return self._by_layer("arrived_at")

    @property
    def ended_at(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: when the layer was done."""
        return self._by_layer("ended_at")

    @property
    def wait_seconds(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: how long each layer stood still for the disk."""
        return self._by_layer("wait_seconds")

    @property
    def bytes_asked_by_layer(self) -> NDArray[np.int64]:
        """int64 [forwards, layers], as `bytes_asked`."""
        return self._by_layer("bytes_asked")

    @property
    def bytes_read_by_layer(self) -> NDArray[np.int64]:
        """int64 [forwards, layers]: what the disk moved since the count before, or the begin of the forward; -1 where none was taken."""
        return self._by_layer("layer_read")

    @property
    def bytes_read_by_forward(self) -> NDArray[np.int64]:
        """int64 [forwards], as `bytes_read`; -1 where the system did not tell."""
        return np.array([forward.bytes_read for forward in self._forwards], np.int64)

    def _by_layer(self, name: str) -> NDArray[Any]:
        rows = [getattr(forward, name) for forward in self._forwards]
        return np.array(rows, _BY_LAYER[name]).reshape(-1, self.num_layers)

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, whole or not at all. Raises StorageError."""
        partial = Path(f"{os.fspath(path)}.partial")
        by_layer: dict[str, Any] = {name: self._by_layer(name) for name in _BY_LAYER}
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(
                    file,
                    version=np.int64(TRACE_VERSION),
                    num_experts=np.int64(self.num_experts),
                    expert_bytes=np.int64(self.expert_bytes),
                    slots=np.int64(self.slots),
                    replayed=np.array([] if self.replayed is None else [self.replayed], np.str_),
                    expert_ids=self.expert_ids,
                    hit=self.hit,
                    forward_tokens=self.forward_tokens,
                    seconds=self.seconds,
                    bytes_read=self.bytes_read_by_forward,
                    **by_layer,
                )
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise StorageError(f"{path}: the trace cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RouteTrace:
        """Read a saved trace. Raises StorageError if it cannot be read, OptionError if it is no trace or one of another version."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
                arrays = {name: saved[name] for name in saved.files}
            version = int(arrays["version"])
            trace = cls._from_arrays(arrays) if version == TRACE_VERSION else None
        except OSError as error:
            raise StorageError(f"{path}: the trace cannot be read: {error.strerror or error}") from error
        except Exception as error:  # damage shows as whatever zipfile, zlib or numpy stumbles over first
            raise OptionError(f"{path}: not a trace, or damaged; record it again with --trace") from error
        if trace is None:
            way_out = "update this program" if version > TRACE_VERSION else "record it again with --trace"
            raise OptionError(f"{path}: a trace of version {version}, this program reads version {TRACE_VERSION}; {way_out}")
        return trace

    @classmethod
    def _from_arrays(cls, arrays: dict[str, NDArray[np.generic]]) -> RouteTrace:
        expert_ids = arrays["expert_ids"].astype(np.int16, casting="safe")
        hit = arrays["hit"].astype(np.bool_, casting="safe")
        tokens, num_layers, top_k = expert_ids.shape
        counts = arrays["forward_tokens"].astype(np.int64, casting="safe")
        by_layer = {name: arrays[name].astype(kind, casting="safe") for name, kind in _BY_LAYER.items()}
        by_forward = {name: arrays[name].astype(kind, casting="safe") for name, kind in _BY_FORWARD.items()}
        num_experts, expert_bytes, slots = (int(arrays[name]) for name in ("num_experts", "expert_bytes", "slots"))
        belong = (
            hit.shape == expert_ids.shape
            and counts.ndim == 1
            and (counts >= 1).all()
            and counts.sum() == tokens
            and all(array.shape == (len(counts), num_layers) for array in by_layer.values())
            and all(array.shape == (len(counts),) for array in by_forward.values())
            and all(np.isfinite(array).all() for array in (*by_layer.values(), *by_forward.values()))
            and ((expert_ids >= 0) & (expert_ids < num_experts)).all()
            and min(num_layers, top_k, expert_bytes, slots) >= 1
        )
        if not belong:
            raise ValueError("the arrays do not belong together")
        replayed = [str(label) for label in arrays["replayed"].astype(np.str_, casting="safe")]
        trace = cls(num_layers, num_experts, top_k, expert_bytes=expert_bytes, slots=slots, replayed=replayed[0] if replayed else None)
        ends = np.cumsum(counts)[:-1]
        for index, (ids, hits) in enumerate(zip(np.split(expert_ids, ends), np.split(hit, ends), strict=True)):
            if len(counts):  # numpy splits nothing into one empty part
                forward = _Forward(0, num_layers, top_k)
                forward.expert_ids, forward.hit = ids, hits
                forward.seconds, forward.bytes_read = float(by_forward["seconds"][index]), int(by_forward["bytes_read"][index])
                for name, array in by_layer.items():
                    setattr(forward, name, array[index])
                trace._forwards.append(forward)
        return trace
