"""bench/packing.py: its baseline gives the bytes of the kernels, and it reports what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from checkpoints import SMALL
from click.testing import CliRunner
from expert_store import disk_folder

from sparseflow.encode import pack_expert

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with sizes that take no time."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import packing

    for name, value in {"HIDDEN": 256, "INNER": 128, "EXPERTS": 2, "VOCAB": 64, "QWEN36": SMALL}.items():
        monkeypatch.setattr(packing, name, value)
    return packing


def test_its_baseline_is_the_same_packing(packing: ModuleType) -> None:
    bits = packing.random_bits(3 * 256 * 128)
    gate, up, down = np.split(bits, 3)
    expert = gate.reshape(128, 256), up.reshape(128, 256), down.reshape(256, 128)
    assert np.array_equal(packing.numpy_expert(*expert), pack_expert(*expert, 8))


def test_it_writes_all_it_measured(packing: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "packing.json"
    with disk_folder(tmp_path) as folder:
        result = CliRunner().invoke(
            packing.main, ["--layers", "2", "--repeats", "2", "--folder", str(folder), "--json", str(file)], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        assert not any(path.is_dir() for path in folder.iterdir())
    record = json.loads(file.read_text())
    assert {"int8, numpy", "int8, generic", "bf16, generic"} <= set(record["memory_gb_s"])
    assert all(len(values) == 2 and min(values) > 0 for values in record["memory_gb_s"].values())
    disk = record["disk"]
    assert disk["source_bytes"] > 0 and disk["packed_bytes"] > 0
    for name in ("pack_s", "pack_cpu_s", "at_once_s", "read_s", "write_s"):
        assert len(disk[name]) == 2
    assert "disk / sf-pack" in result.output
