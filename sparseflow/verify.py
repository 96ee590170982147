"""Every byte of a packed folder against its checksum, at the speed of the disk.

Design. The three large files are cut into parts that lie end to end: a header, a slice, a tensor, each with the zeros behind it
up to the next. Threads take parts in the order of the file, read them past the page cache (`O_DIRECT`) and
compute; zlib's crc32 lets other threads run meanwhile. So it is the disk that is checked, and what other processes have in the
page cache stays there. Where the file system cannot do that, the page cache is told to forget the file before and each part after.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from sparseflow.errors import PackedModelError, StorageError
from sparseflow.layout import PAGE, align
from sparseflow.packfile import (
    DENSE_FILE,
    EMBED_FILE,
    EXPERTS_FILE,
    HEADER_BYTES,
    JOURNAL_FILE,
    MANIFEST_FILE,
    Header,
    Manifest,
    headers,
    read_manifest_alone,
)
from sparseflow.regular_file import open_regular

Progress = Callable[[int, int], None]

THREADS = 16
"""Most of them wait: a virtual disk is fastest with many reads under way."""

_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that are checked as one.

    Attributes:
        file, name: what it is, for people.
        offset, bytes: where the bytes under the checksum lie; `bytes` may be 0.
        end: the file's bytes from offset + bytes to here are zero.
        crc32: of the bytes.
    """

    file: str
    name: str
    offset: int
    bytes: int
    end: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a part of a file.

    Attributes: file, part, problem: for people; unreadable: the disk refused, so what is there is not known.
    """

    file: str
    part: str
    problem: str
    unreadable: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.part}: {self.problem}" if self.part else f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify_model` found.

    Attributes:
        folder: the packed folder.
        faults: all of them, in the order of the files; none means that every bit is as it was packed.
        parts, bytes: how many were checked.
        unchecked: files in the folder that the pack does not know, so that nothing can be said of them.
    """

    folder: Path
    faults: tuple[Fault, ...]
    parts: int
    bytes: int
    unchecked: tuple[str, ...]

    def require_sound(self) -> None:
        """Raises PackedModelError when there is a fault, StorageError when all there is was refused by the disk."""
        if not self.faults:
            return
        kind = StorageError if all(fault.unreadable for fault in self.faults) else PackedModelError
        raise kind(
            f"{self.folder}: {len(self.faults)} of {self.parts} parts are damaged or cannot be read, the first: {self.faults[0]};"
            " pack the checkpoint again with sf-pack"
        )


