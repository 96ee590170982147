"""A disk that fails under a running model: an error that names the expert, everything released, never another token."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expert_store import READ_MAPPED, without_direct_reads

import sparseflow
from sparseflow.errors import PackedModelError

# Makes pread on experts.sfx fail with EIO, and the admission of mapped pages with EFAULT as the kernel does when it cannot read
# them, from the call FAULT_FROM on until the call FAULT_TO.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int calls;

static int fails(void) {
    int call = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    return call >= atoi(getenv("FAULT_FROM")) && call < atoi(getenv("FAULT_TO"));
}

static int is_experts(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return strstr(path, "experts.sfx") != NULL;
}

int madvise(void *address, size_t size, int advice) {
    if (advice == 22 /* MADV_POPULATE_READ */ && fails()) { errno = EFAULT; return -1; }
    int (*real)(void *, size_t, int) = dlsym(RTLD_NEXT, "madvise");
    return real(address, size, advice);
}

ssize_t pread64(int fd, void *buffer, size_t size, off64_t offset) {
    if (is_experts(fd) && fails()) { errno = EIO; return -1; }
    ssize_t (*real)(int, void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pread64");
    return real(fd, buffer, size, offset);
}

ssize_t pread(int fd, void *buffer, size_t size, off_t offset) { return pread64(fd, buffer, size, offset); }
"""

# Generates again and again, while the file may shrink, and tells what came out.
RUN = READ_MAPPED + """
import json, os, sys, threading
import sparseflow
from sparseflow.errors import StorageError

folder, cache, mode, shrink = sys.argv[1:]
if mode == "mapped":
    read_mapped()
stop = threading.Event()
experts = os.path.join(folder, "experts.sfx")

def shrinking(model):
    size = os.path.getsize(experts)
    for tenth in range(9, -1, -1):
        if stop.wait(0.1):
            return
        os.truncate(experts, size * tenth // 10)

texts, errors = [], []
with sparseflow.load(folder, cache=cache, threads=2, strict=mode == "direct") as model:
    assert model.leases.direct == (mode == "direct")
    thread = threading.Thread(target=shrinking, args=(model,))
    if shrink:
        thread.start()
    for _ in range(400 if shrink else 40):
        generation = model.generate("The red fox", max_new_tokens=12)
        try:
            texts.append("".join(generation))
        except StorageError as error:
            errors.append(str(error))
            assert (model.leases.pinned, model.leases.leases) == (0, 0)
            if shrink and not thread.is_alive():
                break
        finally:
            generation.session.close()
    stop.set()
    last = ""
    if not shrink:
        last = "".join(model.generate("The red fox", max_new_tokens=12))
print(json.dumps({"texts": sorted(set(texts)), "errors": errors, "last": last}))
"""
NAMED = re.compile(r"experts\.sfx: expert \d+ of layer \d+: ")


def run(folder: Path, mode: str, *, shrink: bool = False, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", RUN, str(folder), "256KiB", mode, "shrink" if shrink else ""]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def expected(folder: Path) -> str:
    with sparseflow.load(folder, cache="resident", threads=1) as model:
        return "".join(model.generate("The red fox", max_new_tokens=12))


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """The library that makes reads fail."""
    (tmp_path / "shim.c").write_text(SHIM)
    library = tmp_path / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "shim.c", "-ldl"], check=True)
    return library


@pytest.mark.parametrize(("mode", "reason"), [
    ("direct", "the disk could not read it (EIO: Input/output error)"),
    ("mapped", "the disk could not read it (the kernel's log tells why)"),
])  # fmt: skip
def test_a_disk_that_fails_for_a_while(packed_demo: Path, shim: Path, mode: str, reason: str) -> None:
    told = run(packed_demo, mode, LD_PRELOAD=str(shim), FAULT_FROM="300", FAULT_TO="320")
    assert told["texts"] == [expected(packed_demo)] == [told["last"]]
    assert told["errors"]
    assert all(NAMED.search(error) and error.endswith(reason) for error in told["errors"])


@pytest.mark.parametrize("mode", ["direct", "mapped"])
def test_a_file_that_shrinks_under_a_run(packed_demo: Path, tmp_path: Path, mode: str) -> None:
    folder = Path(shutil.copytree(packed_demo, tmp_path / "shrinking"))
    told = run(folder, mode, shrink=True)
    assert told["texts"] in ([], [expected(packed_demo)])
    assert told["errors"]
    assert all(NAMED.search(error) and "the file was cut to" in error for error in told["errors"])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_a_file_replaced_while_open(
    packed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: bool, direct: bool
) -> None:
    folder = Path(shutil.copytree(packed_demo, tmp_path / "replaced"))
    if not direct:
        without_direct_reads(monkeypatch)
    with sparseflow.load(folder, cache="256KiB", threads=2, strict=strict) as model:
        before = "".join(model.generate("The red fox", max_new_tokens=12))
        for name in ("experts.sfx", "dense.sfx", "embed.sfx"):
            (folder / "other").write_bytes(bytes(10_000))
            os.replace(folder / "other", folder / name)
        assert "".join(model.generate("The red fox", max_new_tokens=12)) == before
    with pytest.raises(PackedModelError, match="experts.sfx: truncated, 10000 bytes"):
        sparseflow.load(folder)


@pytest.mark.parametrize("name", ["experts.sfx", "dense.sfx", "embed.sfx"])
def test_a_truncated_file_is_found_when_it_is_opened(packed_demo: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(packed_demo, tmp_path / "cut"))
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    with pytest.raises(PackedModelError, match=f"{name}: truncated"):
        sparseflow.load(folder)
