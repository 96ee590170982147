"""The quality gate on the demo: that less memory and fewer bits do not change the answers, with numbers anyone can repeat.

    python bench/quality.py                          all parts, some minutes
    python bench/quality.py --part questions         one of them; the others in the results file are kept

    questions   60 four-choice questions: INT8 at the smallest cache, at half and resident, and against BF16
    divergence  INT8 against BF16 on text that the demo's training never saw, made by the generator of its corpus from another seed
    outliers    the same on a checkpoint with outlier channels that computes the same function
    schemes     other groups and fewer bits, simulated in float32 numpy; bytes and KL of each
    speed       decoding with INT8 and with BF16, resident

BF16 is the pack made with --experts bf16 --dense bf16: weights as they are, activations in float32. Nothing is downloaded. A part
that misses its bound says so, and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / "tools" / "demo")]

import sparseflow  # noqa: E402
from corpus import DocumentSource, write_corpus  # noqa: E402
from outliers import write_outlier_checkpoint  # noqa: E402
from schemes import SCHEMES, rounded_logits  # noqa: E402
from sparseflow import demo_model  # noqa: E402
from sparseflow.cli.options import SparseFlowCommand  # noqa: E402
from sparseflow.cli.perplexity import WINDOW as DEFAULT_WINDOW  # noqa: E402
from sparseflow.cli.quality import comparison_lines  # noqa: E402
from sparseflow.cli.table import table  # noqa: E402
from sparseflow.divergence import Divergence, TextMeasure, measure_text  # noqa: E402
from sparseflow.footprint import Footprint  # noqa: E402
from sparseflow.likelihood import EngineModel  # noqa: E402
from sparseflow.packfile import read_manifest  # noqa: E402
from sparseflow.quality import WAYS, Score, accuracies, compare, score_questions  # noqa: E402
from sparseflow.questions import read_questions  # noqa: E402
from sparseflow.tokenizer import Tokenizer  # noqa: E402
from special_tokens import END_OF_TEXT  # noqa: E402

QUESTIONS = ROOT / "bench" / "quality_public.jsonl"
RESULTS = ROOT / "bench" / "results" / "quality.json"
UNSEEN_SEED = 20_250_607
TEXT_TOKENS = 20_480
SCHEME_TOKENS = 2_560
OUTLIER_TOKENS = 1_024
WINDOW = 256
CUT_WINDOW = 512
SPEED_TOKENS = 200

MEAN_KL = 2.0e-4
TOP1 = 0.99
SAME_ANSWERS = 58
NATS_FROM_TIE = 1.5


def unseen_ids(tokens: int) -> list[int]:
    """Windows of WINDOW token ids end to end, each from the start of a document, as tools/demo/evaluate.py makes them; the documents are
    of a seed that neither training nor the tokenizer used."""
    tokenizer = Tokenizer.from_folder(demo_model.checkpoint_folder())
    documents = iter(DocumentSource(UNSEEN_SEED))
    ids: list[int] = []
    while len(ids) < tokens:
        window: list[int] = []
        while len(window) < WINDOW:
            window += tokenizer.encode(next(documents) + END_OF_TEXT)
        ids += window[:WINDOW]
    return ids[:tokens]


def unseen_documents(tokens: int) -> list[int]:
    """Documents of that seed one after the other."""
    return Tokenizer.from_folder(demo_model.checkpoint_folder()).encode(write_corpus(UNSEEN_SEED, 8 * tokens))[:tokens]


def end_of_text() -> int:
    """The id that ends a document."""
    return Tokenizer.from_folder(demo_model.checkpoint_folder()).control_tokens[END_OF_TEXT]


class Packs:
    """The demo's packs in a folder, made when they are first asked for."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self.threads = threads

    @cached_property
    def outliers(self) -> Path:
        """The checkpoint with outlier channels."""
        return write_outlier_checkpoint(demo_model.checkpoint_folder(), self.folder / "outliers")

    def open(self, kind: str, *, cache: str | int = "resident", checkpoint: Path | None = None) -> EngineModel:
        """A pack of kind int8 or bf16, of the demo or of another checkpoint."""
        checkpoint = checkpoint or demo_model.checkpoint_folder()
        folder = self.folder / f"{checkpoint.name}-{kind}"
        if not folder.exists():
            sparseflow.pack_checkpoint(checkpoint, folder, experts=kind, dense=kind)
        return EngineModel(sparseflow.load(folder, cache=cache, threads=self.threads))


