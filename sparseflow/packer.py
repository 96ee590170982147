"""The three packed files being filled: units of work that read, round, tile and write.

Design. The caller's thread reads the source in order, keeps checksums and writes; a few workers round and tile. At most
`workers + 1` pieces are in flight, so memory does not depend on the size of a shard or of a tensor. Work is cut into units (one
layer's experts, one layer's dense tensors, the head, the embedding); a unit goes into the journal once its bytes are on the
disk, with all that the manifest needs to know of it.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseflow import packfile
from sparseflow.checkpoint import Checkpoint, family
from sparseflow.encode import as_bf16_bits, as_float32, pack_expert, pack_matrix, values_changed
from sparseflow.equalise import channel_powers, equalised_norm, norm_before, norm_before_experts
from sparseflow.errors import PackedModelError, StorageError
from sparseflow.journal import Journal
from sparseflow.layout import ExpertLayout, TensorEntry
from sparseflow.packfile import BITS, HEADER_BYTES
from sparseflow.quantize import require_finite
from sparseflow.shards import Rows, SourceTensor, total_bytes, whole
from sparseflow.tiles import TILE_ROWS

# Called with (source bytes read so far, source bytes to read); the first call says where a resumed pack stands.
Progress = Callable[[int, int], None]
Record = dict[str, Any]

_BLOCK_WEIGHTS = 4 * 1024 * 1024  # weights of a large matrix in one piece: 8 MiB of bfloat16
_WORKERS = 4


class Packer:
    """The three files being filled, and the units of work that fill them."""

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, headers: dict[str, packfile.Header], progress: Progress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.geometry = checkpoint.geometry
        self.expert_bits = headers[packfile.EXPERTS_FILE].weight_bits
        self.dense_bits = headers[packfile.DENSE_FILE].weight_bits
        self.plan, _ = packfile.dense_plan(self.geometry, self.dense_bits)
        # Of the source and the options only, so that a resumed pack has the same.
        self.powers = cache(partial(channel_powers, checkpoint, self.plan, self.expert_bits))
        self.norms = {norm_before(name) for name in self.plan}
        self.progress = progress
        self.read_bytes = 0
        self.total = sum(tensor.bytes for tensor in checkpoint.dense.values()) + checkpoint.embedding.bytes
        self.total += total_bytes(checkpoint.expert_tensors())
        workers = min(_WORKERS, len(os.sched_getaffinity(0)))
        self.in_flight = workers + 1
        self.pool = ThreadPoolExecutor(workers, "sf-pack")
        self.files: dict[str, int] = {}
        self.source_crc32: dict[str, int] = {}
        self.rounded: dict[str, int] = {}
        self.headers = headers

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        while self.files:
            os.close(self.files.popitem()[1])

    def run(self, journal: Journal) -> None:
        """Do every unit that the journal does not hold.

        Raises StorageError if a file cannot have its full size, PackedModelError if one was lost since the units in it were done.
        """
        for name, header in self.headers.items():
            self.files[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if journal.done and os.fstat(self.files[name]).st_size != header.file_bytes:
                raise PackedModelError(f"{self.folder / name}: was changed since packing stopped, delete the folder to start again")
            self._allocate(name, header.file_bytes)
            self._write(name, header.pack(), 0)
        packfile.sync_folder(self.folder)
        self.read_bytes = sum(record["read_bytes"] for record in journal.done.values())
        self._report()
        for unit, file, work in self._units():
            if unit in journal.done:
                continue
            self.source_crc32, self.rounded = {}, {}
            start = self.read_bytes
            record = work()
            os.fsync(self.files[file])
            record |= {"read_bytes": self.read_bytes - start, "source": self.source_crc32, "rounded": _by_family(self.rounded)}
            journal.finish_unit(unit, record)

    def _units(self) -> Iterator[tuple[str, str, Callable[[], Record]]]:
        """(name, file, work) of each unit, in the order of a checkpoint's shards."""
        names: dict[str, list[str]] = {}
        for name in self.plan:
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "head"
            names.setdefault(unit, []).append(name)
        yield "embed", packfile.EMBED_FILE, self._embed
        for layer in range(self.geometry.num_hidden_layers):
            unit = f"layers.{layer}"
            yield f"{unit}.dense", packfile.DENSE_FILE, partial(self._dense, names[unit])
            yield f"{unit}.experts", packfile.EXPERTS_FILE, partial(self._experts, layer)
        yield "head", packfile.DENSE_FILE, partial(self._dense, names["head"])

    def _experts(self, layer: int) -> Record:
        """All routed experts of a layer; the record holds the crc32 of each slice."""
        layout = ExpertLayout(self.geometry.hidden_size, self.geometry.moe_intermediate_size, self.expert_bits)
        count = self.geometry.num_experts
        powers = self.powers(norm_before_experts(layer))

        def jobs() -> Iterator[Callable[[], NDArray[np.uint8]]]:
            for expert in range(count):
                parts = self.checkpoint.expert(layer, expert)
                gate, up, down = (self._read(rows, self.expert_bits) for rows in parts)
                names = [f"{rows.tensor.name} (expert {expert})" for rows in parts]
                yield partial(pack_expert, gate, up, down, self.expert_bits, (names[0], names[1], names[2]), powers)

        checksums = []
        for expert, data in enumerate(self._in_order(jobs())):
            self._write(packfile.EXPERTS_FILE, data, HEADER_BYTES + (layer * count + expert) * layout.stride)
            checksums.append(zlib.crc32(data))
        return {"experts": checksums}

    def _dense(self, names: list[str]) -> Record:
        """Some tensors of dense.sfx; the record holds the crc32 of each, and which norms had channels evened out."""
        checksums = {name: self._tensor(name, self.plan[name], self.checkpoint.dense[name]) for name in names}
        powers = {name: self.powers(name) for name in names if name in self.norms}
        equalised = {
            name: {"channels": int(np.count_nonzero(power)), "largest_factor": 2 ** int(power.max())}
            for name, power in powers.items()
            if power.any()
        }
        return {"dense": checksums, "equalised": equalised}

    def _tensor(self, name: str, entry: TensorEntry, source: SourceTensor) -> int:
        """Write one tensor of dense.sfx; returns the crc32 of its bytes."""
        if entry.kind == "f32":
            values = as_float32(self._read(whole(source), 32))
            require_finite(values, source.name)
            if name in self.norms:
                values = equalised_norm(values, self.powers(name))
            # The convolution is stored one row per tap; a vector is a single row and stays as it is.
            data = np.ascontiguousarray(values.T if len(source.shape) == 3 else values)
            self._write(packfile.DENSE_FILE, data, entry.offset)
            return zlib.crc32(data.data)
        bits = BITS[entry.kind]
        norm = norm_before(name)
        powers = None if norm is None else self.powers(norm)
        position, checksum, scales = entry.offset, 0, []
        jobs = (partial(pack_matrix, block, bits, source.name, powers) for block in self._blocks(source, bits))
        for tiles, tile_scales in self._in_order(jobs):
            self._write(packfile.DENSE_FILE, tiles, position)
            checksum = zlib.crc32(tiles, checksum)
            position += tiles.nbytes
            scales.append(tile_scales)
        if bits == 8:
            gap = entry.offset + entry.scales_offset - position
            tail = bytes(gap) + np.concatenate(scales).tobytes()
            self._write(packfile.DENSE_FILE, tail, position)
            checksum = zlib.crc32(tail, checksum)
        return checksum

    def _embed(self) -> Record:
        """The embedding's rows as bfloat16; the record holds the crc32 of all of them."""
        source = self.checkpoint.embedding
        position, checksum = HEADER_BYTES, 0
        jobs = (partial(as_bf16_bits, block, source.name) for block in self._blocks(source, 16))
        for rows in self._in_order(jobs):
            self._write(packfile.EMBED_FILE, rows, position)
            checksum = zlib.crc32(rows, checksum)
            position += rows.nbytes
        return {"embed": checksum}

    def _blocks(self, source: SourceTensor, bits: int) -> Iterator[NDArray[Any]]:
        """The rows of a matrix in pieces of whole tile rows."""
        rows, columns = source.shape
        step = max(_BLOCK_WEIGHTS // columns // TILE_ROWS, 1) * TILE_ROWS
        for start in range(0, rows, step):
            yield self._read(Rows(source, start, min(start + step, rows)), bits)

    def _in_order(self, jobs: Iterator[Callable[[], Any]]) -> Iterator[Any]:
        """Results of the jobs in their order, a bounded number of them in flight."""
        pending: deque[Future[Any]] = deque()
        for job in jobs:
            pending.append(self.pool.submit(job))
            if len(pending) >= self.in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _read(self, rows: Rows, bits: int) -> NDArray[Any]:
        """Stored weights that will be packed in `bits`. Each tensor is read in its own order, so a running crc32 covers it."""
        stored = self.checkpoint.read(rows)
        name = rows.tensor.name
        self.source_crc32[name] = zlib.crc32(stored.data, self.source_crc32.get(name, 0))
        if bits == 16 and rows.tensor.dtype != "BF16":
            self.rounded[name] = self.rounded.get(name, 0) + values_changed(stored)
        self.read_bytes += stored.nbytes
        self._report()
        return stored

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.read_bytes, self.total)

    def _write(self, file: str, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        try:
            while view:
                count = os.pwrite(self.files[file], view, offset)
                # Linux begins to write these pages back: the disk then works while the next piece is read and rounded.
                os.posix_fadvise(self.files[file], offset, count, os.POSIX_FADV_DONTNEED)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise StorageError(
                f"{self.folder / file}: writing failed ({error.strerror}), make room and run the same command again to continue"
            ) from None

    def _allocate(self, file: str, size: int) -> None:
        """Give the file its full size at once, so that a full disk shows now and not after hours."""
        try:
            os.posix_fallocate(self.files[file], 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise StorageError(f"{self.folder / file}: no room for {size} bytes ({error.strerror})") from None
            os.ftruncate(self.files[file], size)


def _by_family(rounded: dict[str, int]) -> dict[str, list[int]]:
    """Tensor -> values changed, summed to family -> [tensors, values changed]."""
    families: dict[str, list[int]] = {}
    for name, changed in rounded.items():
        entry = families.setdefault(family(name), [0, 0])
        entry[0] += 1
        entry[1] += changed
    return families
