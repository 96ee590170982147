"""Everything that can be wrong with a checkpoint, a folder or a disk: one clear line, the right status, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from checkpoints import DEMO, SMALL, Stored, random_tensors, write_checkpoint, write_config, write_safetensors
from sparseflow.cli.pack import main
from sparseflow.errors import OptionError, PackedModelError
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import read_manifest, write_manifest

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4000000000\n"
FIRST = "model-00001-of-00003.safetensors"


def refused(source: Path, target: Path, status: int, *message: str, options: tuple[str, ...] = ()) -> None:
    """Packing must fail with one line that holds every part of `message`, and leave no folder."""
    existed = target.exists()
    result = CliRunner().invoke(main, [str(source), str(target), *options])
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for part in message:
        assert part in lines[0]
    assert result.exit_code == status
    assert result.stdout == ""
    assert target.exists() == existed


# --- damage to a sharded checkpoint: (what is done to it, parts of the message) ---


def remove(name: str) -> Callable[[Path], None]:
    return lambda source: (source / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda source: (source / name).write_text(text) and None


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda source: os.truncate(source / name, size)


def configure(**changes: object) -> Callable[[Path], None]:
    return lambda source: write_config(source, SMALL | changes)


def lose_a_tensor_of_the_index(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.norm"] = FIRST
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE = {
    "missing shard": (remove(FIRST), [FIRST, "shard is missing", "model.safetensors.index.json names it"]),
    "truncated data": (truncate(FIRST, 30_000), [FIRST, "is truncated or damaged (30000 bytes"]),
    "truncated header": (truncate(FIRST, 100), [FIRST, "is truncated or damaged (100 bytes"]),
    "truncated length": (truncate(FIRST, 5), [FIRST, "is truncated or damaged (5 bytes"]),
    "empty shard": (truncate(FIRST, 0), [FIRST, "is truncated or damaged (0 bytes"]),
    "shard of text": (write(FIRST, "<html>not found</html>"), [FIRST, "is truncated or damaged"]),
    "pointer for a shard": (write(FIRST, LFS_POINTER), [FIRST, "is a Git LFS pointer", "git lfs pull"]),
    "pointer for the tokenizer": (write("tokenizer.json", LFS_POINTER), ["tokenizer.json", "is a Git LFS pointer"]),
    "no index": (remove("model.safetensors.index.json"), ["holds neither model.safetensors nor model.safetensors.index.json"]),
    "index of text": (write("model.safetensors.index.json", "{"), ["model.safetensors.index.json: is not valid JSON"]),
    "index without map": (write("model.safetensors.index.json", '{"weight_map": []}'), ["holds no weight_map"]),
    "index against shard": (lose_a_tensor_of_the_index, [FIRST, "tensor model.layers.9.norm is missing"]),
    "no config": (remove("config.json"), ["config.json: no such file"]),
    "config of text": (write("config.json", '{"hidden_size": 1,}'), ["config.json: is not valid JSON"]),
    "config of depth": (write("config.json", "[" * 100_000), ["config.json: is not valid JSON"]),
    "config not UTF-8": (lambda source: (source / "config.json").write_bytes(b'"\xff"') and None, ["config.json: is not valid JSON"]),
    "config is a list": (write("config.json", "[]"), ["config.json: expected a JSON object, found list"]),
    "wrong model type": (configure(model_type="qwen3_moe"), ["config.json: model_type is 'qwen3_moe'"]),
    "rope": (configure(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), ["rope_type is 'yarn'"]),
    "quantised": (configure(quantization_config={"quant_method": "gptq"}), ["already quantised", "'gptq'", "original BF16"]),
    "shape": (configure(moe_intermediate_size=32), ["shape is [", "the configuration gives ["]),
    "fewer layers": (configure(num_hidden_layers=2, layer_types=SMALL["layer_types"][:2]), ["layers.2.", "has no place in this model"]),
    "more layers": (
        configure(num_hidden_layers=4, layer_types=[*SMALL["layer_types"], "full_attention"]),
        ["tensor layers.3.input_layernorm.weight is missing"],
    ),
    "other mixer": (configure(layer_types=["full_attention"] * 3), ["tensor layers.0.self_attn.q_proj.weight is missing"]),
    "tokenizer of text": (write("tokenizer.json", "tokens"), ["tokenizer.json: is not valid JSON"]),
    "generation of text": (write("generation_config.json", "eos"), ["generation_config.json: is not valid JSON"]),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint(tmp_path, damage, message):
    source = write_checkpoint(tmp_path / "source", shards=3)
    damage(source)
    refused(source, tmp_path / "packed", 3, *message)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.mlp.experts.down_proj",
        "model.layers.2.mlp.shared_expert_gate.weight",
    ],
)
def test_an_absent_tensor_is_named(tmp_path, name):
    tensors = random_tensors()
    del tensors[name]
    refused(write_checkpoint(tmp_path / "source", tensors), tmp_path / "packed", 3, f"tensor {name.removeprefix('model.')} is missing")


def test_an_absent_expert_is_named(tmp_path):
    source = write_checkpoint(tmp_path / "source", experts="split", shards=40)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    shard = index["weight_map"].pop(name)
    kept = {key: tensor for key, tensor in stored(source / shard).items() if key != name}
    write_safetensors(source / shard, kept)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, tmp_path / "packed", 3, "tensor layers.1.mlp.experts.3.up_proj.weight is missing")


def stored(shard: Path) -> dict[str, Stored]:
    """The tensors of a shard."""
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 1), ("I32", 4), ("F64", 8), ("U8", 1), ("BOOL", 1)])
def test_a_dtype_that_is_not_supported_is_named(tmp_path, dtype, size):
    tensors = random_tensors()
    tensors["model.layers.1.self_attn.k_proj.weight"] = Stored(dtype, (16, 140), bytes(16 * 140 * size))
    source = write_checkpoint(tmp_path / "source", tensors)
    refused(source, tmp_path / "packed", 3, "model.layers.1.self_attn.k_proj.weight", f"dtype {dtype} is not supported", "BF16, F16, F32")


@pytest.mark.parametrize("shape", [(140,), (1, 140, 1), (141, 1), (70, 2)])
def test_a_shape_that_contradicts_the_configuration_is_named(tmp_path, shape):
    tensors = random_tensors()
    tensors["model.layers.1.mlp.shared_expert_gate.weight"] = Stored.of(np.zeros(shape))
    source = write_checkpoint(tmp_path / "source", tensors)
    refused(source, tmp_path / "packed", 3, "model.layers.1.mlp.shared_expert_gate.weight", str(list(shape)), "[1, 140]")


@pytest.mark.parametrize(("dtype", "value"), [("BF16", np.nan), ("BF16", np.inf), ("F16", -np.inf), ("F32", np.nan)])
@pytest.mark.parametrize("form", ["int8", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.linear_attn.dt_bias",
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    ],
)
def test_not_a_number_is_named(tmp_path, name, form, dtype, value):
    tensors = random_tensors()
    values = tensors[name].values().copy()
    values.flat[values.size // 2 + 1] = value
    tensors[name] = Stored.of(values, dtype)
    source = write_checkpoint(tmp_path / "source", tensors)
    options = ("--experts", form, "--dense", form)
    refused(source, tmp_path / "packed", 3, f"tensor {name}", "NaN or infinite weights", options=options)


def test_the_expert_is_named_too(tmp_path):
    tensors = random_tensors()
    values = tensors["model.layers.2.mlp.experts.down_proj"].values().copy()
    values[3, 100, 7] = np.nan
    tensors["model.layers.2.mlp.experts.down_proj"] = Stored.of(values)
    refused(write_checkpoint(tmp_path / "source", tensors), tmp_path / "packed", 3, "model.layers.2.mlp.experts.down_proj (expert 3)")


def test_a_weight_beyond_float16_scales(tmp_path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = Stored.of(np.full((71, 140), 1e9))
    refused(write_checkpoint(tmp_path / "source", tensors), tmp_path / "packed", 3, "tensor lm_head.weight", "too large for a float16 scale")


def test_a_weight_beyond_bfloat16(tmp_path):
    tensors = random_tensors()
    tensors["model.embed_tokens.weight"] = Stored.of(np.full((71, 140), np.finfo(np.float32).max), "F32")
    refused(write_checkpoint(tmp_path / "source", tensors), tmp_path / "packed", 3, "model.embed_tokens.weight", "beyond bfloat16")


def test_a_resumed_pack_of_a_damaged_source_is_removed(tmp_path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = Stored.of(np.full((71, 140), np.nan))
    source = write_checkpoint(tmp_path / "source", tensors)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, tmp_path / "packed", progress=stop)
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "packed"), "--quiet"])
    assert result.exit_code == 3 and "tensor lm_head.weight" in result.stderr
    assert not (tmp_path / "packed").exists()


# --- source and destination ---


def test_a_source_that_does_not_exist(tmp_path):
    refused(tmp_path / "nowhere", tmp_path / "packed", 3, "nowhere: no such folder")


def test_a_source_that_is_a_file(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    refused(source / "model.safetensors", tmp_path / "packed", 3, "is a file, give the folder")


def test_a_source_that_is_empty(tmp_path):
    (tmp_path / "source").mkdir()
    refused(tmp_path / "source", tmp_path / "packed", 3, "config.json: no such file")


def test_a_source_that_is_packed(tmp_path):
    pack_checkpoint(DEMO, tmp_path / "demo")
    refused(tmp_path / "demo", tmp_path / "packed", 3, "is a packed model already")


def test_a_destination_that_is_a_finished_pack(tmp_path):
    pack_checkpoint(DEMO, tmp_path / "demo")
    refused(DEMO, tmp_path / "demo", 2, "is a finished pack already, choose another folder or delete it")


@pytest.mark.parametrize("kind", ["empty folder", "folder", "file", "dangling link"])
def test_a_destination_that_exists(tmp_path, kind):
    target = tmp_path / "packed"
    if kind == "file":
        target.write_text("mine")
    elif kind == "dangling link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        if kind == "folder":
            (target / "mine.txt").write_text("mine")
    refused(DEMO, target, 2, "exists and is not an unfinished pack")
    assert os.path.lexists(target)
    assert kind != "folder" or (target / "mine.txt").read_text() == "mine"


def test_a_destination_without_a_parent(tmp_path):
    refused(DEMO, tmp_path / "a" / "b", 2, "its parent", "is not a folder, create it first")


@pytest.mark.parametrize("options", [("--experts", "int4"), ("--dense", "q8_0"), ("--fast",)])
def test_an_unknown_option(tmp_path, options):
    refused(DEMO, tmp_path / "packed", 2, options[0], options=options)


def test_a_missing_argument():
    result = CliRunner().invoke(main, [str(DEMO)])
    assert result.exit_code == 2
    assert "Missing argument 'DST'" in result.stderr


def test_the_library_checks_its_options(tmp_path):
    with pytest.raises(OptionError, match="experts is 'int4', it must be one of int8, bf16"):
        pack_checkpoint(DEMO, tmp_path / "packed", experts="int4")


# --- the disk ---


def test_a_disk_without_room_is_found_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    refused(DEMO, tmp_path / "packed", 6, "the pack needs 24.5 MiB (25649152 bytes)", "1000 B (1000 bytes) free", "make room or choose another disk")


def test_a_disk_that_refuses_the_files(tmp_path, monkeypatch):
    def refuse(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    refused(DEMO, tmp_path / "packed", 6, "experts.sfx: no room for 5509120 bytes (No space left on device)")


@pytest.mark.slow
def test_a_system_that_refuses_to_write(tmp_path):
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))

    result = subprocess.run(
        [sys.executable, "-P", "-c", "from sparseflow.cli.pack import main; main()", str(DEMO), str(tmp_path / "packed")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 6
    assert result.stderr.startswith("error: ") and "File too large" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "packed").exists()


# --- opening what was packed ---


@pytest.fixture(scope="module")
def packed_demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "demo"
    pack_checkpoint(DEMO, folder)
    return folder


@pytest.fixture
def packed(packed_demo, tmp_path) -> Path:
    """A packed folder to damage."""
    return Path(shutil.copytree(packed_demo, tmp_path / "packed"))


def unreadable(folder: Path, *message: str) -> None:
    with pytest.raises(PackedModelError) as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)
    for part in message:
        assert part in str(caught.value)


def edit(folder: Path, path: str, value: object) -> None:
    """Change one field of the manifest; the path is dotted, a value of `remove` deletes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    *parents, last = path.split(".")
    at = manifest
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if value is remove:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    del manifest["crc32"]
    write_manifest(folder, manifest)


