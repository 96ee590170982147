"""In a memory cgroup, and under RLIMIT_DATA, on a model of real width: what is recommended runs; what is refused would be killed, and stops
before that when it is forced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from expert_store import disk_folder
from memory_cgroup import memory_cgroup, run_inside

MIB = 1 << 20
TOOLS = Path(__file__).parent.parent / "tools"
PROGRAM = [sys.executable, "-P", "-c", "from sparseflow.cli.main import main; main(prog_name='sparseflow')"]

# A session on random ids: a prompt that asks for nearly all experts, then single tokens.
RUN = """
import json, resource, sys, zlib
import numpy as np
import sparseflow, sparseflow.model
from sparseflow.errors import CapacityError
from sparseflow.evidence import peak_rss_bytes

folder, cache, ways, data_limit = sys.argv[1], sys.argv[2], sys.argv[3].split(), int(sys.argv[4])
if data_limit:
    resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
if "unwatched" in ways:
    sparseflow.model.require_memory = lambda needed: None
try:
    model = sparseflow.load(folder, cache=cache, threads=2, context=512, force="force" in ways, strict="strict" in ways,
                            on_warning=lambda warning: print(warning, file=sys.stderr, flush=True))
except CapacityError as error:
    sys.exit(f"refused: {error}")
with model:
    session = model.session(trace=False)
    ids = np.random.default_rng(0).integers(0, model.geometry.vocab_size, 512)
    try:
        session.forward(ids[:508], last_only=True)
    except CapacityError as error:
        sys.exit(f"stopped with {model.leases.num_resident} experts, {model.leases.leases} leases: {error}")
    for token in ids[508:]:
        logits = session.forward([token], last_only=True)
    print(json.dumps({"slots": model.leases.slots, "stride": model.layout.stride, "peak": peak_rss_bytes(),
                      "evictions": model.leases.counters()["evictions"], "logits": zlib.crc32(logits.tobytes())}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two layers: 1.5 GiB of experts, 0.2 GiB of dense core."""
    with disk_folder(tmp_path_factory.mktemp("model")) as folder:
        path = folder / "model"
        make = [sys.executable, "-P", str(TOOLS / "make_model.py"), str(path), "--layers", "2", "--vocab", "65536"]
        subprocess.run(make, check=True, capture_output=True)
        yield path


def run_command(model: Path, cache: str, *ways: str, data_limit: int = 0) -> list[str]:
    return [sys.executable, "-P", "-c", RUN, str(model), cache, " ".join(ways), str(data_limit)]


@pytest.mark.slow
def test_what_is_recommended_in_a_cgroup_runs_there(model: Path) -> None:
    limit = 768 * MIB
    with memory_cgroup(limit) as folder:
        told = run_inside(folder, [*PROGRAM, "doctor", str(model), "--context", "512", "--json"])
        assert told.returncode == 0, told.stdout + told.stderr
        report = json.loads(told.stdout)
        tightest = min(report["memory"]["limits"], key=lambda each: each["room_bytes"])
        assert tightest["name"].startswith(str(folder)) and tightest["limit_bytes"] == limit
        recommended = report["cache"]["recommended_bytes"]
        assert 256 * MIB <= recommended < limit

        done = run_inside(folder, run_command(model, "auto"))
        assert done.returncode == 0, done.stderr
        run = json.loads(done.stdout)
        assert run["slots"] * run["stride"] == pytest.approx(recommended, rel=0.05)
        assert run["evictions"] > 0, "the cache was never full: the run was too short to show a bound"
        assert run["peak"] <= limit

        # More than that is refused.
        for cache in ("700MiB", "resident"):
            done = run_inside(folder, run_command(model, cache))
            assert done.returncode == 1 and "refused: a run needs" in done.stderr and str(folder) in done.stderr
            told = run_inside(folder, [*PROGRAM, "doctor", str(model), "--cache", cache, "--json"])
            assert told.returncode == 1 and json.loads(told.stdout)["verdict"] == "does not fit"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "cache"), [(160 * MIB, "32MiB"), (512 * MIB, "700MiB")])  # less than the dense core, or than the cache
def test_what_is_refused_in_a_cgroup_would_be_killed_and_stops_when_forced(model: Path, limit: int, cache: str) -> None:
    with memory_cgroup(limit) as folder:
        assert run_inside(folder, [*PROGRAM, "doctor", str(model), "--cache", cache]).returncode == 1
        done = run_inside(folder, run_command(model, cache, "strict"))
        assert done.returncode == 1 and "refused: a run needs" in done.stderr
        done = run_inside(folder, run_command(model, cache, "strict", "force", "unwatched"))
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = run_inside(folder, run_command(model, cache, "strict", "force"))
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "forced all the same, it may be slow or fail" in done.stderr
        assert f"stopped before the system does it: {folder}" in done.stderr and "use a smaller --cache" in done.stderr
        assert cache == "32MiB" or " 0 leases: stopped before" in done.stderr


@pytest.mark.slow
def test_what_is_refused_in_a_cgroup_for_its_mapped_cache_is_slow_when_forced(model: Path) -> None:
    free = subprocess.run(run_command(model, "700MiB"), capture_output=True, text=True)
    assert free.returncode == 0, free.stderr
    with memory_cgroup(512 * MIB) as folder:
        done = run_inside(folder, run_command(model, "700MiB"))
        assert done.returncode == 1 and "refused: a run needs" in done.stderr
        done = run_inside(folder, run_command(model, "700MiB", "force"))
        assert done.returncode == 0, done.stderr
        assert "forced all the same, it may be slow or fail" in done.stderr
        assert json.loads(done.stdout)["logits"] == json.loads(free.stdout)["logits"]


@pytest.mark.slow
def test_under_rlimit_data_what_is_recommended_runs_and_more_is_refused(model: Path) -> None:
    done = subprocess.run(run_command(model, "auto", data_limit=900 * MIB), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["slots"] < 512
    done = subprocess.run(run_command(model, "900MiB", data_limit=900 * MIB), capture_output=True, text=True)
    assert done.returncode == 1 and "refused: a run needs" in done.stderr and "RLIMIT_DATA leaves" in done.stderr
