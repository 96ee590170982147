"""How fast weights are packed: the rounding kernels in memory, and a whole pack beside what the disk does for the same bytes.

    python bench/packing.py [--layers 2] [--repeats 5] [--folder DIR] [--json packing.json]

**In memory**: experts of Qwen3.6-35B-A3B's size, random, in bfloat16, several times as many as the processor's caches hold.
One thread packs each of them once a repeat, as sf-pack's threads do, in every instruction set; the table gives GB of bfloat16 per
second. numpy stands beside: the same rule on blocks that stay in the cache. It packs one expert a repeat, by turns with the
kernels, and both must give the same bytes.

**On disk**: a random checkpoint of the real sizes (--layers of them, 1.6 GB each, a smaller vocabulary) is written to a folder that is
removed afterwards. By turns it is packed, and as many bytes are moved without doing anything to them: the checkpoint read front
to back and a file as large as the pack written and made durable, once by two threads at the same time and once one after the
other. All begin with the checkpoint out of the page cache (mincore confirms it) and end when all is on the disk. `disk / sf-pack`
is the shorter of those two times over that of the pack, repeat by repeat: at 100 % the disk is all that packing waits for.
--layers 0 leaves this part out.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("tests", "tools")]
from checkpoints import shapes, write_config  # noqa: E402
from make_model import QWEN36  # noqa: E402

from sparseflow import page_cache  # noqa: E402
from sparseflow.cli.table import table  # noqa: E402
from sparseflow.cli.options import SparseFlowCommand  # noqa: E402
from sparseflow.encode import as_bf16_bits, pack_expert  # noqa: E402
from sparseflow.errors import StorageError  # noqa: E402
from sparseflow.kernels import isa  # noqa: E402
from sparseflow.machine import describe_machine, describe_versions  # noqa: E402
from sparseflow.pack import pack_checkpoint  # noqa: E402
from sparseflow.sizes import format_bytes  # noqa: E402

HIDDEN, INNER, EXPERTS = 2048, 512, 48
VOCAB = 16384
PIECE = 8 << 20
WEIGHT_STD = 0.02

Expert = tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint16]]
"""gate [I, H], up [I, H] and down [H, I], bits of bfloat16."""


# --- in memory ---


def random_bits(size: int, seed: int = 0) -> NDArray[np.uint16]:
    """Normal weights of the usual size."""
    normal = np.random.default_rng(seed).standard_normal((1, size), np.float32) * np.float32(WEIGHT_STD)
    return as_bf16_bits(normal, "random").reshape(-1)


def numpy_matrix(stored: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """int8 tiles [Rt, bytes] and scales [Rt, 16 * G] of [R, K], R a multiple of 16 and K of 128, by numpy alone."""
    rows, columns = stored.shape
    tiles, scales = [], []
    step = max(2**18 // columns, 16)
    for start in range(0, rows, step):
        groups = np.left_shift(stored[start : start + step], 16, dtype=np.uint32).view(np.float32).reshape(-1, columns // 128, 128)
        scale = (np.maximum(groups.max(axis=2), -groups.min(axis=2)) / np.float32(127)).astype(np.float16)
        divisor = scale.astype(np.float32)
        divisor[divisor == 0] = 1
        codes = np.divide(groups, divisor[:, :, None])
        np.clip(np.rint(codes, out=codes), -127, 127, out=codes)
        words = (codes.astype(np.int8).view(np.uint8) ^ np.uint8(128)).reshape(-1, 16, columns).view(np.uint32)
        tiles.append(np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(-1, 16 * columns))
        scales.append(np.ascontiguousarray(scale.reshape(-1, 16, columns // 128).transpose(0, 2, 1)).reshape(-1, columns // 8))
    return np.concatenate(tiles), np.concatenate(scales)


def numpy_expert(gate: NDArray[np.uint16], up: NDArray[np.uint16], down: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """The slice of an int8 expert whose sizes leave no gaps in it."""
    (gate_tiles, gate_scales), (up_tiles, up_scales), (down_tiles, down_scales) = map(numpy_matrix, (gate, up, down))
    sections = (
        np.stack([gate_tiles, up_tiles], axis=1), down_tiles, np.stack([gate_scales, up_scales], axis=1), down_scales
    )
    return np.concatenate([section.reshape(-1).view(np.uint8) for section in sections])


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def pack_all(experts: Sequence[Expert], bits: int) -> None:
    for expert in experts:
        pack_expert(*expert, bits)


def in_memory(repeats: int) -> dict[str, list[float]]:
    """Form and instruction set -> GB of bfloat16 per second and thread, one value a repeat."""
    pool = random_bits(EXPERTS * 3 * HIDDEN * INNER).reshape(EXPERTS, 3, -1)
    experts: list[Expert] = [
        (gate.reshape(INNER, HIDDEN), up.reshape(INNER, HIDDEN), down.reshape(HIDDEN, INNER)) for gate, up, down in pool
    ]
    before = isa.active()
    speeds: dict[str, list[float]] = {}
    size = pool[0].nbytes / 1e9

    def note(name: str, count: int, work: Callable[[], object]) -> None:
        speeds.setdefault(name, []).append(count * size / seconds(work))

    try:
        for repeat in range(repeats + 1):
            expert = experts[repeat % EXPERTS]
            note("int8, numpy", 1, lambda: numpy_expert(*expert))
            for name in isa.available():
                isa.select(name)
                note(f"int8, {name}", EXPERTS, lambda: pack_all(experts, 8))
                note(f"bf16, {name}", EXPERTS, lambda: pack_all(experts, 16))
                if not np.array_equal(pack_expert(*expert, 8), numpy_expert(*expert)):
                    raise AssertionError(f"{name} and numpy differ")
    finally:
        isa.select(before)
    return {name: values[1:] for name, values in speeds.items()}  # the first touches memory for the first time


# --- on disk ---


def write_checkpoint(folder: Path, layers: int) -> None:
    """A random bfloat16 checkpoint in one shard, durable."""
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    config = QWEN36 | {"num_hidden_layers": layers, "vocab_size": VOCAB, "layer_types": kinds}
    folder.mkdir()
    write_config(folder, config)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    pool = random_bits(PIECE).view(np.uint8)
    with open(folder / "model.safetensors", "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end:
            start = 2 * int(rng.integers(0, PIECE // 2))
            end -= file.write(pool[start : start + min(end, PIECE)])
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    page_cache.drop(path)
    left = page_cache.cached_bytes(path)
    if left > path.stat().st_size // 100:
        raise StorageError(f"{path}: {format_bytes(left)} stay in the page cache, a cold run cannot be made here")


def read_all(path: Path) -> float:
    """Seconds to read a file front to back."""
    buffer = bytearray(PIECE)

    def work() -> None:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return seconds(work)


def write_all(path: Path, size: int) -> float:
    """Seconds to write a file of random bytes and make it durable."""
    data = memoryview(os.urandom(PIECE))

    def work() -> None:
        with open(path, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            left = size
            while left:
                left -= file.write(data[: min(left, PIECE)])
            os.fsync(file.fileno())

    return seconds(work)


def on_disk(folder: Path, layers: int, repeats: int) -> dict[str, Any]:
    """Sizes, and seconds of each repeat: the pack and its processor time, reading and writing at once, either alone."""
    source, packed, plain = folder / "source", folder / "packed", folder / "plain"
    write_checkpoint(source, layers)
    shard = source / "model.safetensors"
    times: dict[str, list[float]] = {name: [] for name in ("pack_s", "pack_cpu_s", "at_once_s", "read_s", "write_s")}
    with ThreadPoolExecutor(2) as threads:
        for _ in range(repeats):
            forget(shard)
            cpu = time.process_time()
            times["pack_s"].append(seconds(lambda: pack_checkpoint(source, packed)))
            times["pack_cpu_s"].append(time.process_time() - cpu)
            size = sum(path.stat().st_size for path in packed.iterdir())
            shutil.rmtree(packed)
            forget(shard)
            parts = [threads.submit(read_all, shard), threads.submit(write_all, plain, size)]
            times["at_once_s"].append(max(part.result() for part in parts))
            plain.unlink()
            forget(shard)
            times["read_s"].append(read_all(shard))
            times["write_s"].append(write_all(plain, size))
            plain.unlink()
    return {"source_bytes": shard.stat().st_size, "packed_bytes": size, **times}


# --- what is said of it ---


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median and extremes."""
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}..{high})"


