"""Packing: what lands in the folder, interruption and resumption, the command line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from random_checkpoint import to_bf16
from reference import ops

from checkpoints import DEMO, SMALL, Stored, extra_tensors, random_tensors, shapes, write_checkpoint
from sparseflow.cli.pack import ProgressLine, main, report_table
from sparseflow.errors import OptionError, PackedModelError, StorageError
from sparseflow.layout import ExpertLayout, tile_bytes
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import HEADER_BYTES, Header, read_manifest
from sparseflow.quantize import from_bf16_bits
from sparseflow.tiles import row_tiles, untile_bf16, untile_int8

SFX = ("experts.sfx", "dense.sfx", "embed.sfx")
OPTIONS = [(experts, dense) for experts in ("int8", "bf16") for dense in ("int8", "bf16")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def matrix(data: np.ndarray, scales: np.ndarray | None, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Codes and scales, or bits, of a packed matrix."""
    if scales is None:
        return (untile_bf16(np.ascontiguousarray(data).view(np.uint16).reshape(-1), rows, columns),)
    return untile_int8(np.ascontiguousarray(data), np.ascontiguousarray(scales).view(np.float16), rows, columns)


def rounded(weights: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    return ops.quantize_weights(weights) if bits == 8 else (to_bf16(weights),)


def assert_equal(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("experts", "dense"), OPTIONS)
def test_every_weight_is_where_the_format_says(tmp_path, experts, dense):
    tensors = random_tensors()
    pack_checkpoint(write_checkpoint(tmp_path / "source", tensors), tmp_path / "packed", experts=experts, dense=dense)
    manifest = read_manifest(tmp_path / "packed")
    assert (manifest.expert_bits, manifest.dense_bits) == ({"int8": 8, "bf16": 16}[experts], {"int8": 8, "bf16": 16}[dense])

    data = np.fromfile(tmp_path / "packed" / "experts.sfx", np.uint8)
    layout = ExpertLayout(140, 24, manifest.expert_bits)
    for layer in range(3):
        gate_up = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"].values()
        down = tensors[f"model.layers.{layer}.mlp.experts.down_proj"].values()
        for expert in range(5):
            start = HEADER_BYTES + (layer * 5 + expert) * layout.stride
            piece = data[start : start + layout.slice_bytes]
            assert zlib.crc32(piece.data) == manifest.expert_crc32[layer][expert]
            assert not data[start + layout.slice_bytes : start + layout.stride].any()
            size = tile_bytes(24, 140, manifest.expert_bits)
            gates = piece[: 2 * size].reshape(row_tiles(24), 2, -1)
            scales: list[np.ndarray | None] = [None, None, None]
            if layout.gate_up_scales is not None and layout.down_scales is not None:
                pair = piece[layout.gate_up_scales : layout.down_scales].reshape(row_tiles(24), 2, -1)
                scales = [pair[:, 0].copy().reshape(-1), pair[:, 1].copy().reshape(-1), piece[layout.down_scales :]]
            bits = manifest.expert_bits
            assert_equal(matrix(gates[:, 0].copy().reshape(-1), scales[0], 24, 140), rounded(gate_up[expert, :24], bits))
            assert_equal(matrix(gates[:, 1].copy().reshape(-1), scales[1], 24, 140), rounded(gate_up[expert, 24:], bits))
            end = layout.down_tiles + tile_bytes(140, 24, bits)
            assert_equal(matrix(piece[layout.down_tiles : end], scales[2], 140, 24), rounded(down[expert], bits))

    data = np.fromfile(tmp_path / "packed" / "dense.sfx", np.uint8)
    for name, entry in manifest.tensors.items():
        piece = data[entry.offset : entry.offset + entry.bytes]
        assert zlib.crc32(piece.data) == entry.crc32
        weights = (tensors.get(f"model.{name}") or tensors[name]).values()
        if entry.kind == "f32":
            stored = piece.view(np.float32).reshape(entry.shape)
            assert np.array_equal(stored, weights[:, 0].T if "conv1d" in name else weights)
        else:
            bits = 8 if entry.kind == "int8" else 16
            tiles = piece[: tile_bytes(*entry.shape, bits)]
            scales_part = piece[entry.scales_offset :] if bits == 8 else None
            assert_equal(matrix(tiles, scales_part, *entry.shape), rounded(weights, bits))

    rows = np.fromfile(tmp_path / "packed" / "embed.sfx", np.uint8)[HEADER_BYTES:]
    assert zlib.crc32(rows.data) == manifest.embed_crc32
    assert rows.tobytes() == tensors["model.embed_tokens.weight"].data


def test_files_are_copied_and_nothing_else_is_left(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "notes.txt").write_text("not ours")
    pack_checkpoint(source, tmp_path / "packed")
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "packed").iterdir()} == copied | set(SFX) | {"manifest.json"}
    for name in copied:
        assert (tmp_path / "packed" / name).read_bytes() == (source / name).read_bytes()


