"""RouteTrace: which experts each token asked for in each layer, which were in memory, and what that cost."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import OptionError, StorageError

TRACE_VERSION = 1


class RouteTrace:
    """The routes of one session, forward by forward.

    A forward is one pass of some tokens through all layers: a chunk of the prompt, or one token of decode. In it, each
    distinct expert of a layer is leased once, however many of the tokens chose it. So `hit` belongs to the lease: all
    tokens of a forward that chose the same expert carry the same flag, and one read from the disk can show as many
    misses. `bytes_asked` counts each lease once. For decode the two views agree.

    Parameters
        num_layers: layers of the model, each with num_experts routed experts (at most 32767), top_k of them a token.
        replayed: label of the recording, when the session followed a RouteReplay and not its own routers; else None.

    The session writes with `begin_forward`, `add_layer` once for every layer in any order, `end_forward`. A forward that
    was begun and not ended (it failed) is not part of the trace. Memory: 3 bytes per token, layer and chosen expert.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int, *, replayed: str | None = None) -> None:
        if num_experts > np.iinfo(np.int16).max:
            raise OptionError(f"a trace holds expert ids up to {np.iinfo(np.int16).max}, not {num_experts} experts")
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.top_k = top_k
        self.replayed = replayed
        self._expert_ids: list[NDArray[np.int16]] = []  # per forward [tokens, layers, top_k]
        self._hit: list[NDArray[np.bool_]] = []  # same shape
        self._wait_seconds: list[NDArray[np.float32]] = []  # per forward [layers]
        self._bytes_asked: list[NDArray[np.int64]] = []  # per forward [layers]
        self._bytes_read: list[int] = []  # per forward, -1 where the system did not tell
        self._begin_next(0)

    def _begin_next(self, tokens: int) -> None:
        self._next_ids = np.zeros((tokens, self.num_layers, self.top_k), np.int16)
        self._next_hit = np.zeros((tokens, self.num_layers, self.top_k), np.bool_)
        self._next_wait = np.zeros(self.num_layers, np.float32)
        self._next_asked = np.zeros(self.num_layers, np.int64)

    # --- written by the session ---

    def begin_forward(self, tokens: int) -> None:
        """Begin a forward of some tokens. Drops one that was begun and never ended."""
        self._begin_next(tokens)

    def add_layer(
        self, layer: int, expert_ids: NDArray[np.int32], hit: NDArray[np.bool_], wait_seconds: float, bytes_asked: int
    ) -> None:
        """Add one layer of the forward that was begun.

        Parameters
            expert_ids: int32 [tokens, top_k], each row ascending.
            hit: bool [tokens, top_k], whether that expert was in memory when its wave of leases was acquired.
            wait_seconds: how long this layer stood still for the disk.
            bytes_asked: distinct experts of the layer times the stride.
        """
        self._next_ids[:, layer] = expert_ids
        self._next_hit[:, layer] = hit
        self._next_wait[layer] = wait_seconds
        self._next_asked[layer] = bytes_asked

    def end_forward(self, bytes_read: int | None) -> None:
        """End the forward. bytes_read: what the process read from the disk meanwhile; None where the system did not tell."""
        self._expert_ids.append(self._next_ids)
        self._hit.append(self._next_hit)
        self._wait_seconds.append(self._next_wait)
        self._bytes_asked.append(self._next_asked)
        self._bytes_read.append(-1 if bytes_read is None else bytes_read)
        self._begin_next(0)

    # --- totals ---

    @property
    def forwards(self) -> int:
        """Forwards that ended."""
        return len(self._expert_ids)

    @property
    def tokens(self) -> int:
        """Tokens fed in them."""
        return sum(len(ids) for ids in self._expert_ids)

    @property
    def requests(self) -> int:
        """Experts chosen: tokens x layers x top_k."""
        return self.tokens * self.num_layers * self.top_k

    @property
    def hits(self) -> int:
        """Choices that met an expert in memory; see the class's text about forwards of several tokens."""
        return sum(int(np.count_nonzero(hit)) for hit in self._hit)

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
        """Bytes of all leased experts, in memory or not: each distinct expert of a forward's layer once, by its stride."""
        return sum(int(asked.sum()) for asked in self._bytes_asked)

    @property
    def bytes_read(self) -> int | None:
        """Bytes that the disk moved for this process during the forwards; None where the system did not tell."""
        return None if -1 in self._bytes_read else sum(self._bytes_read)

    # --- the record itself; each call makes a new array ---

    @property
    def expert_ids(self) -> NDArray[np.int16]:
        """int16 [tokens, layers, top_k], ascending along the last axis."""
        return np.concatenate([self._next_ids[:0], *self._expert_ids])

    @property
    def hit(self) -> NDArray[np.bool_]:
        """bool [tokens, layers, top_k], for the expert at the same place in `expert_ids`."""
        return np.concatenate([self._next_hit[:0], *self._hit])

    @property
    def forward_of_token(self) -> NDArray[np.int32]:
        """int32 [tokens], ascending: the forward that fed each token."""
        return np.repeat(np.arange(self.forwards, dtype=np.int32), [len(ids) for ids in self._expert_ids])

    @property
    def wait_seconds(self) -> NDArray[np.float32]:
        """float32 [forwards, layers]: how long each layer stood still for the disk."""
        return np.array(self._wait_seconds, np.float32).reshape(-1, self.num_layers)

    @property
    def bytes_asked_by_layer(self) -> NDArray[np.int64]:
        """int64 [forwards, layers], as `bytes_asked`."""
        return np.array(self._bytes_asked, np.int64).reshape(-1, self.num_layers)

    @property
    def bytes_read_by_forward(self) -> NDArray[np.int64]:
        """int64 [forwards], as `bytes_read`; -1 where the system did not tell."""
        return np.array(self._bytes_read, np.int64)

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a compressed .npz, whole or not at all. Raises StorageError."""
        partial = Path(f"{os.fspath(path)}.partial")
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(
                    file,
                    version=np.int64(TRACE_VERSION),
                    num_experts=np.int64(self.num_experts),
                    replayed=np.array([] if self.replayed is None else [self.replayed], np.str_),
                    expert_ids=self.expert_ids,
                    hit=self.hit,
                    forward_tokens=np.array([len(ids) for ids in self._expert_ids], np.int64),
                    wait_seconds=self.wait_seconds,
                    bytes_asked=self.bytes_asked_by_layer,
                    bytes_read=self.bytes_read_by_forward,
                )
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise StorageError(f"{path}: the trace cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RouteTrace:
        """Read a saved trace. Raises StorageError if it cannot be read, OptionError if it is no trace or a later one."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
                arrays = {name: saved[name] for name in saved.files}
            version = int(arrays["version"])
            trace = cls._from_arrays(arrays) if version <= TRACE_VERSION else None
        except OSError as error:
            raise StorageError(f"{path}: the trace cannot be read: {error.strerror or error}") from error
        except Exception as error:  # damage shows as whatever zipfile, zlib or numpy stumbles over first
            raise OptionError(f"{path}: not a trace, or damaged; record it again with --trace") from error
        if trace is None:
            raise OptionError(f"{path}: a trace of version {version}, this program reads up to {TRACE_VERSION}; update it")
        return trace

    @classmethod
    def _from_arrays(cls, arrays: dict[str, NDArray[np.generic]]) -> RouteTrace:
        expert_ids = arrays["expert_ids"].astype(np.int16, casting="safe")
        hit = arrays["hit"].astype(np.bool_, casting="safe")
        tokens, num_layers, top_k = expert_ids.shape
        ends = np.cumsum(arrays["forward_tokens"].astype(np.int64, casting="safe"))
        if hit.shape != expert_ids.shape or (ends[-1] if len(ends) else 0) != tokens:
            raise ValueError("the arrays do not belong together")
        replayed = [str(label) for label in arrays["replayed"].astype(np.str_, casting="safe")]
        trace = cls(num_layers, int(arrays["num_experts"]), top_k, replayed=replayed[0] if replayed else None)
        trace._expert_ids = np.split(expert_ids, ends)[:-1]
        trace._hit = np.split(hit, ends)[:-1]
        trace._wait_seconds = list(arrays["wait_seconds"].astype(np.float32).reshape(len(ends), num_layers))
        trace._bytes_asked = list(arrays["bytes_asked"].astype(np.int64).reshape(len(ends), num_layers))
        trace._bytes_read = [int(count) for count in arrays["bytes_read"].reshape(len(ends))]
        return trace
