"""Fixtures that several test modules share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_system import FakeSystem

from sparseflow import demo_model, limits
from sparseflow.kernels import isa
from sparseflow.pack import pack_checkpoint


@pytest.fixture(params=isa.available())
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for every instruction set this processor has."""
    before = isa.active()
    isa.select(request.param)
    yield request.param
    isa.select(before)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c() -> None:
    """A suite that a shell started in the background ignores SIGINT, and so would all processes that tests start and stop by it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def packed_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, packed with the default options."""
    folder = tmp_path_factory.mktemp("demo") / "int8"
    pack_checkpoint(demo_model.checkpoint_folder(), folder)
    return folder


@pytest.fixture(scope="session")
def packed_demo_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with all weights kept in bfloat16."""
    folder = tmp_path_factory.mktemp("demo") / "bf16"
    pack_checkpoint(demo_model.checkpoint_folder(), folder, experts="bf16", dense="bf16")
    return folder


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    """A machine of 1000 MiB and 4 processors, without cgroups and rlimits, in place of the real one."""
    fake = FakeSystem(tmp_path / "system")
    monkeypatch.setattr(limits, "_PROC", fake.proc)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (limits.resource.RLIM_INFINITY, limits.resource.RLIM_INFINITY))
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    return fake
