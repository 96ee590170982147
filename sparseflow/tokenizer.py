"""Text to ids and ids to text, with the checkpoint's own byte-level BPE.

Design: two ways in. `Tokenizer.encode` parses control tokens (`<|im_start|>`, `<think>`, …) wherever they stand in the text, as
a raw prompt wants; `Tokenizer.encode_plain` never does, as the text of a user needs. One way out: every id is a fixed run of bytes,
so text is those bytes decoded as UTF-8, and a stream decodes in O(1) per token.
"""

from __future__ import annotations

import codecs
import json
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from sparseflow.errors import CapacityError, OptionError, PackedModelError
from sparseflow.sizes import format_bytes

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

# What the library may take, generously: with tokenizers 0.23, loading the demo's tokenizer.json of 0.1 MB took 3.2 MB, and
# encoding 140 to 433 bytes for one of text, the most where every character is a token.
_LOADED_BYTES = 20
_ENCODED_BYTES = 512
_LEAST_BYTES = 2 << 20


def _byte_of_character() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for (GPT-2's table): printable Latin-1 characters stand for
    themselves, the other 68 bytes, in order, are the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """The tokenizer of one model folder.

    Attributes:
        control_tokens: text → id of every added token (`<|im_end|>`, `<think>`, …).
        special_tokens: those of them the checkpoint marks as special (in Qwen's files `<think>` is not one).
        config: tokenizer_config.json; empty when the folder has none.
        generation_config: generation_config.json; empty when the folder has none.
        eos_token_ids: the ids that end a text, from generation_config.json, else from tokenizer_config.json's `eos_token`.

    All methods that encode or decode raise CapacityError when there is too little memory.

    Thread-safety: all methods may be called from several threads at once.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, config: dict[str, Any] | None = None,
                 generation_config: dict[str, Any] | None = None, source: str = TOKENIZER_FILE) -> None:
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise PackedModelError(f"{source}: decoder {type(backend.decoder).__name__} is not supported, only ByteLevel is")
        backend.no_truncation()  # a tokenizer.json may carry the settings of a training run
        backend.no_padding()
        self._backend = backend
        self._source = source
        self.config = config or {}
        self.generation_config = generation_config or {}
        added = backend.get_added_tokens_decoder()
        self.control_tokens: dict[str, int] = {token.content: token_id for token_id, token in sorted(added.items())}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        alternatives = sorted(map(re.escape, self.control_tokens), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(alternatives) or r"(?!)")
        self._bytes_of_id: dict[int, bytes] = {}
        self.eos_token_ids = self._find_eos_token_ids()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, and tokenizer_config.json and generation_config.json where the folder has them.

        Raises PackedModelError when tokenizer.json is missing, or a file is damaged or of a kind that is not supported;
        CapacityError when there is too little memory.
        """
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise PackedModelError(f"{path} is missing: copy the checkpoint's tokenizer files into this folder (Session.forward runs on token ids without them)")
        with _library(f"{path} cannot be read as a tokenizer", _LOADED_BYTES * path.stat().st_size):
            backend = tokenizers.Tokenizer.from_file(str(path))
        return cls(backend, config=_read_json(folder / TOKENIZER_CONFIG_FILE),
                   generation_config=_read_json(folder / GENERATION_CONFIG_FILE), source=str(path))

    @property
    def vocab_size(self) -> int:
        """Ids this tokenizer knows; the model's embedding may have more rows, which stand for no text."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def largest_id(self) -> int:
        """The largest id this tokenizer may give, as far as its counts and control tokens tell."""
        return max(self.vocab_size - 1, *self.control_tokens.values(), -1)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; control tokens in it become their single ids. OptionError when it holds lone surrogates.

        `add_special_tokens` also adds what the checkpoint puts around every text (nothing in Qwen's files).
        """
        check_unicode(text, "the prompt")
        with self._encoding(text):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` in which nothing is a control token: `<|im_end|>` is encoded as ten plain characters."""
        check_unicode(text, "the text")
        normalized = self.normalize(text)
        with self._encoding(text):
            if not (self._control_pattern.search(text) or self._control_pattern.search(normalized)):
                return self._backend.encode(text, add_special_tokens=False).ids
            # The library always parses added tokens, so its stages are run one by one.
            pieces = self._backend.pre_tokenizer.pre_tokenize_str(normalized) if self._backend.pre_tokenizer else [(normalized, None)]
            model = self._backend.model
            return [token.id for piece, _ in pieces for token in model.tokenize(piece)]

    def normalize(self, text: str) -> str:
        """`text` in the normal form the vocabulary was made for (NFC in Qwen's files)."""
        with self._encoding(text):
            return self._backend.normalizer.normalize_str(text) if self._backend.normalizer else text

    def split_control_tokens(self, text: str) -> list[str | int]:
        """`text` cut at its control tokens: the ids of those, and the stretches of text between them (empty ones left out)."""
        check_unicode(text, "the text")
        with self._encoding(text):
            encoding = self._backend.encode(text, add_special_tokens=False)
        ids_of_control_tokens = set(self.control_tokens.values())
        parts: list[str | int] = []
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets):
            if token_id not in ids_of_control_tokens:
                continue
            if start > position:
                parts.append(text[position:start])
            parts.append(token_id)
            position = end
        if position < len(text):
            parts.append(text[position:])
        return parts

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of UTF-8 one id stands for; none for an id beyond the vocabulary."""
        known = self._bytes_of_id.get(token_id)
        if known is None:
            with _library(f"{self._source} cannot tell the token {token_id}"):
                token = self._backend.id_to_token(token_id) or ""
            try:
                known = bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token that is not spelled in the byte alphabet
                known = token.encode()
            self._bytes_of_id[token_id] = known
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self)

    def _encoding(self, text: str) -> AbstractContextManager[None]:
        most = len(text) if text.isascii() else 4 * len(text)
        return _library(f"{self._source} cannot encode the text", _ENCODED_BYTES * most)

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        found = self.generation_config.get("eos_token_id")
        if found is None:
            token = token_text(self.config.get("eos_token"))
            found = [] if token is None or self.token_id(token) is None else self.token_id(token)
        ids: Sequence[Any] = found if isinstance(found, list) else [found]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise PackedModelError(f"{GENERATION_CONFIG_FILE}: eos_token_id is {found!r}, expected an id or a list of ids")
        return tuple(dict.fromkeys(ids))


class StreamDecoder:
    """Decodes ids one at a time and never gives out half a character.

    The pieces joined, with `flush()` last, equal `Tokenizer.decode` of all ids. At most three bytes are held back: those that a
    later token could still complete to a character. Bytes that can no longer become one come out at once, as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this id; may be empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back, as U+FFFD, once no more ids will come."""
        return self._decoder.decode(b"", final=True)


def check_unicode(text: str, what: str) -> None:
    """OptionError naming the place of the first lone surrogate in `text`; Python uses them for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OptionError(f"{what} is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character "
                          f"{error.start}; pass UTF-8 text") from None


def token_text(entry: Any) -> str | None:
    """The text of a token named in tokenizer_config.json, where it is a string or an object with its `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


@contextmanager
def _library(problem: str, needs: int = 0) -> Iterator[None]:
    """What the library raises becomes a PackedModelError that begins with `problem`.

    It ends the process when it is refused memory. So it is tried before whether the bytes that it may need can be had, and
    CapacityError raised if not.
    """
    needs += _LEAST_BYTES
    try:
        mmap.mmap(-1, needs, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise CapacityError(f"{problem}: {format_bytes(needs)} of memory for it cannot be had: {error.strerror}") from error
    try:
        yield
    except BaseException as error:
        # It raises bare Exception, whatever is wrong, and where it is at fault itself what is none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise PackedModelError(f"{problem}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # escapes may spell what is no Unicode
    except (OSError, ValueError, RecursionError) as error:
        raise PackedModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise PackedModelError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content
