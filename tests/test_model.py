"""Opening a model: arguments, cache sizes, the demo, and the sentence from the README."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from expert_store import without_direct_reads

import sparseflow
from sparseflow import demo_model
from sparseflow.errors import CapacityError, OptionError, PackedModelError, SparseFlowError, StorageError
from sparseflow.evidence import rss_bytes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threads", 0), ("threads", "2"), ("threads", True), ("context", 0), ("context", 4097), ("prefill_chunk", 0),
        ("cache", "lots"), ("cache", "-1"), ("cache", None), ("cache", 1.5), ("cache", True), ("cache", ""), ("strict", "no"),
    ],
)
def test_bad_arguments_are_named(packed_demo: Path, option: str, value: object) -> None:
    with pytest.raises(OptionError):
        sparseflow.load(packed_demo, **{option: value})


def test_a_cache_below_the_smallest_is_refused_with_the_smallest(packed_demo: Path) -> None:
    with pytest.raises(CapacityError, match="smallest is 114688 bytes"):
        sparseflow.load(packed_demo, cache=114687)
    with sparseflow.load(packed_demo, cache=114688) as model:
        assert model.leases.slots == 4


def test_more_cache_than_experts_is_all_experts(packed_demo: Path) -> None:
    for cache in ("1TiB", "resident", "auto"):
        with sparseflow.load(packed_demo, cache=cache) as model:
            assert model.leases.slots == 192
            assert (model.leases.num_resident == 192) == (cache == "resident")


def test_an_unpacked_checkpoint_names_the_command() -> None:
    with pytest.raises(PackedModelError, match="sf-pack .*demo"):
        sparseflow.load(demo_model.checkpoint_folder())


def test_what_is_not_a_model_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PackedModelError, match="no such folder"):
        sparseflow.load(tmp_path / "nothing")
    with pytest.raises(PackedModelError, match="not a packed model"):
        sparseflow.load(tmp_path)


def test_generation_is_what_the_readme_says(packed_demo: Path) -> None:
    with sparseflow.load(packed_demo, cache="1MiB", threads=2) as model:
        generation = model.generate("The red fox", max_new_tokens=24)
        text = "".join(generation)
        assert text == generation.text and len(generation.ids) == 24 and generation.finish_reason == "length"
        evidence = model.evidence(generation)
        assert (evidence.prompt_tokens, evidence.new_tokens) == (generation.prompt_tokens, 24)
        assert evidence.requests == sum(usage.requests for usage in generation.session.usage)
        assert 0 < evidence.hits < evidence.requests
        assert evidence.bytes_asked == evidence.requests * model.layout.stride
        chat = model.generate([{"role": "user", "content": "What do bees live in?"}], enable_thinking=False, temperature=0)
        assert "hive" in "".join(chat)


def test_a_closed_model_says_so(packed_demo: Path) -> None:
    model = sparseflow.load(packed_demo, cache="1MiB")
    session = model.session()
    model.close()
    model.close()
    with pytest.raises(SparseFlowError, match="model is closed"):
        model.session()
    with pytest.raises(SparseFlowError):
        session.forward([1])


def test_the_demo_is_packed_once_into_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = demo_model.packed_folder()
    assert folder.parent == tmp_path / "sparseflow"
    made = (folder / "manifest.json").stat().st_mtime_ns
    assert demo_model.packed_folder() == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == made
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    shutil.rmtree(folder)
    with sparseflow.load("demo", cache="1MiB") as model:
        assert model.folder == folder


def test_a_cache_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        demo_model.packed_folder()


def closed_memory(folder: Path, **options: object) -> tuple[int, int]:
    """(bytes of the cache while open, of those how many closing gave back)."""
    model = sparseflow.load(folder, **options)
    model.session().forward([1, 2, 3])
    held = rss_bytes()
    model.close()
    return model.leases.slots * model.layout.stride, held - rss_bytes()


@pytest.mark.parametrize("strict", [False, True])
def test_closing_frees_the_resident_experts(packed_demo: Path, strict: bool) -> None:
    cache, given_back = closed_memory(packed_demo, cache="resident", strict=strict)
    assert given_back >= 0.9 * cache


def test_a_load_that_fails_keeps_no_slots(packed_demo: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "experts" and done == total:
            raise KeyboardInterrupt

    threads = len(os.listdir("/proc/self/task"))
    with pytest.raises(KeyboardInterrupt) as caught:
        sparseflow.load(packed_demo, cache="resident", progress=stop)
    assert len(os.listdir("/proc/self/task")) == threads  # none reads into slots, though the traceback still holds the model
    assert caught.tb is not None


@pytest.mark.parametrize("cache", ["1MiB", "resident"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_experts_cut_while_open(
    packed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, strict: bool, direct: bool
) -> None:
    folder = shutil.copytree(packed_demo, tmp_path / "cut")
    if not direct:
        without_direct_reads(monkeypatch)
    with sparseflow.load(folder, cache=cache, threads=2, strict=strict) as model:
        assert model.leases.direct == (direct and (strict or cache == "resident"))
        expected = model.session().forward([1, 2, 3]).tobytes()
        os.truncate(folder / "experts.sfx", 8192)
        if cache == "resident" and model.leases.direct:
            assert model.session().forward([1, 2, 3]).tobytes() == expected  # slots are memory
            return
        with pytest.raises(StorageError, match=r"experts\.sfx: expert \d+ of layer \d+: the file was cut to 8192 bytes"):
            for token in range(50):
                model.session().forward([token])
        assert (model.leases.pinned, model.leases.leases) == (0, 0)


def test_a_forked_child_of_a_direct_model_is_told_to_open_its_own(packed_demo: Path) -> None:
    with sparseflow.load(packed_demo, cache="resident", threads=2) as model:
        expected = model.session().forward([1, 2, 3]).tobytes()

        def child() -> None:
            try:
                model.session().forward([1, 2, 3])
            except SparseFlowError as error:
                model.close()
                with sparseflow.load(packed_demo, cache="1MiB", threads=1) as own:
                    sender.send((str(error), own.session().forward([1, 2, 3]).tobytes()))

        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=child)
        process.start()
        assert receiver.poll(120), "the child hangs"
        message, logits = receiver.recv()
        process.join()
        assert "of which this is a fork; open the model again in this one" in message and logits == expected
        assert model.session().forward([1, 2, 3]).tobytes() == expected


def test_a_forked_child_computes_the_same(packed_demo: Path) -> None:
    with sparseflow.load(packed_demo, cache="1MiB", threads=2) as model:
        expected = model.session().forward([1, 2, 3]).tobytes()
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=lambda: sender.send_bytes(model.session().forward([1, 2, 3]).tobytes()))
        child.start()
        assert receiver.poll(60), "the child hangs"
        assert receiver.recv_bytes() == expected
        child.join()


def forked_answer(model: sparseflow.Model) -> str:
    """What a forked child gets from a forward, or is told."""

    def child() -> None:
        try:
            sender.send(model.session().forward([1, 2, 3]).tobytes().hex())
        except SparseFlowError as error:
            sender.send(str(error))

    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=child)
    process.start()
    assert receiver.poll(60), "the child hangs"
    answer: str = receiver.recv()
    process.join()
    return answer


def test_a_child_that_is_forked_while_others_compute_is_told_or_computes_the_same(packed_demo: Path) -> None:
    with sparseflow.load(packed_demo, cache="256KiB", threads=1) as model:
        expected = model.session().forward([1, 2, 3]).tobytes().hex()
        refusal = f"{packed_demo / 'experts.sfx'}: opened by another process, of which this is a fork; open the model again in this one"
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                model.session().forward([4, 5, 6])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        answers = {forked_answer(model) for _ in range(20)}
        stop.set()
        for thread in threads:
            thread.join()
        assert answers <= {expected, refusal}
        with model.leases.acquire(0, np.array([0], np.int32)):
            assert forked_answer(model) == refusal
        assert forked_answer(model) == expected


def test_damage_to_the_dense_core_is_found_when_it_is_read(packed_demo: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(packed_demo, tmp_path / "damaged")
    with open(folder / "dense.sfx", "r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(PackedModelError, match="dense.sfx: .* is damaged"):
        sparseflow.load(folder)


def test_an_embedding_cut_while_open_is_an_error(packed_demo: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(packed_demo, tmp_path / "cut")
    with sparseflow.load(folder, cache="1MiB") as model:
        session = model.session()
        os.truncate(folder / "embed.sfx", 4096)
        with pytest.raises(PackedModelError, match="embed.sfx: token 4000"):
            session.forward([4000])
