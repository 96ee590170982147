"""manifest.json as bytes. Its second line is the crc32 of all that follows that line, so that no bit of it can change unseen:

    {
     "crc32": 2718281828,
     "format": "sparseflow",
     ...
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

_FIRST_LINES = re.compile(rb'\{\n "crc32": (0|[1-9][0-9]{0,9}),\n')


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The text of a manifest, its checksum first."""
    lines = json.dumps(manifest, indent=1).encode() + b"\n"
    rest = lines.removeprefix(b"{\n")
    return b'{\n "crc32": %d,\n' % zlib.crc32(rest) + rest


def decode(text: bytes) -> tuple[Any, bool]:
    """(the JSON value without its checksum, whether it had one). Packs made before there was one have none.

    Raises ValueError (or RecursionError) when the text is no JSON, or its checksum differs.
    """
    value = json.loads(text)
    if not isinstance(value, dict) or "crc32" not in value:
        return value, False
    lines = _FIRST_LINES.match(text)
    if lines is None or int(lines[1]) != zlib.crc32(text[lines.end() :]):
        raise ValueError("the checksum differs")
    del value["crc32"]
    return value, True
