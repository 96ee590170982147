"""What `sf-bench quality` and `sf-bench perplexity` compare: a packed model, and a pack or a checkpoint as its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparseflow.cli.options import open_model
from sparseflow.errors import PackedModelError
from sparseflow.kernels.threads import check_threads
from sparseflow.likelihood import EngineModel, LanguageModel
from sparseflow.packfile import MANIFEST_FILE
from sparseflow.transformers_model import TransformersModel

AGAINST_HELP = "Compare with this one: a pack (made with --experts bf16 --dense bf16, say), or a checkpoint, which takes the extra [oracle]."


def open_packed(model: str, **engine: Any) -> EngineModel:
    """A packed model; `engine` are the options of `engine_options`."""
    return EngineModel(open_model(model, force=False, **engine))


def open_reference(reference: str, **engine: Any) -> LanguageModel:
    """A packed model, or a checkpoint computed by transformers.

    Raises PackedModelError when it is neither, OptionError when [oracle] is needed and not there.
    """
    folder = Path(reference)
    if reference != "demo" and not (folder / MANIFEST_FILE).exists() and (folder / "config.json").exists():
        return TransformersModel(folder, check_threads(engine["threads"]))
    try:
        return open_packed(reference, **engine)
    except PackedModelError as error:
        raise PackedModelError(f"--against: {error}") from error
