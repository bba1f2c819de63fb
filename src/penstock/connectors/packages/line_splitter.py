"""PURE: bytes as they come from a pipe, made lines of a limited length."""

from __future__ import annotations

from typing import Final

LINE_BYTES_MAX: Final = 64 << 20
"""Bytes of a message: a line."""


class LineTooLong(Exception):
    """A line is longer than allowed; it holds the beginning of it."""

    def __init__(self, beginning: bytes) -> None:
        super().__init__("a line is too long")
        self.beginning = beginning


class LineSplitter:
    """Keeps the bytes of a line whose end has not come yet."""

    def __init__(self, limit: int = LINE_BYTES_MAX) -> None:
        self._limit = limit
        self._begun = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk, without their ends, and without empty ones."""
        *ended, rest = chunk.split(b"\n")
        if ended:
            ended[0] = bytes(self._begun) + ended[0]
            self._begun.clear()
        self._begun += rest
        for line in (*ended, self._begun):
            if len(line) > self._limit:
                raise LineTooLong(bytes(line[:200]))
        return [line for line in ended if line.strip()]

    def end(self) -> list[bytes]:
        """Return the last line, if it has no end."""
        line = bytes(self._begun)
        self._begun.clear()
        return [line] if line.strip() else []
