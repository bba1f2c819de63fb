"""PURE: the bytes of one state-log entry.

    0x50 | envelope version u8 | flags u8 | crc32 u32, big endian | body
    body = msgpack array, fields in the order of `LogEntry`; flag bit 0: compressed with zlib

The checksum covers everything else, header included, so neither a torn write nor a foreign value
under our key can pass for an entry. msgpack of a fixed array of integers and byte strings has one
spelling, so an entry has one spelling too, and an attempt can be sent again as identical bytes.

Two versions guard two things. The *envelope* version is this module's: a newer envelope cannot be
parsed at all. The *format* is the log's own: it says how `diff` and `state` are encoded, and only
the machine of that log can judge it.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from penstock.errors import PenstockError

MAGIC = 0x50
ENVELOPE_VERSION = 1

_FLAG_ZLIB = 0x01
_KNOWN_FLAGS = _FLAG_ZLIB
_PREFIX = struct.Struct(">BBBI")
_COMPRESS_FROM_BYTES = 4 * 1024  # below, the saving is smaller than the work
_BODY_BYTES_MAX = 1 << 30  # inflating stops here: a forged entry must not fill the memory

NO_BASE = -1
"""`LogEntry.base` of a log that was never rolled up: it starts at entry 0 and the initial state."""


class CorruptEntry(PenstockError):
    """These bytes are not an entry that this module wrote, or are damaged."""


class NewerFormat(PenstockError):
    """A newer release wrote this; an older one may read the log, but must not append to it."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The entry that one compare-and-set of a state log commits.

    - `diff` without `state`: a command.
    - `diff` with `state`: a command, and a rollup: the whole state after that command.
    - `state` alone: a rollup only. Neither: a change of epoch.

    `base` is the newest entry below this one that carries a state. So the head alone tells a new
    reader where to start, however long the log is.
    """

    format: int
    """Encoding of `diff` and `state`; the machine's to define."""
    writer: bytes
    """16 random bytes, one per open log handle."""
    writer_seq: int
    """Counts the writer's commands; no two of its committed entries share one."""
    token: bytes
    """16 random bytes, one per command: how an attempt recognises itself after a lost reply."""
    epoch: int
    """Epoch of the leader that wrote the entry; 0 in a log that was never led."""
    base: int
    wall_ms: int
    """When it was written, for people. No decision depends on it."""
    diff: bytes | None = None
    state: bytes | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LogEntry)


def encode(entry: LogEntry) -> bytes:
    body = _ENCODER.encode(entry)
    flags = 0
    if len(body) >= _COMPRESS_FROM_BYTES:
        body, flags = zlib.compress(body, level=1), _FLAG_ZLIB
    checksum = _checksum(ENVELOPE_VERSION, flags, body)
    return _PREFIX.pack(MAGIC, ENVELOPE_VERSION, flags, checksum) + body


def decode(data: bytes, *, where: str) -> LogEntry:
    """Decode an entry; `where` (key and sequence number) goes into the error."""
    if len(data) < _PREFIX.size or data[0] != MAGIC:
        raise CorruptEntry(
            "not a state-log entry",
            where=where,
            why=f"{len(data)} bytes that start with {data[:1].hex() or 'nothing'}, not {MAGIC:02x}",
            fix="another program wrote under this key; give it a separate key",
        )
    _, version, flags, checksum = _PREFIX.unpack_from(data)
    # Before the checksum: a newer envelope may compute it differently.
    if version > ENVELOPE_VERSION or flags & ~_KNOWN_FLAGS:
        raise NewerFormat(
            "the log was written by a newer release",
            where=where,
            why=f"envelope version {version}, flags {flags:#x}; this release reads version "
            f"{ENVELOPE_VERSION}, flags {_KNOWN_FLAGS:#x}",
            fix="upgrade this process",
        )
    body = data[_PREFIX.size :]
    if checksum != _checksum(version, flags, body):
        raise CorruptEntry("state-log entry damaged", where=where, why="its checksum is wrong")
    try:
        return _DECODER.decode(_inflate(body) if flags & _FLAG_ZLIB else body)
    except (zlib.error, msgspec.MsgspecError) as error:
        # The checksum holds, so these are the bytes that were written.
        raise CorruptEntry("state-log entry malformed", where=where, why=str(error)) from error


def _checksum(version: int, flags: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(bytes((MAGIC, version, flags))))


def _inflate(body: bytes) -> bytes:
    inflater = zlib.decompressobj()
    whole = inflater.decompress(body, _BODY_BYTES_MAX)
    if not inflater.eof or inflater.unused_data:
        raise zlib.error(f"incomplete, trailing, or more than {_BODY_BYTES_MAX} bytes")
    return whole