def divergence_misses(found: Divergence) -> list[str]:
    """What is beyond its bound."""
    misses = []
    if found.mean_kl > MEAN_KL:
        misses.append(f"mean KL {found.mean_kl:.3g} is above {MEAN_KL:.1e}")
    if found.top1_agreement < TOP1:
        misses.append(f"top-1 agreement {100 * found.top1_agreement:.2f} % is below {100 * TOP1:.0f} %")
    return misses


def questions(packs: Packs) -> dict[str, Any]:
    """Streaming against resident, INT8 against BF16."""
    asked = read_questions(QUESTIONS)

    def scored(kind: str, cache: str | int) -> list[Score]:
        with closing(packs.open(kind, cache=cache)) as opened:
            return score_questions(opened, asked, opened.model.tokenizer, opened.model.context)

    resident = scored("int8", "resident")
    footprint = Footprint.of(read_manifest(packs.folder / "demo-int8"))
    caches = {"smallest": footprint.smallest_cache_bytes, "half": footprint.all_experts_bytes // 2}
    streamed = {name: compare(scored("int8", size), resident) for name, size in caches.items()}
    reference = scored("bf16", "resident")
    against = compare(resident, reference)
    misses = [f"{name} cache: {found.identical} of {found.questions} identical" for name, found in streamed.items()
              if found.identical < found.questions]
    for way in ("sum", "character"):
        if against.agreements(way) < SAME_ANSWERS:
            misses.append(f"by {way} {against.agreements(way)} answers agree, not {SAME_ANSWERS}")
        misses += [f"{found.id} by {way} is {found.nats_from_tie:.2f} nats from a tie" for found in against.disagreements[way]
                   if found.nats_from_tie > NATS_FROM_TIE]
    for name, found in streamed.items():
        click.echo(f"INT8 with the {name} cache ({caches[name]} bytes) against resident: {found.identical} of {found.questions} identical")
    rows = [("right", *(f"by {way}" for way in WAYS))]
    for name, scores in (("INT8", resident), ("BF16", reference)):
        rows.append((name, *(f"{accuracies(asked, scores)['all'][way].right} of {len(asked)}" for way in WAYS)))
    click.echo("\n".join([*table(rows), "INT8 against BF16:", *comparison_lines(against)]))
    return {
        "caches": caches,
        "streamed_against_resident": {name: found.to_json() for name, found in streamed.items()},
        "int8_against_bf16": against.to_json(),
        "sums": {"int8": [score.sums for score in resident], "bf16": [score.sums for score in reference]},
        "misses": misses,
    }


def measured(
    packs: Packs, ids: list[int], window: int, checkpoint: Path | None = None, document_end: int | None = None
) -> TextMeasure:
    """INT8 against BF16 on a text."""
    with closing(packs.open("int8", checkpoint=checkpoint)) as model, closing(packs.open("bf16", checkpoint=checkpoint)) as reference:
        return measure_text(model, ids, window, reference, document_end=document_end)


def told(measure: TextMeasure) -> dict[str, Any]:
    """A measure printed and recorded."""
    found = measure.against
    assert found is not None
    rows = [("tokens", "perplexity", "of BF16", "mean KL", "p99 KL", "top-1", "top-10")]
    rows.append((str(measure.tokens), f"{measure.perplexity:.4f}", f"{found.reference_perplexity:.4f}", f"{found.mean_kl:.3g}",
                 f"{found.p99_kl:.3g}", f"{100 * found.top1_agreement:.2f} %", f"{100 * found.top10_overlap:.2f} %"))
    click.echo("\n".join(table(rows)))
    return measure.to_json() | {"misses": divergence_misses(found)}


def divergence(packs: Packs) -> dict[str, Any]:
    """The demo as it is. The bounds are for windows as `sf-bench perplexity` makes them, and for those that training and the other parts
    have; windows that begin amid a document, which the demo was never trained on, are there to be seen."""
    ids = unseen_documents(TEXT_TOKENS + 1)
    click.echo(f"windows of at most {DEFAULT_WINDOW} that end where documents do")
    found = told(measured(packs, ids, DEFAULT_WINDOW, document_end=end_of_text()))
    click.echo(f"windows of {WINDOW} from the start of a document")
    short = told(measured(packs, unseen_ids(TEXT_TOKENS + 1), WINDOW))
    click.echo(f"windows of {CUT_WINDOW} cut anywhere")
    cut = told(measured(packs, ids, CUT_WINDOW))
    return found | {"from_starts": short, "cut_anywhere": cut, "misses": found["misses"] + short["misses"]}


def outliers(packs: Packs) -> dict[str, Any]:
    """The demo with outlier channels, which sf-pack evens out; the part schemes has what they would cost otherwise."""
    return told(measured(packs, unseen_ids(SCHEME_TOKENS + 1), WINDOW, packs.outliers))


class Simulated:
    """A simulation as a LanguageModel; the windows are asked for in their order."""

    def __init__(self, name: str, logits: Iterable[NDArray[np.float32]]) -> None:
        self.name = name
        self.vocab_size = 4096
        self._logits = iter(logits)

    def logits(self, ids: Any) -> Iterator[NDArray[np.float32]]:
        """The next window."""
        yield next(self._logits)

    def continuations(self, prefix: Any, endings: Any) -> list[NDArray[np.float64]]:
        """Not simulated."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to free."""


def schemes(packs: Packs) -> dict[str, Any]:
    """Bytes and KL of each scheme, on the demo and with outlier channels: without rounding both compute the same."""
    ids = unseen_ids(SCHEME_TOKENS + 1)
    windows = [ids[start : start + WINDOW] for start in range(0, SCHEME_TOKENS, WINDOW)]
    plain = list(rounded_logits(demo_model.checkpoint_folder(), None, windows))
    rows = [("scheme, simulated", "bytes a weight", "KL", "top-1", "KL, outliers", "top-1, outliers")]
    found = {}
    for scheme in SCHEMES:
        measures = []
        for folder, count in ((demo_model.checkpoint_folder(), SCHEME_TOKENS), (packs.outliers, OUTLIER_TOKENS)):
            model = Simulated(scheme.name, rounded_logits(folder, scheme, windows))
            against = measure_text(model, ids[: count + 1], WINDOW, Simulated("not rounded", plain)).against
            assert against is not None
            measures.append(against)
        size = scheme.bytes_per_weight()
        cells = [cell for each in measures for cell in (f"{each.mean_kl:.3g}", f"{100 * each.top1_agreement:.2f} %")]
        rows.append((scheme.name, f"{size:.4f}", *cells))
        found[scheme.name] = {"bytes_per_weight": size, "demo": asdict(measures[0]), "outliers": asdict(measures[1])}
        click.echo(scheme.name, err=True)
    click.echo("\n".join(table(rows)))
    return {"tokens": SCHEME_TOKENS, "outlier_tokens": OUTLIER_TOKENS, "schemes": found, "misses": []}


def speed(packs: Packs) -> dict[str, Any]:
    """Tokens per second of decoding, resident, by turns."""
    rates: dict[str, list[float]] = {"int8": [], "bf16": []}
    for _ in range(3):
        for kind in rates:
            with closing(packs.open(kind)) as opened, opened.model.session(trace=False) as session:
                session.forward([1, 2, 3])
                begun = time.perf_counter()
                for token in range(SPEED_TOKENS):
                    session.forward([token])
                rates[kind].append(SPEED_TOKENS / (time.perf_counter() - begun))
    sizes = {kind: Footprint.of(read_manifest(packs.folder / f"demo-{kind}")).bytes_per_token for kind in rates}
    rows = [("pack", "bytes a token", "tok/s (median of 3)")]
    rows += [(kind, str(sizes[kind]), f"{sorted(rates[kind])[1]:.0f}") for kind in rates]
    click.echo("\n".join(table(rows)))
    return {"bytes_per_token": sizes, "tokens_per_second": rates, "misses": []}


PARTS: dict[str, Callable[[Packs], dict[str, Any]]] = {
    "questions": questions, "divergence": divergence, "outliers": outliers, "schemes": schemes, "speed": speed,
}  # fmt: skip


@click.command(cls=SparseFlowCommand)
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), default=list(PARTS), help="Only this part; may be repeated.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Compute threads.")
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS, help="File to write.")
def main(parts: tuple[str, ...], threads: int, results: Path) -> None:
    """The quality gate on the demo; see the first lines of this file."""
    record: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    misses = []
    with tempfile.TemporaryDirectory() as folder:
        packs = Packs(Path(folder), threads)
        for part in parts:
            click.echo(f"\n== {part}")
            record[part] = PARTS[part](packs)
            misses += [f"{part}: {miss}" for miss in record[part]["misses"]]
            results.write_text(json.dumps(record, indent=1) + "\n")
    if misses:
        click.echo("\nmissed: " + "; ".join(misses))
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