def test_a_whole_pack_opens(packed):
    manifest = read_manifest(packed)
    assert manifest.folder == packed
    assert len(manifest.tensors) == 124
    assert read_manifest(str(packed)).raw == manifest.raw


def test_folders_that_are_not_packs(tmp_path):
    unreadable(tmp_path / "nowhere", "nowhere: no such folder")
    (tmp_path / "file").write_text("")
    unreadable(tmp_path / "file", "is a file, a packed model is a folder")
    (tmp_path / "empty").mkdir()
    unreadable(tmp_path / "empty", "is not a packed model", "sf-pack CHECKPOINT FOLDER")


def test_an_unpacked_checkpoint_names_the_command(tmp_path):
    source = write_checkpoint(tmp_path / "qwen")
    unreadable(source, "is an unpacked checkpoint", f"sf-pack {source} qwen-packed")


def test_an_unfinished_pack(packed):
    (packed / "manifest.json").unlink()
    unreadable(packed, "the pack is unfinished, run the same sf-pack command again")
    (packed / "experts.sfx").unlink()
    (packed / "pack.journal").write_text("")
    unreadable(packed, "the pack is unfinished")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": "sparseflow"', "\ud800"])
def test_a_manifest_that_is_not_json(packed, text):
    (packed / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    unreadable(packed, "manifest.json: is not valid JSON")


@pytest.mark.parametrize("text", ["[]", "null", '"sparseflow"', "{}", '{"format": "gguf"}'])
def test_another_json_file(packed, text):
    (packed / "manifest.json").write_text(text)
    unreadable(packed, "manifest.json: is not the manifest of a packed model")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format_version", 2, "packed format version 2 is newer than this SparseFlow reads (1), update SparseFlow"),
        ("format_version", 10**30, "is newer than this SparseFlow reads"),
        ("format_version", 0, "format_version is 0, expected 1"),
        ("format_version", "1", "format_version is '1', expected int"),
        ("format_version", True, "format_version is True, expected int"),
        ("geometry", remove, "geometry is None, expected dict"),
        ("geometry.hidden_size", 2**70, "hidden_size is"),
        ("geometry.num_hidden_layers", 2**31 - 1, "num_hidden_layers is 2147483647"),
        ("geometry.num_experts", 65536, "files is"),
        ("quantization", [], "quantization.experts is None, expected str"),
        ("quantization.experts", "int4", "quantization.experts is 'int4', expected one of int8, bf16"),
        ("quantization.dense", "bf16", "files is"),
        ("quantization.weight_group", 64, "quantization.weight_group is 64, expected 128"),
        ("quantization.activation_group", remove, "quantization.activation_group is None, expected int"),
        ("files", [], "files is [], expected dict"),
        ("files", {}, "files is {}, the geometry gives"),
        ("experts.stride", 2**63, "experts.stride is 9223372036854775808, expected 28672"),
        ("experts.stride", 0, "experts.stride is 0"),
        ("experts.slice_bytes", -1, "experts.slice_bytes is -1"),
        ("experts.crc32", {}, "experts.crc32 is {}, expected list"),
        ("experts.crc32", [], "experts.crc32 is not one checksum per layer and expert"),
        ("experts.crc32.3", [1], "experts.crc32 is not one checksum per layer and expert"),
        ("experts.crc32.3", None, "experts.crc32 is not one checksum per layer and expert"),
        ("experts.crc32.3.5", -1, "experts.crc32 is -1, expected a 32-bit checksum"),
        ("experts.crc32.3.5", 2**32, "experts.crc32 is 4294967296, expected a 32-bit checksum"),
        ("experts.crc32.3.5", True, "experts.crc32 is True, expected a 32-bit checksum"),
        ("dense.tensors", remove, "dense.tensors is None, expected list"),
        ("dense.tensors", [], "dense.tensors has 0 entries, the geometry needs 124"),
        ("dense.tensors.7", 7, "dense.tensors: crc32 of"),
        ("dense.tensors.7.name", ["x"], "dense.tensors: {'name': ['x']"),
        ("dense.tensors.7.offset", 2**64, "dense.tensors: "),
        ("dense.tensors.7.shape", [1, -1], "dense.tensors: "),
        ("dense.tensors.7.kind", "int4", "dense.tensors: "),
        ("dense.tensors.7.crc32", "x", "dense.tensors: crc32 of"),
        ("embed.crc32", None, "embed.crc32 is None, expected int"),
        ("embed", 3, "embed.crc32 is None, expected int"),
    ],
)
def test_a_manifest_field_that_is_wrong(packed, path, value, message):
    edit(packed, path, value)
    unreadable(packed, "manifest.json: ", message)


