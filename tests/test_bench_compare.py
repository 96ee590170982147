"""sf-bench compare: the rank test against first principles, what is compared with what, and files that are no results."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.bench_compare import LEVEL, QUANTITIES, compare, middle_ranks, rank_test
from sparseflow.bench_file import CELL_FIELDS
from sparseflow.bench_results import MEASURED_FIELDS, SCHEMA, SCHEMA_VERSION
from sparseflow.cli.bench import main

SAMPLES = st.lists(st.integers(0, 6), min_size=2, max_size=5)


def test_known_values() -> None:
    assert rank_test([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert rank_test([7] * 5, [7] * 5) == 1
    assert rank_test([7] * 5, [8] * 5) == pytest.approx(2 / 252)
    assert rank_test([1, 2, 3], [4, 5, 6]) is None  # at best 2 of 20
    assert rank_test([1], [2] * 100) is not None and rank_test([1], [2] * 10) is None
    assert rank_test(list(range(30)), list(range(100, 130))) < 1e-3  # type: ignore[operator]
    assert middle_ranks([5, 1, 5, 9]) == [2.5, 1, 2.5, 4]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_it_is_the_permutation_test(first: list[int], second: list[int]) -> None:
    """Against the definition: all deals of all values, with doubled ranks, so that they are whole."""
    values = [*first, *second]
    doubled = [sum(2 * (other < value) + (other == value) for other in values) + 1 for value in values]
    deals = [deal for deal in product((False, True), repeat=8) if sum(deal) == 4]
    sums = [sum(rank for rank, mine in zip(doubled, deal, strict=True) if mine) for deal in deals]
    far = abs(sum(doubled[:4]) - sum(doubled) // 2)
    expected = sum(abs(total - sum(doubled) // 2) >= far for total in sums) / len(deals)
    assert rank_test(first, second) == pytest.approx(expected)


@settings(deadline=None)
@given(SAMPLES, SAMPLES)
def test_it_is_symmetric_and_no_more_than_certain(first: list[int], second: list[int]) -> None:
    p = rank_test(first, second)
    assert p == rank_test(second, first) or p == pytest.approx(rank_test(second, first))
    assert p is None or 0 < p <= 1


def record(**cells: list[float]) -> dict[str, Any]:
    """Results whose every quantity has the given values, for each cell."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "complete": True,
        "bandwidths": {"memory_bytes_per_second": 2e10, "disk_bytes_per_second": None},
        "cells": [
            dict.fromkeys(CELL_FIELDS) | {"name": name} | {field: list(values) for field in MEASURED_FIELDS}
            for name, values in cells.items()
        ],
    }


def run(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Result:
    for name, content in (("a.json", first), ("b.json", second)):
        (folder / name).write_text(json.dumps(content))
    return CliRunner().invoke(main, ["compare", str(folder / "a.json"), str(folder / "b.json")], prog_name="sf-bench")


def test_what_differs_is_told(tmp_path: Path) -> None:
    before = record(same=[1, 2, 3, 4, 5], faster=[1, 2, 3, 4, 5], few=[1, 2])
    after = record(same=[2, 1, 3, 5, 4], faster=[11, 12, 13, 14, 15], few=[8, 9])
    result = run(tmp_path, before, after)
    assert result.exit_code == 10, result.output
    lines = result.stdout.splitlines()
    rows = [line for line in lines if line.startswith("| faster ")]
    assert len(rows) == len(QUANTITIES) and not any(line.startswith(("| same ", "| few ")) for line in lines)
    assert next(row for row in rows if "decode_tok_s" in row).split()[-2] == "0.008"
    assert f"{len(QUANTITIES)} of {2 * len(QUANTITIES)} comparisons exceed the noise (p ≤ {LEVEL}); by chance it would be about 1" in lines
    assert "few: too few repeats to tell" in lines
    assert "memory: 20.00 GB/s in A, 20.00 GB/s in B (+0%)" in lines


def test_exit_statuses(tmp_path: Path) -> None:
    same = record(a=[1, 2, 3, 4])
    assert run(tmp_path, same, same).exit_code == 0
    assert run(tmp_path, record(a=[1, 2]), record(a=[5, 6])).exit_code == 11
    assert run(tmp_path, record(a=[1, 2, 3, 4]), record(b=[1, 2, 3, 4])).exit_code == 11


def test_only_the_same_work_is_compared() -> None:
    first = record(a=[1, 2, 3, 4], b=[1, 2, 3, 4], c=[1, 2, 3, 4], d=[1, 2, 3, 4])
    second = copy.deepcopy(first)
    second["cells"][0]["new_tokens"] = 8
    second["cells"][1]["ttft_s"] = []
    second["cells"][2]["name"] = "e"
    second["cells"][3]["load_s"] = [None] * 4  # another engine does not tell
    comparison = compare(first, second)
    assert comparison.apart == [
        "a: new_tokens is None and 8", "b: not measured in the second file", "c: only in the first file", "e: only in the second file",
    ]  # fmt: skip
    assert [difference.quantity for difference in comparison.differences] == [name for name in QUANTITIES if name != "load_s"]


def test_an_incomplete_file_is_told(tmp_path: Path) -> None:
    first = record(a=[1, 2, 3, 4])
    result = run(tmp_path, first, first | {"complete": False})
    assert "B is incomplete: it was stopped before all was measured" in result.stdout


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ("{", 2, "is not JSON"),
        ("[]", 2, "holds no results of sf-bench"),
        ('{"schema": "other"}', 2, "holds no results of sf-bench"),
        (json.dumps(record() | {"schema_version": 1}), 2, "has version 1 of the schema, this program reads 2; measure again"),
        (json.dumps(record() | {"schema_version": 3}), 2, "has version 3 of the schema"),
        (json.dumps(record() | {"cells": [{}]}), 2, "the file is damaged"),
        (json.dumps(record() | {"cells": [dict.fromkeys(CELL_FIELDS) | {"ttft_s": [1]}]}), 2, "lacks measured fields"),
        (None, 6, "the results cannot be read: No such file"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, content: str | None, status: int, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record()))
    if content is not None:
        (tmp_path / "b.json").write_text(content)
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")], prog_name="sf-bench")
    assert result.exit_code == status
    assert result.stderr.startswith(f"error: {tmp_path / 'b.json'}") and message in result.stderr and result.stderr.count("\n") == 1


def test_compare_has_help() -> None:
    result = CliRunner().invoke(main, ["compare", "--help"], prog_name="sf-bench")
    assert result.exit_code == 0
    assert "Usage: sf-bench compare [OPTIONS] A.json B.json" in result.stdout and "10  a difference exceeds the noise" in result.stdout
