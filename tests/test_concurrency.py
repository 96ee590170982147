"""Many threads on one model, and Ctrl-C at any moment: the same answers as alone, and nothing held afterwards."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from expert_store import without_direct_reads
from soak import THREADS, soak

import sparseflow


def check(folder: Path, seconds: float, cache: str, strict: bool) -> None:
    soaked = soak(folder, seconds, cache=cache, strict=strict)
    assert not soaked.wrong
    assert soaked.answers > THREADS and soaked.broken_off and soaked.forks


@pytest.mark.parametrize(("cache", "strict", "direct"), [("1MiB", True, True), ("1MiB", False, True), ("1MiB", True, False), ("resident", False, True)])
def test_eight_threads_get_what_one_gets(
    packed_demo: Path, monkeypatch: pytest.MonkeyPatch, cache: str, strict: bool, direct: bool
) -> None:
    if not direct:
        without_direct_reads(monkeypatch)
    check(packed_demo, 2, cache, strict)


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "strict"), [("1MiB", True), ("1MiB", False), ("resident", False)])
def test_eight_threads_for_longer(packed_demo: Path, cache: str, strict: bool) -> None:
    check(packed_demo, 30, cache, strict)


@pytest.mark.parametrize("strict", [False, True])
def test_ctrl_c_at_any_moment_leaves_nothing_held(packed_demo: Path, strict: bool) -> None:
    armed = False

    def interrupt(*signal_and_frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        with sparseflow.load(packed_demo, cache="256KiB", threads=2, strict=strict) as model:
            expected = "".join(model.generate("The red fox", max_new_tokens=12))
            for number in range(40):
                generation = model.generate("The red fox", max_new_tokens=12)
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 * (number + 1))
                    text = "".join(generation)
                    armed = False
                    assert text == expected
                except KeyboardInterrupt:
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert (model.leases.pinned, model.leases.leases) == (0, 0)
                generation.session.close()
            assert "".join(model.generate("The red fox", max_new_tokens=12)) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted
