"""Exports a packed model as GGUF (architecture qwen35moe), so that llama.cpp runs the very same weights.

    pip install 'sparseflow[peers]'
    python tools/export_gguf.py MODEL DST.gguf [--float32]

Nothing is rounded again. An int8 matrix becomes Q8_0: a block of Q8_0 is 32 codes behind one float16 scale, and a group of
ours is 128 codes under one float16 scale, so codes move as they are and each scale is written four times. A bf16 matrix and
the embedding stay BF16, all small tensors become F32; with --float32 everything does, and llama.cpp then rounds no activations
either, which makes it an oracle for small bf16 packs. What else changes is what llama.cpp's own converter changes: norms
centred on zero are stored as 1 + w, A_log as -exp(A_log), and the value heads of linear attention, which the checkpoint
groups by key head, take turns (heads 0, r, 2r, ..., then 1, r + 1, ...), because ggml repeats key heads in that order.

The file is written front to back in pieces of a few MiB, whatever the model's size.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from sparseflow.cli.options import SparseFlowCommand
from sparseflow.config import Geometry
from sparseflow.errors import OptionError, StorageError
from sparseflow.layout import ExpertLayout, TensorEntry, scale_bytes, tile_bytes
from sparseflow.model import model_folder
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, EXPERTS_FILE, HEADER_BYTES, Manifest, read_manifest
from sparseflow.quantize import WEIGHT_GROUP, dequantize_weights, from_bf16_bits
from sparseflow.sizes import format_bytes
from sparseflow.tiles import TILE_ROWS, row_tiles, untile_bf16, untile_int8

try:
    import gguf
except ImportError:
    sys.exit("error: the package gguf is missing, install it with: pip install 'sparseflow[peers]'")

BLOCK = 32
"""Weights in one block of Q8_0."""
PIECE_ROWS = 256 * TILE_ROWS
WIDENED = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "shared_expert_gate.weight")
"""Small matrices that are F32 in the GGUF file whatever the large ones are."""
QWEN_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""How tokenizer.json splits text into words -> llama.cpp's name for it."""


