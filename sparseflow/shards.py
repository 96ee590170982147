"""Safetensors files as byte ranges: headers are checked by the library, weights are read range by range with `pread`.

Our own buffers and not a mapping: pages of a mapped shard count as ours, and a shard may be larger than the memory that packing
promises to stay under. The library gives no offsets, so the header it has approved is decoded once more here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sparseflow.errors import CheckpointError, StorageError
from sparseflow.regular_file import open_regular, read_regular

# Numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype(np.uint16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a shard: `name` as in the file, `offset` of its first byte from the file's start."""

    name: str
    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a tensor seen as a matrix: all dimensions but the last are flattened into rows."""

    tensor: SourceTensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.tensor.shape[-1]


def whole(tensor: SourceTensor) -> Rows:
    """All rows of a tensor; a vector is one row, a convolution [C, 1, k] is [C, k]."""
    return Rows(tensor, 0, math.prod(tensor.shape[:-1]))


def total_bytes(tensors: Iterable[SourceTensor]) -> int:
    """Sum of the sizes of tensors in their shards."""
    return sum(tensor.bytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its size in bytes, modification time in ns, header as stored (length and JSON), and tensors."""

    size: int
    modified: int
    header: bytes
    tensors: dict[str, SourceTensor]

    def identity(self) -> dict[str, Any]:
        """What must stay the same for an interrupted pack to be resumed."""
        return {"bytes": self.size, "modified_ns": self.modified, "header": hashlib.sha256(self.header).hexdigest()}


def read_header(folder: Path, name: str) -> Shard:
    """Read a shard's header. Raises CheckpointError for a Git LFS pointer, a truncated or a damaged file."""
    path = folder / name
    size = 0
    try:
        with open(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            refuse_pointer(path, file.read(len(_LFS_POINTER)))
            # The library checks what can be wrong with a header: offsets, overlaps, holes, sizes against dtypes and the file.
            with safe_open(path, framework="numpy"):
                file.seek(0)
                start = file.read(8)
                text = file.read(int.from_bytes(start, "little"))
        entries = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is truncated or damaged ({size} bytes; {error}), download it again") from None
    entries.pop("__metadata__", None)
    data = len(start) + len(text)
    tensors = {}
    for tensor, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensors[tensor] = SourceTensor(tensor, name, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
    return Shard(size, status.st_mtime_ns, start + text, tensors)


class ShardReader:
    """Reads ranges of the shards of one folder; a context manager that holds the files open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors: dict[str, int] = {}

    def read(self, rows: Rows) -> NDArray[Any]:
        """The rows as stored: uint16 bits for BF16, float16 or float32 otherwise.

        Raises StorageError if the disk refuses, CheckpointError if the file has become shorter.
        """
        tensor = rows.tensor
        buffer: NDArray[Any] = np.empty(rows.shape, DTYPES[tensor.dtype])
        view = buffer.data.cast("B")
        position = tensor.offset + rows.start * tensor.shape[-1] * buffer.itemsize
        path = self.folder / tensor.shard
        try:
            descriptor = self._descriptors.get(tensor.shard)
            if descriptor is None:
                descriptor = self._descriptors[tensor.shard] = open_regular(path)
            while view:
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    raise CheckpointError(f"{path}: ends inside tensor {tensor.name}, it was changed while being read")
                view, position = view[count:], position + count
        except OSError as error:
            raise StorageError(f"{path}: reading tensor {tensor.name} failed ({error.strerror})") from None
        return buffer

    def close(self) -> None:
        """Close the shards that were read."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_json(path: Path) -> Any:
    """Decode a JSON file of a checkpoint. Raises CheckpointError if it is absent, a Git LFS pointer, or not JSON."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    refuse_pointer(path, data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from None


def refuse_pointer(path: Path, data: bytes) -> None:
    """Raise CheckpointError if a file that begins with `data` is what Git LFS leaves in place of a file it did not fetch."""
    if data.startswith(_LFS_POINTER):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself: run git lfs pull in the checkpoint's folder")
