"""Damaged and hostile inputs for every reader of the package, made at random from sound ones, the same for the same seed."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from checkpoints import SMALL, random_tensors, write_checkpoint
from fake_model import DEMO
from report_cases import random_trace, results

from sparseflow import manifest_text, packfile
from sparseflow.bench_compare import compare
from sparseflow.bench_file import CELL_FIELDS, read_results
from sparseflow.bench_matrix import read_matrix
from sparseflow.bench_results import MEASURED_FIELDS
from sparseflow.chat import ChatTemplate
from sparseflow.checkpoint import Checkpoint
from sparseflow.cli.compare import as_text
from sparseflow.config import Geometry
from sparseflow.journal import Journal
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import HEADER_BYTES, MAGIC, Header, read_manifest
from sparseflow.questions import read_questions
from sparseflow.replay import RouteReplay
from sparseflow.report.page import NamedTrace, render
from sparseflow.report.results import load_results
from sparseflow.route_evidence import describe_route
from sparseflow.sampling import Sampler, SamplingOptions
from sparseflow.shards import read_json
from sparseflow.store import PackedStore
from sparseflow.tokenizer import Tokenizer
from sparseflow.trace import RouteTrace

Case = Callable[[random.Random], None]

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**32, 2**63 - 1, 2**64, -(2**63), 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "x", "é", "\ud800", "\0", "../x", "/dev/zero", "int8", "a" * 1000, [], {}, [[]], {"a": {}}, [None] * 20, "<|im_end|>", "default",
]  # fmt: skip
ODD_BYTES = [b"", b"\0", b"\xff\xfe", b"{", b"}", b"[", b'"', b"\\u", b"null", b"-1", b"1e999", b"9" * 5000, b"[" * 100_000, b'{"a":' * 5000]
FRAGMENTS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|im_", "start|>", "|im_end|>", "<", ">", "|", "\ue000", "\U000f0000",
    "\ud800", "\udfff", "\0", "\x1b[2J", "\u202e", "\ufeff", "\uff1c", "\u0338", "🙂", "👩\u200d👩", "a\u0301", "中", " ", "\n", "\r\n", "{{ x }}", "{% raw %}",
    "user", "system", "word ", "12345",
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What is fed: `make` prepares a folder and gives a function that makes one case and feeds it; how many cases are run by default
    and by the slow test."""

    name: str
    fast: int
    slow: int
    make: Callable[[Path], Case]


