"""Threads that use one model at random and compare all they get with what it gives alone.

    PYTHONPATH=. python tests/soak.py 600          ten minutes on the demo
    PYTHONPATH=. python tests/soak.py 600 FOLDER   on another packed model
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import sparseflow
from sparseflow.model import Model, model_folder

THREADS = 8
PROMPTS = ("The red fox", "Once upon a time", "What do bees live in?", "a", "The sea is")


@dataclass
class Soaked:
    """What the threads did: answers that were compared, of them those broken off, sessions forked."""

    answers: int = 0
    broken_off: int = 0
    forks: int = 0
    wrong: list[str] = field(default_factory=list)


def soak(folder: Path, seconds: float, *, cache: str, strict: bool, seed: int = 0) -> Soaked:
    """Eight threads on one model for some seconds. Leaves nothing behind: that is checked, too."""
    with sparseflow.load(folder, cache="resident", threads=1) as model:
        expected = {prompt: answer(model, prompt, 16) for prompt in PROMPTS}
    soaked, lock, end = Soaked(), threading.Lock(), time.monotonic() + seconds
    with sparseflow.load(folder, cache=cache, threads=2, strict=strict) as model:

        def work(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            try:
                while time.monotonic() < end and not soaked.wrong:
                    one_turn(rng)
            except BaseException as error:
                with lock:
                    soaked.wrong.append(f"thread {number}: {error!r}")

        def one_turn(rng: random.Random) -> None:
            prompt, tokens = rng.choice(PROMPTS), rng.randrange(1, 17)
            what = rng.random()
            if what < 0.2:  # begins to read, and goes away
                session = model.session(trace=rng.random() < 0.5)
                session.forward(model.tokenizer.encode(prompt), last_only=True)
                session.close()
                return
            if what < 0.4:
                forked(rng, prompt)
                return
            pieces = []
            generation = model.generate(prompt, max_new_tokens=tokens, trace=rng.random() < 0.5)
            for piece in generation:
                pieces.append(piece)
                if what < 0.6 and rng.random() < 0.2:
                    generation.close()
                    break
            generation.session.close()
            compare(prompt, "".join(pieces), what < 0.6)

        def forked(rng: random.Random, prompt: str) -> None:
            with model.session() as session:
                ids = model.tokenizer.encode(prompt)
                cut = rng.randrange(len(ids))
                if cut:
                    session.forward(ids[:cut])
                with session.fork() as other:
                    one, two = (each.forward(ids[cut:], last_only=True).tobytes() for each in (session, other))
            with lock:
                soaked.forks += 1
                if one != two:
                    soaked.wrong.append(f"{prompt!r}: a fork has other logits")

        def compare(prompt: str, text: str, broken_off: bool) -> None:
            with lock:
                soaked.answers += 1
                soaked.broken_off += broken_off
                if not expected[prompt].startswith(text):
                    soaked.wrong.append(f"{prompt!r} gave {text!r}, alone it gives {expected[prompt]!r}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if (model.leases.pinned, model.leases.leases) != (0, 0):
            soaked.wrong.append(f"{model.leases.leases} leases are left")
    return soaked


def answer(model: Model, prompt: str, tokens: int) -> str:
    """What the model says to a prompt."""
    return "".join(model.generate(prompt, max_new_tokens=tokens))


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    folder = model_folder(sys.argv[2] if len(sys.argv) > 2 else "demo")
    for number, (cache, strict) in enumerate((("1MiB", True), ("1MiB", False), ("resident", False))):
        soaked = soak(folder, seconds / 3, cache=cache, strict=strict, seed=number)
        print(f"cache {cache}{', strict' if strict else ''}: {soaked.answers} answers, {soaked.broken_off} broken off, {soaked.forks} forks")
        if soaked.wrong:
            sys.exit("\n".join(soaked.wrong))


if __name__ == "__main__":
    main()
