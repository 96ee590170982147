"""The loop: prompt in, pieces of text out. Also what a prompt of each kind means: its ids and its default sampling."""

from __future__ import annotations

import numbers
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from sparseflow.chat import ChatTemplate
from sparseflow.errors import CapacityError, OptionError
from sparseflow.messages import Message
from sparseflow.sampling import Sampler, SamplingOptions
from sparseflow.tokenizer import Tokenizer

Prompt = str | Sequence[Message] | Sequence[int]


class ForwardSession(Protocol):
    """What the loop needs of a session."""

    @property
    def position(self) -> int: ...

    @property
    def context(self) -> int: ...

    def forward(self, ids: Sequence[int], *, last_only: bool = False) -> np.ndarray: ...

    def fork(self) -> ForwardSession: ...

    def close(self) -> None: ...

    @property
    def trace(self) -> Any: ...

    @property
    def usage(self) -> Sequence[Any]: ...

    @property
    def replay(self) -> Any: ...


class TextModel(Protocol):
    """What reading a prompt needs of a model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate: ...

    @property
    def generation_config(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready for the loop.

    Attributes:
        ids: its tokens.
        sampling: how to choose the next ones.
        opening: what a chat prompt has already begun to say for the model (`"<think>\\n"`), else empty.
    """

    ids: list[int]
    sampling: SamplingOptions
    opening: str = ""


def prepare_prompt(model: TextModel, prompt: Prompt, *, enable_thinking: bool | None = None,
                   **sampling: Any) -> PreparedPrompt:
    """Read a prompt: text (control tokens in it are parsed), a list of chat messages, or a list of ids.

    `sampling` holds fields of SamplingOptions, None where the default is wanted: greedy for text and ids, the checkpoint's
    generation config for chat. Raises OptionError when the prompt is empty or of another kind, or `enable_thinking` is given
    without messages.
    """
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, (str, Sequence, np.ndarray)):
        raise OptionError(f"the prompt is a {type(prompt).__name__}, expected text, a list of chat messages or a list of token ids")
    if len(prompt) == 0:
        raise OptionError("the prompt is empty: pass at least one token")
    if not isinstance(prompt, str) and isinstance(prompt[0], Mapping):
        messages = cast(Sequence[Message], prompt)
        ids = model.chat_template.encode(messages, enable_thinking=enable_thinking)
        opening = model.chat_template.opening(messages, enable_thinking=enable_thinking)
        defaults = SamplingOptions.from_generation_config(model.generation_config)
        return PreparedPrompt(ids, defaults.replace(**sampling), opening)
    if enable_thinking is not None:
        raise OptionError(f"enable_thinking is {enable_thinking!r}, but only chat messages have a template that could think")
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else _checked_ids(prompt)
    return PreparedPrompt(ids, SamplingOptions().replace(**sampling))


def generate(session: ForwardSession, prompt_ids: Sequence[int], tokenizer: Tokenizer, *, max_new_tokens: int = 256,
             sampler: Sampler | None = None, eos_token_ids: Sequence[int] = (), stop: Sequence[str] = (), opening: str = "",
             past_ids: Sequence[int] = (), fork_at: int | None = None) -> Generation:
    """Continue `session` with `prompt_ids`, then with tokens of the model's own until one of `finish_reason`'s reasons.

    Args:
        session: where to go on; it may already hold tokens.
        prompt_ids: the tokens to feed first, at least one.
        max_new_tokens: at least 1; fewer come when the context is full before.
        sampler: greedy when None.
        eos_token_ids: ids that end the text; they are counted among `ids` and are no part of the text.
        stop: texts before which the text ends; no part of one is given out.
        opening: kept on the result, see PreparedPrompt.
        past_ids: the tokens the session holds already, for the repetition penalty.
        fork_at: fork the session after this many of `prompt_ids`; the fork is the result's `fork`, the caller's to close.

    Nothing is computed until the first piece is asked for. Raises OptionError for an empty prompt, `max_new_tokens` or `stop` out
    of range, CapacityError for a prompt longer than the rest of the context.
    """
    if not prompt_ids:
        raise OptionError("the prompt is empty: pass at least one token")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, numbers.Integral) or max_new_tokens <= 0:
        raise OptionError(f"max_new_tokens is {max_new_tokens!r}, expected a whole number of at least 1")
    needed = session.position + len(prompt_ids)
    if needed > session.context:
        raise CapacityError(f"the prompt needs {needed} tokens but the context holds {session.context}: shorten it or raise the context")
    return Generation(session, list(prompt_ids), tokenizer, max_new_tokens, sampler or Sampler(), frozenset(eos_token_ids),
                      StopStrings(stop), opening, list(past_ids), fork_at)


