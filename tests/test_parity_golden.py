"""bf16 packs against float32 transformers: the golden logits of tools/make_golden.py, over prompt and 40 greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparseflow
from packed_cases import BY_NAME, NAMES, PackedCases, forward
from random_checkpoint import digest, random_weights
from reference.checkpoint import read_safetensors

TOLERANCE = 2e-4  # of the largest logit
GOLDEN = Path(__file__).parent / "golden"


def chunk_sizes(feed: str, n: int, prompt: int) -> list[int]:
    """How n tokens are fed: the prompt at once and single tokens, odd chunks throughout, or single tokens throughout."""
    if feed == "prompt":
        return [prompt] + [1] * (n - prompt)
    if feed == "single":
        return [1] * n
    sizes: list[int] = []
    for size in cycle([3, 1, 7, 2, 13, 5, 1, 1, 29]):
        sizes.append(min(size, n - sum(sizes)))
        if sum(sizes) == n:
            return sizes
    raise AssertionError


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> PackedCases:
    return PackedCases(tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def golden(name: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def model(name: str, cases: PackedCases) -> Iterator[sparseflow.Model]:
    with sparseflow.load(cases.packed(name, "bf16", "bf16"), cache="resident", threads=2) as model:
        yield model


def test_golden_belongs_to_these_weights(name: str, golden: dict[str, Any], cases: PackedCases) -> None:
    if name == "demo":
        weights = read_safetensors(cases.checkpoint(name) / "model.safetensors")
    else:
        weights = random_weights(BY_NAME[name])
    assert digest(weights) == golden["digest"]


@pytest.mark.parametrize("feed", ["prompt", "odd", "single"])
def test_logits_match_transformers(feed: str, golden: dict[str, Any], model: sparseflow.Model) -> None:
    ids = golden["ids"]
    logits = forward(model, ids, chunk_sizes(feed, len(ids), int(golden["prompt"])))
    assert logits.dtype == np.float32
    allowed = TOLERANCE * golden["scale"]
    assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() <= allowed
    # The tool refuses goldens in which two logits that each move by the tolerance could change places.
    assert golden["lead"].min() > 2 * allowed
    assert np.array_equal(logits.argmax(axis=1), golden["best"])
