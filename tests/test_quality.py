"""Questions and perplexity: what is read, what is computed, what is shown, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import sparseflow
from sparseflow import divergence, likelihood, transformers_model
from sparseflow.cli.bench import main
from sparseflow.divergence import measure_text, windows_of
from sparseflow.errors import CapacityError, OptionError
from sparseflow.likelihood import EngineModel, log_softmax
from sparseflow.quality import Accuracy, Score, accuracies, compare, score_questions
from sparseflow.questions import Question, read_questions, read_text

QUESTIONS = Path(__file__).parents[1] / "bench" / "quality_public.jsonl"
GOOD = {"id": "a", "task": "t", "ctx": "The red", "choices": [" fox", " hen house"], "gold": 0}


def write(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + "\n")
    return path


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--threads", "1"], prog_name="sf-bench")


# --- questions ---


def test_the_questions_that_ship() -> None:
    questions = read_questions(QUESTIONS)
    assert len(questions) == 60 and len({question.task for question in questions}) == 15
    assert all(len(question.choices) == 4 for question in questions)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(({name: value for name, value in GOOD.items() if name != field}, f"has no field '{field}'") for field in GOOD),
        (GOOD | {"choices": []}, "choices is [], expected a list of at least 2 texts"),
        (GOOD | {"choices": [" fox"]}, "choices is "),
        (GOOD | {"choices": " fox"}, "choices is "),
        (GOOD | {"choices": [" fox", ""]}, "choice 1 is ''"),
        (GOOD | {"choices": [" fox", 3]}, "choice 1 is 3"),
        (GOOD | {"gold": 2}, "gold is 2, expected the index of a choice, 0 to 1"),
        (GOOD | {"gold": -1}, "gold is -1"),
        (GOOD | {"gold": True}, "gold is True"),
        (GOOD | {"gold": "0"}, "gold is '0'"),
        (GOOD | {"ctx": ""}, "ctx is ''"),
        (GOOD | {"id": 7}, "id is 7"),
        (GOOD | {"ctx": "x\ud800"}, "ctx is not valid Unicode"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        (GOOD | {"id": "first"}, "id 'first' is that of line 1 already"),
    ],
    ids=str,
)
def test_bad_questions_are_named_by_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "q.jsonl", GOOD | {"id": "first"}, "", line)
    with pytest.raises(OptionError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path}, line 3: ") and message in str(error.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    with pytest.raises(OptionError, match="q.jsonl: cannot be read: No such file"):
        read_questions(path)
    path.write_text("\n\n")
    with pytest.raises(OptionError, match="q.jsonl: holds no question"):
        read_questions(path)
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n")
    with pytest.raises(OptionError, match=r"q.jsonl, line 2: is not UTF-8 \(byte 0xff\)"):
        read_questions(path)


# --- scores ---


def test_scores_are_those_of_whole_texts(packed_demo: Path) -> None:
    """One prefix and its forks, against every choice in a session of its own, token by token."""
    questions = read_questions(QUESTIONS)[:3]
    with sparseflow.load(packed_demo, cache="1MiB", threads=1) as model:
        scores = score_questions(EngineModel(model), questions, model.tokenizer, model.context)
        for question, score in zip(questions, scores, strict=True):
            for choice, total, tokens in zip(question.choices, score.sums, score.tokens, strict=True):
                prefix, ending = model.tokenizer.encode(question.ctx), model.tokenizer.encode(choice)
                assert len(ending) == tokens
                expected = 0.0
                with model.session() as session:
                    logits = session.forward(prefix, last_only=True)
                    for token in ending:
                        expected += float(logits[0, token] - np.logaddexp.reduce(logits[0].astype(np.float64)))
                        logits = session.forward([token])
                assert total == pytest.approx(expected, abs=1e-9)


def test_long_endings_are_scored_in_pieces(packed_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sparseflow.load(packed_demo, threads=1) as model:
        engine = EngineModel(model)
        whole = engine.continuations([1, 2], [[3, 4, 5, 6, 7, 8], [9]])
        monkeypatch.setattr(likelihood, "_LOGITS_AT_ONCE", 2 * 4096)
        pieces = engine.continuations([1, 2], [[3, 4, 5, 6, 7, 8], [9]])
        assert [len(part) for part in engine.logits([1, 2, 3, 4, 5])] == [2, 2, 1]
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces, strict=True)) and [len(a) for a in whole] == [6, 1]


def test_a_question_beyond_the_context_is_named(packed_demo: Path) -> None:
    question = Question("long", "t", "a b c d e f g h", (" i", " j"), 0)
    with sparseflow.load(packed_demo, context=5, threads=1) as model, pytest.raises(CapacityError, match="question long: "):
        score_questions(EngineModel(model), [question], model.tokenizer, model.context)


def test_picks_and_ties() -> None:
    score = Score("q", (-4.0, -3.0, -4.5), (2, 1, 3), (4, 1, 5))
    assert [score.pick(way) for way in ("sum", "character", "token")] == [1, 2, 2]
    assert score.nats_from_tie("sum", 0) == 1.0 and score.nats_from_tie("sum", 1) == 0.0
    assert score.nats_from_tie("character", 1) == pytest.approx(-4.5 / 3 + 3.0)
    assert Score("q", (-2.0, -2.0), (1, 1), (1, 1)).pick("sum") == 0


def test_wilson_intervals() -> None:
    """Against values of Wilson's interval in the literature (Newcombe 1998, method 3)."""
    for right, asked, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (29, 29, 0.8830, 1.0)]:
        found = Accuracy.of(right, asked)
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_accuracy_by_task_and_comparison() -> None:
    questions = [Question(name, task, "c", ("x", "yy"), gold) for name, task, gold in (("a", "s", 0), ("b", "t", 1), ("c", "s", 1))]
    mine = [Score(name, sums, (1, 2), (1, 1)) for name, sums in (("a", (-1.0, -2.5)), ("b", (-1.0, -3.0)), ("c", (-1.0, -1.5)))]
    found = accuracies(questions, mine)
    assert list(found) == ["s", "t", "all"]
    assert [found[task]["sum"].right for task in found] == [1, 0, 1]
    assert [found[task]["character"].right for task in found] == [2, 0, 2]
    other = [mine[0], Score("b", (-1.25, -0.5), (1, 2), (1, 1)), mine[2]]
    comparison = compare(mine, other)
    assert comparison.agreements("sum") == 2 and comparison.identical == 2
    (differs,) = comparison.disagreements["sum"]
    assert (differs.id, differs.pick, differs.reference_pick, differs.nats_from_tie) == ("b", 0, 1, 0.75)
    assert comparison.largest_difference == 2.5 and comparison.mean_difference == pytest.approx(2.75 / 6)
    with pytest.raises(OptionError, match="not of the same questions"):
        compare(mine, mine[:2])


