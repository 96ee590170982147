"""Format version 1 of a packed model: file headers, strides, the manifest. Bytes only; nothing here computes with weights.

A packed folder holds `experts.sfx`, `dense.sfx`, `embed.sfx`, the checkpoint's configuration and tokenizer files, and
`manifest.json`, which is written last: a folder without it is an unfinished pack. All numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from sparseflow import manifest_text
from sparseflow.config import Geometry
from sparseflow.errors import PackedModelError
from sparseflow.layout import PAGE, ExpertLayout, TensorEntry, align, tensor_bytes
from sparseflow.quantize import ACTIVATION_GROUP, WEIGHT_GROUP
from sparseflow.regular_file import open_regular, read_regular

FORMAT_VERSION = 1
MAGIC = b"SPARSEFX"
HEADER_BYTES = 4096

KIND_EXPERTS, KIND_DENSE, KIND_EMBED = 1, 2, 3
EXPERTS_FILE, DENSE_FILE, EMBED_FILE = "experts.sfx", "dense.sfx", "embed.sfx"
MANIFEST_FILE, JOURNAL_FILE = "manifest.json", "pack.journal"
BITS = {"int8": 8, "bf16": 16}
NAME_OF_BITS = {bits: name for name, bits in BITS.items()}

# Small matrices whose rounding would move the routes and the decay: they are always kept in bfloat16.
_ALWAYS_BF16 = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "shared_expert_gate.weight")

_REPACK = "pack the checkpoint again with sf-pack"
_STRUCT = struct.Struct("<8sIIIIIIIIIIQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first 4096 bytes of every .sfx file, so that each can be opened on its own. Fields in the order of the file.

    kind 1 (experts): slice (layer, e) lies at header_bytes + (layer * num_experts + e) * stride.
    kind 2 (dense): the sizes that make no sense there are 0, weight_bits is that of its large matrices.
    kind 3 (embed): num_experts is the vocabulary, stride = slice_bytes = one row of bfloat16.
    """

    kind: int
    weight_bits: int
    num_layers: int = 0
    num_experts: int = 0
    hidden_size: int
    intermediate_size: int = 0
    weight_group: int = WEIGHT_GROUP
    activation_group: int = ACTIVATION_GROUP
    stride: int = 0
    slice_bytes: int = 0
    file_bytes: int

    def pack(self) -> bytes:
        """The header's 4096 bytes: magic, version, header size, fields, crc32 of all those, zeros."""
        data = _STRUCT.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, *astuple(self))
        return (data + struct.pack("<I", zlib.crc32(data))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes, source: str) -> Header:
        """Read a header. Raises PackedModelError naming `source` if it is short, damaged, or of a later version."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise PackedModelError(f"{source}: does not begin with a SparseFlow header, {_REPACK}")
        _, version, header_bytes, *values = _STRUCT.unpack_from(data)
        if version > FORMAT_VERSION:
            raise PackedModelError(f"{source}: {_future(version)}")
        (checksum,) = struct.unpack_from("<I", data, _STRUCT.size)
        if checksum != zlib.crc32(data[: _STRUCT.size]) or header_bytes != HEADER_BYTES:
            raise PackedModelError(f"{source}: the header is damaged, {_REPACK}")
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))


def dense_plan(geometry: Geometry, dense_bits: int) -> tuple[dict[str, TensorEntry], int]:
    """Where each tensor of dense.sfx lies (crc32 still 0), in file order, and the size of the file."""
    plan: dict[str, TensorEntry] = {}
    offset = HEADER_BYTES
    for name, shape in geometry.dense_shapes().items():
        if name.endswith("conv1d.weight"):
            # Stored one row per tap, so that a step is a few multiply-adds along the channels.
            shape = (shape[2], shape[0])
        if len(shape) == 1 or name.endswith("conv1d.weight"):
            kind = "f32"
        else:
            kind = "bf16" if name.endswith(_ALWAYS_BF16) else NAME_OF_BITS[dense_bits]
        size = tensor_bytes(kind, shape)
        plan[name] = TensorEntry(kind, shape, offset, size, 0)
        offset = align(offset + size, PAGE)
    return plan, offset


def headers(geometry: Geometry, expert_bits: int, dense_bits: int) -> dict[str, Header]:
    """File name -> the header it must have. `file_bytes` of each is the exact size of the file."""
    hidden = geometry.hidden_size
    layers, experts = geometry.num_hidden_layers, geometry.num_experts
    layout = ExpertLayout(hidden, geometry.moe_intermediate_size, expert_bits)
    return {
        EXPERTS_FILE: Header(
            kind=KIND_EXPERTS,
            weight_bits=expert_bits,
            num_layers=layers,
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=geometry.moe_intermediate_size,
            stride=layout.stride,
            slice_bytes=layout.slice_bytes,
            file_bytes=HEADER_BYTES + layers * experts * layout.stride,
        ),
        DENSE_FILE: Header(
            kind=KIND_DENSE, weight_bits=dense_bits, hidden_size=hidden, file_bytes=dense_plan(geometry, dense_bits)[1]
        ),
        EMBED_FILE: Header(
            kind=KIND_EMBED,
            weight_bits=16,
            num_experts=geometry.vocab_size,
            hidden_size=hidden,
            stride=2 * hidden,
            slice_bytes=2 * hidden,
            file_bytes=HEADER_BYTES + geometry.vocab_size * 2 * hidden,
        ),
    }


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says, checked against the geometry.

    `copied` has the files that were taken over from the checkpoint: name -> (bytes, crc32). `has_checksum` is whether the manifest
    has one of its own, which then is right.
    """

    folder: Path
    geometry: Geometry
    expert_bits: int
    dense_bits: int
    stride: int
    slice_bytes: int
    tensors: dict[str, TensorEntry]
    expert_crc32: list[list[int]]
    embed_crc32: int
    copied: dict[str, tuple[int, int]]
    has_checksum: bool
    raw: dict[str, Any]


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json whole or not at all, and durably."""
    target = folder / MANIFEST_FILE
    draft = folder / (MANIFEST_FILE + ".tmp")
    with open(draft, "wb") as file:
        file.write(manifest_text.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, target)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Open a packed folder: read its manifest and check it, and the size and header of each file, against the geometry.

    Raises what `read_manifest_alone` does, and PackedModelError for a missing or truncated file, or one of another pack.
    """
    manifest = read_manifest_alone(folder)
    for name, header in headers(manifest.geometry, manifest.expert_bits, manifest.dense_bits).items():
        _check_file(manifest.folder / name, header)
    return manifest


