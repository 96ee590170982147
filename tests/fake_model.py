"""A model without weights, for tests of the text layer: its next token is a fixed function of every id its session was fed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import sparseflow
from sparseflow.chat import ChatTemplate
from sparseflow.tokenizer import Tokenizer

DEMO = Path(sparseflow.__file__).parent / "demo"
VOCAB = 4096


def digest(ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(ids, dtype=np.int64).tobytes())


def last_end(ids: list[int], marker: list[int]) -> int:
    ends = [end for end in range(len(marker), len(ids) + 1) if ids[end - len(marker):end] == marker]
    return ends[-1] if ends else len(ids)


class FakeSession:
    """A session that remembers all ids; `answer_of(prompt ids)` says what follows a prompt, token by token, then <|im_end|>.

    A prompt ends with the last `marker` of its model, without one after the first forward.
    """

    def __init__(self, model: FakeModel, ids: Sequence[int] = ()) -> None:
        self.model = model
        self.ids = list(ids)
        self.prompt_length = 0
        self.context = model.context
        self.closed = False
        model.open_sessions += 1

    @property
    def position(self) -> int:
        return len(self.ids)

    def forward(self, ids: Sequence[int], *, last_only: bool = False) -> np.ndarray:
        assert not self.closed and ids
        for token_id in ids:
            self.ids.append(int(token_id))
            self.model.fed += 1
            if self.model.fed == self.model.fail_at:
                raise self.model.failure
        self.prompt_length = self.prompt_length or len(self.ids)
        end = last_end(self.ids, self.model.marker) if self.model.marker else self.prompt_length
        script = self.model.answer_of(self.ids[:end])
        step = len(self.ids) - end
        logits = np.random.default_rng(digest(self.ids)).standard_normal(VOCAB).astype(np.float32)
        logits[script[step] if step < len(script) else self.model.eos_token_ids[0]] = 50.0
        return logits[None]

    def fork(self) -> FakeSession:
        assert not self.closed
        return FakeSession(self.model, self.ids)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.model.open_sessions -= 1


class FakeModel:
    def __init__(self, answer_of: Callable[[list[int]], list[int]], *, context: int = 4096, template: str | None = None,
                 marker: Sequence[int] = ()) -> None:
        self.answer_of = answer_of
        self.context = context
        self.marker = list(marker)
        self.tokenizer = Tokenizer.from_folder(DEMO)
        self.chat_template = ChatTemplate(template, self.tokenizer) if template else ChatTemplate.from_folder(DEMO, self.tokenizer)
        self.generation_config: dict = {}
        self.eos_token_ids = (4093, 4091)
        self.open_sessions = 0
        self.fed = 0
        self.fail_at = -1
        self.failure: BaseException = KeyboardInterrupt()

    def session(self, *, trace: bool = True) -> FakeSession:
        return FakeSession(self)