@pytest.mark.parametrize("name", ["experts.sfx", "dense.sfx", "embed.sfx"])
def test_a_file_that_is_missing_or_of_another_size(packed, name):
    path = packed / name
    size = path.stat().st_size
    os.truncate(path, size + 1)
    unreadable(packed, f"{name}: too long, {size + 1} bytes where the manifest has {size}")
    os.truncate(path, size - 1)
    unreadable(packed, f"{name}: truncated, {size - 1} bytes where the manifest has {size}")
    os.truncate(path, 0)
    unreadable(packed, f"{name}: truncated, 0 bytes")
    path.unlink()
    unreadable(packed, f"{name}: is missing")
    path.mkdir()
    unreadable(packed, f"{name}: cannot be read")


@pytest.mark.parametrize("name", ["experts.sfx", "dense.sfx", "embed.sfx"])
def test_a_header_that_is_damaged(packed, name):
    with open(packed / name, "r+b") as file:
        file.seek(30)
        file.write(b"\xff")
    unreadable(packed, f"{name}: the header is damaged")


def test_files_of_different_packs(packed, tmp_path):
    pack_checkpoint(DEMO, tmp_path / "other", experts="bf16", dense="bf16")
    header = (tmp_path / "other" / "dense.sfx").read_bytes()[:4096]
    with open(packed / "dense.sfx", "r+b") as file:
        file.write(header)
    unreadable(packed, "dense.sfx: its header contradicts the manifest, the files are of different packs")


def test_a_file_of_a_later_format(packed):
    with open(packed / "embed.sfx", "r+b") as file:
        file.seek(8)
        file.write(b"\x09")
    unreadable(packed, "embed.sfx: packed format version 9 is newer than this SparseFlow reads")
