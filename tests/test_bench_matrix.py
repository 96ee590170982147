"""The matrix of sf-bench: files good and bad, the built-in ones, and which cells they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bench import cell

from sparseflow.bench_matrix import PUBLISHED_CACHES, STATES, Matrix, quick_caches, read_matrix
from sparseflow.bench_plan import plan_cells, schedule
from sparseflow.cli.bench import matrix_of_options
from sparseflow.errors import OptionError
from sparseflow.packfile import Manifest, read_manifest
from sparseflow.sizes import parse_size

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def manifest(packed_demo: Path) -> Manifest:
    return read_manifest(packed_demo)


def written(folder: Path, content: Any) -> Path:
    path = folder / "m.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_full_matrix(tmp_path: Path, manifest: Manifest) -> None:
    routes = np.argsort(np.random.default_rng(0).random((9, 8, manifest.geometry.num_experts)), axis=-1)
    np.savez(tmp_path / "r.npz", en_ids=routes[..., : manifest.geometry.num_experts_per_tok], en_n_prefill=np.int32(6))
    content = {
        "version": 1,
        "repeats": 2,
        "threads": 1,
        "defaults": {"tokens": 3, "strict": True, "prompt_tokens": 5},
        "cells": [
            {"cache": ["resident", "1MiB"], "state": ["warm", "cold"]},
            {"cache": "1MiB", "replay": "r.npz:en", "strict": False},
            {"cache": "1MiB", "prompt": "The red fox", "name": "fox"},
            {"peer": "llama.cpp=x", "state": "cold"},
        ],
    }
    matrix = read_matrix(written(tmp_path, content))
    assert (matrix.repeats, matrix.threads) == (2, 1)
    cells = plan_cells(manifest, matrix.entries)
    assert [cell.name for cell in cells] == [
        "resident warm strict (5 + 3 tokens)",
        "1MiB warm strict (5 + 3 tokens)",
        "resident cold strict (5 + 3 tokens)",
        "1MiB cold strict (5 + 3 tokens)",
        "1MiB warm (r.npz:en, 6 + 3 tokens)",
        "1MiB warm strict (3 + 3 tokens) fox",
        "llama.cpp cold (5 + 3 tokens)",
    ]
    assert [cell.mode for cell in cells] == ["resident", "streaming", "resident", *["streaming"] * 3, "offload"]
    assert cells[4].workload.replay == str(tmp_path / "r.npz:en")  # beside the matrix file
    assert cells[5].workload.prompt == "given"
    assert cells[6].workload == cells[0].workload


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: "),
        ("\x00", "is not JSON: "),
        ('{"version": 1, "version": 1}', "'version' is given twice in one object"),
        ([], "is [], expected an object of version, repeats, threads, defaults, cells"),
        ({"version": 2, "cells": [{"cache": "resident"}]}, "version is 2, this program reads version 1"),
        ({"cells": [{"cache": "resident"}]}, "version is null"),
        ({"version": 1}, "cells is null, expected a list"),
        ({"version": 1, "cells": []}, "cells is [], expected a list"),
        ({"version": 1, "cells": [{"cache": "resident"}], "rounds": 3}, "unknown field 'rounds', known are version, repeats"),
        ({"version": 1, "cells": [3]}, "cells[0]: is 3, expected an object"),
        ({"version": 1, "cells": [{"cache": "resident"}, {"cash": "1GiB"}]}, "cells[1]: unknown field 'cash', known are cache, state"),
        ({"version": 1, "defaults": {"repeats": 1}, "cells": [{"cache": "resident"}]}, "defaults: unknown field 'repeats'"),
        ({"version": 1, "cells": [{}]}, "cells[0]: give either cache"),
        ({"version": 1, "cells": [{"cache": "1GiB", "peer": "transformers"}]}, "cells[0]: give either cache"),
        ({"version": 1, "cells": [{"cache": []}]}, "cells[0].cache: is empty"),
        ({"version": 1, "cells": [{"cache": 4}]}, "cells[0].cache: is 4, expected text"),
        ({"version": 1, "cells": [{"cache": "1GiB", "state": "tepid"}]}, "cells[0].state: 'tepid' is none of warm, cold"),
        ({"version": 1, "cells": [{"cache": "1GiB", "strict": "yes"}]}, 'cells[0].strict: is "yes", expected true or false'),
        ({"version": 1, "cells": [{"cache": "1GiB", "tokens": 1}]}, "cells[0].tokens: is 1, expected a whole number of at least 2"),
        ({"version": 1, "cells": [{"cache": "1GiB", "tokens": True}]}, "cells[0].tokens: is true, expected a whole number"),
        ({"version": 1, "cells": [{"cache": "1GiB", "prompt": "a", "replay": "b:c"}]}, "prompt and replay do not go together"),
        ({"version": 1, "cells": [{"peer": "transformers", "strict": True}]}, "cells[0].strict: does not go with peer"),
        ({"version": 1, "repeats": 0, "cells": [{"cache": "1GiB"}]}, "repeats: is 0, expected a whole number of at least 1"),
        ({"version": 1, "threads": 1.5, "cells": [{"cache": "1GiB"}]}, "threads: is 1.5, expected a whole number"),
    ],
)
def test_bad_files(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(OptionError) as error:
        read_matrix(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="none.json: the matrix cannot be read: No such file"):
        read_matrix(tmp_path / "none.json")


def test_cells_that_cannot_be(tmp_path: Path, manifest: Manifest) -> None:
    for entries, message in [
        ([{"cache": "much"}], "m.json: cells[0]: 'much' is not a size"),
        ([{"cache": "1KiB"}], "m.json: cells[0]: a cache of 1.0 KiB is too small"),
        ([{"cache": "1MiB"}, {"cache": "1MiB"}], "m.json: cells[1]: 1MiB warm is given twice"),
        ([{"cache": "1MiB", "tokens": 9999999}], "m.json: cells[0]: a prompt of 41 and 9999999 new tokens do not fit"),
    ]:
        matrix = read_matrix(written(tmp_path, {"version": 1, "cells": entries}))
        with pytest.raises(Exception) as error:
            plan_cells(manifest, matrix.entries)
        assert message in str(error.value)


def test_the_published_matrix_is_the_default(manifest: Manifest) -> None:
    matrix = matrix_of_options(manifest, False, (), False, False, None, (), None, None)
    cells = plan_cells(manifest, matrix.entries)
    wanted = ("resident", "256MiB", "1GiB", "2GiB", "4GiB", "8GiB")
    assert [(each.cache, each.state) for each in cells] == [(cache, state) for state in STATES for cache in wanted]
    assert all(each.strict == each.cold for each in cells)
    assert {cell.workload.new_tokens for cell in cells} == {32} and matrix.repeats == 5
    assert (PUBLISHED_CACHES, Matrix(())) == (wanted, Matrix((), 5, None))
    # The file that shows the form is the same matrix.
    assert plan_cells(manifest, read_matrix(BENCH / "published.json").entries) == cells


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 1 << 30))
def test_quick_caches_are_neither_too_small_nor_all(all_experts: int, smallest: int) -> None:
    resident, size = quick_caches(all_experts, smallest)
    assert resident == "resident"
    assert smallest <= parse_size(size) <= max(all_experts // 4, 2 * smallest)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STATES), st.booleans()), min_size=1, max_size=6), st.integers(1, 6))
def test_every_cell_runs_as_often_as_asked_and_once_a_round(kinds: list[tuple[str, bool]], repeats: int) -> None:
    cells = [cell(str(number), state, strict=strict) for number, (state, strict) in enumerate(kinds)]
    runs = schedule(cells, repeats)
    measured = [(cell.name, repeat) for cell, repeat in runs if repeat]
    assert len(measured) == len(set(measured)) == len(cells) * repeats
    assert [repeat for _, repeat in measured] == sorted(repeat for _, repeat in measured)
    for (before, _), (after, repeat) in zip(runs, runs[1:], strict=False):
        if before.cold and not after.cold:
            assert repeat == 0  # nothing is warm after a cold run
