"""A synthetic experts.sfx of any size, in which every page says where it belongs, and ways to look at what is in memory."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparseflow import store as store_module
from sparseflow.layout import PAGE, align
from sparseflow.packfile import HEADER_BYTES, KIND_EXPERTS, Header
from sparseflow.store import PackedStore


@contextmanager
def disk_folder(folder: Path) -> Iterator[Path]:
    """The folder, or a fresh one beside the tests if it is on a tmpfs, which is page cache itself and cannot be dropped."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    kinds = {mount[1]: mount[2] for mount in mounts}  # the last mount on a folder is the one in use
    mount = next(str(parent) for parent in [folder.resolve(), *folder.resolve().parents] if str(parent) in kinds)
    if kinds[mount] != "tmpfs":
        yield folder
    else:
        with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
            yield Path(name)


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """As `tmp_path`, but always on a disk."""
    with disk_folder(tmp_path) as folder:
        yield folder


def expert_header(num_layers: int, num_experts: int, slice_bytes: int) -> Header:
    """The header of an experts file whose slices hold `slice_bytes` bytes of anything."""
    stride = align(slice_bytes, PAGE)
    return Header(
        kind=KIND_EXPERTS,
        weight_bits=8,
        num_layers=num_layers,
        num_experts=num_experts,
        hidden_size=128,
        intermediate_size=64,
        stride=stride,
        slice_bytes=slice_bytes,
        file_bytes=HEADER_BYTES + num_layers * num_experts * stride,
    )


def write_expert_store(path: Path, num_layers: int, num_experts: int, slice_bytes: int) -> Path:
    """Write the file, through to the disk, so that its page cache can be dropped.

    Each page of slice `layer * num_experts + expert` begins with two uint32: the slice and the page within it. The rest
    is one page of noise for all: not zero, not sparse, and cheap to make.
    """
    header = expert_header(num_layers, num_experts, slice_bytes)
    noise = np.random.default_rng(0).integers(1, 256, PAGE, dtype=np.uint8).view(np.uint32)
    pages = np.tile(noise, (header.stride // PAGE, 1))  # [pages of a slice, words of a page]
    pages[:, 1] = np.arange(len(pages))
    with open(path, "wb") as file:
        file.write(header.pack())
        for slice_number in range(num_layers * num_experts):
            pages[:, 0] = slice_number
            file.write(pages.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return path


def page_marks(address: int, stride: int) -> NDArray[np.uint32]:
    """The two words at the start of each page of a mapped slice: uint32 [pages, 2]. Touches every page."""
    words = np.ctypeslib.as_array((ctypes.c_uint32 * (stride // 4)).from_address(address))
    return words.reshape(-1, PAGE // 4)[:, :2].copy()


def expected_marks(slice_number: int, stride: int) -> NDArray[np.uint32]:
    """What `page_marks` returns for a slice."""
    pages = np.arange(stride // PAGE, dtype=np.uint32)
    return np.stack([np.full_like(pages, slice_number), pages], axis=1)


def mapped_bytes(store: PackedStore) -> int:
    """Bytes of the store's file that this process has mapped to memory now: what it adds to the resident set."""
    first = (store.address(0, 0) - HEADER_BYTES) // PAGE
    pages = -(-store.file_bytes // PAGE)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read(pages * 8), np.uint64)
    assert len(entries) == pages
    return int(np.count_nonzero(entries >> np.uint64(63))) * PAGE


def cut(path: Path, slice_number: int, stride: int) -> None:
    """Cut the file in the middle of a slice: after its first page, or before it if it has but one."""
    os.truncate(path, HEADER_BYTES + slice_number * stride + (PAGE if stride > PAGE else 0))


def wait_for(condition: Callable[[], object]) -> None:
    """Return when the condition is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def without_direct_reads(monkeypatch: pytest.MonkeyPatch, when: str = "open") -> None:
    """Make every file system refuse O_DIRECT when a file is opened, or only when it is read."""
    really_open, really_read = os.open, os.preadv
    refused: set[int] = set()

    def open_(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and when == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = really_open(path, flags, *rest)
        refused.discard(descriptor)
        if flags & os.O_DIRECT:
            refused.add(descriptor)
        return descriptor

    def preadv(descriptor: int, *rest: Any) -> int:
        if descriptor in refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_read(descriptor, *rest)

    monkeypatch.setattr(store_module.os, "open", open_)
    monkeypatch.setattr(store_module.os, "preadv", preadv)


READ_MAPPED = """
import os

def read_mapped():
    really_open = os.open
    def without_direct_reads(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really_open(path, flags, *rest, **named)
    os.open = without_direct_reads
"""
# The same for programs that tests run in a process of their own: they begin with this, and call read_mapped().
