"""A chat that goes on: every turn prefills only what is new.

Design: a session cannot be rewound, and the template changes what is behind it (it takes the thinking out of earlier answers). So
the conversation keeps a fork of the session at the longest prefix that every next turn is certain to share, and the session as it
stands after the answer, in case the template leaves that as it is. A turn renders the whole conversation, goes on from the longest
kept session whose tokens begin the rendering, and feeds the rest. What a session holds is thus always compared, never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparseflow.generate import ForwardSession, Generation, TextModel, generate
from sparseflow.messages import Message, as_answer
from sparseflow.sampling import Sampler, SamplingOptions


class ChatModel(TextModel, Protocol):
    """What a conversation needs of a model; `sparseflow.Model` is one."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def session(self, *, trace: bool = True) -> ForwardSession: ...


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A session together with the ids it holds."""

    ids: list[int]
    session: ForwardSession

    def begins(self, ids: list[int]) -> bool:
        return len(self.ids) < len(ids) and ids[:len(self.ids)] == self.ids


class Conversation:
    """A chat with one model.

        with sparseflow.load("demo") as model, sparseflow.Conversation(model) as conversation:
            for piece in conversation.send("What do bees live in?"):
                print(piece, end="", flush=True)

    For one thread at a time; several conversations may share a model.
    """

    def __init__(self, model: ChatModel, *, messages: Sequence[Message] = (), max_new_tokens: int = 256,
                 temperature: float | None = None, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
                 repetition_penalty: float | None = None, seed: int | None = None, stop: Sequence[str] = (),
                 enable_thinking: bool | None = None, trace: bool = True) -> None:
        """`messages`: what was said before, such as a system message. `max_new_tokens` and `stop` act on each answer; sampling
        options that are None are those of the checkpoint's generation config; with `trace` the sessions record their routes."""
        self._model = model
        self._start = [dict(message) for message in messages]
        self._history = list(self._start)
        self._max_new_tokens = max_new_tokens
        self._stop = stop
        self._enable_thinking = enable_thinking
        self._trace = trace
        options = SamplingOptions.from_generation_config(model.generation_config)
        self._sampler = Sampler(options.replace(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                                                repetition_penalty=repetition_penalty, seed=seed))
        self._stable: _Checkpoint | None = None  # the longest prefix every next turn shares
        self._end: _Checkpoint | None = None  # the end of the last answer
        self._generation: Generation | None = None
        self._turn_ids: list[int] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, with the answer that is under way; a thought is apart from its answer, in `reasoning_content`."""
        if self._generation is None or not self._generation.ids:
            return list(self._history)
        return [*self._history, as_answer(self._generation.text, self._generation.opening)]

    def send(self, text: str) -> Generation:
        """Say `text`; iterating over the result gives the pieces of the answer, as `Model.generate` does.

        An answer that is broken off stays in the conversation as far as it came; a turn that failed before its first token is
        taken back. Raises OptionError for text the template refuses, CapacityError when the conversation has outgrown the context.
        """
        self._settle()
        messages = [*self._history, {"role": "user", "content": text}]
        template = self._model.chat_template
        ids = template.encode(messages, enable_thinking=self._enable_thinking)
        stable = template.stable_prefix(messages, ids, enable_thinking=self._enable_thinking)
        opening = template.opening(messages, enable_thinking=self._enable_thinking)
        session, shared = self._resume(ids)
        try:
            generation = generate(
                session, ids[shared:], self._model.tokenizer, max_new_tokens=self._max_new_tokens, sampler=self._sampler,
                eos_token_ids=self._model.eos_token_ids, stop=self._stop, opening=opening, past_ids=ids[:shared],
                fork_at=stable - shared if shared < stable < len(ids) else None)
        except BaseException:
            session.close()
            raise
        self._history, self._turn_ids, self._generation = messages, ids, generation
        return generation

    def reset(self) -> None:
        """Forget everything but the messages the conversation was created with."""
        self.close()
        self._history = list(self._start)

    def close(self) -> None:
        """End the turn that is under way and close the sessions that are kept; the next turn would prefill everything."""
        self._settle()
        for checkpoint in (self._stable, self._end):
            if checkpoint is not None:
                checkpoint.session.close()
        self._stable = self._end = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _resume(self, ids: list[int]) -> tuple[ForwardSession, int]:
        """A session to feed, and how many of `ids` it holds already: fewer than all, since the last must give logits."""
        for checkpoint in (self._end, self._stable):
            if checkpoint is not None and checkpoint.begins(ids):
                session, shared = checkpoint.session.fork(), len(checkpoint.ids)
                break
        else:
            session, shared = self._model.session(trace=self._trace), 0
        # The end of the last answer is of no use any more; the stable prefix is, if this turn fails.
        if self._end is not None:
            self._end.session.close()
            self._end = None
        return session, shared

    def _settle(self) -> None:
        """End the turn that is under way: write down its answer, and keep its sessions in place of the last turn's."""
        generation, self._generation = self._generation, None
        if generation is None:
            return
        generation.close()
        if generation.ids:
            self._history.append(as_answer(generation.text, generation.opening))
        else:
            self._history.pop()
        if generation.fork is not None:
            if self._stable is not None:
                self._stable.session.close()
            self._stable = _Checkpoint(self._turn_ids[:generation.fork.position], generation.fork)
        session = generation.session
        if generation.intact and generation.ids:
            self._end = _Checkpoint((self._turn_ids + generation.ids)[:session.position], session)
        else:
            session.close()
