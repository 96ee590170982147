from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import sparseflow
from fake_model import DEMO
from sparseflow.cli.chat import numbered
from sparseflow.cli.main import main
from sparseflow.cli.options import SparseFlowCommand, report_error
from sparseflow.footprint import Footprint
from sparseflow.packfile import read_manifest

ONE = ["--threads", "1"]
PROGRAM = [sys.executable, "-P", "-c", "from sparseflow.cli.main import main; main(prog_name='sparseflow')"]


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache_home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


@pytest.fixture
def packed(cache_home) -> Path:
    """The packed demo."""
    sparseflow.load("demo").close()
    return next((cache_home / "sparseflow").glob("demo-*"))


def invoke(*args: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, args, input=text, prog_name="sparseflow")


def told(result: Result) -> str:
    """The one line an error is."""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("error: ").strip()


def expected(prompt, **options) -> str:
    with sparseflow.load("demo", threads=1) as model:
        return "".join(model.generate(prompt, **options))


# --- run ---

def test_run_prints_the_text_and_one_line_of_evidence():
    result = invoke("run", "demo", "The red fox", "--max-new-tokens", "12", "--cache", "1MiB", "--strict", *ONE)
    assert result.exit_code == 0
    assert result.stdout == expected("The red fox", max_new_tokens=12) + "\n"
    assert result.stderr.count("\n") == 1
    for part in ("3 + 12 tokens", "tok/s", "first token after", "peak RSS", "36 experts", "strict", "hit rate", "asked", "from disk"):
        assert part in result.stderr


def test_run_as_json():
    result = invoke("run", "demo", "The red fox", "--max-new-tokens", "5", "--json", *ONE)
    answer = json.loads(result.stdout)
    assert answer["text"] == expected("The red fox", max_new_tokens=5)
    assert len(answer["ids"]) == 5 and answer["finish_reason"] == "length"
    assert answer["evidence"]["prompt_tokens"] == 3 and answer["evidence"]["new_tokens"] == 5
    assert 0 <= answer["evidence"]["hit_rate"] <= 1


@pytest.mark.parametrize("text", ["The red fox\n", "The red fox\r\n", "The red fox"])
def test_run_reads_the_prompt_from_stdin(text):
    result = invoke("run", "demo", "-", "--max-new-tokens", "5", *ONE, text=text)
    assert result.stdout == expected("The red fox", max_new_tokens=5) + "\n"


def test_run_chat_sends_messages():
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What do bees live in?"}]
    result = invoke("run", "demo", "What do bees live in?", "--chat", "--system", "Be kind.", "--no-thinking", "--temperature", "0", *ONE)
    assert result.stdout == expected(messages, enable_thinking=False, temperature=0) + "\n"
    result = invoke("run", "demo", "What do bees live in?", "--chat", "--temperature", "0", *ONE)
    assert result.stdout.startswith("<think>\n") and "</think>" in result.stdout


def test_run_sampling_options_reach_the_sampler():
    options = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--repetition-penalty", "1.1", "--seed", "5"]
    outputs = {invoke("run", "demo", "The", "--max-new-tokens", "12", *options, *ONE).stdout for _ in range(2)}
    assert outputs == {expected("The", max_new_tokens=12, temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1,
                                seed=5) + "\n"}


def test_run_stop_may_be_given_several_times():
    whole = expected("The red fox", max_new_tokens=20)
    word = whole.split()[1]
    result = invoke("run", "demo", "The red fox", "--max-new-tokens", "20", "--stop", "no such text", "--stop", word, "--json", *ONE)
    assert json.loads(result.stdout)["text"] == whole[:whole.index(word)]
    assert json.loads(result.stdout)["finish_reason"] == "stop_string"


def test_run_saves_the_trace(tmp_path):
    file = tmp_path / "routes.npz"
    result = invoke("run", "demo", "The red fox", "--max-new-tokens", "4", "--trace", str(file), *ONE)
    assert result.exit_code == 0
    assert sparseflow.RouteTrace.load(file).tokens == 3 + 4 - 1


# --- chat ---

def test_chat_reads_messages_from_a_pipe():
    result = invoke("chat", "demo", "--no-thinking", "--temperature", "0", *ONE, text="Hello\n\n  What do bees live in?  \n")
    assert result.exit_code == 0
    with sparseflow.load("demo", threads=1) as model, sparseflow.Conversation(model, temperature=0, enable_thinking=False) as talk:
        answers = ["".join(talk.send(text)) for text in ("Hello", "What do bees live in?")]
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.stderr.count("tok/s") == 2 and "> " not in result.stderr