# --- divergence ---


class Recorded:
    """Logits from a table: position i of a window gets row i of it."""

    def __init__(self, table: NDArray[np.float32]) -> None:
        self.table = table
        self.name = "recorded"
        self.vocab_size = table.shape[1]

    def logits(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        rows = likelihood.rows_at_once(self.vocab_size)
        for start in range(0, len(ids), rows):
            yield self.table[start : min(start + rows, len(ids))]

    def continuations(self, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_divergence_is_what_its_definition_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    q, p = (rng.standard_normal((6, 40)).astype(np.float32) * 3 for _ in range(2))
    ids = rng.integers(0, 40, 15).tolist()
    monkeypatch.setattr(likelihood, "_LOGITS_AT_ONCE", 4 * 40)
    monkeypatch.setattr(divergence, "_FLOATS_AT_ONCE", 3 * 40)
    steps: list[tuple[int, int]] = []
    found = measure_text(Recorded(q), ids, 6, Recorded(p), lambda done, total: steps.append((done, total)))
    rows = [*range(6), *range(6), *range(2)]
    log_q, log_p = log_softmax(q)[rows], log_softmax(p)[rows]
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    assert found.tokens == 14 and steps == [(0, 14), (4, 14), (6, 14), (10, 14), (12, 14)]
    assert found.perplexity == pytest.approx(math.exp(-np.mean(log_q[range(14), ids[1:]])))
    against = found.against
    assert against is not None
    assert (against.mean_kl, against.largest_kl) == pytest.approx((kl.mean(), kl.max()))
    assert against.p99_kl == pytest.approx(np.quantile(kl, 0.99))
    assert against.reference_perplexity == pytest.approx(math.exp(-np.mean(log_p[range(14), ids[1:]])))
    assert against.top1_agreement == pytest.approx(np.mean(log_q.argmax(1) == log_p.argmax(1)))
    tops = [np.argsort(-values, axis=1)[:, :10] for values in (log_q, log_p)]
    assert against.top10_overlap == pytest.approx(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(*tops, strict=True)]))


