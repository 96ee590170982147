"""sf-bench: what it records, what it shows, what it refuses, and what it leaves behind. No figure itself is tested."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from expert_store import disk_path  # noqa: F401

import sparseflow
from sparseflow import bench_process, benchmark, machine, memory_speed
from sparseflow.bench_file import CELL_FIELDS, read_results, write_results
from sparseflow.bench_plan import Cell, Workload, schedule
from sparseflow.bench_prompt import bench_prompt
from sparseflow.bench_results import measured_fields, without_folders
from sparseflow.cli.bench import main
from sparseflow.cli.bench_table import as_text
from sparseflow.cli.progress import ProgressLine
from sparseflow.cli.table import table
from sparseflow.errors import StorageError
from sparseflow.footprint import Footprint
from sparseflow.packfile import read_manifest
from sparseflow.speed_of_light import Rates
from sparseflow.tokenizer import Tokenizer

PROGRAM = [sys.executable, "-P", "-c", "from sparseflow.cli.bench import main; main(prog_name='sf-bench')"]
MEASURED = {
    "load_s": float,
    "ttft_s": float,
    "decode_tok_s": float,
    "token_p50_s": float,
    "token_p95_s": float,
    "peak_rss_bytes": int,
    "logical_requests": int,
    "hits": int,
    "misses": int,
    "evictions": int,
    "admitted_bytes": int,
    "physical_bytes": int,
    "page_cache_bytes": int,
    "read_all_admitted": bool,
    "cached_before_bytes": int,
    "cached_after_bytes": int,
    "experts_cached_before_bytes": int,
    "experts_cached_after_bytes": int,
    "token_memory_bound_s": float,
    "memory_bytes_per_second": float,
    "disk_bytes_per_second": float,
    "token_disk_bound_s": float,
    "bound_fraction": float,
    "sum_bound_fraction": float,
    "ttft_bound_fraction": float,
    "tokens_match": bool,
    "token_s": list,
    "ids": list,
    "phases": dict,
}
IDENTITY = set(CELL_FIELDS)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a buffer this small is the cache's, which is all the same here."""
    monkeypatch.setattr(memory_speed, "buffer_size", lambda cache, available: 4 << 20)


@pytest.fixture
def demo(packed_demo: Path, disk_path: Path) -> Path:  # noqa: F811
    """The packed demo, on a disk."""
    return Path(shutil.copytree(packed_demo, disk_path / "demo"))


def bench(*args: object, tokens: int = 4) -> Result:
    options = ["--threads", "1", "--tokens", str(tokens), *map(str, args)]
    return CliRunner().invoke(main, options, prog_name="sf-bench")


