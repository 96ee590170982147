"""Reading ahead the experts of the next layer, as long as guessing them pays.

The guess is what the next layer's router makes of the residual stream before this layer's experts have been added to it. How
often a guess was right is measured for every rank of the router's order, always, and only the ranks that are mostly right are
read ahead; when none is, guessing itself stops, but for an occasional trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseflow.kernels.experts import route
from sparseflow.leases import LeaseTable
from sparseflow.weights import Activations, Linear

PAYS = 0.5
"""Share of right guesses from which on a rank is read ahead: the disk would be idle, so a wrong one costs little more than its slot."""

MEMORY = 200
"""Guesses that the measured share looks back on, about: some tokens' worth of layers."""

ENOUGH = 20
"""Guesses before a share counts for anything."""

TRIAL = 16
"""Where nothing pays, one token in so many is guessed for all the same."""


class GuessRecord:
    """How often the guesses of each rank were right; shared by the layers of a model.

    Attributes:
        share: float64 [top_k], of the guesses of each rank lately, heaviest first, those that were chosen.
        ranks: how many of the first ranks are worth reading ahead.
    """

    def __init__(self, top_k: int) -> None:
        self.share = np.zeros(top_k)
        self.ranks = 0
        self._count = 0
        self._tokens = 0

    def begin_token(self) -> bool:
        """Whether to guess for the token that begins."""
        self._tokens += 1
        return self.ranks > 0 or self._count < ENOUGH or self._tokens % TRIAL == 0

    def add(self, right: NDArray[np.bool_]) -> None:
        """Whether the guess of each rank was right, once."""
        self._count += 1
        self.share += (right - self.share) / min(self._count, MEMORY)
        paying = self.share >= PAYS
        self.ranks = 0 if self._count < ENOUGH else len(paying) if paying.all() else int(paying.argmin())


class NextRouter(NamedTuple):
    """The router of a layer, as the layer before sees it."""

    layer: int
    norm: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    gate: Linear


class Guesses:
    """The guesses for one token, from layer to layer.

    `predict` notes kernels down in the Step of this thread; once it has run, `begin` reads ahead what is likely enough; in the next
    layer `judge` compares with what the router chose.
    """

    def __init__(self, record: GuessRecord, leases: LeaseTable, top_k: int, threads: int) -> None:
        self._record = record
        self._leases = leases
        self._top_k = top_k
        self._threads = threads
        self._router: NextRouter | None = None
        self._predicted: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
        self._guess: NDArray[np.int32] | None = None

    def predict(self, router: NextRouter, residual: NDArray[np.float32]) -> None:
        """What the next router makes of the residual stream, float32 [1, hidden]."""
        logits = router.gate(Activations(router.norm(residual), self._threads))
        self._router = router
        self._predicted = route(logits, self._top_k, self._threads)

    def begin(self) -> None:
        """Reads ahead; does nothing unless a prediction has been computed since."""
        if self._router is None or self._predicted is None:
            return
        ids, weights = self._predicted
        self._predicted = None
        self._guess = np.ascontiguousarray(ids[0][np.argsort(-weights[0], kind="stable")])
        if self._record.ranks > 0:
            self._leases.prefetch(self._router.layer, self._guess[: self._record.ranks], spare=2 * self._top_k)

    def judge(self, chosen: NDArray[np.int32]) -> None:
        """Takes note of how good the guess was for a layer that has chosen, int32 [1, top_k]."""
        if self._guess is not None:
            self._record.add(np.isin(self._guess, chosen))
            self._guess = None