def read_manifest_alone(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a packed folder and check it against its checksum and the geometry.

    Raises PackedModelError that says what is wrong and what to do: no such folder, an unpacked checkpoint, an unfinished pack,
    a later format, a damaged manifest. Checksums of the weights are not computed here.
    """
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    try:
        raw, has_checksum = manifest_text.decode(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        _explain_missing(folder)
    except OSError as error:
        raise PackedModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise PackedModelError(f"{path}: is not valid JSON or differs from its checksum, {_REPACK}") from None
    return _parse(folder, raw, has_checksum)


def _future(version: int) -> str:
    return f"packed format version {version} is newer than this SparseFlow reads ({FORMAT_VERSION}), update SparseFlow"


def _explain_missing(folder: Path) -> NoReturn:
    """Say which kind of folder without a manifest this is."""
    if not folder.exists():
        raise PackedModelError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise PackedModelError(f"{folder}: is a file, a packed model is a folder made by sf-pack")
    if (folder / JOURNAL_FILE).exists() or (folder / EXPERTS_FILE).exists():
        raise PackedModelError(f"{folder}: the pack is unfinished, run the same sf-pack command again to finish it")
    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        target = f"{folder.resolve().name}-packed"
        raise PackedModelError(f"{folder}: is an unpacked checkpoint, pack it first: sf-pack {folder} {target}")
    raise PackedModelError(f"{folder}: is not a packed model (no {MANIFEST_FILE}), make one with: sf-pack CHECKPOINT FOLDER")


def _parse(folder: Path, raw: Any, has_checksum: bool) -> Manifest:
    """Manifest of decoded JSON. Whatever follows from the geometry is computed again and must be equal."""
    manifest = _Fields(str(folder / MANIFEST_FILE), raw)
    if not isinstance(raw, dict) or raw.get("format") != "sparseflow":
        manifest.damaged("is not the manifest of a packed model")
    version = manifest.get("format_version", int)
    if version > FORMAT_VERSION:
        raise PackedModelError(f"{manifest.path}: {_future(version)}")
    manifest.require("format_version", FORMAT_VERSION)
    geometry = Geometry.from_json(manifest.get("geometry", dict), f"{manifest.path}: geometry")
    for part in ("quantization.experts", "quantization.dense"):
        if manifest.get(part, str) not in BITS:
            manifest.damaged(f"{part} is {_short(manifest.get(part, str))}, expected one of {', '.join(BITS)}")
    expert_bits, dense_bits = BITS[raw["quantization"]["experts"]], BITS[raw["quantization"]["dense"]]
    layout = ExpertLayout(geometry.hidden_size, geometry.moe_intermediate_size, expert_bits)
    manifest.require("quantization.weight_group", WEIGHT_GROUP)
    manifest.require("quantization.activation_group", ACTIVATION_GROUP)
    sizes = {name: {"bytes": header.file_bytes} for name, header in headers(geometry, expert_bits, dense_bits).items()}
    if manifest.get("files", dict) != sizes:
        manifest.damaged(f"files is {_short(raw['files'])}, the geometry gives {sizes}")
    manifest.require("experts.stride", layout.stride)
    manifest.require("experts.slice_bytes", layout.slice_bytes)
    table = manifest.get("experts.crc32", list)
    if [len(row) if isinstance(row, list) else -1 for row in table] != [geometry.num_experts] * geometry.num_hidden_layers:
        manifest.damaged("experts.crc32 is not one checksum per layer and expert")
    return Manifest(
        folder=folder,
        geometry=geometry,
        expert_bits=expert_bits,
        dense_bits=dense_bits,
        stride=layout.stride,
        slice_bytes=layout.slice_bytes,
        tensors=_parse_tensors(manifest, geometry, dense_bits),
        expert_crc32=[[manifest.checksum(value, "experts.crc32") for value in row] for row in table],
        embed_crc32=manifest.checksum(manifest.get("embed.crc32", int), "embed.crc32"),
        copied=_parse_copied(manifest) if has_checksum else {},  # both came into the format together
        has_checksum=has_checksum,
        raw=raw,
    )


def _parse_tensors(manifest: _Fields, geometry: Geometry, dense_bits: int) -> dict[str, TensorEntry]:
    """The entries of dense.tensors; each must lie where the geometry puts it."""
    plan, _ = dense_plan(geometry, dense_bits)
    listed = manifest.get("dense.tensors", list)
    if len(listed) != len(plan):
        manifest.damaged(f"dense.tensors has {len(listed)} entries, the geometry needs {len(plan)}")
    tensors = {}
    for found, (name, want) in zip(listed, plan.items(), strict=True):
        crc32 = manifest.checksum(found.get("crc32") if isinstance(found, dict) else None, f"dense.tensors: crc32 of {name}")
        entry = replace(want, crc32=crc32)
        if found != entry.to_json(name):
            manifest.damaged(f"dense.tensors: {_short(found)} is not {name} as the geometry places it")
        tensors[name] = entry
    return tensors


def _parse_copied(manifest: _Fields) -> dict[str, tuple[int, int]]:
    """The entries of copied, whose names must be those of files in the folder itself."""
    copied = {}
    for name, entry in manifest.get("copied", dict).items():
        size = entry.get("bytes") if isinstance(entry, dict) else None
        if Path(name).name != name or not isinstance(size, int):
            manifest.damaged(f"copied: {_short({name: entry})} is not a file name with its bytes and crc32")
        copied[name] = (size, manifest.checksum(entry.get("crc32"), f"copied: crc32 of {name}"))
    return copied


class _Fields:
    """The decoded manifest, read by dotted names; every complaint names the file and the field."""

    def __init__(self, path: str, raw: Any) -> None:
        self.path = path
        self.raw = raw

    def damaged(self, what: str) -> NoReturn:
        raise PackedModelError(f"{self.path}: {what}, {_REPACK}")

    def get(self, name: str, kind: type) -> Any:
        value = self.raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            self.damaged(f"{name} is {_short(value)}, expected {kind.__name__}")
        return value

    def require(self, name: str, expected: int) -> None:
        value = self.get(name, int)
        if value != expected:
            self.damaged(f"{name} is {_short(value)}, expected {expected}")

    def checksum(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            self.damaged(f"{name} is {_short(value)}, expected a 32-bit checksum")
        return value


def _check_file(path: Path, header: Header) -> None:
    """The file must have the size and the header that follow from the manifest; PackedModelError tells how it has not."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise PackedModelError(f"{path}: is missing, {_REPACK}") from None
    except OSError as error:
        raise PackedModelError(f"{path}: cannot be read ({error.strerror})") from None
    if size != header.file_bytes:
        problem = "truncated" if size < header.file_bytes else "too long"
        raise PackedModelError(
            f"{path}: {problem}, {size} bytes where the manifest has {header.file_bytes}: {_REPACK}"
        )
    if Header.unpack(found, str(path)) != header:
        raise PackedModelError(f"{path}: its header contradicts the manifest, the files are of different packs")


def _short(value: Any) -> str:
    """A value for a message, cut to one readable line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
