"""Checkpoint -> packed folder: resumable, nothing left behind when the source is at fault, the manifest written last.

A resumed pack is byte-identical to an undisturbed one: everything in the manifest comes from the journal's records.

Source digest of a shard, in the manifest: sha256 over the shard's header (length and JSON, as stored), then for each tensor that
was read, in order of name: the name in UTF-8, a zero byte, and the crc32 of the tensor's bytes as a little-endian u32.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sparseflow import packfile
from sparseflow.checkpoint import Checkpoint
from sparseflow.errors import CheckpointError, OptionError, StorageError
from sparseflow.journal import Journal
from sparseflow.packer import Packer, Progress, Record
from sparseflow.packfile import BITS
from sparseflow.shards import SourceTensor, read_json, total_bytes
from sparseflow.sizes import format_bytes

REQUIRED_FILES = ("config.json",)
# A model without a tokenizer still runs on token ids; asking it for text says what is missing.
OPTIONAL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

_SPARE_BYTES = 16 * 1024 * 1024  # room for the manifest, the journal and the tokenizer files


def pack_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    experts: str = "int8",
    dense: str = "int8",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Pack the checkpoint folder `source` into the new folder `destination`; returns the manifest.

    `experts` and `dense` are "int8" or "bf16". `destination` may be a pack of the same source and options that was interrupted:
    it is completed. Its parent must exist. On KeyboardInterrupt, and when the disk fails midway, the folder is left to be resumed.

    Raises CheckpointError (the source is at fault: no folder is left), OptionError (`destination` exists or cannot be resumed, an
    option has no such value), PackedModelError (the unfinished pack is damaged), StorageError (no room, the disk refused).
    """
    for option, value in (("experts", experts), ("dense", dense)):
        if value not in BITS:
            raise OptionError(f"{option} is {value!r}, it must be one of {', '.join(BITS)}")
    folder = Path(destination)
    if folder.exists() and Path(source).exists() and folder.samefile(source):
        raise OptionError(f"{folder}: is the checkpoint itself, choose a folder that does not exist")
    try:
        with Checkpoint(source) as checkpoint:
            copied = _files_to_copy(checkpoint.folder)
            identity = _identity(checkpoint, experts, dense)
            headers = packfile.headers(checkpoint.geometry, BITS[experts], BITS[dense])
            resumed = _claim(folder, sum(header.file_bytes for header in headers.values()))
            with _journal(folder, resumed) as journal:
                if (folder / packfile.MANIFEST_FILE).exists():  # another process finished it before this one had the lock
                    journal.path.unlink(missing_ok=True)
                    raise OptionError(f"{folder}: is a finished pack already, choose another folder or delete it")
                if journal.identity is None:
                    journal.begin(identity)
                elif journal.identity != identity:
                    raise OptionError(f"{folder}: {_difference(journal.identity, identity)}, delete the folder to start again")
                try:
                    with Packer(checkpoint, folder, headers, progress) as packer:
                        packer.run(journal)
                    entries = {name: _copy(checkpoint.folder / name, folder / name) for name in copied}
                    manifest = _manifest(checkpoint, identity, headers, journal.done, entries)
                    packfile.write_manifest(folder, manifest)
                except CheckpointError:
                    # The source will not get better by trying again.
                    _discard(folder)
                    raise
                except (StorageError, OSError):
                    # With nothing done there is nothing worth resuming.
                    if not resumed and not journal.done:
                        _discard(folder)
                    raise
                journal.path.unlink()
                packfile.sync_folder(folder)
            return manifest
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: {error.strerror or error}") from None


def _journal(folder: Path, resumed: bool) -> Journal:
    """The folder's journal. If it cannot be begun, a folder that was just made does not stay behind to be refused next time."""
    try:
        return Journal(folder)
    except BaseException:
        if not resumed:
            with suppress(OSError):  # something lies in it: not ours to remove
                folder.rmdir()
        raise


