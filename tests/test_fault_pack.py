"""Packing that is killed, runs out of disk, or cannot read: the next run finishes to the same bytes, and nothing half done opens."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint

from sparseflow.errors import PackedModelError, StorageError
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import read_manifest
from sparseflow.verify import verify_model
from test_pack import big_source, contents

MIB = 1 << 20


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes. Fails the test, with the reason, where none can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.fail(f"this test mounts a small disk, and that is refused here ({mounted.stderr.strip()}): run it as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all room there is left."""
    path = folder / "filler"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(descriptor)
    return path


def opens_as(folder: Path, sound: dict[str, bytes]) -> bool:
    """Whether the folder opens as a packed model; then it must be the whole one."""
    try:
        read_manifest(folder)
    except PackedModelError:
        return False
    assert {name: data for name, data in contents(folder).items() if name != "pack.journal"} == sound
    return True


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    source = big_source(tmp_path / "source", experts=32)
    pack_checkpoint(source, tmp_path / "undisturbed")
    sound = contents(tmp_path / "undisturbed")
    command = [sys.executable, "-P", "-c", "from sparseflow.cli.pack import main; main()", str(source)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def begin(folder: Path) -> subprocess.Popen[bytes]:
        """A process that packs and has begun to."""
        process = subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        while not (folder / "pack.journal").exists() and process.poll() is None:
            time.sleep(0.001)
        return process

    with begin(tmp_path / "measured") as process:
        started = time.monotonic()
        process.communicate()
    duration = time.monotonic() - started
    rng = random.Random(0)
    killed = finished = 0
    folder = tmp_path / "packed-0"
    while killed < 20:
        with begin(folder) as process:
            time.sleep(rng.uniform(0, duration))
            process.kill()
            _, errors = process.communicate()
        if process.returncode == -signal.SIGKILL:
            killed += 1
        else:
            assert process.returncode == 0, errors
        if opens_as(folder, sound):
            finished += 1
            folder = tmp_path / f"packed-{finished}"
    pack_checkpoint(source, folder)
    assert contents(folder) == sound and not verify_model(folder).faults


@pytest.mark.slow
@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 1.0])
def test_a_disk_that_others_fill(tmp_path: Path, at: float) -> None:
    source = write_checkpoint(tmp_path / "source")
    pack_checkpoint(source, tmp_path / "undisturbed")
    sound = contents(tmp_path / "undisturbed")
    with small_disk(tmp_path / "disk", 20 * MIB) as disk:
        filled: list[Path] = []

        def progress(done: int, total: int) -> None:
            if done >= at * total and not filled:
                filled.append(fill(disk))

        with pytest.raises(StorageError, match="No space left on device"):
            pack_checkpoint(source, disk / "packed", progress=progress)
        assert not opens_as(disk / "packed", sound)
        filled[0].unlink()
        pack_checkpoint(source, disk / "packed")
        assert contents(disk / "packed") == sound


@pytest.mark.slow
def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        with pytest.raises(StorageError, match="the pack needs .* make room or choose another disk"):
            pack_checkpoint(source, disk / "packed")
        assert os.listdir(disk) == []


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_a_source_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    source = write_checkpoint(tmp_path / "source")
    reads: list[int] = []
    preadv = os.preadv

    def counting(*arguments: Any) -> int:
        reads.append(1)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", counting)
    pack_checkpoint(source, tmp_path / "undisturbed")
    good = int(share * len(reads))
    reads.clear()

    def failing(*arguments: Any) -> int:
        if len(reads) >= good:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return counting(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match=r"model.safetensors: reading tensor \S+ failed \(Input/output error\)"):
        pack_checkpoint(source, tmp_path / "packed")
    monkeypatch.undo()
    assert (tmp_path / "packed").exists() == (share > 0)
    assert not opens_as(tmp_path / "packed", {})
    pack_checkpoint(source, tmp_path / "packed")
    assert contents(tmp_path / "packed") == contents(tmp_path / "undisturbed")


def test_an_edited_journal_is_not_believed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    pack_checkpoint(source, tmp_path / "undisturbed")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    for edit in ((b'"read_bytes":', b'"read_bytes":1'), (b'"unit":"layers.0.dense"', b'"unit":"layers.9.dense"'), (b'"source":{', b'"origin":{')):
        with pytest.raises(KeyboardInterrupt):
            pack_checkpoint(source, tmp_path / "packed", progress=stop)
        journal = tmp_path / "packed" / "pack.journal"
        data = journal.read_bytes()
        assert edit[0] in data
        journal.write_bytes(data.replace(*edit))
        pack_checkpoint(source, tmp_path / "packed")
        assert contents(tmp_path / "packed") == contents(tmp_path / "undisturbed")
        for path in (tmp_path / "packed").iterdir():
            path.unlink()
        (tmp_path / "packed").rmdir()
