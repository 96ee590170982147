"""Other engines on the same weights: llama.cpp on a GGUF export, transformers with the layers left on the disk.

A peer is named on the command line as NAME=WHERE. It is made ready once, in a temporary folder that is removed at the end
(TMPDIR says where), and then measured like a cell. What an engine does not tell is None: both are asked for tokens and times,
neither has a lease table.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from sparseflow import demo_model
from sparseflow.bench_plan import Workload
from sparseflow.bench_process import answer, run_command
from sparseflow.bench_transformers import PACKAGES, OffloadRun
from sparseflow.errors import OptionError, SparseFlowError, StorageError
from sparseflow.memory import available_memory
from sparseflow.packfile import Manifest
from sparseflow.sizes import format_bytes

PEERS = ("llama.cpp", "transformers")
EXPORT = Path(__file__).parent.parent / "tools" / "export_gguf.py"
OFFLOAD_COMMAND = (sys.executable, "-P", "-m", "sparseflow.bench_transformers")

_NANO = 1e-9
_KEPT = ("build_commit", "build_number", "model_type", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn")

Waiting = Callable[[], None]


class Peer(Protocol):
    """Another engine.

    Attributes
        name: of PEERS. details: versions and settings, once it ran.
        files: what it reads, to be dropped from the page cache; known once it is ready.
        mode: "offload" when it reads weights from the disk as it needs them, "resident" when the machine holds them.
    """

    name: str
    details: dict[str, Any]
    files: list[Path]
    mode: str

    def prepare(self, folder: Path, waiting: Waiting) -> None:
        """Makes it ready in a temporary folder. Raises StorageError when there is no room."""

    def measure(self, workload: Workload, threads: int, waiting: Waiting) -> dict[str, Any]:
        """One run in a fresh process: load_s, ttft_s, token_s, decode_tok_s, peak_rss_bytes, physical_bytes, ids."""


def make_peer(spec: str, manifest: Manifest, is_demo: bool) -> Peer:
    """The peer that NAME=WHERE means, for a packed model. Raises OptionError when it, or what it needs, is not there."""
    name, _, where = spec.partition("=")
    if name == "llama.cpp":
        if not where:
            raise OptionError("--peer llama.cpp: say which program, as llama.cpp=PATH/llama-bench; it is built from llama.cpp's sources")
        return LlamaCpp(manifest, where)
    if name == "transformers":
        if not where and not is_demo:
            raise OptionError("--peer transformers: say where the checkpoint is that this model was packed from, as transformers=DIR")
        return Transformers(manifest, Path(where) if where else demo_model.checkpoint_folder())
    raise OptionError(f"--peer {spec}: there is no peer {name!r}, but {' and '.join(PEERS)}")


class LlamaCpp:
    """llama-bench on the weights exported as GGUF: the time of the prompt, then that of all further tokens from an empty context.

    It is told the lengths and draws ids itself, so there are no tokens to compare, and no time of a single one. Its file is mapped:
    what memory does not hold is read again.
    """

    name = PEERS[0]

    def __init__(self, manifest: Manifest, program: str) -> None:
        found = shutil.which(program)
        if found is None:
            raise OptionError(f"--peer llama.cpp={program}: is not a program, build llama-bench from llama.cpp's sources")
        if not EXPORT.is_file():
            raise OptionError("--peer llama.cpp: needs tools/export_gguf.py, which only a checkout has: run sf-bench from one")
        require(self.name, ("gguf",))
        self.details: dict[str, Any] = {}
        self.files: list[Path] = []
        self.mode = "offload"
        self._model = manifest.folder
        self._program = found

    def prepare(self, folder: Path, waiting: Waiting) -> None:
        """Exports the weights; the exporter sees to it that there is room."""
        gguf = folder / "model.gguf"
        try:
            run_command((sys.executable, str(EXPORT), str(self._model), str(gguf)), waiting)
        except SparseFlowError as error:
            raise StorageError(f"the export to GGUF failed: {error}") from error
        self.files = [gguf]
        size = gguf.stat().st_size
        available = available_memory()
        self.mode = "offload" if available is None or size > available else "resident"
        self.details = {"gguf_bytes": size}

    def measure(self, workload: Workload, threads: int, waiting: Waiting) -> dict[str, Any]:
        command = [self._program, "-m", str(self.files[0]), "-t", str(threads), "-r", "1", "--no-warmup", "-o", "json"]
        command += ["-p", str(len(workload.prompt_ids)), "-n", str(workload.new_tokens - 1)]
        ended = run_command(command, waiting)
        try:
            tests = json.loads(ended.output)
            prompt_s, decode_s = (
                next(test for test in tests if bool(test["n_prompt"]) == prompt)["samples_ns"][0] * _NANO for prompt in (True, False)
            )
        except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
            raise SparseFlowError(f"{self._program}: what it says is not what llama-bench says with -o json") from error
        self.details |= {key: tests[0][key] for key in _KEPT if key in tests[0]}
        return {
            "load_s": None,
            "ttft_s": prompt_s,
            "token_s": None,
            "decode_tok_s": (workload.new_tokens - 1) / decode_s,
            "peak_rss_bytes": ended.peak_rss_bytes,
            "physical_bytes": ended.bytes_read,
            "ids": None,
        }


class Transformers:
    """transformers on the checkpoint that the model was packed from, its layers left on the disk by accelerate."""

    name = PEERS[1]
    mode = "offload"

    def __init__(self, manifest: Manifest, checkpoint: Path) -> None:
        require(self.name, PACKAGES)
        self.details: dict[str, Any] = {}
        self.files: list[Path] = []
        self._checkpoint = checkpoint
        self._offload = ""
        for shard, about in manifest.raw["source"]["shards"].items():
            path = checkpoint / shard
            size = path.stat().st_size if path.is_file() else None
            if size != about["bytes"]:
                found = "is not there" if size is None else f"has {size} bytes"
                raise OptionError(f"--peer transformers: {path} {found}, the model was packed from one of {about['bytes']} bytes")
            self.files.append(path)

    def prepare(self, folder: Path, waiting: Waiting) -> None:
        """Weights that have to be rearranged are written once more: there has to be room for all of them."""
        needed, free = sum(path.stat().st_size for path in self.files), shutil.disk_usage(folder).free
        if needed > free:
            raise StorageError(f"offloading may take {format_bytes(needed)} of disk, {format_bytes(free)} are free where TMPDIR is")
        self._offload = os.fspath(folder / "offload")
        self.details = {name: version(name) for name in PACKAGES}

    def measure(self, workload: Workload, threads: int, waiting: Waiting) -> dict[str, Any]:
        run = OffloadRun(os.fspath(self._checkpoint), self._offload, threads, workload.prompt_ids, workload.new_tokens)
        measured = answer(OFFLOAD_COMMAND, asdict(run), waiting)
        return measured | {"decode_tok_s": len(measured["token_s"]) / sum(measured["token_s"])}


def require(peer: str, packages: tuple[str, ...]) -> None:
    """OptionError when a package that a peer needs is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise OptionError(f"--peer {peer}: needs the package {package}, install sparseflow with the extra [peers]")
