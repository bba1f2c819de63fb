"""PURE: what the process of a capture in Python writes to its pipe.

A frame is a kind, a stream (or nothing), and a payload:

    ROWS     JSON texts, one per line
    ARROW    an Arrow IPC stream
    STATE    JSON: {"value": …, "merge": false}
    SCHEMA   JSON Schema of a stream
    FOUND    JSON: what was discovered
    FAILED   JSON: {"what": …, "file": …, "line": …, "function": …, "transient": false}
    DONE     nothing: the function has returned
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PAYLOAD_BYTES_MAX: Final = 1 << 30

_HEAD: Final = struct.Struct(">cII")


class FrameKind(enum.Enum):
    """What a payload is."""

    ROWS = b"R"
    ARROW = b"A"
    STATE = b"S"
    SCHEMA = b"C"
    FOUND = b"F"
    FAILED = b"E"
    DONE = b"D"


_KINDS: Final = {kind.value: kind for kind in FrameKind}


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: FrameKind
    stream: str = ""
    payload: bytes = b""


class NoFrame(ValueError):
    """Bytes that are no frame."""


def encode(frame: Frame) -> bytes:
    """Encode a frame."""
    name = frame.stream.encode()
    return _HEAD.pack(frame.kind.value, len(name), len(frame.payload)) + name + frame.payload


class FrameReader:
    """Takes bytes as they come, and gives frames as soon as they are complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def rest(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._bytes)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes in, and yield what they complete."""
        self._bytes += data
        at = 0
        while len(self._bytes) - at >= _HEAD.size:
            kind, named, size = _HEAD.unpack_from(self._bytes, at)
            if kind not in _KINDS or size > PAYLOAD_BYTES_MAX:
                raise NoFrame(f"{bytes(self._bytes[at : at + 20])!r}")
            begin = at + _HEAD.size
            if len(self._bytes) < begin + named + size:
                break
            name = self._bytes[begin : begin + named].decode()
            at = begin + named + size
            yield Frame(_KINDS[kind], name, bytes(self._bytes[begin + named : at]))
        del self._bytes[:at]
