"""Other engines beside SparseFlow. Stand-ins show what sf-bench does with them; `-m peers` runs transformers itself."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from expert_store import disk_path  # noqa: F401
from test_bench import IDENTITY, MEASURED, told

from sparseflow import bench_peers, memory_speed
from sparseflow.bench_process import run_command
from sparseflow.cli.bench import main
from sparseflow.demo_model import checkpoint_folder
from sparseflow.errors import SparseFlowError

LLAMA_BENCH = """#!{python}
import json, sys
assert open(sys.argv[sys.argv.index("-m") + 1]).read() == "weights"
kept = {{"build_commit": "abc", "model_filename": "/somewhere/model.gguf"}}
print(json.dumps([
    kept | {{"n_prompt": int(sys.argv[sys.argv.index("-p") + 1]), "n_gen": 0, "samples_ns": [500000000]}},
    kept | {{"n_prompt": 0, "n_gen": int(sys.argv[sys.argv.index("-n") + 1]), "samples_ns": [1500000000]}},
]))
"""
EXPORT = "import sys; open(sys.argv[2], 'w').write('weights'); print('written', file=sys.stderr)"
NO_ROOM = "import sys; sys.exit('error: the file takes 9 GiB, the disk has 1 GiB free')"
OFFLOAD = """
import json, sys
run = json.loads(sys.stdin.readline())
n = run["new_tokens"]
print(json.dumps({"load_s": 1.0, "ttft_s": 2.0, "token_s": [0.5] * (n - 1), "peak_rss_bytes": 7, "physical_bytes": 9, "ids": [1] * n}))
"""


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a buffer this small is the cache's, which is all the same here."""
    monkeypatch.setattr(memory_speed, "buffer_size", lambda cache, available: 4 << 20)


