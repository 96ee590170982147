"""One text being read and written: feeds tokens to the decoder in chunks and keeps the state between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseflow.decoder import LeaseCount
from sparseflow.errors import CapacityError, OptionError, SparseFlowError
from sparseflow.evidence import disk_bytes_read
from sparseflow.finite import require_finite_logits
from sparseflow.replay import RouteReplay
from sparseflow.state import DecoderState
from sparseflow.trace import RouteTrace

if TYPE_CHECKING:
    from sparseflow.model import Model


class ForwardUsage(NamedTuple):
    """What one forward asked of the experts: leases, those in memory, evictions of the table meanwhile, bytes."""

    tokens: int
    requests: int
    hits: int
    evictions: int
    bytes_asked: int
    bytes_read: int | None


class Session:
    """A text in progress on one model. Made by `Model.session`; several may share a model.

    Attributes:
        trace: RouteTrace of all forwards of this session, None when it was made with trace=False.
        usage: one ForwardUsage per forward (a prompt takes one per chunk).
        replay: the recorded routes it follows instead of the routers' choice, or None. Token i takes the experts of the recording's
            token i, whatever its id is.

    Thread-safety: one forward at a time; a second thread waits. Different sessions run side by side.
    """

    def __init__(self, model: Model, *, trace: bool = True, replay: RouteReplay | None = None) -> None:
        g = model.geometry
        if replay is not None:
            replay.check(g)
        self._model = model
        self._state: DecoderState | None = DecoderState(g)
        self._lock = threading.Lock()
        self._broken = False
        self.replay = replay
        self.trace: RouteTrace | None = None
        if trace:
            self.trace = RouteTrace(
                g.num_hidden_layers,
                g.num_experts,
                g.num_experts_per_tok,
                expert_bytes=model.layout.stride,
                slots=model.leases.slots,
                replayed=None if replay is None else replay.label,
            )
        self.usage: list[ForwardUsage] = []

    @property
    def position(self) -> int:
        """Tokens fed so far."""
        return self._live().position

    @property
    def context(self) -> int:
        """The most tokens this session can hold."""
        return self._model.context

    def forward(self, ids: Sequence[int] | NDArray[np.integer], *, last_only: bool = False) -> NDArray[np.float32]:
        """Feeds token ids after those fed before; logits float32 [len(ids), vocab], or [1, vocab] with `last_only`.

        The ids are fed in chunks of the model's prefill_chunk; the logits do not depend on it. Raises OptionError for ids that are
        empty or not in the vocabulary, CapacityError when they do not fit in the context or in the replay, StorageError or PackedModelError when the
        experts cannot be read, NonFiniteError when a logit is NaN or infinite, SparseFlowError when the session is closed or an
        earlier forward was broken off.
        """
        with self._lock:
            self._model.require_open()
            state = self._live()
            tokens = self._checked(ids, state.position)
            chunk = self._model.prefill_chunk
            logits = []
            for start in range(0, len(tokens), chunk):
                part = tokens[start : start + chunk]
                is_last = start + chunk >= len(tokens)
                logits.append(self._chunk(part, state, (1 if is_last else 0) if last_only else len(part)))
            return logits[-1] if len(logits) == 1 or last_only else np.concatenate(logits)

    def fork(self) -> Session:
        """An independent continuation from here, sharing what it can of the past. Its trace starts empty."""
        with self._lock:
            state = self._live()
            other = Session(self._model, trace=self.trace is not None, replay=self.replay)
            other._state = state.fork()
            return other

    def close(self) -> None:
        """Frees the state. Closing again does nothing."""
        self._state = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _live(self) -> DecoderState:
        if self._state is None:
            raise SparseFlowError("the session is closed: make another with model.session()")
        if self._broken:
            raise SparseFlowError(
                "the session's last forward was broken off, its state is between two tokens: make another with model.session()"
            )
        return self._state

    def _checked(self, ids: Sequence[int] | NDArray[np.integer], position: int) -> NDArray[np.int64]:
        tokens = np.asarray(ids)
        vocab = self._model.geometry.vocab_size
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise OptionError("the ids to feed must be a sequence of at least one whole number")
        outside = tokens[(tokens < 0) | (tokens >= vocab)]
        if outside.size:
            raise OptionError(f"token id {outside[0]} is not in the vocabulary: ids go from 0 to {vocab - 1}")
        if position + len(tokens) > self.context:
            raise CapacityError(
                f"{position + len(tokens)} tokens do not fit in the context of {self.context}: shorten the prompt or raise the context"
            )
        if self.replay is not None:
            self.replay.check_position(position + len(tokens))
        return tokens.astype(np.int64)

    def _chunk(self, tokens: NDArray[np.int64], state: DecoderState, logits: int) -> NDArray[np.float32]:
        count = LeaseCount()
        evictions = self._model.leases.counters()["evictions"]
        read = disk_bytes_read()
        record = None if self.trace is None else self.trace.begin_forward(len(tokens), read)
        self._broken = True
        result = self._model.decoder(tokens, state, logits=logits, usage=count, trace=record, replay=self.replay)
        require_finite_logits(result)
        self._broken = False
        read_after = disk_bytes_read()
        bytes_read = None if read is None or read_after is None else read_after - read
        if record is not None:
            record.end(read_after)
        evictions = self._model.leases.counters()["evictions"] - evictions
        asked = count.requests * self._model.layout.stride
        self.usage.append(ForwardUsage(len(tokens), count.requests, count.hits, evictions, asked, bytes_read))
        return result