def memory_table(speeds: dict[str, list[float]]) -> list[str]:
    rows = [("in memory, one thread", "GB/s of BF16", "times numpy")]
    numpy_speed = statistics.median(speeds["int8, numpy"])
    for name, values in speeds.items():
        ratio = f"{statistics.median(values) / numpy_speed:.1f}" if name.startswith("int8") else ""
        rows.append((name, spread(values), ratio))
    return table(rows)


def disk_table(disk: dict[str, Any]) -> list[str]:
    read, written = disk["source_bytes"], disk["packed_bytes"]
    by_turns = [one + other for one, other in zip(disk["read_s"], disk["write_s"], strict=True)]
    bounds = [min(times) for times in zip(disk["at_once_s"], by_turns, strict=True)]
    shares = [100 * bound / pack for bound, pack in zip(bounds, disk["pack_s"], strict=True)]
    rows = [
        (f"{format_bytes(read)} read, {format_bytes(written)} written", "seconds", "GB/s of BF16"),
        ("sf-pack", spread(disk["pack_s"]), spread([read / 1e9 / value for value in disk["pack_s"]])),
        ("processor time of it", spread(disk["pack_cpu_s"]), ""),
        ("plain, at the same time", spread(disk["at_once_s"]), spread([read / 1e9 / value for value in disk["at_once_s"]])),
        ("plain, one after the other", spread(by_turns), spread([read / 1e9 / value for value in by_turns])),
        ("the reading of it", spread(disk["read_s"]), ""),
        ("the writing of it", spread(disk["write_s"]), ""),
        ("disk / sf-pack", spread(shares, "{:.0f} %"), ""),
    ]
    return table(rows)


@click.command(cls=SparseFlowCommand)
@click.option("--layers", type=click.IntRange(0, 40), default=2, show_default=True, help="Layers of the checkpoint; 0: no disk.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Of everything.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True), help="Where the checkpoint is made for the time being.  [default: the system's temporary folder]")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), metavar="FILE", help="Write all values as JSON.")
def main(layers: int, repeats: int, folder: str | None, json_file: str | None) -> None:
    """Speed of packing, in memory and on disk."""
    record: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions(), "repeats": repeats}
    record["memory_gb_s"] = in_memory(repeats)
    click.echo("\n".join(memory_table(record["memory_gb_s"])))
    if layers:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            record["disk"] = {"layers": layers} | on_disk(Path(made), layers, repeats)
        click.echo("\n" + "\n".join(disk_table(record["disk"])))
    if json_file is not None:
        Path(json_file).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