# --- how inputs are damaged ---


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bits, bytes or stretches changed, gone, doubled or put in."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(result) + 1)
        end = min(len(result), at + rng.choice((1, 2, 8, 100)))
        match rng.randrange(6):
            case 0 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                del result[at:end]
            case 2:
                result[at:at] = result[at:end]
            case 3:
                result[at:end] = rng.choice(ODD_BYTES)
            case 4:
                result[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            case _:
                del result[at:]
    return bytes(result)


def damaged_json(rng: random.Random, value: Any) -> Any:
    """`value` with some nodes of it replaced, removed, renamed or moved; it is changed itself."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        parent, key = None, None
        node = value
        while isinstance(node, (dict, list)) and node and rng.random() < 0.85:
            parent, key = node, rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            node = parent[key]
        if parent is None:
            return rng.choice(ODD_VALUES)
        match rng.randrange(6):
            case 0 | 1:
                parent[key] = json.loads(json.dumps(rng.choice(ODD_VALUES)))
            case 2:
                del parent[key]
            case 3 if isinstance(node, (int, float)):
                parent[key] = rng.choice((node + 1, node - 1, node * 2, -node, str(node), [node]))
            case 4 if isinstance(parent, dict):
                parent[rng.choice(("x", "", *parent))] = parent.pop(key)
            case _:
                parent[key] = [node, node] if rng.random() < 0.5 else {"x": node}
    return value


def damaged_text(rng: random.Random, text: str) -> bytes:
    """JSON text: its value damaged, or its bytes, or both."""
    data = json.dumps(damaged_json(rng, json.loads(text))).encode() if rng.random() < 0.8 else text.encode()
    return damaged_bytes(rng, data) if rng.random() < 0.3 else data


def any_text(rng: random.Random, pieces: list[str], most: int = 12) -> str:
    """Pieces and single characters from all of Unicode in a row."""
    parts = [rng.choice(pieces) if rng.random() < 0.7 else chr(rng.randrange(0x110000)) for _ in range(rng.randrange(most + 1))]
    return "".join(parts)


# --- packed models and checkpoints ---


def small_pack(folder: Path) -> Path:
    """A small packed model."""
    source = write_checkpoint(folder / "source")
    pack_checkpoint(source, folder / "packed")
    return folder / "packed"


def manifests(folder: Path) -> Case:
    packed = small_pack(folder)
    path = packed / "manifest.json"
    original = path.read_bytes()
    text = json.dumps(manifest_text.decode(original)[0])

    def case(rng: random.Random) -> None:
        if rng.random() < 0.3:
            path.write_bytes(damaged_bytes(rng, original))
        else:
            value = damaged_json(rng, json.loads(text))
            path.write_bytes(manifest_text.encode(value) if rng.random() < 0.8 else json.dumps(value).encode())
        read_manifest(packed)

    return case


def headers(folder: Path) -> Case:
    packed = small_pack(folder)
    files = {name: (packed / name).read_bytes() for name in (packfile.EXPERTS_FILE, packfile.DENSE_FILE, packfile.EMBED_FILE)}
    names = [field.name for field in fields(Header)]

    def case(rng: random.Random) -> None:
        name = rng.choice(list(files))
        data = files[name]
        head = data[:HEADER_BYTES]
        if rng.random() < 0.7:
            values = list(astuple(Header.unpack(head, name)))
            for _ in range(rng.choice((1, 1, 2, 4))):
                at = rng.randrange(len(names))
                bits = 64 if names[at] in ("stride", "slice_bytes", "file_bytes") else 32
                near = (values[at] + 1, values[at] - 1, values[at] * 2, values[at] + 4096)
                values[at] = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**64 - 4096, rng.getrandbits(bits), *near)) % 2**bits
            version = 1 if rng.random() < 0.9 else rng.getrandbits(32)
            head = struct.pack("<8sIIIIIIIIIIQQQ", MAGIC, version, HEADER_BYTES, *values)
            head = (head + struct.pack("<I", zlib.crc32(head))).ljust(HEADER_BYTES, b"\0")
        else:
            head = damaged_bytes(rng, head[:128]).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
        changed = head + data[HEADER_BYTES:]
        if rng.random() < 0.2:
            changed = changed[: rng.randrange(len(changed))]
        (packed / name).write_bytes(changed)
        try:
            if name == packfile.EXPERTS_FILE:
                PackedStore(packed / name).close()
            read_manifest(packed)
        finally:
            (packed / name).write_bytes(data)

    return case


def safetensors_headers(folder: Path) -> Case:
    source = write_checkpoint(folder / "source")
    path = source / "model.safetensors"
    original = path.read_bytes()
    length = int.from_bytes(original[:8], "little")
    text = original[8 : 8 + length].decode()

    def case(rng: random.Random) -> None:
        header = damaged_text(rng, text)
        size = len(header) if rng.random() < 0.9 else rng.choice((0, 1, len(header) - 1, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)))
        path.write_bytes(size.to_bytes(8, "little") + header)
        os.truncate(path, rng.choice((len(header) + len(original) - length, 8 + len(header), rng.randrange(len(original)))))
        Checkpoint(source).close()

    return case


def configurations(folder: Path) -> Case:
    path = folder / "config.json"
    nested = {"model_type": "qwen3_5_moe", "text_config": {name: value for name, value in SMALL.items() if name != "model_type"}}
    texts = [json.dumps(SMALL), json.dumps(nested)]

    def case(rng: random.Random) -> None:
        path.write_bytes(damaged_text(rng, rng.choice(texts)))
        Geometry.from_config(read_json(path), str(path)).dense_shapes()

    return case


def shard_indexes(folder: Path) -> Case:
    source = write_checkpoint(folder / "source", shards=2)
    path = source / "model.safetensors.index.json"
    text = path.read_text()

    def case(rng: random.Random) -> None:
        path.write_bytes(damaged_text(rng, text))
        Checkpoint(source).close()

    return case


def journals(folder: Path) -> Case:
    source = write_checkpoint(folder / "source", random_tensors())
    pack_checkpoint(source, folder / "undisturbed")
    sound = {path.name: path.read_bytes() for path in (folder / "undisturbed").iterdir()}

    def stop(done: int, total: int) -> None:
        if done > total * 0.7:
            raise KeyboardInterrupt

    packed = folder / "packed"
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, packed, progress=stop)
    unfinished = {path.name: path.read_bytes() for path in packed.iterdir()}
    original = unfinished["pack.journal"]
    with Journal(packed) as journal:
        identity, done = journal.identity, dict(journal.done)

    def case(rng: random.Random) -> None:
        lines = original.splitlines(keepends=True)
        match rng.randrange(4):
            case 0:
                rng.shuffle(lines)
                data = b"".join(lines)
            case 1:
                at = rng.randrange(len(lines))
                lines[at] = damaged_text(rng, lines[at].decode()) + b"\n"
                data = b"".join(lines)
            case _:
                data = damaged_bytes(rng, original)
        (packed / "pack.journal").write_bytes(data)
        with Journal(packed) as journal:
            assert journal.identity in (None, identity)
            assert all(record == done[unit] for unit, record in journal.done.items())
        if rng.random() < 0.02:
            for name, content in unfinished.items():
                (packed / name).write_bytes(data if name == "pack.journal" else content)
            try:
                pack_checkpoint(source, packed)
                assert {path.name: path.read_bytes() for path in packed.iterdir()} == sound
            finally:
                (packed / "manifest.json").unlink(missing_ok=True)

    return case


# --- text ---


def tiny_tokenizer() -> str:
    """tokenizer.json of a byte-level BPE with two merges and the demo's control tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate([*alphabet, "he", "hel"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("h", "e"), ("he", "l")]))
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    text: str = tokenizer.to_str()
    return text


def tokenizer_files(folder: Path) -> Case:
    text = tiny_tokenizer()

    def case(rng: random.Random) -> None:
        (folder / "tokenizer.json").write_bytes(damaged_text(rng, text))
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode("hello <|im_end|>é")
        tokenizer.decode([*ids, tokenizer.largest_id, 2**31])
        tokenizer.encode_plain("hello <|im_end|>é")
        tokenizer.split_control_tokens("hello <|im_end|>é")

    return case


def tokenizer_settings(folder: Path) -> Case:
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    texts = {name: (DEMO / name).read_text() for name in ("tokenizer_config.json", "generation_config.json")}

    def case(rng: random.Random) -> None:
        for name, text in texts.items():
            (folder / name).write_bytes(damaged_text(rng, text) if rng.random() < 0.6 else text.encode())
        tokenizer = Tokenizer.from_folder(folder)
        options = SamplingOptions.from_generation_config(tokenizer.generation_config)
        Sampler(options).next(np.linspace(-1, 1, 300, dtype=np.float32), [1, 2])
        ChatTemplate.from_folder(folder, tokenizer).encode([{"role": "user", "content": "hello"}])

    return case


_EXPRESSIONS = [
    "messages", "m", "m.content", "m['role']", "x", "ns.x", "loop.index", "'a'", "''", "3", "-1", "100000", "10**9", "1e308", "none", "true", "[x, x]",
    "(x, x)", "{'a': x}", "range(9)", "range(100000)", "namespace(x=x)", "dict(a=x)", "cycler(1, x)", "strftime_now('%Y')", "x.__class__",
    "''.__class__.__mro__[1].__subclasses__()", "self", "self.__init__", "raise_exception('no')", "f(x)", "caller()", "messages.append(1)",
    "x.format(x)", "'{0.__class__}'.format(x)", "'%s' % x", "'%9999999s' % x", "'ab'.join(x)", "x.replace('a', x)", "x.split('a')", "x.center(10**9)", "x[0]",
    "x[::-1]", "x.items()", "x()", "loop", "cycler", "eos_token", "get_flashed_messages", "request", "config", "joiner()", "lipsum(9999)",
]  # fmt: skip
_OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is"]
_FILTERS = [
    "tojson", "tojson(indent=999)", "length", "upper", "trim", "list", "join", "join(x)", "replace('a', x)", "map('upper')", "map('list')", "map(attribute='x')",
    "select", "sort", "unique", "sum", "sum(start=[])", "first", "last", "int", "float", "string", "safe", "escape", "default(x)", "dictsort",
    "items", "attr('__class__')", "center(10**9)", "indent(10**9)", "batch(2)", "groupby('x')", "reverse", "format(x)", "wordcount", "round",
]  # fmt: skip


def any_template(rng: random.Random, depth: int = 0) -> str:
    """Statements and expressions of jinja2 in no sensible order."""

    def expression(inner: int = 0) -> str:
        text = rng.choice(_EXPRESSIONS)
        if inner < 3 and rng.random() < 0.4:
            text = f"{text} {rng.choice(_OPERATORS)} {expression(inner + 1)}"
        if rng.random() < 0.4:
            text = f"({text}) | {rng.choice(_FILTERS)}"
        return text

    parts = []
    for _ in range(rng.randrange(1, 5)):
        inner = any_template(rng, depth + 1) if depth < 4 else "text"
        e = expression()
        parts.append(
            rng.choice((
                f"{{{{ {e} }}}}", f"{{% for m in {e} %}}{inner}{{% endfor %}}", f"{{% if {e} %}}{inner}{{% else %}}a{{% endif %}}",
                f"{{% set x = {e} %}}", f"{{% set ns.x = {e} %}}", f"{{% set x %}}{inner}{{% endset %}}", "{% set ns = namespace(x='ab') %}",
                f"{{% macro f(x) %}}{inner}{{% endmacro %}}", f"{{% call f({e}) %}}{inner}{{% endcall %}}", f"{{% filter upper %}}{inner}{{% endfilter %}}",
                f"{{% for m in {e} recursive %}}{{{{ loop(m) }}}}{{% endfor %}}", f"{{% include {e} %}}", f"{{% import {e} as x %}}", f"{{% extends {e} %}}",
                f"{{% block b %}}{inner}{{% endblock %}}", f"{{% with x = {e} %}}{inner}{{% endwith %}}", f"{{% autoescape {e} %}}{inner}{{% endautoescape %}}",
                "{% break %}", "{% continue %}", "{% generation %}a{% endgeneration %}", "{# a #}", "{% raw %}{{ x }}{% endraw %}", "a", "<|im_start|>",
                "(" * 300, "{{ [" * 300, "{% if x %}" * 300, "{% for a in x %}" * 30,
            ))
        )  # fmt: skip
    return "".join(parts)


def chat_templates(folder: Path) -> Case:
    tokenizer = Tokenizer.from_folder(DEMO)
    demo = tokenizer.config["chat_template"]
    messages = [{"role": "user", "content": "ab" * 10}, {"role": "assistant", "content": "<think>a</think>b"}, {"role": "user", "content": "c"}]

    def case(rng: random.Random) -> None:
        if rng.random() < 0.3:
            source = damaged_bytes(rng, demo.encode()).decode(errors="replace")
        else:
            source = "{% set x = 'ab' %}{% set ns = namespace(x=x) %}" + any_template(rng)
        ChatTemplate(source, tokenizer).encode(messages)

    return case


def prompts(folder: Path) -> Case:
    tokenizer = Tokenizer.from_folder(DEMO)
    template = ChatTemplate.from_folder(DEMO, tokenizer)
    control = set(tokenizer.control_tokens.values())
    plain = [id_ for id_ in template.encode([{"role": "user", "content": "a"}]) if id_ in control]

    def case(rng: random.Random) -> None:
        long = rng.random() < 0.003
        text = any_text(rng, FRAGMENTS, 12)
        text = (text + "a") * (100_000 // (len(text) + 1)) if long else text
        ids = template.encode([{"role": "user", "content": text}])
        assert [id_ for id_ in ids if id_ in control] == plain
        assert not control & set(tokenizer.encode_plain(text))
        raw = tokenizer.decode(tokenizer.encode(text))
        assert raw == tokenizer.normalize(text) or any(token in text for token in tokenizer.control_tokens)

    return case


# --- evidence ---


def saved(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@np.errstate(all="ignore")
def damaged_arrays(rng: random.Random, arrays: dict[str, Any]) -> bytes:
    """An .npz file with arrays of other shapes, types and values, or none, or damaged as a file."""
    changed = dict(arrays)
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice(list(changed))
        array = np.asarray(changed[name])
        match rng.randrange(6):
            case 0:
                del changed[name]
                if not changed:
                    break
            case 1:
                changed[name] = array[..., :-1] if array.ndim else array[None]
            case 2 if array.size and array.dtype.kind in "iuf":
                array = array.copy()
                array.flat[rng.randrange(array.size)] = rng.choice((0, 1, 100, 32767 if array.dtype.kind in "iu" else np.nan))
                changed[name] = array
            case 3 if array.dtype.kind in "iufb":
                changed[name] = array.astype(rng.choice(("f8", "i8", "i2", "U8", "?", "c16")))
            case 4:
                changed[name] = rng.choice((np.int64(-1), np.int64(2**62), np.zeros(0), np.zeros((2, 0, 3)), np.array("x"), np.float32(np.nan)))
            case _:
                changed[name] = -array if array.dtype.kind in "if" else array[None]
    data = saved(changed)
    return damaged_bytes(rng, data) if rng.random() < 0.3 else data


def traces(folder: Path) -> Case:
    path = folder / "trace.npz"
    random_trace(8).save(path)
    with np.load(path) as file:
        arrays = dict(file)

    def case(rng: random.Random) -> None:
        path.write_bytes(damaged_arrays(rng, arrays))
        trace = RouteTrace.load(path)
        describe_route(trace)
        if rng.random() < 0.1:
            render([], [NamedTrace("trace", trace)])

    return case


def replays(folder: Path) -> Case:
    path = folder / "routes.npz"
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((6, 3, 5)), axis=-1)[..., :2]
    union = np.tile(np.array([0, 1, 2, 3, -1]), (3, 1))
    arrays = {"a_ids": ids, "a_n_prefill": np.int64(3), "b_decode_sets": ids, "b_prefill_union": union}
    geometry = Geometry.from_config(SMALL, "config.json")

    def case(rng: random.Random) -> None:
        path.write_bytes(damaged_arrays(rng, arrays))
        replay = RouteReplay.load(f"{path}:{rng.choice('ab')}")
        replay.check(geometry)
        replay.check_position(1)
        replay.route(np.zeros((1, 5), np.float32), 0, 0, 1)

    return case


def matrices(folder: Path) -> Case:
    text = json.dumps({
        "version": 1, "repeats": 5, "threads": 2, "defaults": {"strict": True, "tokens": 8},
        "cells": [{"cache": ["resident", "4GiB"], "state": ["warm", "cold"]}, {"cache": "1MiB", "replay": "routes.npz:en", "name": "x"},
                  {"peer": "llama.cpp=llama-bench", "state": "cold"}, {"cache": "1MiB", "prompt": "The"}],
    })  # fmt: skip

    def case(rng: random.Random) -> None:
        (folder / "matrix.json").write_bytes(damaged_text(rng, text))
        read_matrix(folder / "matrix.json")

    return case


def benchmark_results(folder: Path) -> Case:
    record = results(complete=True)
    for cell in record["cells"]:
        repeats = len(cell.get("ttft_s", ()))
        for name in (*CELL_FIELDS, *(MEASURED_FIELDS if repeats else ())):
            cell.setdefault(name, [0.5] * repeats if name in MEASURED_FIELDS else None)
    text = json.dumps(record)
    sound = folder / "sound.json"
    sound.write_text(text)

    def case(rng: random.Random) -> None:
        path = folder / "results.json"
        path.write_bytes(damaged_text(rng, text))
        if rng.random() < 0.5:
            as_text(compare(read_results(path), read_results(sound)))
        else:
            render([load_results(path)], [])

    return case


def questions(folder: Path) -> Case:
    lines = [json.dumps({"id": f"q{n}", "task": "t", "ctx": "The sky is", "choices": [" blue", " red"], "gold": n % 2}) for n in range(3)]

    def case(rng: random.Random) -> None:
        changed = [damaged_text(rng, line) if rng.random() < 0.5 else line.encode() for line in lines]
        (folder / "questions.jsonl").write_bytes(b"\n".join(changed))
        read_questions(folder / "questions.jsonl")

    return case


TARGETS = [
    Target("manifest.json", 300, 6000, manifests),
    Target("headers of .sfx files", 250, 5000, headers),
    Target("safetensors headers", 250, 5000, safetensors_headers),
    Target("config.json", 400, 6000, configurations),
    Target("model.safetensors.index.json", 100, 2000, shard_indexes),
    Target("pack.journal", 100, 2000, journals),
    Target("tokenizer.json", 100, 3000, tokenizer_files),
    Target("tokenizer_config.json and generation_config.json", 150, 4000, tokenizer_settings),
    Target("chat templates", 200, 6000, chat_templates),
    Target("prompts", 500, 12000, prompts),
    Target("traces", 50, 1500, traces),
    Target("replays", 50, 1500, replays),
    Target("matrix.json", 300, 5000, matrices),
    Target("results.json", 100, 2000, benchmark_results),
    Target("questions", 200, 2500, questions),
]
