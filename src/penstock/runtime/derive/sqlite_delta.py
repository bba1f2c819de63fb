"""PURE: how the file of a SQLite database changed in a transaction, in few bytes.

SQLite appends the pages that a transaction changed to its write-ahead log. A delta holds each such
page, compressed with its former content as the dictionary: a scattered update costs tens of bytes,
not a page. Applied to the same former file it gives the same new file, byte for byte, so rowids,
AUTOINCREMENT, rows without a primary key and changes of the schema are all in it. A changeset of a
SQLite session is little smaller, and leaves out rowids, and rows whose key is NULL.

    page size, pages of the new file     two 32-bit integers, big-endian as all of them
    page number, length, deflated page   for every changed page
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

_HEAD = struct.Struct(">II")
_WAL_HEAD = struct.Struct(">4sIIIIIII")
_WAL_FRAME = struct.Struct(">IIIIII")
_WAL_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_RAW = -15
"""Deflate without a header, and so without a checksum: SQLite's pages have their structure."""


class Torn(Exception):
    """Bytes that are not a whole delta, or a delta of another file."""


def delta(log: BinaryIO, former: BinaryIO) -> bytes:
    """Return the delta of the committed transactions in a write-ahead log; empty if there are none.

    `former` is the database file, which the log was not copied into yet.
    """
    head = log.read(_WAL_HEAD.size)
    if len(head) < _WAL_HEAD.size:
        return b""
    magic, _, page_size, _, *salts, _, _ = _WAL_HEAD.unpack(head)
    if magic not in _WAL_MAGIC:
        raise Torn("the write-ahead log has no header")
    newest, pages = _committed(log, page_size, tuple(salts))
    if not newest:
        return b""
    parts = [_HEAD.pack(page_size, pages)]
    for page, at in sorted(newest.items()):
        if page > pages:
            continue
        log.seek(at)
        packed = _deflate(log.read(page_size), _page(former, page, page_size))
        parts += (_HEAD.pack(page, len(packed)), packed)
    return b"".join(parts)


def _committed(log: BinaryIO, page_size: int, salts: tuple[int, ...]) -> tuple[dict[int, int], int]:
    """Return where the last version of each page is, and the pages of the database."""
    newest: dict[int, int] = {}
    pending: dict[int, int] = {}
    pages = 0
    at = _WAL_HEAD.size
    while len(head := log.read(_WAL_FRAME.size)) == _WAL_FRAME.size:
        page, pages_after, *marks, _, _ = _WAL_FRAME.unpack(head)
        if tuple(marks) != salts:
            break
        pending[page] = at + _WAL_FRAME.size
        if pages_after:
            newest |= pending
            pending, pages = {}, pages_after
        at += _WAL_FRAME.size + page_size
        log.seek(at)
    return newest, pages


def apply(data: bytes, file: BinaryIO) -> None:
    """Change a database file by a delta of exactly this file."""
    if len(data) < _HEAD.size:
        raise Torn("a delta has no header")
    page_size, pages = _HEAD.unpack_from(data)
    for page, packed in _pages(data):
        former = _page(file, page, page_size)
        inflate = zlib.decompressobj(_RAW, zdict=former) if former else zlib.decompressobj(_RAW)
        try:
            content = inflate.decompress(packed)
        except zlib.error as e:
            raise Torn(f"page {page} of a delta cannot be read: {e}") from None
        if len(content) != page_size or not inflate.eof:
            raise Torn(f"page {page} of a delta is not whole")
        file.seek((page - 1) * page_size)
        file.write(content)
    file.truncate(pages * page_size)


def _pages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = _HEAD.size
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise Torn("a delta ends within the head of a page")
        page, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield page, data[at : at + length]
        at += length


def _page(file: BinaryIO, page: int, page_size: int) -> bytes:
    file.seek((page - 1) * page_size)
    return file.read(page_size)


def _deflate(content: bytes, former: bytes) -> bytes:
    if former:
        packer = zlib.compressobj(6, zlib.DEFLATED, _RAW, 9, zlib.Z_DEFAULT_STRATEGY, former)
    else:
        packer = zlib.compressobj(6, zlib.DEFLATED, _RAW)
    return packer.compress(content) + packer.flush()
