"""The journal of an unfinished pack: which units of work are durable, so that an interrupted pack can be resumed.

One JSON object a line. The first names the source and the options; each later line is one finished unit and carries the
checksums that the manifest needs, so that resuming reads nothing again. A line is appended after its data is on the disk. Its last
field is the crc32 of the line without that field: a line that was cut off, damaged or edited is dropped together with all that
follows it, and its unit is done again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sparseflow.errors import OptionError
from sparseflow.packfile import JOURNAL_FILE, sync_folder

_LINE = re.compile(rb'(\{.*),"crc32":([0-9]{1,10})\}\n')


class Journal:
    """The journal of `folder`, locked against a second process for as long as it is open.

    Attributes: identity (the first line, None if the pack had not begun), done (unit -> its record).
    Raises OptionError if another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FILE
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise OptionError(f"{folder}: another process is packing into this folder, wait for it or choose another") from None
        lines, length = _whole_lines(self.path.read_bytes())
        os.ftruncate(self._descriptor, length)
        os.lseek(self._descriptor, length, os.SEEK_SET)
        self.identity: dict[str, Any] | None = lines[0] if lines else None
        self.done: dict[str, dict[str, Any]] = {line["unit"]: line for line in lines[1:]}

    def begin(self, identity: dict[str, Any]) -> None:
        """Write the first line of a new journal."""
        self.identity = identity
        self._append(identity)
        sync_folder(self.path.parent)

    def finish_unit(self, unit: str, record: Mapping[str, Any]) -> None:
        """Record a unit whose data is on the disk."""
        line = {"unit": unit, **record}
        self._append(line)
        self.done[unit] = line

    def close(self) -> None:
        """Release the lock; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode()
        data = memoryview(text[:-1] + b',"crc32":%d}\n' % zlib.crc32(text))
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)


def _whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """(decoded lines up to the first that is cut off or damaged, their length in bytes)."""
    lines: list[dict[str, Any]] = []
    length = 0
    for line in data.splitlines(keepends=True):
        parts = _LINE.fullmatch(line)
        if parts is None or zlib.crc32(parts[1] + b"}") != int(parts[2]):
            break
        value = json.loads(parts[1] + b"}")
        if ("unit" in value) != bool(lines):
            break
        lines.append(value)
        length += len(line)
    return lines, length
