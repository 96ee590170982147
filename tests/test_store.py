"""PackedStore: index arithmetic, what is in memory after admit and evict (as the kernel tells it), and how it fails."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_store import (  # noqa: F401  (disk_path is a fixture)
    disk_path,
    expected_marks,
    expert_header,
    mapped_bytes,
    page_marks,
    write_expert_store,
)

from sparseflow.errors import OptionError, PackedModelError, SparseFlowError, StorageError
from sparseflow.layout import PAGE
from sparseflow.leases import LeaseTable
from sparseflow.packfile import HEADER_BYTES, Header
from sparseflow.store import PackedStore, read_ahead_bytes

LAYERS, EXPERTS = 3, 16
SMALL = 100 * 1024 - 60  # stride 25 pages: no slice begins on a 64 KiB boundary twice in a row


@pytest.fixture
def path(disk_path: Path) -> Path:
    return write_expert_store(disk_path / "experts.sfx", LAYERS, EXPERTS, SMALL)


def test_attributes_come_from_the_header(path: Path) -> None:
    with PackedStore(path) as store:
        assert (store.num_layers, store.num_experts) == (LAYERS, EXPERTS)
        assert (store.slice_bytes, store.stride) == (SMALL, 25 * PAGE)
        assert store.file_bytes == path.stat().st_size == PAGE + LAYERS * EXPERTS * store.stride
        assert store.path == str(path)
        assert store.header["hidden_size"] == 128
        assert not store.strict and not store.closed


@pytest.mark.parametrize("strict", [False, True])
def test_every_slice_is_where_its_address_says(path: Path, strict: bool) -> None:
    with PackedStore(path, strict) as store:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                store.admit(layer, expert)
                marks = page_marks(store.address(layer, expert), store.stride)
                assert np.array_equal(marks, expected_marks(layer * EXPERTS + expert, store.stride))


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (LAYERS, 0), (0, -1), (0, EXPERTS), (2**70, 0)])
def test_an_expert_that_does_not_exist_is_an_option_error(path: Path, layer: int, expert: int) -> None:
    with PackedStore(path) as store:
        for method in (store.address, store.will_need, store.admit, store.evict, store.resident_pages):
            with pytest.raises(OptionError, match="no expert"):
                method(layer, expert)


# --- what is in memory ---


def test_strict_opening_drops_what_the_page_cache_held(path: Path) -> None:
    path.read_bytes()
    with PackedStore(path) as store:
        assert store.resident_bytes() == store.file_bytes
    with PackedStore(path, strict=True) as store:
        assert store.resident_bytes() == 0


def test_strict_admits_and_evicts_whole_slices_of_the_page_cache(path: Path) -> None:
    with PackedStore(path, strict=True) as store:
        assert store.resident_pages(1, 5) == (0, 25)
        store.admit(1, 5)
        assert store.resident_pages(1, 5) == (25, 25)
        assert store.resident_bytes() == store.stride
        store.evict(1, 5)
        assert store.resident_pages(1, 5) == (0, 25)
        assert store.resident_bytes() == 0


@pytest.mark.parametrize("slice_bytes", [PAGE, 3 * PAGE, SMALL, 700 * 1024 + 1])
def test_strict_holds_exactly_the_admitted_slices(disk_path: Path, slice_bytes: int) -> None:
    path = write_expert_store(disk_path / "experts.sfx", 1, 40, slice_bytes)
    rng = np.random.default_rng(1)
    admitted: set[int] = set()
    with PackedStore(path, strict=True) as store:
        for _ in range(60):
            expert = int(rng.integers(40))
            if expert in admitted:
                store.evict(0, expert)
            else:
                store.admit(0, expert)
            admitted ^= {expert}
            assert store.resident_bytes() == mapped_bytes(store) == len(admitted) * store.stride


def warm_by_reading(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:  # in sequence and from the disk: readahead grows into large folios
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(128 * 1024):
            pass


def warm_by_writing(path: Path) -> None:
    with open(path, "r+b") as file:  # one large write: the page cache holds it in the largest folios it can
        content = file.read()
        file.seek(0)
        file.write(content)
        os.fsync(file.fileno())


@pytest.mark.parametrize("warm", [warm_by_reading, warm_by_writing])
@pytest.mark.parametrize("slice_bytes", [PAGE, SMALL, 700 * 1024 + 1])
def test_neighbours_in_a_warm_page_cache_are_neither_mapped_nor_unmapped(
    disk_path: Path, warm: Callable[[Path], None], slice_bytes: int
) -> None:
    path = write_expert_store(disk_path / "experts.sfx", 1, 40, slice_bytes)
    rng = np.random.default_rng(2)
    admitted: set[int] = set()
    with PackedStore(path) as store:
        warm(path)
        for _ in range(60):
            expert = int(rng.integers(40))
            if expert in admitted:
                store.evict(0, expert)
            else:
                store.admit(0, expert)
            admitted ^= {expert}
            assert mapped_bytes(store) == len(admitted) * store.stride


def wait_until_read(store: PackedStore, layer: int, expert: int) -> None:
    deadline = time.monotonic() + 30
    while store.resident_pages(layer, expert)[0] < store.stride // PAGE and time.monotonic() < deadline:
        time.sleep(0.005)
    assert store.resident_pages(layer, expert) == (store.stride // PAGE, store.stride // PAGE)


def test_will_need_reads_the_whole_of_a_slice_that_is_larger_than_the_readahead(disk_path: Path) -> None:
    slice_bytes = min(2 * read_ahead_bytes(disk_path.stat().st_dev), 24 << 20) + PAGE
    path = write_expert_store(disk_path / "experts.sfx", 1, 2, slice_bytes)
    with PackedStore(path, strict=True) as store:
        store.will_need(0, 0)
        wait_until_read(store, 0, 0)
        assert store.resident_bytes() == store.stride
        assert mapped_bytes(store) == 0


def test_strict_admits_no_more_than_the_slice_when_what_was_asked_for_is_gone_again(path: Path) -> None:
    with PackedStore(path, strict=True) as store:
        store.will_need(0, 3)
        wait_until_read(store, 0, 3)
        store.drop_page_cache()
        assert store.resident_bytes() == 0
        store.admit(0, 3)
        assert store.resident_bytes() == mapped_bytes(store) == store.stride


def test_a_slice_that_was_only_asked_for_can_be_evicted(path: Path) -> None:
    with PackedStore(path, strict=True) as store:
        store.will_need(0, 3)
        store.admit(0, 4)
        store.evict(0, 3)
        assert store.resident_bytes() == mapped_bytes(store) == store.stride


def test_strict_drops_what_the_disk_was_still_reading(disk_path: Path) -> None:
    path = write_expert_store(disk_path / "experts.sfx", 1, 4, 4 << 20)
    with PackedStore(path, strict=True) as store:
        for expert in range(4):
            store.will_need(0, expert)
        for expert in range(4):
            store.evict(0, expert)
        assert store.resident_bytes() == mapped_bytes(store) == 0
        time.sleep(0.05)  # a read that was left running would be done by now
        assert store.resident_bytes() == 0


def test_evicting_what_is_not_there_does_nothing(path: Path) -> None:
    with PackedStore(path, strict=True) as store:
        store.admit(0, 1)
        store.evict(0, 0)
        store.evict(0, 2)
        store.evict(0, 2)
        assert store.resident_bytes() == mapped_bytes(store) == store.stride


def test_many_threads_leave_what_they_admitted(path: Path) -> None:
    errors: list[BaseException] = []

    def work(store: PackedStore, layer: int) -> None:
        rng = np.random.default_rng(layer)
        try:
            for expert in rng.integers(EXPERTS, size=200):  # neighbours, so that the threads meet in the same windows
                store.admit(layer, int(expert))
                marks = page_marks(store.address(layer, int(expert)), store.stride)
                assert np.array_equal(marks, expected_marks(layer * EXPERTS + int(expert), store.stride))
                store.evict(layer, int(expert))
            store.admit(layer, layer)
        except BaseException as error:
            errors.append(error)

    with PackedStore(path, strict=True) as store:
        threads = [threading.Thread(target=work, args=(store, layer)) for layer in range(LAYERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert store.resident_bytes() == mapped_bytes(store) == LAYERS * store.stride


def test_read_ahead_of_this_disk_and_of_an_unknown_device(path: Path) -> None:
    assert read_ahead_bytes(path.stat().st_dev) % 1024 == 0 < read_ahead_bytes(path.stat().st_dev)
    assert read_ahead_bytes(os.makedev(4095, 1048575)) == 128 * 1024


WITHOUT_POPULATE = """
import ctypes, struct, sys
sys.path.insert(0, {tests!r})
from expert_store import expected_marks, mapped_bytes, page_marks
import numpy as np
from sparseflow.errors import StorageError
from sparseflow.store import PackedStore
import os, platform
# A seccomp filter that answers EINVAL to madvise(..., MADV_POPULATE_READ), as kernels before 5.14 do.
madvise = {{"x86_64": 28, "aarch64": 233}}[platform.machine()]
rules = [(0x20, 0, 0, 0), (0x15, 0, 3, madvise), (0x20, 0, 0, 32), (0x15, 0, 1, 22)]  # load, jump unless equal, twice
rules += [(0x06, 0, 0, 0x00050016), (0x06, 0, 0, 0x7FFF0000)]  # return EINVAL, or allow
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(rules), ctypes.addressof(program))), 0, 0) == 0
with PackedStore({path!r}, strict=True) as store:
    store.admit(1, 3)
    assert store.resident_bytes() == mapped_bytes(store) == store.stride
    assert np.array_equal(page_marks(store.address(1, 3), store.stride), expected_marks({slice_number}, store.stride))
    os.truncate({path!r}, 5 * store.stride)
    try:
        store.admit(1, 4)
    except StorageError as error:
        print(error)