def _claim(folder: Path, size: int) -> bool:
    """Create the folder, or find it unfinished: then return True. Checks that there is room for `size` bytes."""
    resumed = False
    if folder.exists() or folder.is_symlink():
        if (folder / packfile.MANIFEST_FILE).exists():
            raise OptionError(f"{folder}: is a finished pack already, choose another folder or delete it")
        if not (folder / packfile.JOURNAL_FILE).is_file():
            raise OptionError(f"{folder}: exists and is not an unfinished pack, choose a folder that does not exist")
        resumed = True
    elif not folder.parent.is_dir():
        raise OptionError(f"{folder}: its parent {folder.parent} is not a folder, create it first")
    have = sum((folder / name).stat().st_blocks * 512 for name in os.listdir(folder)) if resumed else 0
    need = max(size + _SPARE_BYTES - have, 0)
    free = shutil.disk_usage(folder.parent).free
    if need > free:
        raise StorageError(
            f"{folder}: the pack needs {format_bytes(need)} ({need} bytes), the disk has {format_bytes(free)} ({free} bytes) free: "
            "make room or choose another disk"
        )
    if not resumed:
        try:
            folder.mkdir()
        except FileExistsError:
            raise OptionError(f"{folder}: another process has just begun to pack into it, wait for it or choose another") from None
    return resumed


def _discard(folder: Path) -> None:
    """Remove what packing wrote, by name: whatever else lies in the folder is not ours."""
    ours = (packfile.EXPERTS_FILE, packfile.DENSE_FILE, packfile.EMBED_FILE, packfile.MANIFEST_FILE + ".tmp")
    for name in (*ours, *REQUIRED_FILES, *OPTIONAL_FILES, packfile.JOURNAL_FILE):
        (folder / name).unlink(missing_ok=True)
    if not os.listdir(folder):
        folder.rmdir()


def _files_to_copy(source: Path) -> list[str]:
    """Names of the configuration and tokenizer files to take along. Raises CheckpointError for one that is damaged or lacking."""
    names = [name for name in (*REQUIRED_FILES, *OPTIONAL_FILES) if name in REQUIRED_FILES or (source / name).exists()]
    for name in names:
        if name.endswith(".json"):
            read_json(source / name)
        elif not (source / name).is_file():
            raise CheckpointError(f"{source / name}: is not a file")
    return names