class Tensor(NamedTuple):
    """One tensor of the GGUF file: its logical shape, and its bytes in pieces, made when they are written."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    pieces: Callable[[], Iterator[NDArray[Any]]]

    @property
    def bytes(self) -> int:
        """What it takes in the file, without padding."""
        weights, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // weights * size


def q8_0(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Codes [R, K] and scales [R, G] as rows of Q8_0 blocks, uint8 [R, K / 32 * 34]: exactly the same weights."""
    rows, columns = codes.shape
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    spread = np.repeat(scales, WEIGHT_GROUP // BLOCK, axis=1)[:, : columns // BLOCK]
    blocks[:, :, :2] = spread.view(np.uint8).reshape(rows, -1, 2)
    blocks[:, :, 2:] = codes.view(np.uint8).reshape(rows, -1, BLOCK)
    return blocks.reshape(rows, -1)


def encoded(
    tiles: NDArray[np.uint8], scales: NDArray[np.float16] | None, rows: int, columns: int, widened: bool
) -> NDArray[Any]:
    """The rows [R, ...] of a matrix in tiles, as Q8_0, or as BF16 when there are no scales; `widened`: as float32 instead."""
    if scales is None:
        bits = untile_bf16(tiles.view(np.uint16), rows, columns)
        return from_bf16_bits(bits) if widened else bits
    codes, scales = untile_int8(tiles, scales, rows, columns)
    return dequantize_weights(codes, scales) if widened else q8_0(codes, scales)


class PackedTensors:
    """The tensors of a packed model as llama.cpp wants them, in the order of the file."""

    def __init__(self, manifest: Manifest, float32: bool) -> None:
        self.float32 = float32
        self.folder = manifest.folder
        self.entries = manifest.tensors
        self.geometry = manifest.geometry
        self.layout = ExpertLayout(self.geometry.hidden_size, self.geometry.moe_intermediate_size, manifest.expert_bits)
        self.names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, self.geometry.num_hidden_layers)

    def __iter__(self) -> Iterator[Tensor]:
        g = self.geometry
        embedding = (g.vocab_size, g.hidden_size)
        yield self._tensor("embed_tokens.weight", embedding, _kind(16, self.float32), self._embedding)
        for name, entry in self.entries.items():
            yield self._dense(name, entry)
            if name.endswith("mlp.shared_expert.down_proj.weight"):
                yield from self._experts(int(name.split(".")[1]))

    def _tensor(self, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, pieces: Callable) -> Tensor:
        checkpoint_name = name if name.startswith("lm_head.") else f"model.{name}"
        mapped = self.names.get_name(checkpoint_name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        return Tensor(mapped, shape, kind, pieces)

    def _dense(self, name: str, entry: TensorEntry) -> Tensor:
        if entry.kind == "f32":
            values = self._vector(name, entry)
            name = name.replace("dt_bias", "dt_proj.bias")
            return self._tensor(name, values.shape, gguf.GGMLQuantizationType.F32, lambda: iter([values]))
        widened = self.float32 or name.endswith(WIDENED)
        # The shared expert's gate has one row, which llama.cpp declares as a vector.
        shape = entry.shape[1:] if name.endswith("shared_expert_gate.weight") else entry.shape
        return self._tensor(name, shape, _kind(_bits(entry), widened), partial(self._matrix, name, entry, widened))

    def _vector(self, name: str, entry: TensorEntry) -> NDArray[np.float32]:
        stored = self._read(DENSE_FILE, entry.offset, entry.bytes).view(np.float32).reshape(entry.shape)
        if name.endswith("conv1d.weight"):
            return self._values_taking_turns(np.ascontiguousarray(stored.T))
        if name.endswith("A_log"):
            return self._taking_turns(-np.exp(stored.astype(np.float64)).astype(np.float32))
        if name.endswith("dt_bias"):
            return self._taking_turns(stored)
        return stored if name.endswith("linear_attn.norm.weight") else 1 + stored

    def _matrix(self, name: str, entry: TensorEntry, widened: bool) -> Iterator[NDArray[Any]]:
        """The rows of a matrix of dense.sfx, encoded; in one piece where heads change places, which is never a large one."""
        rows, columns = entry.shape
        reordered = "linear_attn." in name
        step = rows if reordered else PIECE_ROWS
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = encoded(*self._tile_rows(entry, first, count), count, columns, widened)
            if name.endswith("in_proj_qkv.weight"):
                data = self._values_taking_turns(data)
            elif name.endswith("linear_attn.out_proj.weight"):
                heads = data.reshape(rows, self.geometry.linear_num_value_heads, -1).swapaxes(0, 1)
                data = self._taking_turns(heads).swapaxes(0, 1)
            elif reordered:
                data = self._taking_turns(data)
            yield data

    def _tile_rows(self, entry: TensorEntry, first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float16] | None]:
        """Tiles and scales (None for bf16) of the rows from `first` (a multiple of 16) of a matrix of dense.sfx."""
        columns = entry.shape[1]
        bits = _bits(entry)
        start = entry.offset + tile_bytes(first, columns, bits)
        tiles = self._read(DENSE_FILE, start, tile_bytes(count, columns, bits))
        if bits == 16:
            return tiles, None
        start = entry.offset + entry.scales_offset + scale_bytes(first, columns)
        return tiles, self._read(DENSE_FILE, start, scale_bytes(count, columns)).view(np.float16)

    def _experts(self, layer: int) -> Iterator[Tensor]:
        g = self.geometry
        wide = (g.num_experts, g.moe_intermediate_size, g.hidden_size)
        kind = _kind(self.layout.bits, self.float32)
        for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", (g.num_experts, wide[2], wide[1]))):
            pieces = partial(self._expert_matrices, layer, name)
            yield self._tensor(f"layers.{layer}.mlp.experts.{name}.weight", shape, kind, pieces)

    def _expert_matrices(self, layer: int, name: str) -> Iterator[NDArray[Any]]:
        """One matrix of each expert of a layer, encoded."""
        layout = self.layout
        rows, columns = layout.moe_intermediate_size, layout.hidden_size
        matrices, tiles_start, scales_start = 2, layout.gate_up_tiles, layout.gate_up_scales
        if name == "down_proj":
            rows, columns = columns, rows
            matrices, tiles_start, scales_start = 1, layout.down_tiles, layout.down_scales

        def section(start: int, size: int) -> NDArray[np.uint8]:
            data = self._read(EXPERTS_FILE, start, matrices * size)
            # Tile rows of gate and up alternate.
            return data.reshape(row_tiles(rows), matrices, -1)[:, int(name == "up_proj")].reshape(-1)

        for expert in range(self.geometry.num_experts):
            start = HEADER_BYTES + (layer * self.geometry.num_experts + expert) * layout.stride
            tiles = section(start + tiles_start, tile_bytes(rows, columns, layout.bits))
            scales = None
            if scales_start is not None:
                scales = section(start + scales_start, scale_bytes(rows, columns)).view(np.float16)
            yield encoded(tiles, scales, rows, columns, self.float32)

    def _embedding(self) -> Iterator[NDArray[Any]]:
        rows, row_bytes = self.geometry.vocab_size, 2 * self.geometry.hidden_size
        for first in range(0, rows, PIECE_ROWS):
            data = self._read(EMBED_FILE, HEADER_BYTES + first * row_bytes, min(PIECE_ROWS, rows - first) * row_bytes)
            yield from_bf16_bits(data.view(np.uint16)) if self.float32 else data

    def _taking_turns(self, heads: NDArray[Any]) -> NDArray[Any]:
        """Rows of all value heads, grouped by key head -> the first value head of each key head, then the second, ..."""
        turns = heads.reshape(self.geometry.linear_num_key_heads, -1, heads.size // self.geometry.linear_num_value_heads)
        return turns.swapaxes(0, 1).reshape(heads.shape)

    def _values_taking_turns(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The same for rows of queries, keys and values, of which only the values move."""
        values = 2 * self.geometry.linear_key_dim
        return np.concatenate([rows[:values], self._taking_turns(rows[values:])])

    def _read(self, file: str, offset: int, size: int) -> NDArray[np.uint8]:
        return np.fromfile(self.folder / file, np.uint8, size, offset=offset)


def _bits(entry: TensorEntry) -> int:
    return 8 if entry.kind == "int8" else 16


def _kind(bits: int, widened: bool) -> gguf.GGMLQuantizationType:
    if widened:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.BF16


def require_exportable(manifest: Manifest, float32: bool) -> None:
    """OptionError for sizes that llama.cpp's architecture, or a block of Q8_0, cannot hold."""
    g = manifest.geometry
    if g.linear_key_head_dim != g.linear_value_head_dim:
        raise OptionError(
            f"{manifest.folder}: linear_key_head_dim is {g.linear_key_head_dim} and linear_value_head_dim "
            f"{g.linear_value_head_dim}, llama.cpp's qwen35moe has one size for both: this model cannot be exported"
        )
    if len(set(g.layer_types)) == 1:
        raise OptionError(
            f"{manifest.folder}: all layers are {g.layer_types[0]}, and llama.cpp aborts on a qwen35moe without both kinds: "
            "export a model with more layers"
        )
    names = {"hidden_size", "moe_intermediate_size"} if manifest.expert_bits == 8 else set()
    if manifest.dense_bits == 8:
        names |= {"hidden_size", "shared_expert_intermediate_size", "attention_dim", "linear_value_head_dim"}
    for name in sorted(names):
        size = getattr(g, name)
        if size % BLOCK and not float32:
            raise OptionError(f"{manifest.folder}: {name} is {size}, no multiple of the {BLOCK} of Q8_0: export with --float32")


def add_sizes(writer: gguf.GGUFWriter, g: Geometry) -> None:
    """The metadata that llama.cpp builds the model from."""
    writer.add_block_count(g.num_hidden_layers)
    writer.add_context_length(g.max_position_embeddings)
    writer.add_embedding_length(g.hidden_size)
    writer.add_vocab_size(g.vocab_size)
    writer.add_head_count(g.num_attention_heads)
    writer.add_head_count_kv(g.num_key_value_heads)
    writer.add_key_length(g.head_dim)
    writer.add_value_length(g.head_dim)
    writer.add_layer_norm_rms_eps(g.rms_norm_eps)
    writer.add_rope_freq_base(g.rope_theta)
    writer.add_rope_dimension_count(g.rotary_dim)
    # Time, height, width: for text all three are the same position, so that only their sum matters.
    pairs = g.rotary_dim // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_expert_count(g.num_experts)
    writer.add_expert_used_count(g.num_experts_per_tok)
    writer.add_expert_feed_forward_length(g.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(g.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(g.linear_conv_kernel_dim)
    writer.add_ssm_state_size(g.linear_key_head_dim)
    writer.add_ssm_group_count(g.linear_num_key_heads)
    writer.add_ssm_time_step_rank(g.linear_num_value_heads)
    writer.add_ssm_inner_size(g.linear_value_dim)
    recurrent = [kind == "linear_attention" for kind in g.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    # Versions that do not know that list take every n-th layer for full attention.
    writer.add_full_attention_interval(recurrent.index(False) + 1)


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> str:
    """The tokenizer's metadata; returns what it is, for people. Without one, llama.cpp takes token ids only."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes()) if path.is_file() else {}
    first = ((tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or [{}])[0]
    split = QWEN_SPLITS.get(first.get("pattern", {}).get("Regex"))
    if split is None:
        writer.add_tokenizer_model("no_vocab")
        return "no vocabulary (no tokenizer.json of Qwen's kind)"
    tokens = [f"[PAD{token}]" for token in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token], types[token] = text, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
    return f"the tokenizer, split {split}"


def export(model: str | os.PathLike[str], destination: Path, *, float32: bool = False) -> None:
    """Writes the GGUF file, whole or not at all.

    Raises OptionError when it exists or the model has sizes that GGUF cannot hold, StorageError when the disk has no room.
    """
    manifest = read_manifest(model_folder(model))
    require_exportable(manifest, float32)
    if destination.exists():
        raise OptionError(f"{destination}: exists, choose a file that does not")
    if not destination.absolute().parent.is_dir():
        raise OptionError(f"{destination}: the folder {destination.absolute().parent} does not exist, make it first")
    tensors = list(PackedTensors(manifest, float32))
    draft = destination.with_name(destination.name + ".part")
    writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35MOE])
    writer.add_type("model")
    writer.add_name(manifest.folder.resolve().name)
    writer.add_file_type(file_type(manifest, float32))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_sizes(writer, manifest.geometry)
    vocabulary = add_vocabulary(writer, manifest.folder, manifest.geometry.vocab_size)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=tensor.kind)
    total = sum(tensor.bytes for tensor in tensors)
    room = shutil.disk_usage(destination.absolute().parent).free
    if total > room:
        raise StorageError(f"{destination}: the file takes {format_bytes(total)}, the disk has {format_bytes(room)} free")
    try:
        write(writer, tensors, total)
        os.replace(draft, destination)
    except OSError as error:
        raise StorageError(f"{destination}: cannot be written ({error.strerror}), what was written is removed") from error
    finally:
        writer.close()
        draft.unlink(missing_ok=True)
    print(f"{destination}: {len(tensors)} tensors, {format_bytes(destination.stat().st_size)}, {vocabulary}", file=sys.stderr)


def file_type(manifest: Manifest, float32: bool) -> gguf.LlamaFileType:
    """What most weights are, for people: llama.cpp goes by each tensor's own type."""
    if float32:
        return gguf.LlamaFileType.ALL_F32
    return gguf.LlamaFileType.MOSTLY_Q8_0 if manifest.expert_bits == 8 else gguf.LlamaFileType.MOSTLY_BF16


def write(writer: gguf.GGUFWriter, tensors: list[Tensor], total: int) -> None:
    """Metadata and all tensors, with a line on stderr now and then."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    begun = shown = time.monotonic()
    done = 0
    for number, tensor in enumerate(tensors, start=1):
        writer.write_padding(file, file.tell())
        start = file.tell()
        for piece in tensor.pieces():
            file.write(np.ascontiguousarray(piece))
        assert file.tell() - start == tensor.bytes, tensor.name
        done += tensor.bytes
        now = time.monotonic()
        if now - shown > 2 or number == len(tensors):
            shown, speed = now, done / (now - begun)
            left = (total - done) / speed
            print(f"{done / total:4.0%}  {tensor.name}, {format_bytes(int(speed))}/s, {left:.0f} s left", file=sys.stderr)
    writer.write_padding(file, file.tell())
    file.flush()
    os.fsync(file.fileno())
    # The page cache is for the run that is measured next.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@click.command(cls=SparseFlowCommand)
@click.argument("model")
@click.argument("destination", metavar="DST.gguf", type=click.Path(path_type=Path))
@click.option("--float32", is_flag=True, help="Write all weights as F32: for small models, as an oracle.")
def main(model: str, destination: Path, float32: bool) -> None:
    """Export the packed MODEL (a folder made by sf-pack, or "demo") as the new file DST.gguf for llama.cpp."""
    export(model, destination, float32=float32)


if __name__ == "__main__":
    main()