def test_a_model_does_not_diverge_from_itself(packed_demo: Path) -> None:
    ids = list(range(50, 90))
    with sparseflow.load(packed_demo, cache="1MiB", threads=1) as model, sparseflow.load(packed_demo, threads=1) as other:
        found = measure_text(EngineModel(model), ids, 16, EngineModel(other))
        windows = [log_softmax(model.session().forward(ids[:-1][start : start + 16])) for start in range(0, 39, 16)]
    assert found.perplexity == pytest.approx(math.exp(-np.mean(np.concatenate(windows)[range(39), ids[1:]])), rel=1e-12)
    assert found.against is not None and found.against.largest_kl == 0 and found.against.top10_overlap == 1


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 12), st.sampled_from([None, 0]))
def test_windows_end_where_documents_do(ids: list[int], window: int, document_end: int | None) -> None:
    windows = [list(part) for part in windows_of(ids, window, document_end)]
    assert sum(windows, []) == ids
    for number, part in enumerate(windows[:-1], 1):
        after = sum(windows[number:], [])
        assert part[-1] == document_end or (len(part) == window and document_end not in part)
        assert document_end not in (part + after)[len(part) : window]
    assert all(1 <= len(part) <= window for part in windows)


def test_a_document_does_not_know_the_one_before(packed_demo: Path) -> None:
    first, second = [50, 51, 52, 53, 9], [60, 61, 62]
    with sparseflow.load(packed_demo, threads=1) as model:
        found = measure_text(EngineModel(model), [*first, *second], 6, document_end=9)
        losses = [-log_softmax(model.session().forward(part))[range(len(targets)), targets]
                  for part, targets in ((first, [*first[1:], 60]), (second[:-1], second[1:]))]
    assert found.perplexity == pytest.approx(math.exp(np.concatenate(losses).mean()), rel=1e-12)


def test_texts_that_cannot_be_measured() -> None:
    model = Recorded(np.zeros((2, 3), np.float32))
    with pytest.raises(OptionError, match="the text has 1 tokens"):
        measure_text(model, [1], 8)
    with pytest.raises(OptionError, match="compare models of one vocabulary"):
        measure_text(model, [1, 2], 8, Recorded(np.zeros((2, 4), np.float32)))


# --- the commands ---


def test_quality_as_text_and_json(packed_demo: Path, packed_demo_bf16: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", *QUESTIONS.read_text().splitlines()[:4])
    result = bench("quality", packed_demo, "--questions", path, "--against", packed_demo_bf16, "--cache", "1MiB")
    assert result.exit_code == 0, result.output
    for part in ("| colours ", "| all ", "same answer by sum: ", "sums identical to the last bit: 0 of 4", "nats at most"):
        assert part in result.stdout
    result = bench("quality", packed_demo, "--questions", path, "--against", packed_demo, "--json")
    record = json.loads(result.stdout)
    assert (record["schema"], record["comparison"]["identical"], record["comparison"]["agreements"]["sum"]) == ("sparseflow-quality", 4, 4)
    assert record["models"][0]["scores"][0]["sums"] == record["models"][1]["scores"][0]["sums"]
    assert json.loads(bench("quality", packed_demo, "--questions", path, "--json").stdout)["comparison"] is None


def test_perplexity_as_text_and_json(packed_demo: Path, packed_demo_bf16: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little fox.<|endoftext|>The sun was warm.")
    result = bench("perplexity", packed_demo, "--text", text, "--against", packed_demo_bf16, "--window", 8)
    assert result.exit_code == 0, result.output
    assert "KL, 99th percentile" in result.stdout and "in windows of at most 8" in result.stdout
    record = json.loads(bench("perplexity", packed_demo, "--text", text, "--tokens", 9, "--context", 4, "--json").stdout)
    assert (record["tokens"], record["window"], record["against"]) == (8, 4, None)


@pytest.mark.parametrize("command", ["quality", "perplexity"])
def test_what_is_refused(packed_demo: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    option = {"quality": "--questions", "perplexity": "--text"}[command]
    path = tmp_path / "file"
    path.write_bytes(b"\n\xc3(")
    cases: list[tuple[list[object], int, str]] = [
        ([packed_demo, option, path], 2, "file, line 2: is not UTF-8"),
        ([packed_demo, option, tmp_path / "absent"], 2, "absent: cannot be read"),
        ([packed_demo], 2, f"Missing option '{option}'"),
    ]
    good = write(tmp_path / "good", GOOD)
    cases += [
        ([tmp_path, option, good], 4, "is not a packed model"),
        ([packed_demo, option, good, "--against", tmp_path], 4, "--against: "),
        ([packed_demo, option, good, "--against", Path(sparseflow.__file__).parent / "demo"], 2, "sparseflow[oracle]"),
    ]
    monkeypatch.setattr(transformers_model.importlib, "import_module", lambda name: __import__("no_such_" + name))
    for arguments, status, message in cases:
        result = bench(command, *arguments)
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.exit_code == status and message in line


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("a\r\nü".encode())
    assert read_text(tmp_path / "t") == "a\r\nü"
