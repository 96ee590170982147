"""sparseflow doctor: what it finds, its verdict and exit status, and the same checks before a run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result
from expert_store import disk_path  # noqa: F401
from fake_system import MIB, FakeSystem, write
from hypothesis import given
from hypothesis import strategies as st

import sparseflow
from sparseflow import checks, doctor, filesystem, memory_speed
from sparseflow.checks import MemoryPlan, check_memory, check_processor, check_threads
from sparseflow.cli.main import main
from sparseflow.errors import CapacityError, OptionError
from sparseflow.expectation import RECORDED_HITS, expect, recorded_hits
from sparseflow.filesystem import FileSystem, file_system
from sparseflow.footprint import Footprint
from sparseflow.kernels import isa
from sparseflow.limits import MemoryLimit
from sparseflow.packfile import read_manifest

NAMES = ["model", "processor", "threads", "limits", "memory", "cache", "disk space", "disk kind", "disk speed", "speed"]
DEMO_EXPERTS = 192
BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a buffer this small is the cache's, which is all the same here."""
    monkeypatch.setattr(memory_speed, "buffer_size", lambda cache, available: 4 * MIB)


@pytest.fixture
def demo(packed_demo: Path, disk_path: Path) -> Path:  # noqa: F811
    """The packed demo, on a disk."""
    return Path(shutil.copytree(packed_demo, disk_path / "demo"))


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, list(map(str, args)), prog_name="sparseflow")


def report(*args: object, status: int = 0) -> dict:
    result = invoke("doctor", *args, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["schema_version"], found["exit_status"]) == ("sparseflow-doctor", 1, status)
    assert found["verdict"] == doctor.VERDICTS[status]
    return found


def by_name(found: dict) -> dict[str, dict]:
    return {check["name"]: check for check in found["checks"]}


# --- the report ---


def test_the_report_of_a_model_that_fits(demo: Path) -> None:
    found = report(demo, "--context", 1000, "--threads", 1)
    assert [check["name"] for check in found["checks"]] == NAMES
    assert all(check.keys() == {"name", "status", "value", "unit", "text", "advice"} for check in found["checks"])
    assert not {"fail", "unknown"} & {check["status"] for check in found["checks"]}
    footprint = Footprint.of(read_manifest(demo))
    assert found["run"] == {
        "slots": DEMO_EXPERTS, "cache_bytes": footprint.all_experts_bytes, "context": 1000, "prefill_chunk": 512, "threads": 1}
    memory = found["memory"]
    items = {item["name"]: item["bytes"] for item in memory["items"]}
    assert set(items) == {"dense core", "cache", "KV cache", "recurrent state", "activations", "tokenizer", "code"}
    assert items["dense core"] == footprint.dense_bytes and items["KV cache"] == 1024 * footprint.kv_bytes_per_token
    assert memory["added_bytes"] == sum(items.values()) and memory["peak_bytes"] == memory["held_bytes"] + memory["added_bytes"]
    assert memory["available_bytes"] == min(limit["room_bytes"] for limit in memory["limits"])
    assert found["cache"]["recommended_bytes"] == footprint.all_experts_bytes
    assert found["disk"]["free_bytes"] > 0 and found["disk"]["bytes_per_second"] > 0 and found["memory_bytes_per_second"] > 0
    assert 0 < found["expectation"]["slow"] < found["expectation"]["fast"]


def test_the_report_as_text(demo: Path) -> None:
    result = invoke("doctor", demo, "--cache", "1MiB", "--threads", 1)
    assert result.exit_code == 0 and result.stdout.endswith(f"\n\n{demo}: fits\n")
    for part in ("packed format version 1", f"{isa.active()} kernels", "36 experts x 28.0 KiB", "5.2 MiB recommended", "MemAvailable",
                 "tokens/s expected", "peak resident set", "finds more experts in memory"):
        assert part in result.stdout, part
    lines = [line for line in result.stdout.splitlines() if line.startswith(("ok", "WARNING"))]
    assert [line[9:21].strip() for line in lines] == NAMES


