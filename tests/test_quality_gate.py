"""The quality gate on the demo: less memory changes no bit of a score, INT8 changes few answers. bench/quality.py prints the figures."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import sparseflow
from outliers import CHANNELS, FACTOR, write_outlier_checkpoint
from sparseflow import equalise
from sparseflow.divergence import Divergence, measure_text
from sparseflow.likelihood import EngineModel
from sparseflow.pack import pack_checkpoint
from sparseflow.quality import Score, compare, score_questions
from sparseflow.questions import read_questions
from sparseflow.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
DEMO = Path(sparseflow.__file__).parent / "demo"
sys.path[:0] = [str(ROOT / "tools" / "demo"), str(ROOT / "bench")]

from corpus import DocumentSource  # noqa: E402
from special_tokens import END_OF_TEXT  # noqa: E402

UNSEEN_SEED = 20_250_607
TOKENS = 20_480
WINDOW = 256
SMALLEST = 114_688
HALF = 96 * 28_672


@pytest.fixture(scope="module")
def outlier_packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo with outlier channels, as int8 and bf16."""
    folder = tmp_path_factory.mktemp("outliers")
    write_outlier_checkpoint(DEMO, folder / "checkpoint")
    for kind in ("int8", "bf16"):
        pack_checkpoint(folder / "checkpoint", folder / kind, experts=kind, dense=kind)
    return {kind: folder / kind for kind in ("int8", "bf16")}


def scores(pack: Path, cache: str | int) -> list[Score]:
    with sparseflow.load(pack, cache=cache, threads=1) as model:
        return score_questions(EngineModel(model), read_questions(ROOT / "bench" / "quality_public.jsonl"), model.tokenizer, model.context)


def unseen_ids(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Windows end to end, each from the start of a document, as tools/demo/evaluate.py makes them."""
    documents = iter(DocumentSource(UNSEEN_SEED))
    ids: list[int] = []
    while len(ids) < tokens:
        window: list[int] = []
        while len(window) < WINDOW:
            window += tokenizer.encode(next(documents) + END_OF_TEXT)
        ids += window[:WINDOW]
    return ids[:tokens]


def unseen(pack: Path, reference: Path, tokens: int) -> Divergence:
    with closing(EngineModel(sparseflow.load(pack, threads=1))) as model, closing(EngineModel(sparseflow.load(reference, threads=1))) as other:
        found = measure_text(model, unseen_ids(model.model.tokenizer, tokens + 1), WINDOW, other).against
    assert found is not None
    return found


@pytest.mark.slow
def test_answers_do_not_depend_on_the_cache_and_agree_with_bf16(packed_demo: Path, packed_demo_bf16: Path) -> None:
    resident = scores(packed_demo, "resident")
    for cache in (SMALLEST, HALF):
        assert compare(scores(packed_demo, cache), resident).identical == 60
    against = compare(resident, scores(packed_demo_bf16, "resident"))
    for way in ("sum", "character"):
        assert against.agreements(way) >= 58
        assert all(found.nats_from_tie <= 1.5 for found in against.disagreements[way])


@pytest.mark.slow
def test_int8_is_near_bf16_on_unseen_text(packed_demo: Path, packed_demo_bf16: Path) -> None:
    found = unseen(packed_demo, packed_demo_bf16, TOKENS)
    assert found.mean_kl <= 2.0e-4 and found.top1_agreement >= 0.99


@pytest.mark.slow
def test_outlier_channels_are_evened_out(
    outlier_packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT8 holds on outlier channels as it does on the demo, and would be far off if sf-pack left them as they are."""
    found = unseen(outlier_packs["int8"], outlier_packs["bf16"], 2_560)
    assert found.mean_kl <= 2.0e-4 and found.top1_agreement >= 0.99
    monkeypatch.setattr(equalise, "LEAST_POWER", 1_000)
    pack_checkpoint(outlier_packs["bf16"].parent / "checkpoint", tmp_path / "plain")
    assert unseen(tmp_path / "plain", outlier_packs["bf16"], 2_560).mean_kl > 2.0e-3


def test_outlier_channels_change_nothing_in_bf16(packed_demo_bf16: Path, outlier_packs: dict[str, Path]) -> None:
    logits = []
    for pack in (packed_demo_bf16, outlier_packs["bf16"]):
        with sparseflow.load(pack, threads=1) as model:
            logits.append(model.session().forward(list(range(300, 340))))
            weight = model.decoder.layers[2].input_layernorm.weight[list(CHANNELS)]
    assert np.array_equal(*logits)
    assert (np.abs(weight) > FACTOR / 4).all()