def test_optional_files_may_be_absent(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").unlink()
    (source / "tokenizer.json").unlink()
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "packed")])
    assert result.exit_code == 0
    assert "without tokenizer.json" in result.output
    assert not (tmp_path / "packed" / "generation_config.json").exists()


def test_headers_stand_alone(tmp_path):
    pack_checkpoint(write_checkpoint(tmp_path / "source"), tmp_path / "packed")
    for kind, name in enumerate(SFX, start=1):
        data = (tmp_path / "packed" / name).read_bytes()
        header = Header.unpack(data[:HEADER_BYTES], name)
        assert (header.kind, header.file_bytes) == (kind, len(data))


def test_every_form_packs_to_the_same_bytes(tmp_path):
    forms = [
        {},
        {"experts": "split"},
        {"shards": 5},
        {"nested": True, "prefix": "model.language_model.", "experts": "split", "shards": 3, "extra": extra_tensors()},
    ]
    packed = []
    for index, form in enumerate(forms):
        source = write_checkpoint(tmp_path / f"source{index}", **form)
        pack_checkpoint(source, tmp_path / f"packed{index}")
        packed.append({name: (tmp_path / f"packed{index}" / name).read_bytes() for name in SFX})
    assert all(other == packed[0] for other in packed)


def test_the_manifest_describes_the_source(tmp_path):
    tensors = random_tensors()
    source = write_checkpoint(tmp_path / "source", tensors, shards=2, extra=extra_tensors())
    manifest = pack_checkpoint(source, tmp_path / "packed")
    written = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert written.pop("crc32") and written == manifest
    assert manifest["copied"] == {
        name: {"bytes": len(data), "crc32": zlib.crc32(data)}
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
        for data in [(source / name).read_bytes()]
    }
    stored = tensors | extra_tensors()
    for shard, entry in manifest["source"]["shards"].items():
        data = (source / shard).read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        digest = hashlib.sha256(data[:length])
        for name in sorted(json.loads(data[8:length])):
            if name in tensors:
                digest.update(name.encode() + b"\0" + struct.pack("<I", zlib.crc32(stored[name].data)))
        assert entry == {"bytes": len(data), "digest": f"sha256:{digest.hexdigest()}"}
    report = manifest["report"]
    assert report["left_out"] == {"vision": {"tensors": 2, "source_bytes": 72}, "mtp": {"tensors": 1, "source_bytes": 15}}
    parts = [report[part] for part in ("experts", "dense", "embedding")]
    assert sum(part["tensors"] for part in parts) == len(tensors)
    assert sum(part["source_bytes"] for part in parts) == sum(len(tensor.data) for tensor in tensors.values())
    assert [part["packed_bytes"] for part in parts] == [(tmp_path / "packed" / name).stat().st_size for name in SFX]
    assert report["rounded_to_bf16"] == {}


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_wider_weights_are_rounded_and_counted(tmp_path, dtype):
    tensors = random_tensors(dtype=dtype)
    source = write_checkpoint(tmp_path / "source", tensors)
    manifest = pack_checkpoint(source, tmp_path / "packed", experts="bf16", dense="bf16")
    values = tensors["model.embed_tokens.weight"].values()
    bits = to_bf16(values)
    embedded = np.fromfile(tmp_path / "packed" / "embed.sfx", np.uint16)[HEADER_BYTES // 2 :]
    assert np.array_equal(embedded, bits.reshape(-1))
    entry = manifest["report"]["rounded_to_bf16"]["embed_tokens.weight"]
    assert entry == {"tensors": 1, "values_changed": int((from_bf16_bits(bits) != values).sum())}
    assert manifest["report"]["rounded_to_bf16"]["layers.*.mlp.experts.gate_up_proj"]["tensors"] == 3
    assert "norm.weight" not in manifest["report"]["rounded_to_bf16"]


def test_float32_that_came_from_bf16_changes_nothing(tmp_path):
    tensors = {name: Stored.of(tensor.values(), "F32") for name, tensor in random_tensors().items()}
    wide = pack_checkpoint(write_checkpoint(tmp_path / "wide", tensors), tmp_path / "a", experts="bf16", dense="bf16")
    pack_checkpoint(write_checkpoint(tmp_path / "half"), tmp_path / "b", experts="bf16", dense="bf16")
    assert {entry["values_changed"] for entry in wide["report"]["rounded_to_bf16"].values()} == {0}
    for name in SFX:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_int8_rounds_only_the_small_matrices(tmp_path):
    manifest = pack_checkpoint(write_checkpoint(tmp_path / "source", random_tensors(dtype="F32")), tmp_path / "packed")
    assert set(manifest["report"]["rounded_to_bf16"]) == {
        "embed_tokens.weight",
        "layers.*.linear_attn.in_proj_a.weight",
        "layers.*.linear_attn.in_proj_b.weight",
        "layers.*.mlp.gate.weight",
        "layers.*.mlp.shared_expert_gate.weight",
    }


@pytest.mark.parametrize("dense", ["int8", "bf16"])
def test_a_tied_head_is_packed_from_the_embedding(tmp_path, dense):
    tied = SMALL | {"tie_word_embeddings": True}
    tensors = random_tensors(tied)
    report = pack_checkpoint(write_checkpoint(tmp_path / "tied", tensors, tied), tmp_path / "a", dense=dense)["report"]
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    pack_checkpoint(write_checkpoint(tmp_path / "untied", untied), tmp_path / "b", dense=dense)
    assert (tmp_path / "a" / "dense.sfx").read_bytes() == (tmp_path / "b" / "dense.sfx").read_bytes()
    assert report["dense"]["tensors"] + report["experts"]["tensors"] + report["embedding"]["tensors"] == len(tensors)


# --- interruption ---


class Interrupt:
    """A progress callback that stops the packing once `limit` bytes are read."""

    def __init__(self, limit: int, error: BaseException) -> None:
        self.limit = limit
        self.error = error
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        if done >= self.limit:
            raise self.error


@pytest.mark.parametrize("percent", [0, 1, 20, 50, 75, 99, 100])
def test_an_interrupted_pack_is_completed_to_the_same_bytes(tmp_path, percent):
    source = write_checkpoint(tmp_path / "source", random_tensors(dtype="F32"), experts="split", extra=extra_tensors())
    pack_checkpoint(source, tmp_path / "undisturbed")
    seen: list[tuple[int, int]] = []
    pack_checkpoint(source, tmp_path / "measured", progress=lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, tmp_path / "packed", progress=Interrupt(total * percent // 100, KeyboardInterrupt()))
    assert not (tmp_path / "packed" / "manifest.json").exists()
    resumed: list[tuple[int, int]] = []
    pack_checkpoint(source, tmp_path / "packed", progress=lambda done, total: resumed.append((done, total)))
    assert contents(tmp_path / "packed") == contents(tmp_path / "undisturbed")
    assert resumed[-1] == (total, total)
    if percent >= 50:
        assert resumed[0][0] > 0


def test_a_pack_interrupted_again_and_again(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    pack_checkpoint(source, tmp_path / "undisturbed")
    interruptions = 0
    while not (tmp_path / "packed" / "manifest.json").exists():
        # Each time a little further: units are at most 50 kB of this source.
        progress = Interrupt(60_000 * (interruptions + 1), KeyboardInterrupt())
        try:
            pack_checkpoint(source, tmp_path / "packed", progress=progress)
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 3
    assert contents(tmp_path / "packed") == contents(tmp_path / "undisturbed")


def interrupted(tmp_path: Path, **options: str) -> tuple[Path, Path]:
    """A source, and a pack of it that stopped halfway."""
    source = write_checkpoint(tmp_path / "source")
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, tmp_path / "packed", progress=Interrupt(200_000, KeyboardInterrupt()), **options)
    return source, tmp_path / "packed"


@pytest.mark.parametrize("cut", [1, 2, 30, 100_000])
def test_a_journal_that_was_cut_off_is_still_of_use(tmp_path, cut):
    source, packed = interrupted(tmp_path)
    journal = packed / "pack.journal"
    journal.write_bytes(journal.read_bytes()[:-cut])
    pack_checkpoint(source, packed)
    pack_checkpoint(source, tmp_path / "undisturbed")
    assert contents(packed) == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("tail", [b"\0" * 512, b'{"unit":\n{"unit":"x"}\n', b"[1]\n", b'{"a":1}\n'])
def test_rubbish_at_the_end_of_a_journal_is_dropped(tmp_path, tail):
    source, packed = interrupted(tmp_path)
    with open(packed / "pack.journal", "ab") as journal:
        journal.write(tail)
    pack_checkpoint(source, packed)
    pack_checkpoint(source, tmp_path / "undisturbed")
    assert contents(packed) == contents(tmp_path / "undisturbed")


def test_finished_units_are_not_read_again(tmp_path):
    source, packed = interrupted(tmp_path)
    done = {json.loads(line).get("unit") for line in (packed / "pack.journal").read_text().splitlines()}
    assert {"embed", "layers.0.dense"} <= done
    data = bytearray((packed / "embed.sfx").read_bytes())
    data[HEADER_BYTES] ^= 1
    (packed / "embed.sfx").write_bytes(data)
    pack_checkpoint(source, packed)
    assert (packed / "embed.sfx").read_bytes() == data


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_file_lost_since_cannot_be_continued(tmp_path, damage):
    source, packed = interrupted(tmp_path)
    if damage == "lost":
        (packed / "embed.sfx").unlink()
    else:
        os.truncate(packed / "embed.sfx", 5000)
    for _ in range(2):
        with pytest.raises(PackedModelError, match="embed.sfx: was changed since packing stopped, delete the folder"):
            pack_checkpoint(source, packed)


def test_other_options_cannot_continue_a_pack(tmp_path):
    source, packed = interrupted(tmp_path, experts="bf16")
    before = contents(packed)
    with pytest.raises(OptionError, match="was begun with --experts bf16 and cannot be continued with --experts int8, delete"):
        pack_checkpoint(source, packed)
    assert contents(packed) == before
    pack_checkpoint(source, packed, experts="bf16")


def test_a_changed_source_cannot_continue_a_pack(tmp_path):
    source, packed = interrupted(tmp_path)
    os.utime(source / "model.safetensors")
    before = contents(packed)
    with pytest.raises(OptionError, match="because shard model.safetensors of the checkpoint has changed since it was begun, delete"):
        pack_checkpoint(source, packed)
    assert contents(packed) == before


def test_a_changed_configuration_cannot_continue_a_pack(tmp_path):
    source, packed = interrupted(tmp_path)
    (source / "config.json").write_text(json.dumps(SMALL | {"rms_norm_eps": 1e-5}))
    with pytest.raises(OptionError, match="because config.json of the checkpoint has changed"):
        pack_checkpoint(source, packed)


def test_another_version_cannot_continue_a_pack(tmp_path, monkeypatch):
    source, packed = interrupted(tmp_path)
    monkeypatch.setattr("sparseflow.pack.tool_version", lambda: "99.0")
    with pytest.raises(OptionError, match="was begun by another SparseFlow .*now 99.0"):
        pack_checkpoint(source, packed)


def test_two_processes_do_not_pack_into_one_folder(tmp_path):
    source, packed = interrupted(tmp_path)
    errors = []

    def second(done: int, total: int) -> None:
        if not errors:
            with pytest.raises(OptionError) as caught:
                pack_checkpoint(source, packed)
            errors.append(str(caught.value))

    pack_checkpoint(source, packed, progress=second)
    assert "another process is packing into this folder" in errors[0]


def test_a_folder_without_preallocation_is_filled_all_the_same(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    pack_checkpoint(source, tmp_path / "a")

    def refuse(*arguments: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    pack_checkpoint(source, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_disk_that_fills_up_midway_can_be_resumed(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    pack_checkpoint(source, tmp_path / "undisturbed")
    pwrite, written = os.pwrite, []

    def fill_up(descriptor: int, data: memoryview, offset: int) -> int:
        if sum(written) > 150_000:
            raise OSError(28, "No space left on device")
        # A short write is not an error: the rest must follow.
        written.append(pwrite(descriptor, data[:3000], offset))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(StorageError, match="sfx: writing failed .No space left on device., make room and run the same command again"):
        pack_checkpoint(source, tmp_path / "packed")
    monkeypatch.undo()
    assert len((tmp_path / "packed" / "pack.journal").read_text().splitlines()) > 1
    pack_checkpoint(source, tmp_path / "packed")
    assert contents(tmp_path / "packed") == contents(tmp_path / "undisturbed")


# --- the command line ---


def test_command_prints_what_went_where(tmp_path):
    source = write_checkpoint(tmp_path / "source", random_tensors(dtype="F32"), extra=extra_tensors())
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "packed")])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    names = [line[:16].rstrip() for line in lines[:7]]
    assert names == ["", "routed experts", "dense core", "embedding", "left out: vision", "left out: MTP", "total"]
    assert lines[0].split() == ["tensors", "source", "packed"]
    assert lines[4].split()[3:] == ["2", "72", "B", "-"]
    assert any(line.startswith("rounded to bfloat16 from a wider type: layers.*.mlp.gate.weight (3 tensors,") for line in lines)
    assert result.stderr == ""


def test_command_can_be_quiet(tmp_path):
    result = CliRunner().invoke(main, [str(DEMO), str(tmp_path / "packed"), "--quiet", "--experts", "bf16", "--dense", "bf16"])
    assert (result.exit_code, result.output) == (0, "")
    assert read_manifest(tmp_path / "packed").expert_bits == 16


def test_help_teaches():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for part in ("SRC", "DST", "--experts [int8|bf16]", "default: int8", "Memory stays under 1 GiB", "Exit status"):
        assert part in result.output


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    monkeypatch.setattr(ProgressLine, "__call__", Interrupt(100_000, KeyboardInterrupt()))
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "packed")])
    assert result.exit_code == 130
    assert result.stderr == f"stopped: run the same command again to finish {tmp_path / 'packed'}\n"
    monkeypatch.undo()
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "packed")])
    assert result.exit_code == 0
    assert result.stderr.startswith("continuing an interrupted pack at ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "end"), [(Terminal(), "\x1b[K"), (io.StringIO(), "\n")], ids=["terminal", "log"])
def test_progress_speaks_after_two_seconds(stream, end):
    now = [100.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    for _ in range(19):
        line(0, 1000 * 2**20)
        now[0] += 0.1
    assert stream.getvalue() == ""
    now[0] = 104.0
    line(100 * 2**20, 1000 * 2**20)
    assert stream.getvalue().removeprefix("\r") == f"packing:  10% of 1000.0 MiB, 25.0 MiB/s, 36 s left{end}"
    line(200 * 2**20, 1000 * 2**20)
    assert stream.getvalue().count("packing") == 1
    line.finish()
    assert stream.getvalue().endswith("\r\x1b[K" if stream.isatty() else "left\n")


def test_speed_of_a_resumed_pack_leaves_out_what_was_there():
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    line(900 * 2**20, 1000 * 2**20)
    now[0] = 10.0
    line(910 * 2**20, 1000 * 2**20)
    assert stream.getvalue().splitlines() == [
        "continuing an interrupted pack at 90%",
        "packing:  91% of 1000.0 MiB, 1.0 MiB/s, 1 min 30 s left",
    ]


def test_the_table_of_a_report():
    part = {"tensors": 80, "source_bytes": 60 * 2**30, "packed_bytes": 30 * 2**30}
    none = {"tensors": 0, "source_bytes": 0}
    report = {"experts": part, "dense": part, "embedding": part, "left_out": {"vision": none, "mtp": none}}
    report |= {"rounded_to_bf16": {}, "equalised": {}}
    assert report_table(report).splitlines()[-1] == "total                 240  180.0 GiB  90.0 GiB"


# --- a real process ---


def big_source(folder: Path, experts: int) -> Path:
    """A checkpoint of 6 MB an expert, all zero: the shard is a sparse file."""
    config = SMALL | {"hidden_size": 1024, "moe_intermediate_size": 256, "num_experts": experts, "num_hidden_layers": 4}
    config["layer_types"] = ["linear_attention"] * 4
    source = write_checkpoint(folder, {}, config)
    header, offset = {}, 0
    for name, shape in shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return source


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_process_that_is_stopped_leaves_a_pack_that_can_be_finished(tmp_path, number, status):
    source = big_source(tmp_path / "source", experts=32)
    command = [sys.executable, "-P", "-c", "from sparseflow.cli.pack import main; main()", str(source), str(tmp_path / "packed")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    journal = tmp_path / "packed" / "pack.journal"
    while not journal.exists() or b"layers.0.experts" not in journal.read_bytes():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == status
    if number == signal.SIGINT:
        assert errors.decode().splitlines()[-1] == f"stopped: run the same command again to finish {tmp_path / 'packed'}"
    assert not (tmp_path / "packed" / "manifest.json").exists()
    pack_checkpoint(source, tmp_path / "packed")
    pack_checkpoint(source, tmp_path / "undisturbed")
    assert contents(tmp_path / "packed") == contents(tmp_path / "undisturbed")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path):
    source = big_source(tmp_path / "source", experts=192)
    assert (source / "model.safetensors").stat().st_size > 2**30
    # Not ru_maxrss, which a new process inherits from the one that started it.
    program = (
        "import re, sys; from sparseflow.pack import pack_checkpoint; pack_checkpoint(*sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, str(source), str(tmp_path / "packed")], env=environment, capture_output=True, check=True
    )
    assert int(result.stdout) * 1024 < 2**28


def test_an_interrupt_before_the_journal_leaves_no_folder(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")

    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparseflow.pack.Journal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_checkpoint_itself_is_no_destination(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    (source / "pack.journal").touch()
    with pytest.raises(OptionError, match="is the checkpoint itself"):
        pack_checkpoint(source, source)
