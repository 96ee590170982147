"""The promise: logits are the same bytes whatever the cache, its state, the threads, the chunks, the instruction set.

The baseline is one forward of everything with all experts resident, by one thread, in the best instruction set. Greedy
continuation is compared too, token by token, which carries the state of any difference on.
"""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from expert_store import without_direct_reads
from geometries import CASES
from random_checkpoint import random_weights, write_checkpoint

import sparseflow
from sparseflow.pack import pack_checkpoint

PROMPT, DECODE = 70, 6  # crosses a page of the KV cache and a 16-position block


@pytest.fixture(scope="module", params=["demo", "random"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, and a random model whose sizes fit no tile."""
    if request.param == "demo":
        return request.getfixturevalue("packed_demo")
    case = next(case for case in CASES if case.name == "mha_interval3")
    folder = tmp_path_factory.mktemp("same_bits")
    write_checkpoint(folder / "checkpoint", case.config, random_weights(case))
    pack_checkpoint(folder / "checkpoint", folder / "packed")
    return folder / "packed"


def prompt(vocab: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab, PROMPT)


def run(session: sparseflow.Session, chunk: int, vocab: int) -> bytes:
    """Prompt in chunks, then greedy decode; all logits as bytes."""
    ids = prompt(vocab)
    logits = [session.forward(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    for _ in range(DECODE):
        logits.append(session.forward([int(logits[-1][-1].argmax())]))
    return np.concatenate(logits).tobytes()


def run_model(folder: Path, cache: str | int, threads: int, chunk: int, strict: bool = False) -> bytes:
    with sparseflow.load(folder, cache=cache, threads=threads, strict=strict) as model:
        return run(model.session(), chunk, model.geometry.vocab_size)


@pytest.fixture(scope="module")
def baseline(packed: Path) -> bytes:
    return run_model(packed, "resident", threads=1, chunk=PROMPT)


def smallest(folder: Path) -> int:
    with sparseflow.load(folder, cache="resident") as model:
        return model.geometry.num_experts_per_tok * model.layout.stride


def half(folder: Path) -> int:
    with sparseflow.load(folder, cache="resident") as model:
        return model.geometry.num_hidden_layers * model.geometry.num_experts * model.layout.stride // 2


@pytest.mark.parametrize("chunk", [1, 7, 64, PROMPT])
@pytest.mark.parametrize("cache", ["smallest", "half", "resident"])
def test_cache_and_chunks(packed: Path, baseline: bytes, each_isa: str, cache: str, chunk: int) -> None:
    size = {"smallest": smallest, "half": half}.get(cache, lambda folder: cache)(packed)
    assert run_model(packed, size, threads=2, chunk=chunk) == baseline


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(packed: Path, baseline: bytes, each_isa: str, threads: int) -> None:
    assert run_model(packed, smallest(packed), threads=threads, chunk=7) == baseline


@pytest.mark.parametrize("cache", ["smallest", "resident"])
def test_mapped_and_direct(packed: Path, baseline: bytes, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    size = smallest(packed) if cache == "smallest" else cache
    for direct in (True, False):
        with sparseflow.load(packed, cache=size, threads=2, strict=cache == "smallest") as model:
            assert model.leases.direct == direct
            assert run(model.session(), 7, model.geometry.vocab_size) == baseline
        without_direct_reads(monkeypatch)


def test_reading_ahead_wherever_and_whatever(packed: Path, baseline: bytes) -> None:
    with sparseflow.load(packed, cache=half(packed), threads=2, strict=True) as model:
        layers, experts = model.geometry.num_hidden_layers, model.geometry.num_experts
        rng = np.random.default_rng(4)
        stop = threading.Event()

        def read_ahead() -> None:
            while not stop.is_set():
                model.leases.prefetch(int(rng.integers(layers)), rng.permutation(experts).astype(np.int32), 0)

        reader = threading.Thread(target=read_ahead)
        reader.start()
        try:
            assert run(model.session(), 7, model.geometry.vocab_size) == baseline
        finally:
            stop.set()
            reader.join()
        assert model.leases.counters()["prefetches"] > 0


def test_cold_and_warm(packed: Path, baseline: bytes) -> None:
    # strict mode drops the file from the page cache when it opens, and every expert again when it is evicted
    assert run_model(packed, half(packed), threads=2, chunk=7, strict=True) == baseline
    assert run_model(packed, half(packed), threads=2, chunk=7) == baseline


def test_interleaved_sessions(packed: Path, baseline: bytes) -> None:
    with sparseflow.load(packed, cache=smallest(packed), threads=2) as model:
        vocab = model.geometry.vocab_size
        sessions = [model.session(), model.session()]
        logits: list[list[np.ndarray]] = [[], []]
        for id_, which in product(prompt(vocab), (0, 1)):
            logits[which].append(sessions[which].forward([id_]))
        for _, which in product(range(DECODE), (0, 1)):
            logits[which].append(sessions[which].forward([int(logits[which][-1][-1].argmax())]))
    assert [np.concatenate(part).tobytes() for part in logits] == [baseline, baseline]


def test_sessions_in_threads(packed: Path, baseline: bytes) -> None:
    results: dict[int, bytes] = {}
    with sparseflow.load(packed, cache=smallest(packed), threads=1) as model:
        vocab = model.geometry.vocab_size

        def work(number: int) -> None:
            results[number] = run(model.session(), (1, 7, 64, PROMPT)[number], vocab)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert model.leases.pinned == 0
    assert results == dict.fromkeys(range(4), baseline)


def test_a_fork_continues_like_its_origin(packed: Path, baseline: bytes) -> None:
    with sparseflow.load(packed, cache="resident", threads=2) as model:
        vocab = model.geometry.vocab_size
        ids = prompt(vocab)
        session = model.session()
        logits = [session.forward(ids[:33])]
        fork = session.fork()
        session.forward(ids[::-1][:40])  # the origin goes elsewhere and must leave the fork alone
        logits.append(fork.forward(ids[33:]))
        for _ in range(DECODE):
            logits.append(fork.forward([int(logits[-1][-1].argmax())]))
    assert np.concatenate(logits).tobytes() == baseline


def test_the_last_position_alone_has_the_same_bits(packed: Path) -> None:
    with sparseflow.load(packed, cache="resident", threads=2, prefill_chunk=9) as model:
        ids = prompt(model.geometry.vocab_size)
        assert model.session().forward(ids, last_only=True).tobytes() == model.session().forward(ids)[-1:].tobytes()