def _copy(source: Path, target: Path) -> Record:
    """Copy a small file, durably; returns its entry in the manifest, of the bytes that were read."""
    try:
        data = source.read_bytes()
        with open(target, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # which names one of the two, not the other
        raise StorageError(f"{target}: cannot be copied from {source}: {error.strerror}") from None
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _identity(checkpoint: Checkpoint, experts: str, dense: str) -> Record:
    """What must be equal for a pack to be continued."""
    return {
        "format_version": packfile.FORMAT_VERSION,
        "tool_version": tool_version(),
        "experts": experts,
        "dense": dense,
        "geometry": checkpoint.geometry.to_json(),
        "shards": {name: shard.identity() for name, shard in checkpoint.shards.items()},
    }


def _difference(begun: Record, now: Record) -> str:
    """Why a pack that was begun so cannot be continued now."""
    for option in ("experts", "dense"):
        if begun.get(option) != now[option]:
            return f"was begun with --{option} {begun.get(option)} and cannot be continued with --{option} {now[option]}"
    for key in ("format_version", "tool_version"):
        if begun.get(key) != now[key]:
            return f"was begun by another SparseFlow ({key} {begun.get(key)}, now {now[key]}) and cannot be continued"
    shards = begun.get("shards", {})
    for name in sorted(set(shards) | set(now["shards"])):
        if shards.get(name) != now["shards"].get(name):
            return f"cannot be continued because shard {name} of the checkpoint has changed since it was begun"
    return "cannot be continued because config.json of the checkpoint has changed since it was begun"


def _manifest(
    checkpoint: Checkpoint, identity: Record, headers: dict[str, packfile.Header], done: dict[str, Record], copied: Record
) -> Record:
    """The manifest, of the journal's records and the entries of the copied files only."""
    geometry = checkpoint.geometry
    plan, _ = packfile.dense_plan(geometry, BITS[identity["dense"]])
    dense_crc32 = {name: crc for record in done.values() for name, crc in record.get("dense", {}).items()}
    source_crc32 = {name: crc for record in done.values() for name, crc in record["source"].items()}
    experts = headers[packfile.EXPERTS_FILE]
    return {
        "format": "sparseflow",
        "format_version": packfile.FORMAT_VERSION,
        "tool_version": identity["tool_version"],
        "geometry": geometry.to_json(),
        "quantization": {
            "experts": identity["experts"],
            "dense": identity["dense"],
            "weight_group": experts.weight_group,
            "activation_group": experts.activation_group,
        },
        "files": {name: {"bytes": header.file_bytes} for name, header in headers.items()},
        "experts": {
            "stride": experts.stride,
            "slice_bytes": experts.slice_bytes,
            "crc32": [done[f"layers.{layer}.experts"]["experts"] for layer in range(geometry.num_hidden_layers)],
        },
        "dense": {
            "tensors": [replace(entry, crc32=dense_crc32[name]).to_json(name) for name, entry in plan.items()]
        },
        "embed": {"crc32": done["embed"]["embed"]},
        "copied": copied,
        "source": {"shards": _digests(checkpoint, source_crc32)},
        "report": _report(checkpoint, headers, done),
    }


def _digests(checkpoint: Checkpoint, source_crc32: dict[str, int]) -> Record:
    """Shard -> its size and digest (see the module's docstring)."""
    shards = {}
    for name, shard in checkpoint.shards.items():
        digest = hashlib.sha256(shard.header)
        for tensor in sorted(shard.tensors):
            if tensor in source_crc32:
                digest.update(tensor.encode() + b"\0" + struct.pack("<I", source_crc32[tensor]))
        shards[name] = {"bytes": shard.size, "digest": f"sha256:{digest.hexdigest()}"}
    return shards


def _report(checkpoint: Checkpoint, headers: dict[str, packfile.Header], done: dict[str, Record]) -> Record:
    """What went where: counts and bytes of tensors, which were rounded to bfloat16 from something wider, and which norms had channels
    evened out."""

    def part(tensors: list[SourceTensor], file: str) -> Record:
        return {
            "tensors": len(tensors),
            "source_bytes": total_bytes(tensors),
            "packed_bytes": headers[file].file_bytes,
        }

    rounded: dict[str, list[int]] = {}
    for record in done.values():
        for name, (tensors, changed) in record["rounded"].items():
            entry = rounded.setdefault(name, [0, 0])
            entry[0] += tensors
            entry[1] += changed
    # A tied head is the embedding once more: it has no tensor of its own.
    dense = [tensor for tensor in checkpoint.dense.values() if tensor is not checkpoint.embedding]
    equalised = {name: entry for record in done.values() for name, entry in record.get("equalised", {}).items()}
    return {
        "experts": part(checkpoint.expert_tensors(), packfile.EXPERTS_FILE),
        "dense": part(dense, packfile.DENSE_FILE),
        "embedding": part([checkpoint.embedding], packfile.EMBED_FILE),
        "left_out": {
            kind: {"tensors": len(tensors), "source_bytes": total_bytes(tensors)}
            for kind, tensors in checkpoint.left_out.items()
        },
        "rounded_to_bf16": {
            name: {"tensors": tensors, "values_changed": changed} for name, (tensors, changed) in sorted(rounded.items())
        },
        "equalised": equalised,
    }


def tool_version() -> str:
    """Version of the installed SparseFlow; "unknown" when it runs from a source tree that was never installed."""
    try:
        return version("sparseflow")
    except PackageNotFoundError:
        return "unknown"