def test_chat_as_json_lines_prefills_only_what_is_new():
    text = "Hello\nWhat do bees live in?\n/reset\nWhat do bees live in?\n/exit\nnever said\n"
    result = invoke("chat", "demo", "--temperature", "0", "--system", "Be kind. " * 40, "--json", *ONE, text=text)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 3
    fed = [answer["evidence"]["prompt_tokens"] for answer in answers]
    assert fed[1] < 60 < fed[0] and fed[2] > 60


def test_chat_answers_equal_those_of_whole_prompts():
    """The engine's own sessions, forked at the stable prefix, against a fresh one fed everything."""
    with sparseflow.load("demo", cache="1MiB", threads=1) as model, sparseflow.Conversation(model, temperature=0) as talk:
        for question in ("Hello", "What do bees live in?", "Say <|im_end|> & goodbye."):
            messages = [*talk.messages, {"role": "user", "content": question}]
            assert "".join(talk.send(question)) == "".join(model.generate(messages, temperature=0))


def test_chat_saves_one_trace_a_turn(tmp_path):
    result = invoke("chat", "demo", "--max-new-tokens", "3", "--trace", str(tmp_path / "r.npz"), *ONE, text="Hello\nAnd?\n")
    assert result.exit_code == 0
    first, second = (sparseflow.RouteTrace.load(tmp_path / f"r-{turn}.npz").tokens for turn in (1, 2))
    assert first > 3 and second > 3
    assert numbered("a/routes", 3) == "a/routes-3" and numbered(None, 1) is None


def terminal(monkeypatch) -> None:
    monkeypatch.setattr("sparseflow.cli.chat.is_terminal", lambda: True)


def test_chat_at_a_terminal_goes_on_after_ctrl_c_and_errors(monkeypatch):
    terminal(monkeypatch)
    calls = []

    def interrupted_once(model, generation, as_json):
        calls.append("".join(generation))
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("sparseflow.cli.chat.show", interrupted_once)
    result = invoke("chat", "demo", "--context", "120", "--max-new-tokens", "5", *ONE, text=b"Hello\n" + b"word " * 200 + b"\n\xff\nHi\n")
    assert result.exit_code == 0 and len(calls) == 2
    assert result.stderr.count("> ") == 5
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert "the context holds 120" in errors[0] and "/reset" in errors[0] and "lone surrogate" in errors[1]


def test_chat_from_a_pipe_ends_at_an_error():
    result = invoke("chat", "demo", "--context", "40", *ONE, text="word " * 80)
    assert result.exit_code == 5 and "the context holds 40" in told(result)


# --- inspect ---

def test_inspect_tells_what_the_manifest_says(packed):
    result = invoke("inspect", str(packed), "--cache", "1MiB", "--context", "1000", "--json")
    described = json.loads(result.stdout)
    manifest = read_manifest(packed)
    footprint = Footprint.of(manifest)
    assert described["geometry"] == manifest.geometry.to_json()
    assert described["footprint"]["experts_file_bytes"] == (packed / "experts.sfx").stat().st_size
    assert described["footprint"]["experts_bytes_per_token"] == 8 * 4 * manifest.stride
    assert described["footprint"]["kv_bytes_per_token"] == 2 * (1 * 64 + 1 * 64) * 4
    assert described["run"]["cache"]["slots"] == 2**20 // manifest.stride
    assert described["run"]["context"] == 1000
    assert described["cache_sizes"][-1] == {"bytes": footprint.all_experts_bytes, "slots": 192, "share": 1.0}


def test_inspect_promises_the_cache_that_a_run_takes(packed):
    footprint = Footprint.of(read_manifest(packed))
    for cache in ("1MiB", "3000000", "resident", "auto", str(footprint.smallest_cache_bytes)):
        with sparseflow.load("demo", cache=cache) as model:
            assert footprint.cache_slots(cache, model.context) == model.leases.slots
            assert footprint.dense_bytes == model.core_bytes


def test_inspect_tells_the_sampling():
    described = json.loads(invoke("inspect", "demo", "--temperature", "0.5", "--top-k", "7", "--json").stdout)
    assert described["run"]["sampling"]["top_k"] == 7
    assert "temperature 0.5" in invoke("inspect", "demo", "--temperature", "0.5").stdout
    assert "greedy" in invoke("inspect", "demo").stdout
    result = invoke("inspect", "demo", "--top-p", "2")
    assert result.exit_code == 2 and "top_p" in result.stderr


def test_inspect_as_text():
    result = invoke("inspect", "demo", "--cache", "1MiB", "--strict", *ONE)
    assert result.exit_code == 0
    for part in ("6 linear_attention, 2 full_attention", "24 a layer, 4 a token", "192 of 28.0 KiB", "32 of 28.0 KiB = 896.0 KiB",
                 "36 experts, 19% of all, strict", "1 thread,"):
        assert part in result.stdout


