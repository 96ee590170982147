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
    ended_at        float32 [F, L], when the experts were computed and released; the next layer began there
    wait_seconds    float32 [F, L], how long the layer stood still for the disk
    bytes_asked     int64 [F, L], its distinct experts times expert_bytes
    layer_read      int64 [F, L], bytes the disk moved since the count before; -1 where none was taken (see route_record.SAMPLE_SECONDS)
    bytes_read      int64 [F], bytes the disk moved for the process during the forward; -1 where the system did not tell
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import OptionError, StorageError
from sparseflow.route_record import FORWARD_VALUES, LAYER_VALUES, RouteRecord, RouteRecorder

TRACE_VERSION = 2

_BY_FORWARD = {"forward_tokens": np.int64, "seconds": np.float32, "bytes_read": np.int64}
_BY_LAYER = {
    "wait_seconds": np.float32,
    "bytes_asked": np.int64,
    "asked_at": np.float32,
    "arrived_at": np.float32,
    "ended_at": np.float32,
    "layer_read": np.int64,
}
_TIMES = ("asked_at", "arrived_at", "ended_at")  # they count from the begin of the forward


class RouteTrace(RouteRecorder):
    """The routes of one session, forward by forward.

    A forward is one pass of some tokens through all layers: a chunk of the prompt, or one token of decode. In it, each
    distinct expert of a layer is leased once, however many of the tokens chose it. So `hit` belongs to the lease: all
    tokens of a forward that chose the same expert carry the same flag, and one read from the disk can show as many
    misses. `bytes_asked` counts each lease once. For decode the two views agree.

    Parameters
        num_layers: layers of the model, each with num_experts routed experts (at most 32767), top_k of them a token.
        expert_bytes: bytes of one expert; slots: experts that the cache holds.
        replayed: label of the recording, when the session followed a RouteReplay and not its own routers; else None.

    The session writes with `begin_forward`, whose result the leases of every layer are acquired with, and that is told the end. A
    forward that was begun and not ended (it failed) is not part of the trace. Memory: 3 bytes per token, layer and chosen expert, and
    40 per forward and layer.
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
        all_resident = slots >= num_layers * num_experts
        super().__init__(num_layers, num_experts, top_k, all_resident)
        self._arrays = self._as_in_file(RouteRecord(num_layers, num_experts, top_k, 0, 0, all_resident))  # the records come after them

    def _as_in_file(self, record: RouteRecord) -> dict[str, NDArray[Any]]:
        """The arrays of the file, of the forwards in a record."""
        layers, forwards, tokens = self.num_layers, record.forwards, record.tokens
        rows, whole = record.rows[:forwards], dict(zip(FORWARD_VALUES, record.of_forwards[:forwards].T, strict=True))
        measured = {name: rows[name] - whole["begun_at"][:, None] if name in _TIMES else rows[name] for name in LAYER_VALUES}
        arrays: dict[str, NDArray[Any]] = {
            name: rows[name].transpose(0, 2, 1, 3).reshape(forwards * tokens, layers, self.top_k) for name in ("expert_ids", "hit")
        }
        chosen = np.sort(rows["expert_ids"].reshape(forwards, layers, tokens * self.top_k), axis=-1)
        distinct = np.count_nonzero(np.diff(chosen, prepend=-1), axis=-1)
        arrays["forward_tokens"] = np.full(forwards, tokens, np.int64)
        arrays["bytes_asked"] = distinct * np.int64(self.expert_bytes)
        arrays |= {name: whole[name].astype(_BY_FORWARD[name]) for name in ("seconds", "bytes_read")}
        return arrays | {name: values.astype(_BY_LAYER[name]) for name, values in measured.items()}

    def _array(self, name: str) -> NDArray[Any]:
        """One array of the file."""
        ended = [self._as_in_file(record) for record in self.records if record.forwards]
        if ended:
            self._arrays = {key: np.concatenate([arrays[key] for arrays in (self._arrays, *ended)]) for key in self._arrays}
            self.forget()
        return self._arrays[name]

    # --- totals ---

    @property
    def forwards(self) -> int:
        """Forwards that ended."""
        return len(self._array("forward_tokens"))

    @property
    def tokens(self) -> int:
        """Tokens fed in them."""
        return len(self._array("hit"))

    @property
    def requests(self) -> int:
        """Experts chosen: tokens x layers x top_k."""
        return self.tokens * self.num_layers * self.top_k

    @property
    def hits(self) -> int:
        """Choices that met an expert in memory; see the class's text about forwards of several tokens."""
        return int(np.count_nonzero(self._array("hit")))

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
        return int(self._array("bytes_asked").sum())

    @property
    def bytes_read(self) -> int | None:
        """Bytes that the disk moved for this process during the forwards; None where the system did not tell."""
        read = self._array("bytes_read")
        return None if (read < 0).any() else int(read.sum())

    # --- the record itself, as in the file; each call makes a new array ---

    @property
    def expert_ids(self) -> NDArray[np.int16]:
        """int16 [tokens, layers, top_k], ascending along the last axis."""
        return self._array("expert_ids").copy()

    @property
    def hit(self) -> NDArray[np.bool_]:
        """bool [tokens, layers, top_k], for the expert at the same place in `expert_ids`."""
        return self._array("hit").copy()

    @property
    def forward_tokens(self) -> NDArray[np.int64]:
        """int64 [forwards]: how many tokens each fed."""
        return self._array("forward_tokens").copy()

    @property
    def forward_of_token(self) -> NDArray[np.int32]:
        """int32 [tokens], ascending: the forward that fed each token."""
        return np.repeat(np.arange(self.forwards, dtype=np.int32), self.forward_tokens)

    @property
    def seconds(self) -> NDArray[np.float32]:
        """float32 [forwards]: how long each took."""
        return self._array("seconds").copy()

    @property
    def asked_at(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: when each layer asked for its experts, in seconds since its forward began."""
        return self._array("asked_at").copy()

    @property
    def arrived_at(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: when the last of them was there."""
        return self._array("arrived_at").copy()

    @property
    def ended_at(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: when the layer was done."""
        return self._array("ended_at").copy()

    @property
    def wait_seconds(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: how long each layer stood still for the disk."""
        return self._array("wait_seconds").copy()

    @property
    def bytes_asked_by_layer(self) -> NDArray[np.int64]:
        """int64 [forwards, layers], as `bytes_asked`."""
        return self._array("bytes_asked").copy()

    @property
    def bytes_read_by_layer(self) -> NDArray[np.int64]:
        """int64 [forwards, layers]: what the disk moved since the count before, or the begin of the forward; -1 where none was taken."""
        return self._array("layer_read").copy()

    @property
    def bytes_read_by_forward(self) -> NDArray[np.int64]:
        """int64 [forwards], as `bytes_read`; -1 where the system did not tell."""
        return self._array("bytes_read").copy()

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, whole or not at all. Raises StorageError."""
        partial = Path(f"{os.fspath(path)}.partial")
        arrays: dict[str, Any] = {name: self._array(name) for name in self._arrays}
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(
                    file,
                    version=np.int64(TRACE_VERSION),
                    num_experts=np.int64(self.num_experts),
                    expert_bytes=np.int64(self.expert_bytes),
                    slots=np.int64(self.slots),
                    replayed=np.array([] if self.replayed is None else [self.replayed], np.str_),
                    **arrays,
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
            trace = cls.from_arrays(arrays) if version == TRACE_VERSION else None
        except OSError as error:
            raise StorageError(f"{path}: the trace cannot be read: {error.strerror or error}") from error
        except Exception as error:  # damage shows as whatever zipfile, zlib or numpy stumbles over first
            raise OptionError(f"{path}: not a trace, or damaged; record it again with --trace") from error
        if trace is None:
            way_out = "update this program" if version > TRACE_VERSION else "record it again with --trace"
            raise OptionError(f"{path}: a trace of version {version}, this program reads version {TRACE_VERSION}; {way_out}")
        return trace

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[np.generic]]) -> RouteTrace:
        """The trace that a file with these arrays would hold. Raises KeyError, TypeError or ValueError for arrays that are missing, of
        another type, or do not belong together."""
        expert_ids = arrays["expert_ids"].astype(np.int16, casting="safe")
        hit = arrays["hit"].astype(np.bool_, casting="safe")
        tokens, num_layers, top_k = expert_ids.shape
        by_layer = {name: arrays[name].astype(kind, casting="safe") for name, kind in _BY_LAYER.items()}
        by_forward = {name: arrays[name].astype(kind, casting="safe") for name, kind in _BY_FORWARD.items()}
        num_experts, expert_bytes, slots = (int(arrays[name]) for name in ("num_experts", "expert_bytes", "slots"))
        counts = by_forward["forward_tokens"]
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
        trace._arrays = {"expert_ids": expert_ids, "hit": hit, **by_layer, **by_forward}
        return trace
