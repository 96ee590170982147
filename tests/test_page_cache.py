"""What the page cache holds of a file, and dropping it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from expert_store import disk_path, write_expert_store  # noqa: F401

from sparseflow.errors import StorageError
from sparseflow.page_cache import cached_bytes, drop

SLICE = 4 << 20


@pytest.fixture
def path(disk_path: Path) -> Path:  # noqa: F811
    return write_expert_store(disk_path / "experts.sfx", 1, 3, SLICE)


def test_a_file_that_was_read_is_cached_and_dropped(path: Path) -> None:
    size = path.stat().st_size
    path.read_bytes()
    assert cached_bytes(path) == size
    drop(path)
    assert cached_bytes(path) == 0


def test_a_part_of_a_file(path: Path) -> None:
    path.read_bytes()
    assert cached_bytes(path, 4096, SLICE) == SLICE
    assert cached_bytes(path, 100, 1) == mmap.PAGESIZE
    assert cached_bytes(path, path.stat().st_size) == cached_bytes(path, 0, 0) == 0
    drop(path, [(0, 8 << 20)])
    # A folio that reaches into the range from outside goes as a whole or not at all.
    assert cached_bytes(path, 0, 6 << 20) == 0
    assert cached_bytes(path, 10 << 20) > 0


def test_mapped_pages_stay(path: Path) -> None:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        drop(path)
        assert cached_bytes(path) == path.stat().st_size
    drop(path)
    assert cached_bytes(path) == 0


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_bytes(tmp_path / "empty") == 0
    drop(tmp_path / "empty")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent: what the page cache holds .* No such file"):
        cached_bytes(tmp_path / "absent")
    with pytest.raises(StorageError, match="absent: cannot be opened: No such file"):
        drop(tmp_path / "absent")