# --- errors ---

@pytest.mark.parametrize(("args", "status", "message"), [
    (["run", "demo"], 2, "Missing argument 'PROMPT'"),
    (["run", "demo", "x", "--temperatur", "1"], 2, "No such option"),
    (["run", "demo", "x", "--top-k", "many"], 2, "'many' is not a valid integer"),
    (["nothing"], 2, "No such command"),
    (["run", "demo", ""], 2, "the prompt is empty"),
    (["run", "demo", "x\udcff"], 2, "lone surrogate U+DCFF"),
    (["run", "demo", "x", "--temperature", "-1"], 2, "temperature is -1.0"),
    (["run", "demo", "x", "--temperature", "nan"], 2, "temperature is nan"),
    (["run", "demo", "x", "--top-p", "1.5"], 2, "top_p is 1.5"),
    (["run", "demo", "x", "--max-new-tokens", "0"], 2, "0 is not in the range x>=1"),
    (["run", "demo", "x", "--stop", ""], 2, "stop holds ''"),
    (["run", "demo", "x", "--no-thinking"], 2, "add --chat"),
    (["run", "demo", "x", "--system", "y"], 2, "add --chat"),
    (["run", "demo", "x", "--trace", "/no/such/folder/file"], 2, "the folder /no/such/folder does not exist"),
    (["run", "demo", "x", "--cache", "lots"], 2, "'lots' is not a size"),
    (["run", "demo", "x", "--threads", "0"], 2, "threads"),
    (["run", "demo", "x", "--context", "0"], 2, "context is 0"),
    (["run", "demo", "x", "--cache", "1KiB"], 5, "too small"),
    (["run", "demo", "one two three four", "--context", "3"], 5, "needs 4 tokens but the context holds 3"),
    (["run", "/no/such/model", "x"], 4, "/no/such/model"),
    (["chat", "demo", "--seed", "-1"], 2, "seed is -1"),
    (["inspect", "demo", "--cache", "1KiB"], 5, "too small"),
    (["inspect", "demo", "--context", "100000"], 2, "takes a whole number of tokens from 1 to 4096"),
    (["inspect", "/no/such/model"], 4, "/no/such/model"),
])
def test_errors_are_one_line_and_a_status(args, status, message):
    result = invoke(*args)
    assert result.exit_code == status
    assert message in told(result)
    assert result.stdout == ""


def test_an_unpacked_checkpoint_is_told_how_to_pack():
    for command in (["run", str(DEMO), "x"], ["inspect", str(DEMO)]):
        result = invoke(*command)
        assert result.exit_code == 4 and f"sf-pack {DEMO}" in told(result)


def test_a_pack_without_a_tokenizer(packed, tmp_path):
    bare = shutil.copytree(packed, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    result = invoke("run", str(bare), "x", *ONE)
    assert result.exit_code == 4 and "tokenizer.json is missing" in told(result)


@pytest.mark.parametrize(("failure", "status", "message"), [
    (sparseflow.StorageError("a\nb"), 6, "a b"),
    (sparseflow.SparseFlowError("x"), 1, "x"),
    (PermissionError(13, "Permission denied", "file"), 6, "Permission denied: file"),
    (MemoryError(), 5, "no memory left"),
])
def test_every_failure_has_its_status(failure, status, message):
    def fail() -> None:
        raise failure

    result = CliRunner().invoke(SparseFlowCommand("failing", callback=fail))
    assert result.exit_code == status and message in told(result)


def test_a_bug_stays_a_traceback():
    def bug() -> None:
        raise ZeroDivisionError

    result = CliRunner().invoke(SparseFlowCommand("failing", callback=bug))
    assert isinstance(result.exception, ZeroDivisionError)


def test_report_error_is_one_line(capsys):
    report_error("a\n  b")
    assert capsys.readouterr().err == "error: a b\n"


def endless_run() -> subprocess.Popen:
    """A run that has begun to say what it would go on saying for many seconds."""
    process = subprocess.Popen([*PROGRAM, "run", "demo", "The red fox", "--max-new-tokens", "4000", *ONE], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=os.environ)
    assert process.stdout.read(10)
    return process


def test_ctrl_c_ends_with_130_and_what_was_said():
    with endless_run() as process:
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.endswith(b"\n")
    assert b"Traceback" not in errors and b"tok/s" in errors


def test_a_closed_pipe_ends_quietly():
    with endless_run() as process:
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("command", [[], ["run"], ["chat"], ["inspect"], ["route"], ["report"]])
def test_help_teaches(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout and "Exit status:" in result.stdout and "130" in result.stdout
    assert "sparseflow" in result.stdout


def test_version():
    assert invoke("--version").stdout == f"sparseflow, version {sparseflow.__version__}\n"
