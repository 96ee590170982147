"""Makes a packed model of the real geometry directly, with seeded random weights: something full-size to measure on.

    python tools/make_model.py DST --layers 12                  a slice that fits in memory, 11 GiB
    python tools/make_model.py DST --router-skew 1              all 40 layers, 34 GiB, routes about as repetitive as the real ones

The text it writes is noise. Its sizes, bytes per token and statistics are those of Qwen3.6-35B-A3B: hidden states stay of
order one, every expert is alive. With a router skew the experts of a layer differ in popularity, so that a cache finds
something to keep; at zero, routing is nearly uniform.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from numpy.typing import NDArray

from sparseflow.cli.options import SparseFlowCommand
from sparseflow.config import Geometry
from sparseflow.encode import as_bf16_bits
from sparseflow.errors import OptionError, StorageError
from sparseflow.layout import ExpertLayout, TensorEntry, scales_offset
from sparseflow.packfile import (
    BITS,
    DENSE_FILE,
    EMBED_FILE,
    EXPERTS_FILE,
    FORMAT_VERSION,
    dense_plan,
    headers,
    write_manifest,
)
from sparseflow.quantize import ACTIVATION_GROUP, WEIGHT_GROUP
from sparseflow.sizes import format_bytes

QWEN36 = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
"""Sizes of Qwen3.6-35B-A3B, from its public configuration."""

WEIGHT_STD = 0.02
BIAS_CHANNEL = 0
"""The hidden channel that is the same for every token: through it the router favours some experts."""
BIAS_VALUE = 8.0
POOL_BYTES = 1 << 26


class Pool:
    """A pool of random bytes; every tensor is a window of it that begins somewhere else. Drawing each byte anew would take
    minutes for what nobody can tell apart."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.codes = self.rng.integers(1, 256, POOL_BYTES, np.uint8)  # code + 128, and -128 is not a code
        normal = self.rng.standard_normal((1, POOL_BYTES // 8), np.float32) * np.float32(WEIGHT_STD)
        self.bf16 = as_bf16_bits(normal, "pool").reshape(-1)
        scale = WEIGHT_STD / 73.3  # 73.3: standard deviation of a uniform code
        self.scales = (self.rng.uniform(0.8, 1.2, POOL_BYTES // 16) * scale).astype(np.float16)

    def fill(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Fills a flat array with windows of one of the three pools."""
        done = 0
        while done < target.size:
            start = int(self.rng.integers(0, source.size // 2))
            count = min(target.size - done, source.size - start)
            target[done : done + count] = source[start : start + count]
            done += count

    def slice_of_expert(self, layout: ExpertLayout) -> NDArray[np.uint8]:
        """One expert's slice, padded to the stride."""
        data = np.zeros(layout.stride, np.uint8)
        if layout.gate_up_scales is None:
            self.fill(data[: layout.slice_bytes].view(np.uint16), self.bf16)
        else:
            self.fill(data[: layout.gate_up_scales], self.codes)
            self.fill(data[layout.gate_up_scales : layout.slice_bytes].view(np.float16), self.scales)
        return data

    def matrix(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """A dense matrix in tiles."""
        data = np.zeros(entry.bytes, np.uint8)
        if entry.kind == "bf16":
            self.fill(data.view(np.uint16), self.bf16)
        else:
            start = scales_offset(entry.shape)
            self.fill(data[:start], self.codes)
            self.fill(data[start:].view(np.float16), self.scales)
        return data


class ModelWriter:
    """Writes the three files of a model and remembers their checksums."""

    def __init__(self, folder: Path, geometry: Geometry, expert_bits: int, skew: float, seed: int) -> None:
        self.folder = folder
        self.geometry = geometry
        self.skew = skew
        self.pool = Pool(seed)
        self.layout = ExpertLayout(geometry.hidden_size, geometry.moe_intermediate_size, expert_bits)
        self.headers = headers(geometry, expert_bits, 8)
        self.total = sum(header.file_bytes for header in self.headers.values())
        self.done = 0
        self.started = time.monotonic()

    def experts(self) -> list[list[int]]:
        """experts.sfx; returns the checksum of each slice."""
        g = self.geometry
        checksums = []
        with self._create(EXPERTS_FILE) as file:
            for layer in range(g.num_hidden_layers):
                row = []
                for _ in range(g.num_experts):
                    data = self.pool.slice_of_expert(self.layout)
                    row.append(zlib.crc32(memoryview(data)[: self.layout.slice_bytes]))
                    self._write(file, data)
                checksums.append(row)
                self._report(f"experts of layer {layer + 1} of {g.num_hidden_layers}")
            _flush(file)
        return checksums

    def dense(self) -> list[dict[str, Any]]:
        """dense.sfx; returns the manifest's list of tensors."""
        plan, _ = dense_plan(self.geometry, 8)
        tensors = []
        with self._create(DENSE_FILE) as file:
            for name, entry in plan.items():
                data = self._dense_tensor(name, entry)
                self._write(file, np.zeros(entry.offset - file.tell(), np.uint8))
                self._write(file, data)
                tensors.append(TensorEntry(entry.kind, entry.shape, entry.offset, entry.bytes, zlib.crc32(data)).to_json(name))
            self._write(file, np.zeros(self.headers[DENSE_FILE].file_bytes - file.tell(), np.uint8))
            _flush(file)
        self._report("dense core")
        return tensors

    def embedding(self) -> int:
        """embed.sfx, rows of unit size; returns its checksum."""
        g = self.geometry
        checksum = 0
        block = 4096
        with self._create(EMBED_FILE) as file:
            for first in range(0, g.vocab_size, block):
                rows = self.pool.rng.standard_normal((min(block, g.vocab_size - first), g.hidden_size), np.float32)
                rows[:, BIAS_CHANNEL] = BIAS_VALUE
                data = as_bf16_bits(rows, "embedding").view(np.uint8).reshape(-1)
                checksum = zlib.crc32(data, checksum)
                self._write(file, data)
            _flush(file)
        self._report("embedding")
        return checksum

    def _dense_tensor(self, name: str, entry: TensorEntry) -> NDArray[np.uint8]:
        rng = self.pool.rng
        if entry.kind != "f32":
            data = self.pool.matrix(entry)
            if name.endswith("mlp.gate.weight"):
                # tile order [rows / 16][K / 2][16][2]: the bias channel of all rows lies in the first block of each tile
                tiles = data.view(np.uint16).reshape(entry.shape[0] // 16, -1, 16, 2)
                popularity = rng.standard_normal((1, entry.shape[0])).astype(np.float32) * np.float32(self.skew * WEIGHT_STD)
                tiles[:, BIAS_CHANNEL // 2, :, BIAS_CHANNEL % 2] = as_bf16_bits(popularity, name).reshape(-1, 16)
            return data
        if name.endswith("A_log"):
            values = np.log(rng.uniform(1, 16, entry.shape))
        elif name.endswith("dt_bias"):
            values = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), entry.shape))))
        elif name.endswith("conv1d.weight"):
            values = rng.uniform(-0.5, 0.5, entry.shape)
        elif name.endswith("linear_attn.norm.weight"):
            values = np.ones(entry.shape)
        else:  # norms centred on zero
            values = np.zeros(entry.shape)
        return values.astype(np.float32).reshape(-1).view(np.uint8)

    def _create(self, name: str) -> BinaryIO:
        file = open(self.folder / name, "wb", buffering=0)
        self._write(file, np.frombuffer(self.headers[name].pack(), np.uint8))
        return file

    def _write(self, file: BinaryIO, data: NDArray[np.uint8]) -> None:
        part = memoryview(data)
        while len(part):
            count = file.write(part)
            part = part[count:]
        self.done += data.size

    def _report(self, what: str) -> None:
        speed = self.done / (time.monotonic() - self.started)
        left = (self.total - self.done) / speed
        print(f"{self.done / self.total:4.0%}  {what}, {format_bytes(int(speed))}/s, {left:.0f} s left", file=sys.stderr)


def _flush(file: BinaryIO) -> None:
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_model(folder: Path, *, layers: int, vocab: int, experts: str, skew: float, seed: int) -> None:
    """Makes the packed folder. Raises OptionError when it exists, StorageError when the disk has no room."""
    config = QWEN36 | {"num_hidden_layers": layers, "vocab_size": vocab}
    geometry = Geometry.from_config(config, "make_model")
    if folder.exists():
        raise OptionError(f"{folder}: exists, choose a folder that does not")
    writer = ModelWriter(folder, geometry, BITS[experts], skew, seed)
    free = shutil.disk_usage(folder.absolute().parent).free
    if writer.total > free:
        raise StorageError(
            f"{folder}: the model takes {format_bytes(writer.total)}, the disk has {format_bytes(free)} free: make fewer --layers"
        )
    folder.mkdir()
    config_text = json.dumps(config, indent=1).encode() + b"\n"
    try:
        manifest = {
            "format": "sparseflow",
            "format_version": FORMAT_VERSION,
            "tool_version": "make_model",
            "geometry": geometry.to_json(),
            "quantization": {
                "experts": experts,
                "dense": "int8",
                "weight_group": WEIGHT_GROUP,
                "activation_group": ACTIVATION_GROUP,
            },
            "files": {name: {"bytes": header.file_bytes} for name, header in writer.headers.items()},
            "embed": {"crc32": writer.embedding()},
            "dense": {"tensors": writer.dense()},
            "experts": {
                "stride": writer.layout.stride,
                "slice_bytes": writer.layout.slice_bytes,
                "crc32": writer.experts(),
            },
            "copied": {"config.json": {"bytes": len(config_text), "crc32": zlib.crc32(config_text)}},
            "source": {"shards": {}},
            "report": {"random": {"layers": layers, "router_skew": skew, "seed": seed}},
        }
        (folder / "config.json").write_bytes(config_text)
        write_manifest(folder, manifest)
    except BaseException:
        shutil.rmtree(folder)
        raise


@click.command(cls=SparseFlowCommand)
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1, 40), default=40, show_default=True, help="How many layers.")
@click.option("--vocab", type=click.IntRange(16, 248320), default=248320, show_default=True, help="Rows of embedding and head.")
@click.option("--router-skew", type=click.FloatRange(0), default=0.0, show_default=True, help="How much popularity differs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all weights.")
@click.option("--experts", type=click.Choice(list(BITS)), default="int8", show_default=True, help="How experts are stored.")
def main(destination: Path, layers: int, vocab: int, router_skew: float, seed: int, experts: str) -> None:
    """Make a packed model of Qwen3.6-35B-A3B's sizes with random weights in the new folder DST."""
    make_model(destination, layers=layers, vocab=vocab, experts=experts, skew=router_skew, seed=seed)


if __name__ == "__main__":
    main()