class Generation(Iterator[str]):
    """The pieces of one answer, computed as they are asked for. Created by `generate`.

    Attributes:
        session: the session it runs on. It holds the prompt and `ids` without the last one, which is not fed until needed.
        ids: new ids so far, an end-of-text id included.
        finish_reason: "stop" (end-of-text id), "stop_string", "length" (max_new_tokens), "context" (the context is full); None
            while running, or when it was closed or failed before.
        prompt_tokens: tokens fed before the first new one.
        opening: what a chat prompt has already begun to say for the model, such as `"<think>\\n"`.
        ttft_seconds: from the first request for a piece to the first new token: the prefill.
        token_seconds: for each later token, the seconds it took; the time between requests is not counted.
        fork: the session as it stood at `fork_at`, else None.
        intact: False while the session is inside a forward, and for good when that was broken off: the session must then not
            be used any more.
    """

    def __init__(self, session: ForwardSession, prompt_ids: list[int], tokenizer: Tokenizer, max_new_tokens: int, sampler: Sampler,
                 eos_token_ids: frozenset[int], stop: StopStrings, opening: str, past_ids: list[int], fork_at: int | None) -> None:
        self.session = session
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.prompt_tokens = len(prompt_ids)
        self.opening = opening
        self.ttft_seconds: float | None = None
        self.token_seconds: list[float] = []
        self.fork: ForwardSession | None = None
        self.intact = True
        self._prompt_ids = prompt_ids
        self._past_ids = past_ids
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._stop = stop
        self._fork_at = fork_at
        self._text: list[str] = []
        self._pieces = self._run()

    @property
    def text(self) -> str:
        """The pieces so far, joined."""
        return "".join(self._text)

    @property
    def decode_seconds(self) -> float:
        """Seconds spent on all new tokens but the first."""
        return sum(self.token_seconds)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop here. The session stays usable; what was held back is not given out."""
        self._pieces.close()

    def _run(self) -> Generator[str, None, None]:
        started = time.perf_counter()
        logits = self._prefill()
        stream = self._tokenizer.stream()
        history = self._past_ids + self._prompt_ids
        while True:
            token_id = self._sampler.next(logits[-1], history)
            self.ids.append(token_id)
            history.append(token_id)
            elapsed = time.perf_counter() - started
            if self.ttft_seconds is None:
                self.ttft_seconds = elapsed
            else:
                self.token_seconds.append(elapsed)
            if token_id in self._eos_token_ids:
                self.finish_reason = "stop"
                break
            yield from self._emit(self._stop.push(stream.push(token_id)))
            if self._stop.found:
                self.finish_reason = "stop_string"
                return
            if len(self.ids) >= self._max_new_tokens:
                self.finish_reason = "length"
                break
            if self.session.position >= self.session.context:
                self.finish_reason = "context"
                break
            started = time.perf_counter()
            logits = self._forward([token_id])
        yield from self._emit(self._stop.push(stream.flush()))
        yield from self._emit(self._stop.flush())

    def _prefill(self) -> np.ndarray:
        if self._fork_at is None:
            return self._forward(self._prompt_ids)
        if self._fork_at > 0:
            self._forward(self._prompt_ids[:self._fork_at])
        self.fork = self.session.fork()
        return self._forward(self._prompt_ids[self._fork_at:])

    def _forward(self, ids: list[int]) -> np.ndarray:
        self.intact = False
        logits = self.session.forward(ids, last_only=True)
        self.intact = True
        return logits

    def _emit(self, piece: str) -> Iterator[str]:
        if piece:
            self._text.append(piece)
            yield piece


class StopStrings:
    """Cuts a text before the first of several strings, however it is divided into pieces.

    Of stop strings that overlap, the one that is complete first counts; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = (stops,)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise OptionError(f"stop holds {stop!r}, expected texts of at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Text that is certainly before any stop string; `found` is set once one is complete."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[:min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held:]
        return text[:len(text) - held]

    def flush(self) -> str:
        """What was held back because it could have begun a stop string, once no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _checked_ids(prompt: Sequence[Any]) -> list[int]:
    for index, token_id in enumerate(prompt):
        if isinstance(token_id, (bool, np.bool_)) or not isinstance(token_id, numbers.Integral) or token_id < 0:
            raise OptionError(f"the prompt's token {index} is {token_id!r}, expected an id of at least 0")
    return [int(token_id) for token_id in prompt]
