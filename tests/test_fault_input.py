"""Input that is not what it should be: files of another kind or model, streams that are closed, Ctrl-C before anything has begun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alarm import alarm
from checkpoints import write_checkpoint

import sparseflow
from sparseflow.errors import CheckpointError, OptionError, PackedModelError
from sparseflow.pack import pack_checkpoint
from sparseflow.store import PackedStore
from sparseflow.verify import verify_model

COMMANDS = {"sparseflow": "sparseflow", "sf-pack": "sf_pack", "sf-bench": "sf_bench"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def pack(packed_demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed_demo, tmp_path / "pack"))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["manifest.json", "experts.sfx", "dense.sfx", "embed.sfx"])
def test_a_fifo_in_a_pack_is_not_waited_for(pack: Path, name: str) -> None:
    make_fifo(pack / name)
    with alarm(20):
        with pytest.raises(PackedModelError, match=f"{name}: cannot be read .it is not a regular file"):
            sparseflow.load(pack)
        if name == "manifest.json":
            with pytest.raises(PackedModelError, match="not a regular file"):
                verify_model(pack)
        else:
            assert [str(fault) for fault in verify_model(pack).faults] == [f"{name}: cannot be opened: it is not a regular file"]
        if name == "experts.sfx":
            with pytest.raises(PackedModelError, match="not a regular file"):
                PackedStore(pack / name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_fifo_in_a_checkpoint_is_not_waited_for(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    make_fifo(source / name)
    with alarm(20), pytest.raises(CheckpointError, match=f"{name}: cannot be read .it is not a regular file"):
        pack_checkpoint(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_fifo_as_journal_is_no_unfinished_pack(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (tmp_path / "packed").mkdir()
    os.mkfifo(tmp_path / "packed" / "pack.journal")
    with alarm(20), pytest.raises(OptionError, match="is not an unfinished pack"):
        pack_checkpoint(source, tmp_path / "packed")


def test_a_tokenizer_of_a_larger_model_is_refused_before_it_runs(tmp_path: Path) -> None:
    pack_checkpoint(write_checkpoint(tmp_path / "source"), tmp_path / "packed")
    with sparseflow.load(tmp_path / "packed") as model:
        with pytest.raises(PackedModelError, match=r"tokenizer.json: has the token id 4095, the model's vocabulary ends at 70"):
            model.generate("a")
        assert model.session().forward([70]).shape == (1, 71)


@pytest.mark.parametrize(("config", "message"), [
    ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
    ({"do_sample": True, "top_p": 2}, "top_p is 2"),
    ({"repetition_penalty": -1}, "repetition_penalty is -1"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
])  # fmt: skip
def test_a_bad_generation_config_is_named(pack: Path, config: dict[str, object], message: str) -> None:
    (pack / "generation_config.json").write_text(json.dumps(config))
    with sparseflow.load(pack, cache="1MiB") as model:
        with pytest.raises(PackedModelError, match=f"generation_config.json.*{message}"):
            model.generate(HELLO)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"a": "\\ud800"}', "\xff", "{", "[]"])
def test_settings_that_are_no_json_are_named(pack: Path, name: str, text: str) -> None:
    (pack / name).write_bytes(text.encode("latin-1"))
    with sparseflow.load(pack, cache="1MiB") as model, pytest.raises(PackedModelError, match=name):
        model.generate(HELLO)


# --- streams ---


def shell(redirection: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The command `sparseflow` with a stream redirected as a shell does."""
    program = [sys.executable, "-P", "-c", "from sparseflow.cli.start import sparseflow; sparseflow()"]
    command = ["sh", "-c", f'exec "$0" "$@" {redirection}', *program, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(("redirection", "reason"), [
    (">&-", "error: standard output is closed: give it a file, or /dev/null\n"), ("> /dev/full", "error: No space left on device\n"),
])  # fmt: skip
@pytest.mark.parametrize("command", [["inspect"], ["run", "The red fox", "--max-new-tokens", "2"], ["verify", "--json"]])
def test_output_that_goes_nowhere_is_told(packed_demo: Path, redirection: str, reason: str, command: list[str]) -> None:
    done = shell(redirection, command[0], str(packed_demo), *command[1:])
    assert (done.returncode, done.stderr) == (6, reason)


def test_closed_input_is_empty_input(packed_demo: Path) -> None:
    done = shell("<&-", "run", str(packed_demo), "-")
    assert done.returncode == 2 and done.stderr.startswith("error: the prompt is empty") and done.stderr.count("\n") == 1
    done = shell("<&-", "chat", str(packed_demo))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full"])
def test_nobody_has_to_hear_the_errors(packed_demo: Path, tmp_path: Path, redirection: str) -> None:
    assert shell(redirection, "inspect", str(packed_demo)).returncode == 0
    assert shell(redirection, "verify", str(packed_demo)).returncode == 0
    assert shell(redirection, "inspect", str(tmp_path / "nothing")).returncode == 4


# --- Ctrl-C ---


@pytest.mark.parametrize("command", COMMANDS.values())
def test_ctrl_c_while_modules_are_loaded(tmp_path: Path, command: str) -> None:
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    program = f"from sparseflow.cli.start import {command}; {command}()"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_is_loaded_before_it_is_used() -> None:
    program = "import sys, sparseflow, sparseflow.cli.start; print('numpy' in sys.modules, 'click' in sys.modules); sparseflow.load"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'sparseflow' has no attribute 'nothing'"):
        sparseflow.nothing  # noqa: B018
