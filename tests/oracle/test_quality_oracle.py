"""The scores of a checkpoint by transformers: as a reference for `sf-bench quality` and `sf-bench perplexity`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sparseflow
from sparseflow.cli.against import open_reference
from sparseflow.divergence import measure_text
from sparseflow.errors import CheckpointError
from sparseflow.likelihood import EngineModel
from sparseflow.quality import compare, score_questions
from sparseflow.questions import read_questions

pytestmark = pytest.mark.oracle

DEMO = Path(sparseflow.__file__).parent / "demo"
QUESTIONS = Path(__file__).parents[2] / "bench" / "quality_public.jsonl"


def test_the_bf16_pack_scores_as_transformers_does(packed_demo_bf16: Path) -> None:
    questions = read_questions(QUESTIONS)[::3]
    reference = open_reference(str(DEMO), threads=1)
    with sparseflow.load(packed_demo_bf16, threads=1) as model:
        scores = score_questions(EngineModel(model), questions, model.tokenizer, model.context)
        found = compare(scores, score_questions(reference, questions, model.tokenizer, model.context))
        assert found.largest_difference < 2e-3
        measure = measure_text(EngineModel(model), list(range(100, 400)), 64, reference)
        assert measure.against is not None and abs(measure.against.mean_kl) < 1e-8 and measure.against.top1_agreement == 1
        pieces = np.concatenate(list(reference.logits([5, 6, 7])))
        assert np.abs(pieces - model.session().forward([5, 6, 7])).max() < 1e-3
    reference.close()


def test_a_folder_that_transformers_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        open_reference(str(tmp_path), threads=1)
