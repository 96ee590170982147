"""The table of faults in tests/README.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_table_names_tests_that_exist() -> None:
    rows = [line for line in (TESTS / "README.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) > 30
    for row in rows:
        cells = row.strip("|").split("|")
        named = re.fullmatch(r" `(test_\w+\.py)::(test_\w+)` ", cells[-1])
        assert len(cells) == 3 and named is not None, row
        tree = ast.parse((TESTS / named[1]).read_text())
        assert named[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