def test_too_little_memory_does_not_fit(demo: Path, system: FakeSystem) -> None:
    system.meminfo(total=1000 * MIB, available=8 * MIB)
    found = report(demo, "--cache", "1MiB", status=1)
    assert by_name(found)["memory"]["status"] == "fail" and "--cache" in by_name(found)["memory"]["advice"]
    assert "dense core 1.9 MiB + cache 1008.0 KiB" in by_name(found)["memory"]["text"]
    found = report(demo, status=1)  # with nothing to recommend
    assert found["cache"]["recommended_bytes"] is None
    assert "no cache can be recommended" in by_name(found)["cache"]["text"]
    system.meminfo(total=1000 * MIB, available=50 * MIB)
    found = report(demo, "--cache", "1MiB")
    assert by_name(found)["memory"]["status"] == "warning" and "close" in by_name(found)["memory"]["text"]


def test_a_system_that_tells_nothing_cannot_be_judged(demo: Path, system: FakeSystem) -> None:
    (system.proc / "meminfo").unlink()
    found = report(demo, "--cache", "1MiB", status=2)
    assert {name for name, check in by_name(found).items() if check["status"] == "unknown"} == {"limits", "memory"}
    with pytest.raises(CapacityError, match="does not tell how much memory"):
        sparseflow.load(demo, threads=1)
    sparseflow.load(demo, cache="1MiB", threads=1).close()


def test_a_model_that_cannot_be_opened(packed_demo: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(packed_demo, tmp_path / "cut"))
    os.truncate(cut / "experts.sfx", 1 << 20)
    for folder, reason in ((cut, "truncated"), (tmp_path / "absent", "no such folder")):
        found = report(folder, status=1)
        (check,) = found["checks"]
        assert (check["name"], check["status"]) == ("model", "fail") and reason in check["text"]
        assert "memory" not in found
    result = invoke("doctor", cut)
    assert result.exit_code == 1 and "FAIL" in result.stdout and result.stdout.endswith("does not fit\n")


def test_a_model_without_a_tokenizer_is_warned_of(demo: Path) -> None:
    (demo / "tokenizer.json").unlink()
    found = report(demo)
    assert by_name(found)["model"]["status"] == "warning"
    assert "tokenizer" not in [item["name"] for item in found["memory"]["items"]]


@pytest.mark.parametrize(("options", "status"), [
    (["--cache", "lots"], 2), (["--context", 5000], 2), (["--context", 0], 2), (["--threads", 0], 2), (["--cache", "1KiB"], 5),
])
def test_bad_options(packed_demo: Path, options: list, status: int) -> None:
    result = invoke("doctor", packed_demo, *options)
    assert result.exit_code == status and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_help_teaches() -> None:
    told = invoke("doctor", "--help").stdout
    assert "Examples:" in told and "Exit status:" in told and "1  it does not" in told


# --- before a run ---


