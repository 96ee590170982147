"""Chat messages to ids, with the checkpoint's own template.

Design: the template's control tokens are parsed, a message's never are. A control token begins and ends with certain characters
(`<` and `>` in Qwen's files); before rendering, those characters of a message's text are replaced by private-use characters that
occur nowhere in the conversation, so no text can spell, or complete, a control token, nor forge the replacement. After rendering,
the text is cut at the control tokens the template wrote, the characters are put back, and each stretch is encoded as plain text.
For text without such characters this is what `apply_chat_template` of transformers gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from sparseflow.errors import OptionError, PackedModelError
from sparseflow.messages import CLOSE_THINKING, OPEN_THINKING, Guard, Message
from sparseflow.template_sandbox import ChatEnvironment, TemplateLimitError
from sparseflow.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer, check_unicode, token_text

CHAT_TEMPLATE_FILE = "chat_template.jinja"

# What a next turn may look like: an answer and a question that begin with a letter, with white space; an answer with a thought.
_NEXT_TURNS = (
    ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}),
    ({"role": "assistant", "content": "\n 1"}, {"role": "user", "content": " \n2"}),
    ({"role": "assistant", "content": "c", "reasoning_content": "d"}, {"role": "user", "content": "e"}),
)


class ChatTemplate:
    """The chat template of one model folder.

    Thread-safety: all methods may be called from several threads at once.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, origin: str = CHAT_TEMPLATE_FILE) -> None:
        """`source`: the template's text; `origin`: the file it is from, for messages. PackedModelError when it cannot be compiled."""
        self.source = source
        self._tokenizer = tokenizer
        self._origin = origin
        self._environment = ChatEnvironment()
        try:
            self._template = self._environment.compile_within(source)
        except jinja2.TemplateSyntaxError as error:
            raise PackedModelError(f"{origin}: the chat template does not parse: line {error.lineno}: {error.message}") from error
        except TemplateLimitError as error:
            raise PackedModelError(f"{origin}: the chat template {error.message}") from error
        except Exception as error:  # Python's compiler has limits of its own, and as many ways to say so
            raise PackedModelError(f"{origin}: the chat template cannot be compiled: {type(error).__name__}: {error}") from error
        named = {name: token_text(tokenizer.config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._special_tokens = {name: text for name, text in named.items() if text is not None}
        controls = [text for text in tokenizer.control_tokens if text.strip()]
        self._edges = frozenset(text[0] for text in controls) | frozenset(text[-1] for text in controls)
        # In an answer the template looks for <think> and the like, which are control tokens but not special ones.
        ordinary = {OPEN_THINKING, CLOSE_THINKING, *controls} - (tokenizer.special_tokens - {OPEN_THINKING, CLOSE_THINKING})
        self._ordinary_pattern = re.compile("|".join(map(re.escape, sorted(ordinary, key=len, reverse=True))))

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The template in chat_template.jinja, else the one in tokenizer_config.json (a string, or a list of which "default" is
        taken). PackedModelError when there is none or it is damaged."""
        path = Path(folder) / CHAT_TEMPLATE_FILE
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), tokenizer, origin=str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise PackedModelError(f"{path} cannot be read: {error}") from error
        path = Path(folder) / TOKENIZER_CONFIG_FILE
        found = tokenizer.config.get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found
                     if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
            if not isinstance(named.get("default"), str):
                raise PackedModelError(f"{path}: none of its chat templates is named 'default' (names: {sorted(map(str, named))})")
            found = named["default"]
        if found is None:
            raise PackedModelError(f"{folder} has no chat template ({CHAT_TEMPLATE_FILE} or {TOKENIZER_CONFIG_FILE}): "
                                   "pass a raw prompt instead of messages")
        if not isinstance(found, str):
            raise PackedModelError(f"{path}: chat_template is a {type(found).__name__}, expected text")
        return cls(found, tokenizer, origin=str(path))

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True,
               enable_thinking: bool | None = None) -> list[int]:
        """Ids of a conversation.

        Args:
            messages: objects with `role` and `content` (text, or a list of text parts); further fields reach the template as they
                are (`reasoning_content`, `tool_calls`, …).
            add_generation_prompt: end with the beginning of an answer.
            enable_thinking: the template's switch of that name; None leaves it to the template.

        Raises OptionError when the messages are not of that form or the template refuses them.
        """
        guard = self._guard()
        text = self._render(guard.messages(messages), add_generation_prompt, enable_thinking)
        check_unicode(text, f"what the chat template ({self._origin}) makes of the messages")
        if not guard.used:
            return self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for part in self._tokenizer.split_control_tokens(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenizer.encode_plain(guard.restore(part))
        return ids

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True,
               enable_thinking: bool | None = None) -> str:
        """The conversation as text, to be read; `encode` is not the encoding of it where a message spells a control token."""
        guard = self._guard()
        return guard.restore(self._render(guard.messages(messages), add_generation_prompt, enable_thinking))

    def stable_prefix(self, messages: Sequence[Message], ids: Sequence[int], *, enable_thinking: bool | None = None) -> int:
        """How many leading ids every next turn will share, whatever is answered and asked.

        `ids` is the encoding of `messages` with a generation prompt. Next turns are tried out: the template decides what becomes
        of the beginning of the answer (a `<think>` is usually taken out of the history), so it is asked, not guessed.
        """
        length = len(ids)
        for turn in _NEXT_TURNS:
            following = self.encode([*messages, *turn], enable_thinking=enable_thinking)
            length = min(length, common_prefix(ids, following))
        return length

    def opening(self, messages: Sequence[Message], *, enable_thinking: bool | None = None) -> str:
        """What the generation prompt has already begun to say for the model: `"<think>\\n"`, or empty."""
        guard = self._guard()
        guarded = guard.messages(messages)
        text, history = (self._render(guarded, prompt, enable_thinking) for prompt in (True, False))
        prompt = text.removeprefix(history)
        start = prompt.rfind(OPEN_THINKING)
        return prompt[start:] if start > prompt.rfind(CLOSE_THINKING) else ""

    def _guard(self) -> Guard:
        return Guard(self._edges, self._ordinary_pattern, self._tokenizer.normalize, reserved=self.source)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, enable_thinking: bool | None) -> str:
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return self._environment.render_within(
                self._template, messages=messages, tools=None, documents=None, **self._special_tokens,
                add_generation_prompt=add_generation_prompt, **switches)
        except TemplateLimitError as error:
            raise OptionError(f"the chat template ({self._origin}) {error.message}") from error
        except jinja2.TemplateError as error:
            raise OptionError(f"the chat template refused the messages: {error.message}") from error
        except Exception as error:  # its code may fail as any code may
            raise OptionError(f"the chat template ({self._origin}) failed on the messages: {type(error).__name__}: {error}") from error


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading ids two sequences share."""
    for index, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return index
    return min(len(left), len(right))