@pytest.fixture(autouse=True)
def in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package under test may be installed elsewhere."""
    monkeypatch.setattr(bench_peers, "EXPORT", Path(__file__).parents[1] / "tools" / "export_gguf.py")


@pytest.fixture
def temporary(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """Where peers put their files, on a disk."""
    folder = disk_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def llama_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for llama-bench, and for the export and its package."""
    return stand_in(tmp_path, monkeypatch, EXPORT)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, export: str) -> Path:
    program = folder / "llama-bench"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "export.py").write_text(export)
    monkeypatch.setattr(bench_peers, "EXPORT", folder / "export.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return program


def bench(*args: object) -> Result:
    options = ["--threads", "1", "--tokens", "4", "--repeats", "2", "--cache", "1MiB", "--json", *map(str, args)]
    return CliRunner().invoke(main, options, prog_name="sf-bench")


def test_llama_cpp(packed_demo: Path, llama_bench: Path, temporary: Path) -> None:
    result = bench(packed_demo, "--cold", "--peer", f"llama.cpp={llama_bench}")
    assert result.exit_code == 0, result.output
    cell = json.loads(result.stdout)["cells"][1]
    assert cell.keys() == IDENTITY | MEASURED.keys()
    assert [cell[name] for name in ("name", "engine", "mode", "cache", "cache_bytes", "strict")] == [
        "llama.cpp cold", "llama.cpp", "resident", None, None, False,
    ]  # fmt: skip
    assert (cell["ttft_s"], cell["decode_tok_s"]) == ([0.5, 0.5], [2.0, 2.0])
    assert cell["engine_details"] == {"gguf_bytes": 7, "build_commit": "abc"}
    assert cell["cached_before_bytes"] == [0, 0] and cell["cached_after_bytes"] == [4096, 4096]
    assert all(read >= 4096 for read in cell["physical_bytes"])
    for name in ("load_s", "token_p50_s", "hits", "admitted_bytes", "bound_fraction", "tokens_match", "ids", "phases"):
        assert cell[name] == [None, None], name
    assert os.listdir(temporary) == []  # the export is gone


def test_an_export_without_room_is_not_run(packed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    program = stand_in(tmp_path, monkeypatch, NO_ROOM)
    result = bench(packed_demo, "--peer", f"llama.cpp={program}")
    assert result.exit_code == 0, result.output
    own, peer = json.loads(result.stdout)["cells"]
    assert own["not_run"] is None and len(own["ttft_s"]) == 2
    assert peer["not_run"].endswith("the file takes 9 GiB, the disk has 1 GiB free") and peer.keys() == IDENTITY
    assert os.listdir(temporary) == []


def test_something_else_than_llama_bench(packed_demo: Path, llama_bench: Path, temporary: Path) -> None:
    llama_bench.write_text(f"#!{sys.executable}\nprint('hello')\n")
    result = bench(packed_demo, "--peer", f"llama.cpp={llama_bench}")
    assert result.exit_code == 1 and "is not what llama-bench says with -o json" in told(result)


def test_transformers(packed_demo: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_peers, "version", lambda name: "1.2")
    monkeypatch.setattr(bench_peers, "OFFLOAD_COMMAND", (sys.executable, "-P", "-c", OFFLOAD))
    result = bench(packed_demo, "--peer", f"transformers={checkpoint_folder()}")
    assert result.exit_code == 0, result.output
    cell = json.loads(result.stdout)["cells"][1]
    assert cell.keys() == IDENTITY | MEASURED.keys()
    assert (cell["name"], cell["mode"], cell["engine_details"]["torch"]) == ("transformers warm", "offload", "1.2")
    assert (cell["load_s"], cell["decode_tok_s"], cell["token_p95_s"]) == ([1.0, 1.0], [2.0, 2.0], [0.5, 0.5])
    assert cell["tokens_match"] == [False, False] and cell["tokens_match_with"] == "1MiB warm"

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    result = bench(packed_demo, "--peer", f"transformers={checkpoint_folder()}")
    assert result.exit_code == 0
    assert "of disk, 0 B are free where TMPDIR is" in json.loads(result.stdout)["cells"][1]["not_run"]


@pytest.mark.parametrize(
    ("peer", "installed", "message"),
    [
        ("ollama=x", True, "there is no peer 'ollama', but llama.cpp and transformers"),
        ("llama.cpp", True, "say which program, as llama.cpp=PATH/llama-bench"),
        ("llama.cpp=/absent/llama-bench", True, "--peer llama.cpp=/absent/llama-bench: is not a program"),
        (f"llama.cpp={sys.executable}", False, "needs the package gguf, install sparseflow with the extra [peers]"),
        ("transformers", True, "say where the checkpoint is that this model was packed from"),
        ("transformers=/absent", True, "/absent/model.safetensors is not there, the model was packed from one of"),
        ("transformers=/absent", False, "needs the package torch, install sparseflow with the extra [peers]"),
    ],
)
def test_peers_that_cannot_be(packed_demo: Path, monkeypatch: pytest.MonkeyPatch, peer: str, installed: bool, message: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if installed else None)
    result = bench(packed_demo, "--peer", peer)
    assert result.exit_code == 2 and message in told(result)


def test_llama_cpp_needs_a_checkout(packed_demo: Path, llama_bench: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_peers, "EXPORT", tmp_path / "absent.py")
    result = bench(packed_demo, "--peer", f"llama.cpp={llama_bench}")
    assert result.exit_code == 2 and "which only a checkout has" in told(result)


def test_what_a_process_took(disk_path: Path) -> None:  # noqa: F811
    """The peak is the process's own, though this one was larger; the bytes are those that the disk moved."""
    ours = bytearray(b"1") * (400 << 20)
    path = disk_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    code = (
        "import os, sys, time; f = os.open(sys.argv[1], os.O_RDONLY); os.fsync(f); os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED);"
        "data = os.read(f, 1 << 20) + bytes(1) * (100 << 20); time.sleep(1)"
    )
    ended = run_command((sys.executable, "-c", code, str(path)), lambda: None)
    assert ended.bytes_read >= 1 << 20 and ended.seconds >= 1
    assert ended.peak_rss_bytes is not None and 100 << 20 < ended.peak_rss_bytes < len(ours)


def test_a_program_that_cannot_be_started() -> None:
    with pytest.raises(SparseFlowError, match="/absent: cannot be run: No such file"):
        run_command(("/absent",), lambda: None)


@pytest.mark.peers
def test_transformers_itself_makes_our_tokens(packed_demo_bf16: Path, temporary: Path) -> None:
    result: Any = bench(packed_demo_bf16, "--peer", f"transformers={checkpoint_folder()}", "--prompt-tokens", 12)
    assert result.exit_code == 0, result.output
    own, peer = json.loads(result.stdout)["cells"]
    # Both hold bfloat16 weights, but compute with activations of another width: the first token is clear on this prompt.
    assert [ids[0] for ids in peer["ids"]] == [ids[0] for ids in own["ids"]]
    assert all(size > 0 for size in peer["peak_rss_bytes"]) and peer["not_run"] is None
    assert os.listdir(temporary) == []
