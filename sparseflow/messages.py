"""Chat messages: their form, an answer as one, and the guard that keeps their text from becoming control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparseflow.errors import OptionError
from sparseflow.tokenizer import check_unicode

OPEN_THINKING, CLOSE_THINKING = "<think>", "</think>"

Message = Mapping[str, Any]

# Names templates compare with; any other role is text like the rest.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def as_answer(text: str, opening: str = "") -> dict[str, str]:
    """A generated text as an assistant's message, its thought apart in `reasoning_content`, where templates expect it.

    `opening` is what the template had begun to say before `text`. A thought that was broken off is a thought still.
    """
    text = opening + text
    if CLOSE_THINKING in text:
        thought, _, answer = text.rpartition(CLOSE_THINKING)
    elif opening:
        thought, answer = text, ""
    else:
        return {"role": "assistant", "content": text}
    thought = thought.partition(OPEN_THINKING)[2] if OPEN_THINKING in thought else thought
    return {"role": "assistant", "content": answer.lstrip("\n"), "reasoning_content": thought.strip("\n")}


class Guard:
    """Swaps the edge characters of control tokens in messages for private-use characters, and back."""

    def __init__(self, edges: frozenset[str], ordinary: re.Pattern[str], normalize: Callable[[str], str], *, reserved: str) -> None:
        self._edges = edges
        self._ordinary = ordinary
        self._normalize = normalize
        self._reserved = reserved
        self._forward: dict[int, str] = {}
        self._backward: dict[int, str] = {}

    @property
    def used(self) -> bool:
        return bool(self._forward)

    def restore(self, text: str) -> str:
        return text.translate(self._backward)

    def messages(self, messages: Any) -> list[dict[str, Any]]:
        """A checked, guarded copy of `messages`."""
        plain = [_checked(message, f"messages[{index}]") for index, message in enumerate(_checked_list(messages))]
        text = "".join(_texts(plain))
        check_unicode(text, "a message")
        characters = sorted(set(text))
        # A normalizer may turn a character into an edge, as NFKC does with U+FF1C.
        dangerous = [c for c in characters if c in self._edges or self._edges & set(self._normalize(c))]
        unused = _unused_private_characters(set(characters) | set(self._reserved))
        for character in dangerous:
            substitute = next(unused, None)
            if substitute is None:
                raise OptionError("the messages use every private-use character of Unicode, none is left to protect their text")
            self._forward[ord(character)] = substitute
            self._backward[ord(substitute)] = character
        return [self._message(message) for message in plain] if dangerous else plain

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        answer = message["role"] == "assistant"
        guarded = {}
        for key, value in message.items():
            if key == "role" and value in _ROLES:
                guarded[key] = value
            elif answer and key in ("content", "reasoning_content") and isinstance(value, str):
                guarded[key] = self._answer(value)
            else:
                guarded[key] = self._value(value)
        return guarded

    def _answer(self, text: str) -> str:
        """Guard an answer, in which control tokens that are not special keep their meaning for the template."""
        pieces, position = [], 0
        for match in self._ordinary.finditer(text):
            pieces += [text[position:match.start()].translate(self._forward), match.group()]
            position = match.end()
        return "".join(pieces) + text[position:].translate(self._forward)

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(self._forward)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {self._value(key): self._value(item) for key, item in value.items()}
        return value


def _checked_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise OptionError(f"messages is a {type(messages).__name__}, expected a list of {{'role': …, 'content': …}}")
    if not messages:
        raise OptionError("messages is empty, expected at least one {'role': 'user', 'content': …}")
    return messages


def _checked(message: Any, where: str) -> dict[str, Any]:
    """A plain copy of one message, its text parts joined."""
    if not isinstance(message, Mapping):
        raise OptionError(f"{where} is a {type(message).__name__}, expected {{'role': …, 'content': …}}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise OptionError(f"{where}: role is {role!r}, expected 'system', 'user' or 'assistant'")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "".join(_text_part(part, f"{where}: content[{index}]") for index, part in enumerate(content))
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        raise OptionError(f"{where}: content is {_shown(content)}, expected text")
    try:
        plain = json.loads(json.dumps({key: value for key, value in message.items() if key != "content"}))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{where} holds something that is not JSON: {error}") from error
    return {**plain, "content": content}


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise OptionError(f"{where} is {_shown(part)}, expected {{'type': 'text', 'text': …}}: only text is supported")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)


def _unused_private_characters(used: set[str]) -> Iterator[str]:
    for first, last in ((0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)):
        yield from (chr(point) for point in range(first, last + 1) if chr(point) not in used)