def verify_model(folder: str | os.PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Checks every byte of a packed folder. `progress(done, total)` is called with bytes.

    Raises PackedModelError when the folder is no finished pack, or its manifest is damaged, so that there is nothing to check
    against. All other faults are in the result.
    """
    manifest = read_manifest_alone(folder)
    faults: list[Fault] = []
    if not manifest.has_checksum:
        faults.append(Fault(MANIFEST_FILE, "", "has no checksum, nor have the tokenizer's files: an older sf-pack made this folder"))
    expected = headers(manifest.geometry, manifest.expert_bits, manifest.dense_bits)
    parts = [*parts_of(manifest, expected), *(Part(name, "", 0, size, size, crc) for name, (size, crc) in manifest.copied.items())]
    counter = _Counter(sum(part.end - part.offset for part in parts), progress)
    faults += _check_parts(manifest.folder, parts, counter)
    known = {*expected, *manifest.copied, MANIFEST_FILE}
    unchecked = tuple(sorted(set(os.listdir(manifest.folder)) - known - {JOURNAL_FILE}))
    return Verification(manifest.folder, tuple(faults), len(parts), counter.total, unchecked)


def parts_of(manifest: Manifest, expected: dict[str, Header]) -> Iterator[Part]:
    """The parts of the three large files, in their order: together they are every byte of them."""
    g = manifest.geometry
    for name, header in expected.items():
        fields = header.pack().rstrip(b"\0")
        yield Part(name, "header", 0, len(fields), HEADER_BYTES, zlib.crc32(fields))
        if name == EXPERTS_FILE:
            for index in range(g.num_hidden_layers * g.num_experts):
                layer, expert = divmod(index, g.num_experts)
                start = HEADER_BYTES + index * manifest.stride
                crc32 = manifest.expert_crc32[layer][expert]
                yield Part(name, f"layer {layer}, expert {expert}", start, manifest.slice_bytes, start + manifest.stride, crc32)
        elif name == DENSE_FILE:
            ends = [*(entry.offset for entry in manifest.tensors.values()), header.file_bytes][1:]
            for (tensor, entry), end in zip(manifest.tensors.items(), ends, strict=True):
                yield Part(name, tensor, entry.offset, entry.bytes, end, entry.crc32)
        elif name == EMBED_FILE:
            size = header.file_bytes - HEADER_BYTES
            yield Part(name, "token embedding", HEADER_BYTES, size, header.file_bytes, manifest.embed_crc32)


class _Counter:
    """Bytes checked so far, counted by several threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        """Count some more, and tell."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self.total)


def _check_parts(folder: Path, parts: list[Part], counter: _Counter) -> list[Fault]:
    """The faults of all parts, in their order, and of files that cannot be opened or are too long."""
    faults: dict[Part, Fault | None] = {}
    ends = {part.file: part for part in parts}
    with ExitStack() as stack:
        files: dict[str, _File] = {}
        for name, last in ends.items():
            try:
                files[name] = file = stack.enter_context(_File(folder / name))
            except OSError as error:
                unreadable = error.errno not in (errno.ENOENT, errno.EINVAL)
                faults[last] = Fault(name, "", f"cannot be opened: {error.strerror}", unreadable)
            else:
                if file.size > last.end:
                    faults[replace(last, offset=last.end, bytes=0)] = Fault(name, "", "goes on behind its end")
        # The longest first: the embedding is one part, and nobody should wait for it alone at the end.
        todo = sorted((part for part in parts if part.file in files), key=lambda part: part.offset - part.end)
        threads = stack.enter_context(ThreadPoolExecutor(THREADS, "verify"))
        try:
            faults.update(zip(todo, threads.map(lambda part: _check(files[part.file], part, counter), todo), strict=True))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    names = list(ends)
    in_order = sorted(faults, key=lambda part: (names.index(part.file), part.offset))
    return [fault for part in in_order if (fault := faults[part]) is not None]


def _check(file: _File, part: Part, counter: _Counter) -> Fault | None:
    """What is wrong with a part."""
    crc32 = 0
    is_zero = True
    covered = part.offset + part.bytes
    try:
        for start, data in file.read(part.offset, part.end):
            inside = max(min(covered - start, len(data)), 0)
            crc32 = zlib.crc32(data[:inside], crc32)
            is_zero = is_zero and not any(data[inside:])
            counter.add(len(data))
    except EOFError:
        return Fault(part.file, part.name, "the file ends before it does")
    except OSError as error:
        return Fault(part.file, part.name, f"cannot be read: {error.strerror}", unreadable=True)
    if crc32 != part.crc32:
        return Fault(part.file, part.name, "its checksum differs")
    return None if is_zero else Fault(part.file, part.name, "the bytes behind it are not zero")


class _File:
    """A file that is read past the page cache, by several threads at once. `size` is in bytes."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = open_regular(path, os.O_DIRECT)
            self._direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._descriptor = open_regular(path)
            self._direct = False
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.size = os.fstat(self._descriptor).st_size
        self._buffers = threading.local()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def read(self, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of pieces that make up begin ... end. Raises EOFError when the file is shorter, OSError."""
        buffer = self._buffer()
        position = begin
        while position < end:
            aligned = position // PAGE * PAGE
            size = min(align(end - aligned, PAGE), _PIECE)
            count = os.preadv(self._descriptor, [buffer[:size]], aligned) - (position - aligned)
            if count <= 0:
                raise EOFError
            count = min(count, end - position)
            yield position, buffer[position - aligned : position - aligned + count]
            if not self._direct:
                os.posix_fadvise(self._descriptor, aligned, size, os.POSIX_FADV_DONTNEED)
            position += count

    def _buffer(self) -> memoryview:
        """This thread's buffer, on a page's boundary as O_DIRECT wants it."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(mmap.mmap(-1, _PIECE))
        memory: memoryview = self._buffers.memory
        return memory
