"""Pages that go while somebody computes with them: an error of the lease, and not a signal that ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from expert_store import cut, disk_path, expected_marks, page_marks, write_expert_store  # noqa: F401

from sparseflow.errors import StorageError
from sparseflow.leases import LeaseTable
from sparseflow.store import PackedStore

SLICE = 12_000
STRIDE = 12_288


@pytest.fixture
def path(disk_path: Path) -> Path:  # noqa: F811
    return write_expert_store(disk_path / "experts.sfx", 2, 4, SLICE)


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


@pytest.mark.parametrize("strict", [False, True])
def test_pages_lost_under_a_lease(path: Path, strict: bool) -> None:
    with PackedStore(path, strict=strict) as store:
        table = LeaseTable(store, 4, direct=False)
        with pytest.raises(StorageError, match=r"experts\.sfx: expert 2 of layer 0: the file was cut to \d+ bytes"):
            with table.acquire(0, ids(1, 2)) as lease:
                lease.wait()
                assert (page_marks(int(lease.addresses[1]), STRIDE) == expected_marks(2, STRIDE)).all()
                cut(path, 2, STRIDE)
                assert (page_marks(int(lease.addresses[1]), STRIDE)[1:] == 0).all()
        assert (table.pinned, table.leases) == (0, 0)
        # What lies near the place may be zeros, too: nothing of this mapping counts any more.
        with pytest.raises(StorageError, match="expert 2 of layer 0"), table.acquire(0, ids(1)) as lease:
            lease.wait()


def test_an_error_of_the_body_goes_first(path: Path) -> None:
    with PackedStore(path) as store:
        table = LeaseTable(store, 4, direct=False)
        with pytest.raises(ZeroDivisionError), table.acquire(0, ids(2)) as lease:
            lease.wait()
            cut(path, 2, STRIDE)
            page_marks(int(lease.addresses[0]), STRIDE)
            raise ZeroDivisionError


def test_another_store_of_the_process_is_sound(path: Path) -> None:
    sound = write_expert_store(path.parent / "sound.sfx", 2, 4, SLICE)
    with PackedStore(path) as store, PackedStore(sound) as other:
        store.admit(0, 2)
        cut(path, 2, STRIDE)
        page_marks(store.address(0, 2), STRIDE)
        table = LeaseTable(other, 4, direct=False)
        with table.acquire(0, ids(2)) as lease:
            lease.wait()
            assert (page_marks(int(lease.addresses[0]), STRIDE) == expected_marks(2, STRIDE)).all()


def test_a_mapping_of_somebody_else_is_left_to_them(path: Path) -> None:
    program = """
import mmap, os, sys
from sparseflow.store import PackedStore
store = PackedStore(sys.argv[1])
with open(sys.argv[2], "w+b") as file:
    file.write(bytes(8192))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 8192)
    os.truncate(sys.argv[2], 0)
    print(mapped[5000])
"""
    done = subprocess.run([sys.executable, "-P", "-c", program, str(path), str(path.parent / "other")], capture_output=True)
    assert done.returncode == -signal.SIGBUS
    assert os.path.getsize(path.parent / "other") == 0


def test_a_signal_that_somebody_sends_ends_the_process(path: Path) -> None:
    program = """
import os, signal, sys
from sparseflow.store import PackedStore
store = PackedStore(sys.argv[1])
os.kill(os.getpid(), signal.SIGBUS)
print("still here")
"""
    done = subprocess.run([sys.executable, "-P", "-c", program, str(path)], capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"")