def told(result: Result) -> str:
    """The one line that an error is."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and result.stderr.endswith(lines[0] + "\n"), result.stderr
    return lines[0].removeprefix("error: ")


def check_schema(results: dict[str, Any], repeats: int) -> None:
    """What bench/README.md promises of results.json."""
    assert (results["schema"], results["schema_version"], results["complete"]) == ("sparseflow-bench", 2, True)
    assert results["repeats"] == repeats
    for part in ("machine", "versions", "bandwidths", "model", "threads"):
        assert results[part]
    for cell in results["cells"]:
        assert IDENTITY <= cell.keys()
        if cell["not_run"] is None:
            assert cell.keys() == IDENTITY | MEASURED.keys()
            for name, kind in MEASURED.items():
                assert len(cell[name]) == repeats and all(type(value) is kind for value in cell[name]), name


# --- a run ---


def test_two_caches_twice(demo: Path, tmp_path: Path) -> None:
    result = bench(demo, "--cache", "1MiB", "--cache", "resident", "--repeats", 2, "--prompt-tokens", 9, "--out", tmp_path / "new" / "out")
    assert result.exit_code == 0, result.output
    assert os.listdir(tmp_path / "new" / "out") == ["results.json"]
    results = read_results(tmp_path / "new" / "out" / "results.json")
    assert str(demo.parent) not in json.dumps(results)  # where a file lies concerns nobody else
    check_schema(results, repeats=2)
    streaming, resident = results["cells"]
    for cell in (streaming, resident):
        assert [cell[name] for name in ("prompt", "prompt_tokens", "new_tokens", "replayed")] == ["text", 9, 4, None]
    assert [cell["name"] for cell in results["cells"]] == ["1MiB warm", "resident warm"]
    assert (streaming["mode"], resident["mode"]) == ("streaming", "resident")
    assert streaming["cache_bytes"] <= 1 << 20 < resident["cache_bytes"]

    # The same work in both, and the same tokens as the library makes.
    with sparseflow.load(demo, cache="resident", threads=1) as model:
        session, ids = model.session(), bench_prompt(model.manifest, 9)[0]
        expected = []
        for _ in range(4):
            ids = [int(session.forward(ids, last_only=True)[-1].argmax())]
            expected += ids
        assert session.trace is not None
        requests = sum(usage.requests for usage in session.usage)
    for cell in (streaming, resident):
        assert cell["ids"] == [expected, expected] and cell["tokens_match"] == [True, True]
        assert cell["logical_requests"] == [requests, requests]
        assert [hits + misses for hits, misses in zip(cell["hits"], cell["misses"], strict=True)] == [requests, requests]
        assert all(len(seconds) == 3 for seconds in cell["token_s"])
        assert cell["tokens_match_with"] == "resident warm"
    assert resident["misses"] == [0, 0]
    assert resident["admitted_bytes"] == [resident["cache_bytes"]] * 2
    assert streaming["misses"][0] > 0
    assert streaming["admitted_bytes"][0] >= streaming["misses"][0] * results["model"]["expert_bytes"]

    # The table on the terminal.
    lines = result.stdout.splitlines()
    assert "9 prompt tokens (text), 4 new; 1 threads" in lines[1] and "replayed" not in result.stdout
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1
    assert rows[2].startswith("| 1MiB warm ") and rows[3].startswith("| resident warm ")


def test_cold_runs_read_all_from_the_disk(demo: Path) -> None:
    result = bench(demo, "--cache", "1MiB", "--cold", "--strict", "--repeats", 2, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    check_schema(results, repeats=2)
    (cell,) = results["cells"]
    assert (cell["name"], cell["state"], cell["strict"]) == ("1MiB cold strict", "cold", True)
    assert cell["experts_cached_before_bytes"] == [0, 0]
    assert all(read >= admitted > 0 for read, admitted in zip(cell["physical_bytes"], cell["admitted_bytes"], strict=True))
    # Strict: once the run is over, the page cache holds of the experts what the cache held.
    assert all(after <= cell["cache_bytes"] + 4096 for after in cell["experts_cached_after_bytes"])


def test_a_replay_is_told_everywhere(demo: Path, tmp_path: Path) -> None:
    geometry = read_manifest(demo).geometry
    draws = np.random.default_rng(0).random((12, geometry.num_hidden_layers, geometry.num_experts))
    routes = np.argsort(draws, axis=-1)[..., : geometry.num_experts_per_tok].astype(np.int16)
    np.savez(tmp_path / "routes.npz", a_ids=routes, a_n_prefill=np.int32(8))
    spec = f"{tmp_path / 'routes.npz'}:a"
    result = bench(demo, "--cache", "1MiB", "--replay", spec, "--repeats", 1, "--out", tmp_path, tokens=5)
    assert result.exit_code == 0, result.output
    assert ", routes replayed from routes.npz:a;" in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["cells"][0]["replayed"], results["cells"][0]["prompt_tokens"]) == ("routes.npz:a", 8)
    distinct = sum(len(np.unique(routes[:8, layer])) for layer in range(geometry.num_hidden_layers))
    assert results["cells"][0]["phases"][0]["prefill"]["requests"] == distinct
    assert results["cells"][0]["logical_requests"] == [distinct + routes[8:].size]

    for options, message in [
        (["--tokens", 6], "replay routes.npz:a is over after 5 new tokens"),
        (["--prompt-tokens", 8], "--prompt-tokens does not go with --replay"),
    ]:
        result = bench(demo, "--replay", spec, *options, tokens=5)
        assert result.exit_code == 2 and message in told(result)


# --- what cannot run ---


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--cache", "4Gib!"], 2, "is not a size"),
        (["--cache", "1MiB", "--cache", "1MiB"], 2, "1MiB warm is given twice"),
        (["--quick", "--cache", "1MiB"], 2, "--quick does not go with --cache"),
        (["--matrix", "absent.json"], 2, "--tokens does not go with --matrix"),
        (["--cache", "1KiB"], 5, "is too small"),
        (["--tokens", "1"], 2, "--tokens"),
        (["--repeats", "0"], 2, "--repeats"),
        (["--threads", "0"], 2, "threads is 0"),
        (["--prompt-tokens", "9999999"], 2, "do not fit in the model's context"),
        (["--replay", "absent.npz:en"], 2, "absent.npz: the routes cannot be read"),
        (["--replay", "absent.npz"], 2, "FILE.npz:NAME"),
        (["--out", "/dev/null/results"], 2, "--out /dev/null/results: /dev/null is no folder that can be written to"),
        (["--out", "/dev/null"], 2, "--out"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_bad_options(packed_demo: Path, options: list[str], status: int, message: str) -> None:
    result = bench(packed_demo, *options)
    assert result.exit_code == status and message in told(result)


def test_a_folder_that_is_no_packed_model(tmp_path: Path) -> None:
    result = bench(tmp_path)
    assert result.exit_code == 4 and str(tmp_path) in told(result)


def test_the_command_run_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    ways = [["absent"], ["run", "absent"], ["--tokens", "4", "absent"]]
    results = [CliRunner().invoke(main, way, prog_name="sf-bench") for way in ways]
    assert [(result.exit_code, told(result)) for result in results] == [(4, "absent: no such folder")] * 3
    assert told(bench("./run")).startswith("run: is not a packed model")
    result = CliRunner().invoke(main, ["run"], prog_name="sf-bench")
    assert result.exit_code == 2 and "Missing argument 'MODEL'" in told(result)


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"], prog_name="sf-bench")
    assert result.exit_code == 0 and all(f"  {name} " in result.stdout for name in main.commands)
    result = CliRunner().invoke(main, ["run", "--help"], prog_name="sf-bench")
    assert result.exit_code == 0 and "--repeats" in result.stdout


def test_a_cell_that_does_not_fit_in_memory_is_not_run(packed_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    footprint = Footprint.of(read_manifest(packed_demo))
    monkeypatch.setattr(benchmark, "rss_bytes", lambda: 50 << 20)
    fits = footprint.memory_bytes(footprint.slots(1 << 20), 50) + (50 << 20)
    monkeypatch.setattr(benchmark, "available_memory", lambda: fits)
    result = bench(packed_demo, "--cache", "resident", "--cache", "1MiB", "--repeats", 1, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    check_schema(results, repeats=1)
    resident, streaming = results["cells"]
    assert resident.keys() == IDENTITY and streaming["not_run"] is None
    assert resident["not_run"].startswith("needs ") and resident["not_run"].endswith(" are available")
    assert streaming["tokens_match_with"] == "1MiB warm"
    assert f"resident warm: not run, {resident['not_run']}" in as_text(results)

    monkeypatch.setattr(benchmark, "available_memory", lambda: 0)
    result = bench(packed_demo, "--cache", "1MiB", "--repeats", 1)
    assert result.exit_code == 5 and "nothing was measured: 1MiB warm needs" in told(result)
    assert "1MiB warm: not run, needs" in result.stdout


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", 5, "killed by SIGKILL"),
        ("raise ValueError('a bug')", 1, "failed with status 1: ValueError: a bug"),
        ("pass", 1, "it said nothing"),
        ("print('{\"error\": \"no room\", \"exit_status\": 6}')", 6, "no room"),
    ],
)
def test_runs_that_fail(packed_demo: Path, monkeypatch: pytest.MonkeyPatch, code: str, status: int, message: str) -> None:
    monkeypatch.setattr(bench_process, "COMMAND", (sys.executable, "-P", "-c", code))
    result = bench(packed_demo, "--cache", "1MiB", "--cache", "resident", "--repeats", 3)
    assert result.exit_code == status and message in told(result)
    assert result.stdout.count("not run, ") == 2  # the table is shown nevertheless


def test_an_error_of_the_run_itself(packed_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFLOW_ISA", "sse9")
    with pytest.raises(sparseflow.SparseFlowError, match="'sse9'") as error:
        bench_process.run_in_process(benchmark.Run(str(packed_demo), "1MiB", 1, False, [1], 2), lambda: None)
    assert error.value.exit_status == 2


def test_a_model_in_use_cannot_be_cold(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_DROP_PAUSE_SECONDS", 0.0)
    with sparseflow.load(demo, cache="12MiB") as model:
        model.session().forward(range(200))  # maps experts
        result = bench(demo, "--cache", "1MiB", "--cold", "--repeats", 1)
    assert result.exit_code == 6 and "no run can be cold" in told(result)
    assert "disk not measured" in result.stdout and "disk measured 0 times of 2: " in result.stdout


# --- what is left behind ---


def start(model: Path, out: Path, tokens: int = 4000, repeats: int = 5) -> subprocess.Popen[str]:
    """A benchmark that takes long, in a process group of its own; returns once a run is on its way."""
    options = ["--threads", "1", "--tokens", str(tokens), "--repeats", str(repeats), "--cache", "1MiB", "--out", str(out)]
    command = [*PROGRAM, str(model), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not children(process.pid):
        assert process.poll() is None
        time.sleep(0.05)
    return process


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def gone(pid: int) -> bool:
    """Whether a process has ended, or will within ten seconds."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_what_was_measured_until_ctrl_c_is_kept(packed_demo: Path, tmp_path: Path) -> None:
    process = start(packed_demo, tmp_path, tokens=30, repeats=10000)
    while not (tmp_path / "results.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "incomplete: stopped before all was measured" in stdout
    assert stderr.rstrip().endswith(f"error: stopped before all was measured; {tmp_path / 'results.json'} holds what was")
    assert os.listdir(tmp_path) == ["results.json"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"] is False
    assert results["cells"][0].keys() == IDENTITY | MEASURED.keys() and len(results["cells"][0]["ttft_s"]) >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(packed_demo: Path, tmp_path: Path, number: int) -> None:
    process = start(packed_demo, tmp_path / "out")
    (child,) = children(process.pid)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    assert stdout == "" and "Traceback" not in stderr
    assert gone(child)
    assert not (tmp_path / "out").exists()


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(StorageError, match="results.json: the results cannot be written"):
        write_results({}, tmp_path)
    assert os.listdir(tmp_path) == ["results.json"]


# --- the parts ---


def test_fields_follow_from_what_was_measured(packed_demo: Path) -> None:
    footprint = Footprint.of(read_manifest(packed_demo))
    stride = footprint.expert_bytes
    counts = {"requests": 10, "hits": 4, "misses": 6, "evictions": 1, "admitted_bytes": 6 * stride, "physical_bytes": 8 * stride}
    run = {
        "load_s": 0.5, "ttft_s": 2.0, "token_s": [0.5, 1.0, 1.5], "peak_rss_bytes": 7, "ids": [1, 2, 3, 4],
        "load": dict.fromkeys(counts, 0), "prefill": counts, "decode": counts | {"physical_bytes": 3 * stride},
        "cached_before_bytes": 0, "cached_after_bytes": 0, "experts_cached_before_bytes": 0, "experts_cached_after_bytes": 0,
        "rates": Rates(memory=1e9, disk=1e6),
    }  # fmt: skip
    fields = {name: values[0] for name, values in measured_fields([run], footprint, [1, 2, 3, 4]).items()}
    assert (fields["decode_tok_s"], fields["token_p50_s"], fields["token_p95_s"]) == (1.0, 1.0, pytest.approx(1.45))
    assert (fields["logical_requests"], fields["hits"], fields["misses"], fields["evictions"]) == (20, 8, 12, 2)
    assert (fields["admitted_bytes"], fields["physical_bytes"]) == (12 * stride, 11 * stride)
    assert (fields["page_cache_bytes"], fields["read_all_admitted"]) == (3 * stride, False)  # 2 read in vain for the prompt help not
    memory_s, disk_s = footprint.bytes_per_token / 1e9, stride / 1e6  # the disk: of 6 missed, the page cache served 3
    assert (fields["token_memory_bound_s"], fields["token_disk_bound_s"]) == pytest.approx((memory_s, disk_s))
    assert fields["bound_fraction"] == pytest.approx(max(memory_s, disk_s) / 1.0)
    assert fields["sum_bound_fraction"] == pytest.approx(memory_s + disk_s)
    first_s = max((footprint.dense_bytes + 10 * stride) / 1e9, 6 * stride / 1e6)  # of 8 read, 2 were not asked for
    assert fields["ttft_bound_fraction"] == pytest.approx(first_s / 2.0)
    assert fields["tokens_match"] is True

    fast = {**run, "rates": Rates(memory=1e9, disk=1.0)}  # the disk gave more during the run than beside it
    fields = {name: values[0] for name, values in measured_fields([fast], footprint, None).items()}
    assert fields["disk_bytes_per_second"] == pytest.approx(8 * stride / 2.0) and fields["tokens_match"] is None

    unknown = {**run, "decode": counts | {"physical_bytes": None}}
    fields = {name: values[0] for name, values in measured_fields([unknown], footprint, [1]).items()}
    assert (fields["physical_bytes"], fields["tokens_match"]) == (None, False)
    assert (fields["page_cache_bytes"], fields["read_all_admitted"]) == (None, None)
    assert fields["token_disk_bound_s"] == pytest.approx(2 * stride / 1e6)


def cell(name: str, state: str, *, strict: bool = False, peer: str | None = None) -> Cell:
    return Cell(name, "1MiB", 1 << 20, 10, state, strict, Workload((1,), "text", 2), peer)


def test_runs_are_interleaved_and_warm_up_when_they_have_to() -> None:
    def order(*cells: Cell) -> str:
        return " ".join(f"{cell.name}{repeat or '-'}" for cell, repeat in schedule(cells, 3))

    assert order(cell("a", "warm"), cell("b", "warm")) == "a- a1 b- b1 b2 a2 a3 b3"
    assert order(cell("a", "cold"), cell("b", "cold")) == "a1 b1 b2 a2 a3 b3"
    assert order(cell("c", "cold"), cell("a", "warm")) == "a- a1 c1 c2 a- a2 a3 c3"  # cold runs drop what warm ones left
    assert order(cell("a", "warm"), cell("s", "warm", strict=True)) == "a- a1 s- s1 s2 a- a2 a3 s3"
    assert order(cell("a", "warm"), cell("p", "warm", peer="x")) == "a- a1 p- p1 p2 a- a2 a3 p- p3"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/a b/model: no room", "model: no room"),
        ("(/usr/lib/x.so), '/tmp/y/z' and =/c/d", "(x.so), 'z' and =d"),
        ("1/2 of 3 GB/s, and / too", "1/2 of 3 GB/s, and / too"),
    ],
)
def test_no_folder_of_the_machine_is_told(message: str, told: str) -> None:
    assert without_folders(message, Path("/a b")) == told


