"""sparseflow verify: a single flipped bit anywhere in a packed folder is found, and told where it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sparseflow
from sparseflow import manifest_text
from sparseflow import verify as verify_module
from sparseflow.cli.main import main
from sparseflow.errors import PackedModelError, StorageError
from sparseflow.packfile import HEADER_BYTES, headers, read_manifest, write_manifest
from sparseflow.verify import Fault, parts_of, verify_model

FILES = (
    "config.json", "dense.sfx", "embed.sfx", "experts.sfx", "generation_config.json", "manifest.json", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip


@pytest.fixture
def pack(packed_demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed_demo, tmp_path / "pack"))


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Turns over one bit, in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def fault(folder: Path) -> str:
    """The one thing that is wrong with a pack."""
    try:
        (only,) = verify_model(folder).faults
    except PackedModelError as error:
        return str(error).removeprefix(f"{folder}/")
    return str(only)


def test_a_sound_pack(packed_demo: Path) -> None:
    told: list[tuple[int, int]] = []
    result = verify_model(packed_demo, progress=lambda done, total: told.append((done, total)))
    assert result.faults == () and result.unchecked == ()
    result.require_sound()
    every = sum(path.stat().st_size for path in packed_demo.iterdir() if path.name != "manifest.json")
    assert result.bytes == every and result.parts == 3 + 192 + 124 + 1 + 4
    assert told[0] == (0, every) and told[-1] == (every, every)
    assert sorted(done for done, _ in told) == [done for done, _ in told]


def test_the_parts_are_every_byte_of_the_files(packed_demo: Path) -> None:
    manifest = read_manifest(packed_demo)
    expected = headers(manifest.geometry, manifest.expert_bits, manifest.dense_bits)
    ends = dict.fromkeys(expected, 0)
    for part in parts_of(manifest, expected):
        assert part.offset == ends[part.file] and part.offset + part.bytes <= part.end
        ends[part.file] = part.end
    assert ends == {name: (packed_demo / name).stat().st_size for name in expected}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(file="manifest.json", place=0.0, bit=0)
def test_a_flipped_bit_anywhere_is_found(packed_demo: Path, tmp_path: Path, file: str, place: float, bit: int) -> None:
    folder = tmp_path / "pack"
    if not folder.exists():
        shutil.copytree(packed_demo, folder)
    assert sorted(os.listdir(folder)) == sorted(FILES)
    position = int(place * (folder / file).stat().st_size)
    flip(folder / file, position, bit)
    try:
        assert fault(folder).startswith(file)
    finally:
        flip(folder / file, position, bit)


def test_every_bit_of_a_manifest_is_covered() -> None:
    text = manifest_text.encode({"format": "sparseflow", "epsilon": 1e-06, "crc": [1, 2], "name": "A"})
    assert manifest_text.decode(text) == ({"format": "sparseflow", "epsilon": 1e-06, "crc": [1, 2], "name": "A"}, True)
    for position in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[position] ^= 1 << bit
            try:
                _, has_checksum = manifest_text.decode(bytes(damaged))
            except ValueError:
                continue
            assert not has_checksum  # what the key is called; verify asks for it


def test_a_damaged_manifest_does_not_open(pack: Path) -> None:
    text = (pack / "manifest.json").read_text()
    assert '"rms_norm_eps": 1e-06' in text
    (pack / "manifest.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(PackedModelError, match="differs from its checksum"):
        sparseflow.load(pack)


def test_a_pack_without_these_checksums_opens_and_is_told(pack: Path) -> None:
    text = (pack / "manifest.json").read_bytes()
    (pack / "manifest.json").write_text(json.dumps(manifest_text.decode(text)[0]))
    sparseflow.load(pack).close()
    assert fault(pack).startswith("manifest.json: has no checksum")
    assert "tokenizer.json" in verify_model(pack).unchecked


@pytest.mark.parametrize("entry", [{"../x": {"bytes": 1, "crc32": 1}}, {"x": {"bytes": "1", "crc32": 1}}, {"x": 3}, {"x": {"bytes": 1}}])
def test_bad_entries_of_copied_files(pack: Path, entry: dict[str, Any]) -> None:
    manifest, _ = manifest_text.decode((pack / "manifest.json").read_bytes())
    write_manifest(pack, manifest | {"copied": entry})
    with pytest.raises(PackedModelError, match="manifest.json: copied: "):
        read_manifest(pack)


def test_what_is_damaged_is_named(pack: Path) -> None:
    manifest = read_manifest(pack)
    entry = manifest.tensors["layers.3.self_attn.q_norm.weight"]
    behind = manifest.slice_bytes
    assert behind < manifest.stride and entry.bytes < 4096
    start = HEADER_BYTES + (5 * 24 + 17) * manifest.stride
    cases = {
        ("experts.sfx", start): "layer 5, expert 17: its checksum differs",
        ("experts.sfx", start + behind): "layer 5, expert 17: the bytes behind it are not zero",
        ("experts.sfx", start - 1): "layer 5, expert 16: the bytes behind it are not zero",
        ("experts.sfx", HEADER_BYTES - 1): "header: the bytes behind it are not zero",
        ("dense.sfx", entry.offset + 3): "layers.3.self_attn.q_norm.weight: its checksum differs",
        ("dense.sfx", entry.offset + entry.bytes): "layers.3.self_attn.q_norm.weight: the bytes behind it are not zero",
        ("embed.sfx", HEADER_BYTES + 1): "token embedding: its checksum differs",
        ("tokenizer.json", 9): "its checksum differs",
        ("config.json", 0): "its checksum differs",
    }
    for (file, position), message in cases.items():
        flip(pack / file, position)
        assert fault(pack) == f"{file}: {message}"
        flip(pack / file, position)
    for file, position in cases:
        flip(pack / file, position)
    found = verify_model(pack)
    names = {str(fault) for fault in found.faults}
    assert "dense.sfx: layers.3.self_attn.q_norm.weight: its checksum differs" in names and len(names) == len(cases) - 2
    with pytest.raises(PackedModelError, match="7 of 324 parts are damaged"):
        found.require_sound()


def test_files_that_are_cut_or_gone(pack: Path) -> None:
    os.truncate(pack / "embed.sfx", 5000)
    os.unlink(pack / "experts.sfx")
    os.unlink(pack / "tokenizer_config.json")
    os.truncate(pack / "tokenizer.json", 0)
    (pack / "notes.txt").write_text("mine")
    found = verify_model(pack)
    told = [str(fault) for fault in found.faults]
    assert [line.split(":")[0] for line in told] == [
        "experts.sfx", "embed.sfx", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert told[0].endswith("cannot be opened: No such file or directory")
    assert told[1].endswith("token embedding: the file ends before it does")
    assert found.unchecked == ("notes.txt",)
    assert not any(fault.unreadable for fault in found.faults)


@pytest.mark.parametrize("file", [name for name in FILES if name != "manifest.json"])
def test_bytes_behind_the_end_are_found(pack: Path, file: str) -> None:
    with open(pack / file, "ab") as stream:
        stream.write(b"\0")
    assert fault(pack) == f"{file}: goes on behind its end"


def failing(after: int) -> Callable[..., int]:
    """os.preadv that fails with EIO in a few pages."""
    preadv = os.preadv

    def read(descriptor: int, buffers: list[Any], offset: int) -> int:
        if offset == after and os.readlink(f"/proc/self/fd/{descriptor}").endswith("experts.sfx"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    return read


def test_a_read_error_is_told_and_the_rest_is_checked(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(pack)
    monkeypatch.setattr(verify_module.os, "preadv", failing(HEADER_BYTES + 30 * manifest.stride))
    found = verify_model(pack)
    assert found.faults == (Fault("experts.sfx", "layer 1, expert 6", "cannot be read: Input/output error", True),)
    with pytest.raises(StorageError):
        found.require_sound()
    flip(pack / "experts.sfx", HEADER_BYTES)
    with pytest.raises(PackedModelError, match="2 of 324 parts"):
        verify_model(pack).require_sound()


def test_without_direct_reads_the_page_cache_is_used(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse_direct(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return opened(path, flags, *rest)

    monkeypatch.setattr(verify_module.os, "open", refuse_direct)
    assert verify_model(pack).faults == ()
    flip(pack / "experts.sfx", HEADER_BYTES + 3 * read_manifest(pack).stride)
    assert fault(pack) == "experts.sfx: layer 0, expert 3: its checksum differs"


def test_pieces_smaller_than_a_part(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_PIECE", 8192)
    assert verify_model(pack).faults == ()


def test_an_interrupt_ends_it(pack: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_model(pack, progress=interrupt)


def test_what_is_no_pack_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PackedModelError, match="no such folder"):
        verify_model(tmp_path / "absent")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["verify", *arguments])


def test_the_command(pack: Path) -> None:
    result = invoke(str(pack))
    assert result.exit_code == 0 and "324 parts" in result.stdout and result.stdout.endswith("all sound\n")
    result = invoke(str(pack), "--json")
    assert json.loads(result.stdout)["sound"] is True and json.loads(result.stdout)["faults"] == []
    flip(pack / "experts.sfx", 5000)
    result = invoke(str(pack))
    assert result.exit_code == 4 and result.stdout.startswith("damaged: experts.sfx: layer 0, expert 0: its checksum differs\n")
    assert result.stderr.startswith("error: ") and "layer 0, expert 0" in result.stderr
    result = invoke(str(pack), "--json")
    assert result.exit_code == 4
    (found,) = json.loads(result.stdout)["faults"]
    assert found == {"file": "experts.sfx", "part": "layer 0, expert 0", "problem": "its checksum differs", "unreadable": False}
    flip(pack / "manifest.json", 500)
    result = invoke(str(pack))
    assert result.exit_code == 4 and result.stderr.startswith(f"error: {pack}/manifest.json: ")
