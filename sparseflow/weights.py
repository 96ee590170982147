"""The resident weights of a packed model: the dense core in anonymous memory, the embedding mapped and read by row."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow.errors import CapacityError, PackedModelError, StorageError
from sparseflow.kernels import linear
from sparseflow.layout import ExpertLayout, TensorEntry, align, scales_offset, tile_bytes
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, HEADER_BYTES, Manifest
from sparseflow.regular_file import open_regular
from sparseflow.sizes import format_bytes
from sparseflow.tiles import alternate, row_tiles

READ_BYTES = 16 << 20
"""Read at once, at most."""
_SHARED = ".shared_expert."
_LINE = 64  # tensors begin on a cache line


class Activations:
    """Rows of activations that several matrices share: float32 [tokens, columns], quantised once when first asked for."""

    def __init__(self, x: NDArray[np.float32], threads: int) -> None:
        self.x = x
        self.threads = threads
        self._quantized: linear.Quantized | None = None

    @property
    def quantized(self) -> linear.Quantized:
        """The int8 form of `x`."""
        if self._quantized is None:
            self._quantized = linear.quantize(self.x, self.threads)
        return self._quantized


class Linear:
    """A weight matrix [rows, columns] of the dense core; calling it gives x W^T, float32 [tokens, rows].

    Attributes: rows, columns, bits 8 (tiles uint8, scales the bits of float16) or 16 (tiles uint16, the bits of bfloat16; no scales).
    """

    def __init__(self, entry: TensorEntry, data: NDArray[np.uint8]) -> None:
        self.rows, self.columns = entry.shape
        self.bits = 8 if entry.kind == "int8" else 16
        self.tiles: NDArray[Any] = data.view(np.uint16)
        self.scales = np.empty(0, np.uint16)
        if self.bits == 8:
            self.tiles = data[: tile_bytes(self.rows, self.columns, 8)]
            self.scales = data[scales_offset(entry.shape) :].view(np.uint16)
        self._matrix = linear.Matrix(self.tiles, self.scales, self.rows, self.columns)

    def __call__(
        self, x: Activations, onto: NDArray[np.float32] | None = None, joined: bool = False
    ) -> NDArray[np.float32]:
        """x W^T, or `onto` with that added in place; `joined`: beside the kernel before, of which it needs nothing."""
        return self._matrix.multiply(x.quantized if self.bits == 8 else x.x, x.threads, onto, joined)


def project(x: Activations, *matrices: Linear) -> list[NDArray[np.float32]]:
    """The same activations through several matrices, side by side."""
    if any(matrix.bits == 8 for matrix in matrices):
        x.quantized  # what they all need comes before the first
    return [matrix(x, joined=i > 0) for i, matrix in enumerate(matrices)]


class DenseCore:
    """All tensors of dense.sfx by canonical name (`layers.0.input_layernorm.weight`).

    They are read into one piece of anonymous memory, which no pressure from the experts' file mapping can push out, in huge
    pages where the system has them; only the shared experts' projections lie apart, since SharedExpert rearranges them and
    lets them go. Raises StorageError when the disk refuses, CapacityError when there is no memory, PackedModelError when the
    file ends early or a tensor's checksum differs. `progress(done, total)` is called with bytes.
    """

    def __init__(
        self, manifest: Manifest, *, drop_page_cache: bool, progress: Callable[[int, int], None] | None = None
    ) -> None:
        path = manifest.folder / DENSE_FILE
        self.linears: dict[str, Linear] = {}
        self.arrays: dict[str, NDArray[np.float32]] = {}
        self.nbytes = sum(entry.bytes for entry in manifest.tensors.values())
        kept = {name: align(entry.bytes, _LINE) for name, entry in manifest.tensors.items() if _SHARED not in name}
        memory = _anonymous(sum(kept.values()), str(path))
        done = position = 0
        with _open(path) as descriptor:
            for name, entry in manifest.tensors.items():
                if name in kept:
                    data = memory[position : position + entry.bytes]
                    position += kept[name]
                else:
                    data = np.empty(entry.bytes, np.uint8)
                checksum = 0
                for start in range(0, entry.bytes, READ_BYTES):
                    part = data.data[start : start + READ_BYTES]
                    _read_into(descriptor, part, entry.offset + start, f"{path}: {name}")
                    checksum = zlib.crc32(part, checksum)
                    done += len(part)
                    if progress is not None:
                        progress(done, self.nbytes)
                if checksum != entry.crc32:
                    raise PackedModelError(f"{path}: {name} is damaged (its checksum differs), pack the checkpoint again with sf-pack")
                if entry.kind == "f32":
                    self.arrays[name] = data.view(np.float32).reshape(entry.shape)
                else:
                    self.linears[name] = Linear(entry, data)
            if drop_page_cache:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class SharedExpert:
    """A shared expert in the form of a routed expert's slice, so that one kernel serves both."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.intermediate = gate.rows
        self.layout = ExpertLayout(gate.columns, gate.rows, gate.bits)
        self.slice = _anonymous(self.layout.slice_bytes, "a shared expert")
        tiles = row_tiles(gate.rows)
        self._write(self.layout.gate_up_tiles, alternate(gate.tiles, up.tiles, tiles))
        self._write(self.layout.down_tiles, down.tiles)
        if self.layout.gate_up_scales is not None and self.layout.down_scales is not None:
            self._write(self.layout.gate_up_scales, alternate(gate.scales, up.scales, tiles))
            self._write(self.layout.down_scales, down.scales)
        self.addresses = np.array([self.slice.ctypes.data], np.uint64)

    def _write(self, offset: int, values: NDArray[Any]) -> None:
        data = values.view(np.uint8)
        self.slice[offset : offset + data.size] = data


class Embedding:
    """The token embedding, bfloat16 [vocab, hidden], read by row: it is never resident as a whole.

    Rows are read, not mapped: a run would map 64 KiB around each, and a file cut short would be a signal instead of an error.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._path = manifest.folder / EMBED_FILE
        self._columns = manifest.geometry.hidden_size
        self._file = _open(self._path)

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the tokens `ids`, float32 [tokens, hidden]."""
        rows = np.empty((len(ids), self._columns), np.uint16)
        for row, token in zip(rows, ids.tolist(), strict=True):
            _read_into(
                self._file.descriptor, row.view(np.uint8).data, HEADER_BYTES + token * row.nbytes, f"{self._path}: token {token}"
            )
        return (rows.astype(np.uint32) << 16).view(np.float32)


def _anonymous(size: int, what: str) -> NDArray[np.uint8]:
    """Anonymous memory, in huge pages where the system has them; freed with the last array that views it."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"{what}: {format_bytes(size)} of memory for it cannot be had: {error.strerror}") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: slower, not wrong
    return np.frombuffer(memory, np.uint8)


class _open:
    """A file descriptor for reading, as a context."""

    def __init__(self, path: os.PathLike[str]) -> None:
        self.descriptor = -1
        try:
            self.descriptor = open_regular(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


def _read_into(descriptor: int, part: memoryview, offset: int, what: str) -> None:
    while len(part):
        try:
            count = os.preadv(descriptor, [part], offset)
        except OSError as error:
            raise StorageError(f"{what}: cannot be read: {error.strerror}") from error
        if count == 0:
            raise PackedModelError(f"{what}: the file ends early, pack the checkpoint again with sf-pack")
        part, offset = part[count:], offset + count
