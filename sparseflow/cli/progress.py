"""A line on stderr that says what is being done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_QUIET_SECONDS = 2.0
_TERMINAL_SECONDS = 0.2


class ProgressLine:
    """Says what is being measured. On a terminal one line is rewritten, with the time it has taken; elsewhere each new message
    is a line, once two seconds have gone by."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.clock = clock
        self.terminal = stream.isatty()
        self.begun = clock()
        self.text = ""
        self.since = self.begun
        self.due = 0.0

    def __call__(self, text: str) -> None:
        """`text` is what is being done now."""
        now = self.clock()
        new = text != self.text
        if new:
            self.since = now
        if self.terminal and (new or now >= self.due):
            self.due = now + _TERMINAL_SECONDS
            self.stream.write(f"\r{text}, {now - self.since:.0f} s\x1b[K")
        elif not self.terminal and new and now - self.begun >= _QUIET_SECONDS:
            self.stream.write(f"{text}\n")
        self.stream.flush()
        self.text = text

    def finish(self) -> None:
        """Take the line away from the terminal."""
        if self.terminal and self.text:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