"""


def test_a_kernel_without_populate_read_works_the_same(path: Path) -> None:
    program = WITHOUT_POPULATE.format(tests=str(Path(__file__).parent), path=str(path), slice_number=EXPERTS + 3)
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "expert 4 of layer 1: the file was cut to" in result.stdout


# --- what goes wrong ---


def rewrite_header(path: Path, **changes: int) -> None:
    with open(path, "r+b") as file:
        header = replace(Header.unpack(file.read(HEADER_BYTES), str(path)), **changes)
        file.seek(0)
        file.write(header.pack())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": 2}, "holds no experts"),
        ({"num_layers": 0}, "0 layers"),
        ({"num_layers": LAYERS + 1}, "where its experts take"),
        ({"num_layers": 2**31, "num_experts": 2**31}, "layers of"),
        ({"stride": 2**63, "file_bytes": 2**63}, "where its experts take"),
        ({"stride": 0}, "stride of 0"),
        ({"stride": 25 * PAGE + 64}, "stride of"),
        ({"slice_bytes": 25 * PAGE + 1}, "bytes an expert"),
        ({"slice_bytes": 0}, "0 bytes an expert"),
        ({"file_bytes": 2**64 - 1}, "where its experts take"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(path: Path, changes: dict[str, int], message: str) -> None:
    rewrite_header(path, **changes)
    with pytest.raises(PackedModelError, match=message) as caught:
        PackedStore(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "state"), [(-1, "truncated"), (-25 * PAGE, "truncated"), (1, "too long")])
def test_a_file_of_another_size_than_its_header_says_is_refused(path: Path, size: int, state: str) -> None:
    os.truncate(path, path.stat().st_size + size)
    with pytest.raises(PackedModelError, match=state):
        PackedStore(path)


@pytest.mark.parametrize("content", [b"", b"SPARSEFX", b"version https://git-lfs.github.com/spec/v1\n", bytes(8192)])
def test_a_file_that_is_no_packed_model_is_refused(disk_path: Path, content: bytes) -> None:
    path = disk_path / "experts.sfx"
    path.write_bytes(content)
    with pytest.raises(PackedModelError, match="header"):
        PackedStore(path)


def test_a_damaged_header_is_refused(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    with pytest.raises(PackedModelError, match="damaged"):
        PackedStore(path)


def test_a_folder_is_refused(disk_path: Path) -> None:
    with pytest.raises(PackedModelError, match="not a regular file"):
        PackedStore(disk_path)


def test_a_missing_file_is_a_storage_error(disk_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent\.sfx: cannot be opened: No such file"):
        PackedStore(disk_path / "absent.sfx")


def test_what_cannot_be_mapped_is_a_storage_error(path: Path) -> None:
    program = (
        "import resource, sparseflow.store\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\n"
        f"sparseflow.store.PackedStore({str(path)!r})\n"
    )
    header = expert_header(1, 1024, 1 << 20)
    path.write_bytes(header.pack())
    os.truncate(path, header.file_bytes)
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1].startswith("sparseflow.errors.StorageError")
    assert "cannot be mapped: Cannot allocate memory" in result.stderr


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_cut_while_open_is_an_error_that_names_the_expert(path: Path, strict: bool) -> None:
    with PackedStore(path, strict) as store:
        store.admit(0, 0)
        os.truncate(path, HEADER_BYTES + 5 * store.stride + PAGE)  # in the middle of expert 5
        with pytest.raises(StorageError, match=r"experts\.sfx: expert 5 of layer 0: the file was cut to") as caught:
            store.admit(0, 5)
        assert "\n" not in str(caught.value)
        with pytest.raises(StorageError, match="expert 7 of layer 2"):
            store.admit(2, 7)
        assert mapped_bytes(store) == store.stride  # expert 0, and nothing of those that failed
        store.admit(0, 4)
        assert np.array_equal(page_marks(store.address(0, 4), store.stride), expected_marks(4, store.stride))


def test_closing_is_refused_while_a_lease_is_out(path: Path) -> None:
    store = PackedStore(path)
    table = LeaseTable(store, 4)
    lease = table.acquire(0, np.array([1, 2], np.int32))
    with pytest.raises(SparseFlowError, match="leases are still out: 1"):
        store.close()
    assert not store.closed
    lease.wait()
    lease.release()
    store.close()
    assert store.closed


def test_closing_twice_and_using_a_closed_store(path: Path) -> None:
    store = PackedStore(path)
    store.admit(0, 0)
    store.close()
    store.close()
    assert store.closed and str(path) not in Path("/proc/self/maps").read_text()
    for method in (store.address, store.will_need, store.admit, store.evict, store.resident_pages):
        with pytest.raises(SparseFlowError, match="closed"):
            method(0, 0)
    with pytest.raises(SparseFlowError, match="closed"):
        store.resident_bytes()
    with pytest.raises(SparseFlowError, match="closed"):
        store.drop_page_cache()
    with pytest.raises(SparseFlowError, match="closed"):
        LeaseTable(store, 2).acquire(0, np.array([0], np.int32))


def test_a_store_is_opened_once(path: Path) -> None:
    with PackedStore(path) as store:
        with pytest.raises(SparseFlowError, match="opened once"):
            store.__init__(path)  # type: ignore[misc]
        store.admit(0, 0)


def test_a_store_unmaps_when_it_goes_out_of_use(path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    store = PackedStore(path)
    store.admit(0, 0)
    assert str(path) in Path("/proc/self/maps").read_text()
    del store
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_refused_file_is_not_kept_open(path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    rewrite_header(path, kind=3)
    for _ in range(3):
        with pytest.raises(PackedModelError):
            PackedStore(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_addresses_are_those_of_one_mapping(path: Path) -> None:
    with PackedStore(path) as store:
        first = store.address(0, 0)
        assert first % PAGE == 0
        assert store.address(1, 2) - first == (EXPERTS + 2) * store.stride
        assert ctypes.string_at(first - HEADER_BYTES, 8) == b"SPARSEFX"
