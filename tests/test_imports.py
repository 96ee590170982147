"""Imports run one way: every module may use only those before it in this list, and nothing heavy is ever imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sparseflow

ORDER = """
errors finite sizes regular_file config quantize tiles layout manifest_text limits kernels.isa kernels.threads kernels.packing
packfile shards checkpoint encode equalise journal packer pack demo_model verify
extents store estimate policy readers slots waiting prefetch pins route_record lease leases kernels.linear kernels.norms kernels.experts kernels.deltanet kernels.attention
kernels.bandwidth page_cache
weights recorded state rotary replay lookahead evidence decoder trace session route_simulation route_evidence tokenizer memory activations footprint checks
messages template_sandbox chat sampling generate conversation model likelihood transformers_model questions quality divergence
memory_speed disk_speed speed_of_light filesystem expectation doctor machine bench_matrix bench_prompt bench_plan bench_cell bench_process bench_transformers bench_peers bench_results benchmark bench_file bench_compare
report.results report.charts report.bench_charts report.route_data report.page
cli.options cli.progress cli.pack cli.verify cli.run cli.chat cli.inspect cli.doctor cli.table cli.bench_table cli.against cli.quality cli.perplexity cli.compare cli.bench cli.route cli.report cli.main cli.start
""".split()
ALLOWED_OUTSIDE = {"numpy", "click", "safetensors", "tokenizers", "jinja2"}
SHARED_FIRST_LINE = (
    "# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, "
    "embedsignature=True, freethreading_compatible=True"
)
SOURCE = Path(__file__).parent.parent / "sparseflow"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def sources() -> dict[str, Path]:
    found = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyx")]
    return {module_name(path): path for path in found if path.stem != "__init__"}


def imported(path: Path) -> set[str]:
    """Every module a source imports or cimports when it is loaded, dotted."""
    text = path.read_text()
    if path.suffix == ".pyx":
        statements = re.findall(r"^(?:from (\S+) c?import ([^(\n]+|\([^)]*\))|c?import (\S+))", text, re.MULTILINE)
        names = {module or plain for module, _, plain in statements}
        for module, members, _ in statements:
            names |= {f"{module}.{member}" for member in re.findall(r"\w+", members)}
        return names
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:
                inner.names = []  # for the type checker only
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.names:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_list_is_complete() -> None:
    assert sorted(sources()) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_run_one_way(name: str) -> None:
    inside = {module.removeprefix("sparseflow.") for module in imported(sources()[name]) if module.startswith("sparseflow.")}
    later = ORDER[ORDER.index(name) :]
    assert not inside & set(later)


def test_nothing_outside_the_core_dependencies_is_imported() -> None:
    import sys

    for name, path in sources().items():
        roots = {module.split(".")[0] for module in imported(path)}
        roots -= {"sparseflow", "cython", "libc", "cpython", "posix"} | ALLOWED_OUTSIDE | set(sys.stdlib_module_names)
        assert not roots, f"{name} imports {roots}"


def test_every_cython_module_has_the_same_directives_and_a_stub() -> None:
    modules = list(SOURCE.rglob("*.pyx"))
    assert modules
    for path in modules:
        assert path.read_text().splitlines()[0] == SHARED_FIRST_LINE
        assert path.with_suffix(".pyi").exists()


def test_public_names_exist() -> None:
    for name in sparseflow.__all__:
        assert getattr(sparseflow, name).__doc__