def test_the_prompt(packed_demo: Path, tmp_path: Path) -> None:
    manifest = read_manifest(packed_demo)
    ids, source = bench_prompt(manifest, 700)
    assert (len(ids), source) == (700, "text")
    assert Tokenizer.from_folder(packed_demo).decode(ids[:20]).startswith("The ferry to the island")
    shutil.copytree(packed_demo, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    ids, source = bench_prompt(read_manifest(tmp_path / "bare"), 50)
    assert (len(ids), source) == (50, "random ids") and 0 <= min(ids) and max(ids) < 4096
    assert bench_prompt(read_manifest(tmp_path / "bare"), 50)[0] == ids


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    now = 100.0
    lines, terminal = io.StringIO(), Terminal()
    shown = [ProgressLine(stream, clock=lambda: now) for stream in (lines, terminal)]
    for now, text in [(100.0, "first"), (101.0, "first"), (103.0, "second"), (103.05, "second"), (104.0, "second"), (105.0, "third")]:
        for progress in shown:
            progress(text)
    for progress in shown:
        progress.finish()
    assert lines.getvalue() == "second\nthird\n"
    assert [part.removesuffix("\x1b[K") for part in terminal.getvalue().split("\r")[1:]] == [
        "first, 0 s", "first, 1 s", "second, 0 s", "second, 1 s", "third, 0 s", "",
    ]  # fmt: skip


def test_the_table_is_aligned_markdown() -> None:
    assert table([("cell", "tok/s"), ("a", "1.5"), ("long name", "12.25")]) == [
        "| cell      | tok/s |",
        "| --------- | ----: |",
        "| a         |   1.5 |",
        "| long name | 12.25 |",
    ]


def test_the_revision_is_only_that_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "venv").mkdir()
    monkeypatch.setattr(machine, "_CHECKOUT", tmp_path / "venv")
    assert machine.describe_versions()["revision"] is None
    monkeypatch.setattr(machine, "_CHECKOUT", tmp_path)
    assert machine.describe_versions()["revision"] is None  # no commit yet
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert len(machine.describe_versions()["revision"]) >= 7