def test_load_refuses_what_does_not_fit(packed_demo: Path, system: FakeSystem) -> None:
    system.meminfo(total=1000 * MIB, available=8 * MIB)
    with pytest.raises(CapacityError, match=r"dense core .* MemAvailable leaves 8.0 MiB: .*--force, force=True"):
        sparseflow.load(packed_demo, cache="1MiB", threads=1)
    with pytest.raises(CapacityError, match="no cache can be recommended"):
        sparseflow.load(packed_demo, threads=1)
    with sparseflow.load(packed_demo, cache="1MiB", threads=1, force=True) as model:
        assert any("MemAvailable leaves 8.0 MiB" in warning for warning in model.warnings)
        assert model.session().forward([1, 2, 3]).shape == (3, 4096)
    with pytest.raises(OptionError, match="force is 'yes'"):
        sparseflow.load(packed_demo, force="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [["run"], ["chat"]])
def test_run_and_chat_refuse_it_too(packed_demo: Path, system: FakeSystem, command: list[str]) -> None:
    system.meminfo(total=1000 * MIB, available=8 * MIB)
    options = [str(packed_demo), *(["The"] if command == ["run"] else []), "--cache", "1MiB", "--threads", "1", "--max-new-tokens", "2"]
    result = CliRunner().invoke(main, [*command, *options], input="Hi\n")
    assert result.exit_code == 5 and result.stderr.startswith("error: a run needs") and result.stdout == ""
    result = CliRunner().invoke(main, [*command, *options, "--force"], input="Hi\n")
    assert result.exit_code == 0 and result.stderr.startswith("warning: a run needs") and result.stdout


def test_a_context_that_is_asked_for_counts_in_full(packed_demo: Path, system: FakeSystem) -> None:
    footprint = Footprint.of(read_manifest(packed_demo))
    few, many = footprint.memory_bytes(36, 64), footprint.memory_bytes(36, 4096)
    assert many - few > 3 * MIB
    system.meminfo(total=1000 * MIB, available=(few + many) // 2)
    sparseflow.load(packed_demo, cache="1MiB", threads=1, context=64).close()
    with pytest.raises(CapacityError):
        sparseflow.load(packed_demo, cache="1MiB", threads=1, context=4096)


def test_auto_is_what_doctor_recommends(packed_demo: Path) -> None:
    footprint = Footprint.of(read_manifest(packed_demo))
    with sparseflow.load(packed_demo, threads=1) as model:
        assert model.leases.slots == footprint.recommended_slots(4096) == DEMO_EXPERTS


def test_an_address_limit_counts_mapped_files(packed_demo: Path) -> None:
    footprint = Footprint.of(read_manifest(packed_demo))
    added = footprint.memory_bytes(36, 64)
    items = footprint.memory_items(36, 64)
    for maps, expected in ((False, "ok"), (True, "fail")):
        limit = MemoryLimit("RLIMIT_AS", added + 64 * MIB, maps=maps)
        plan = MemoryPlan(36, 64, 512, 0, items, (limit,), mapped_bytes=65 * MIB)
        assert check_memory(plan).status == expected


# --- single checks ---


def test_threads_beside_what_is_allowed(system: FakeSystem) -> None:
    assert check_threads(4).status == "ok" and check_threads(4).advice is None
    assert check_threads(2).status == "ok" and "--threads 4" in str(check_threads(2).advice)
    write(system.mount("cgroup2", "rw"), cpu__max="150000 100000")
    system.member("0::/")
    check = check_threads(4)
    assert check.status == "warning" and "quota is 1.5" in check.text and "--threads 1" in str(check.advice)


def test_the_processor_and_its_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check_processor().status == ("ok" if isa.active() != "generic" else "warning")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu sse2 avx2 fma f16c avx512_vnni\n")
    monkeypatch.setattr(checks, "_PROCESSORS", tmp_path / "cpuinfo")
    assert "avx2 fma f16c avx512_vnni" in check_processor().text
    monkeypatch.setattr(checks, "_PROCESSORS", tmp_path / "absent")
    assert "none of the vector extensions" in check_processor().text
    monkeypatch.setattr(isa, "active", lambda: "generic")
    monkeypatch.setattr(isa, "available", lambda: ("generic",))
    assert check_processor().status == "warning" and "very slow" in str(check_processor().advice)
    monkeypatch.setattr(isa, "available", lambda: ("generic", "avx2"))
    assert "unset SPARSEFLOW_ISA to use avx2" in str(check_processor().advice)


@pytest.mark.parametrize(("disk", "status", "part"), [
    (FileSystem("ext4", 1, 2, False), "ok", "no rotating disk"),
    (FileSystem("overlay", 1, 2, None), "ok", "unknown"),
    (FileSystem("ext4", 1, 2, True), "warning", "rotational"),
    (FileSystem("nfs4", 1, 2, None), "warning", "network"),
    (FileSystem("tmpfs", 1, 2, None), "warning", "twice"),
])
def test_kinds_of_disks(disk: FileSystem, status: str, part: str) -> None:
    check = doctor.check_kind(disk)
    assert check.status == status and part in check.text
    assert (check.advice is None) == (status == "ok")


def test_little_free_space_is_warned_of() -> None:
    assert doctor.check_space(FileSystem("ext4", 1 << 20, 1 << 40, False)).status == "warning"
    assert doctor.check_space(FileSystem("ext4", 1 << 40, 1 << 41, False)).status == "ok"


def test_the_file_system_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts, blocks = tmp_path / "mountinfo", tmp_path / "block"
    monkeypatch.setattr(filesystem, "_MOUNTS", mounts)
    monkeypatch.setattr(filesystem, "_BLOCK_DEVICES", blocks)
    assert file_system(tmp_path).kind is None and file_system(tmp_path).rotational is None
    mounts.write_text(f"20 1 0:99 / /proc rw - proc proc rw\n21 1 {number} / / rw shared:1 - xfs /dev/sda1 rw\n")
    (blocks / number).mkdir(parents=True)
    (blocks / "queue").mkdir()
    (blocks / "queue/rotational").write_text("1\n")  # a partition: its disk is the folder above
    assert (file_system(tmp_path).kind, file_system(tmp_path).rotational) == ("xfs", True)
    (blocks / number / "queue").mkdir()
    (blocks / number / "queue/rotational").write_text("0\n")
    assert file_system(tmp_path).rotational is False
    assert file_system(tmp_path).free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_a_disk_that_cannot_be_measured_is_no_failure(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise sparseflow.StorageError("stays in the page cache")

    monkeypatch.setattr(doctor, "measure_disk", refuse)
    found = report(demo, "--cache", "1MiB")
    assert found["disk"]["bytes_per_second"] is None and found["expectation"] is None
    assert by_name(found)["disk speed"]["status"] == by_name(found)["speed"]["status"] == "warning"
    assert report(demo, "--cache", "resident")["expectation"]["fast"] > 0  # no disk is needed


# --- what is expected ---


@given(st.floats(0, 1), st.floats(0, 1))
def test_recorded_hits_grow_with_the_cache(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 <= recorded_hits(less) <= recorded_hits(more) <= 1


def test_recorded_hits_meet_the_record() -> None:
    for share, hits in RECORDED_HITS:
        assert recorded_hits(share) == pytest.approx(hits)


def test_more_of_anything_is_expected_to_be_faster(packed_demo: Path) -> None:
    footprint = Footprint.of(read_manifest(packed_demo))
    base = expect(footprint, 50, 8, 10e6, 1e6)
    assert 0 < base.slow < base.fast
    for better in (expect(footprint, 100, 8, 10e6, 1e6), expect(footprint, 50, 8, 10e6, 2e6), expect(footprint, 50, 8, 20e6, 1e6)):
        assert better.slow > base.slow and better.fast >= base.fast
    resident = expect(footprint, DEMO_EXPERTS, 8, 10e6, 1e6)
    assert resident.slow_hits == resident.fast_hits == 1.0


# --- the prediction ---


@pytest.fixture
def bench() -> ModuleType:
    """bench/doctor.py."""
    sys.path.insert(0, str(BENCH))
    try:
        import doctor as bench_doctor
    finally:
        sys.path.remove(str(BENCH))
    return bench_doctor


@pytest.mark.parametrize("cache", ["256KiB", "1MiB", "resident"])
def test_the_predicted_peak_is_within_a_tenth(packed_demo: Path, bench: ModuleType, cache: str) -> None:
    assert bench.predicted(packed_demo, cache, 136) == pytest.approx(bench.measured(packed_demo, cache, 64, 8), rel=0.1)
