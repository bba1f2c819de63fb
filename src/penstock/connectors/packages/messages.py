"""PURE: the lines of a package's standard output, read as messages of its protocol.

A document inside a message is not parsed: its text is taken out as it is. A line that is no message
is something that the package prints for people, and goes to the log; unless it looks like a message
that is broken, which may have been a document, and must not be lost.
"""

from __future__ import annotations

import json
from typing import Any, Final, Generic, TypeVar

import msgspec

QUOTED_BYTES: Final = 200
"""Bytes of a broken line that an error shows."""


class BrokenMessage(Exception):
    """A line that looks like a message, and cannot be read."""

    def __init__(self, line: bytes) -> None:
        super().__init__("a broken message")
        self.beginning = line[:QUOTED_BYTES].decode(errors="replace")


class UnknownStream(Exception):
    """A document of a stream that cannot be told: to pass it over could be to lose it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


M = TypeVar("M", bound=msgspec.Struct)


class MessageReader(Generic[M]):
    """Reads lines as messages of one kind; those of a `vital` type must not be lost."""

    def __init__(self, kind: type[M], vital: tuple[str, ...]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._vital = vital

    def read(self, line: bytes) -> M | None:
        """Return the message of a line; None if it is none."""
        try:
            return self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._read_again(line)

    def _read_again(self, line: bytes) -> M | None:
        """Python writes `NaN`, which is no JSON: such a document is refused when it is taken in."""
        if not line.lstrip().startswith(b"{"):
            return None
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            if any(f'"{kind}"'.encode() in line for kind in self._vital):
                raise BrokenMessage(line) from None
            return None
        kind = value.get("type")
        if kind not in self._vital:
            return None
        if kind != "RECORD" or not isinstance(value.get("record"), dict):
            raise BrokenMessage(line)
        return self._with_text(value, line)

    def _with_text(self, value: dict[str, Any], line: bytes) -> M:
        """A message whose document Python can read, and JSON cannot; its text stays as it is."""
        inside = isinstance(value["record"].get("data"), dict) and "stream" in value["record"]
        holder, member = (value["record"], "data") if inside else (value, "record")
        text, holder[member] = json.dumps(holder[member]), {}
        try:
            message = self._decode(json.dumps(value).encode())
        except msgspec.MsgspecError:
            raise BrokenMessage(line) from None
        setattr(message.record if inside else message, member, msgspec.Raw(text.encode()))  # type: ignore[attr-defined]
        return message
