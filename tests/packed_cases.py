"""The random cases and the demo as checkpoints and packed folders, each made once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import sparseflow
from geometries import CASES
from random_checkpoint import random_weights, write_checkpoint
from sparseflow.pack import pack_checkpoint

DEMO = Path(sparseflow.__file__).parent / "demo"
BY_NAME = {case.name: case for case in CASES}
NAMES = [*BY_NAME, "demo"]


class PackedCases:
    """Checkpoints and packs under one folder, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, name: str) -> Path:
        """The checkpoint of a case, in the form that the case asks for."""
        if name == "demo":
            return DEMO
        folder = self.folder / name
        if not folder.exists():
            case = BY_NAME[name]
            weights = random_weights(case)
            write_checkpoint(
                folder, case.config, weights, experts=case.experts, nested=case.nested, shards=case.shards
            )
        return folder

    def packed(self, name: str, experts: str, dense: str) -> Path:
        """The packed folder of a case."""
        folder = self.folder / f"{name}-{experts}-{dense}"
        if not folder.exists():
            pack_checkpoint(self.checkpoint(name), folder, experts=experts, dense=dense)
        return folder


def forward(model: sparseflow.Model, ids: NDArray[np.integer], chunks: list[int]) -> NDArray[np.float32]:
    """[n, vocab] logits of a fresh session that is fed ids [n] in chunks of the given sizes."""
    with model.session() as session:
        starts = np.cumsum([0, *chunks])
        assert starts[-1] == len(ids)
        parts = [session.forward(ids[start:end].tolist()) for start, end in zip(starts, starts[1:], strict=False)]
        return np.concatenate(parts)
