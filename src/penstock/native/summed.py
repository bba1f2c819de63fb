"""Temporary files that are compared with what was written to them before they are decoded."""

from __future__ import annotations

import zlib
from typing import IO, Final

_STEP_BYTES: Final = 4 << 20


class SummedFile:
    """A file that is written from its begin to its end, and the CRC-32 of what was."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = 0

    def write(self, data: bytes) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()


def sum_of(file: IO[bytes]) -> int:
    """The CRC-32 of what a file has from here on."""
    found = 0
    while some := file.read(_STEP_BYTES):
        found = zlib.crc32(some, found)
    return found
