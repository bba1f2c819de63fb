"""What is read is what was written: checksums of objects, taken as they pass, compared on reading.

The record of a fragment has the *digest* of its object: how long it is, how long its footer is, and
a hash of the footer. The footer in turn has the *sums* of everything before it. So the record,
which the consensus store keeps under a checksum of its own, vouches for every byte:

    record ── size, hash ──▸ footer ── sums ──▸ body, each page of it, and the headers of pages

Each reader compares as much as it reads. Arrow gets small objects in one piece, and of larger ones
the pages of the columns it asks for, each compared before it is decoded. Spark's own reader
compares the content of pages with the checksums in their headers; what it takes on trust, footers
and headers, is compared where the scan is planned. Nothing else of a Parquet file is looked at.

Objects of releases that took no sums are read as they were then.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet
import xxhash

from penstock.errors import Bug, PenstockError, Unavailable
from penstock.journal.codec import decode_page
from penstock.journal.state import Blob, Digest, Page, Record

if TYPE_CHECKING:
    from penstock.journal.blobs import BlobStore

_pa: Any = pa  # the published stubs lack much of this
_pq: Any = pyarrow.parquet

WHOLE_BYTES: Final = 256 << 10
"""Objects up to this are read in one piece. To look for each column takes longer, and in an object
store it is a request each."""

SUMS_KEY: Final = "penstock.sums"
"""Under which a footer has them."""

RESTORE: Final = "restore the object from a backup; `penstock verify` lists all that is damaged"

_MAGIC: Final = b"PAR1"
_MAGIC_BYTES: Final = len(_MAGIC)


class CorruptBlob(PenstockError):
    """An object that a state names is not what was written. No retry will mend it."""


class UnreadableBlob(Unavailable):
    """An object cannot be read now."""


def damaged(path: str, why: str, *, where: str | None = None) -> CorruptBlob:
    """The error of an object that is not what was written."""
    return CorruptBlob(f"an object is damaged: {path}", where=where, why=why, fix=RESTORE)


def describe_offsets(journal: str, begin: int, end: int) -> str:
    """Describe where rows are, for errors."""
    return f"journal {journal}, offsets {begin} to {end}"


@contextmanager
def locate_damage(journal: str, begin: int, end: int) -> Iterator[None]:
    """Around reading an object: if it is damaged, the error says which rows are lost with it."""
    try:
        yield
    except (CorruptBlob, UnreadableBlob) as error:
        where = describe_offsets(journal, begin, end)
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from None


# ------------------------------------------------------------------------------------------ sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Checksums of everything before the footer, which holds them.

    Pages lie side by side from the first magic on. A small object has one sum for all of them.
    """

    body: int
    """CRC-32 of everything before the footer, of a small object."""
    headers: int
    """XXH3 of the headers of all pages, one after the other."""
    sizes: Sequence[int] = ()
    """Bytes of each page, its header included."""
    header_sizes: Sequence[int] = ()
    pages: Sequence[int] = ()
    """CRC-32 of each page, its header included."""

    def encode(self) -> str:
        count = len(self.sizes)
        numbers = (*self.sizes, *self.header_sizes, *self.pages)
        fixed = _SUMS.pack(_SUMS_FORMAT, self.body, self.headers, count)
        return base64.b64encode(fixed + struct.pack(f"<{3 * count}I", *numbers)).decode()

    @classmethod
    def decode(cls, text: bytes) -> Sums:
        """Raises ValueError if it cannot be read."""
        try:
            data = base64.b64decode(text, validate=True)
            version, body, headers, count = _SUMS.unpack_from(data)
            if version != _SUMS_FORMAT:
                raise ValueError(f"sums of format {version}; this release reads {_SUMS_FORMAT}")
            numbers = struct.unpack_from(f"<{3 * count}I", data, _SUMS.size)
        except (binascii.Error, struct.error) as error:
            raise ValueError(f"its sums cannot be read: {error}") from None
        return cls(
            body=body,
            headers=headers,
            sizes=numbers[:count],
            header_sizes=numbers[count : 2 * count],
            pages=numbers[2 * count :],
        )


_SUMS_FORMAT: Final = 1
_SUMS: Final = struct.Struct("<BIQI")


class SummingSink:
    """The sink of a Parquet writer: it passes everything on, and sums it up.

    Until `end_body`, what comes is the magic and pages, each behind a header that says how long it
    is; what comes afterwards is the footer.
    """

    closed = False

    def __init__(self, sink: pa.NativeFile) -> None:
        self._sink = sink
        self._bytes = 0
        self._body = 0
        self._footer: Any = None
        self._footer_begin = 0
        self._passing = _MAGIC_BYTES
        """Bytes that are still to come of the magic, or of a page."""
        self._header = b""
        """The begin of a header of which the rest is still to come."""
        self._headers: Any = xxhash.xxh3_64()
        self._page = 0
        self._sizes: list[int] = []
        self._header_sizes: list[int] = []
        self._pages: list[int] = []

    def write(self, data: pa.Buffer | bytes) -> int:
        view = memoryview(data)
        self._bytes += len(view)
        if self._footer is not None:
            self._footer.update(view)
        else:
            if self._bytes <= WHOLE_BYTES:
                self._body = zlib.crc32(view, self._body)
            self._walk(view)
        self._sink.write(data)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """The sink is flushed when it is closed."""

    def close(self) -> None:
        """Do nothing: the caller closes the sink."""

    def end_body(self) -> Sums:
        """All pages are written."""
        if self._passing or self._header:
            raise Bug("a Parquet file ends within a page")
        self._footer, self._footer_begin = xxhash.xxh3_64(), self._bytes
        large = self._bytes > WHOLE_BYTES
        return Sums(
            body=0 if large else self._body,
            headers=self._headers.intdigest(),
            sizes=self._sizes if large else (),
            header_sizes=self._header_sizes if large else (),
            pages=self._pages if large else (),
        )

    def digest(self, rows: int) -> Digest:
        """Return the digest of the whole object, once its rows are written."""
        return Digest(
            bytes=self._bytes,
            footer=self._bytes - self._footer_begin,
            value=self._footer.intdigest(),
            rows=rows,
        )

    def _walk(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            if self._passing:
                some = view[at : at + self._passing]
                self._page = zlib.crc32(some, self._page)
                at += len(some)
                self._passing -= len(some)
                if not self._passing and self._sizes:
                    self._pages.append(self._page)
                continue
            header = self._header + bytes(view[at : at + _HEADER_BYTES_MAX])
            try:
                end, content = page_header(header)
            except IndexError:
                if len(view) - at > _HEADER_BYTES_MAX:
                    raise Bug("the header of a page has no end") from None
                self._header = header  # the rest comes with the next write
                return
            at += end - len(self._header)
            self._header = b""
            self._headers.update(header[:end])
            self._page = zlib.crc32(header[:end])
            self._sizes.append(end + content)
            self._header_sizes.append(end)
            self._passing = content
            if not content:
                self._pages.append(self._page)


_HEADER_BYTES_MAX: Final = 64 << 10
"""Far more than a header has, statistics of long strings included."""


def page_header(data: bytes) -> tuple[int, int]:
    """Return the length of a page's header, and of the page behind it.

    Thrift's compact protocol; raises IndexError if `data` does not have all of it.
    """
    content, field, at = -1, 0, 0
    while data[at]:
        delta, kind = data[at] >> 4, data[at] & 15
        at += 1
        if delta:
            field += delta
        else:
            zigzag, at = _varint(data, at)
            field = zigzag >> 1
        if field == _COMPRESSED_SIZE:
            zigzag, at = _varint(data, at)
            content = zigzag >> 1
        else:
            at = _skipped(data, at, kind)
    if content < 0:
        raise Bug("a page of a Parquet file does not say how long it is")
    return at + 1, content


_COMPRESSED_SIZE: Final = 3
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (
    (1, 2),
    3,
    (4, 5, 6),
    7,
    8,
    (9, 10),
    12,
)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


def _skipped(data: bytes, at: int, kind: int) -> int:
    """Return where the next field begins, behind one of this kind."""
    if kind in _BOOLEANS:
        return at
    if kind == _BYTE:
        return at + 1
    if kind in _INTEGERS:
        return _varint(data, at)[1]
    if kind == _DOUBLE:
        return at + 8
    if kind == _BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind in _LISTS:
        size, of = data[at] >> 4, data[at] & 15
        at += 1
        if size == 15:
            size, at = _varint(data, at)
        for _ in range(size):
            at = at + 1 if of in _BOOLEANS else _skipped(data, at, of)
        return at
    if kind == _STRUCT:
        while data[at]:
            delta, inner = data[at] >> 4, data[at] & 15
            at += 1
            if not delta:
                at = _varint(data, at)[1]
            at = _skipped(data, at, inner)
        return at + 1
    raise Bug(f"the header of a page has a field of kind {kind}")


# --------------------------------------------------------------------------------------- reading


def open_parquet(source: pa.NativeFile, blob: Blob) -> Any:  # noqa: ANN401 - the stubs lack it
    """An object as Arrow's `ParquetFile`, each byte of which is compared before it is decoded.

    Raises CorruptBlob, here or when rows are read.
    """
    if blob.digest is None:
        small = source.size() <= WHOLE_BYTES
        return _pq.ParquetFile(_pa.BufferReader(source.read_buffer()) if small else source)
    opened = _open(source, blob, blob.digest)
    if opened.whole is not None:
        return _pq.ParquetFile(_pa.BufferReader(opened.whole), metadata=opened.metadata)
    pages = _pa.PythonFile(_Pages(source, blob, opened.sums), "r")
    return _pq.ParquetFile(pages, metadata=opened.metadata)


def check_skeleton(blobs: BlobStore, blob: Blob, *, headers: bool) -> None:
    """Compare what a reader that compares the content of pages takes on trust.

    That is all of a small object, and of a larger one the footer and the headers of pages.
    """
    if blob.digest is None:
        return
    with blobs.open(blob.path) as source:
        opened = _open(source, blob, blob.digest)
        if opened.whole is not None or not headers:
            return
        found: Any = xxhash.xxh3_64()
        at = _MAGIC_BYTES
        for size, header in zip(opened.sums.sizes, opened.sums.header_sizes, strict=True):
            found.update(_read_at(source, header, at))
            at += size
        if found.intdigest() != opened.sums.headers:
            raise damaged(blob.path, "the headers of its pages are not those that were written")


def check_object(blobs: BlobStore, blob: Blob) -> int:
    """Compare every byte of an object; its size."""
    if blob.digest is None:
        raise Bug("an object is compared that has no digest", where=blob.path)
    with blobs.open(blob.path) as source:
        opened = _open(source, blob, blob.digest)
        if opened.whole is None:
            if _read_at(source, _MAGIC_BYTES, 0) != _MAGIC:
                raise damaged(blob.path, _WRONG)
            pages = _Pages(source, blob, opened.sums)
            end = blob.digest.bytes - blob.digest.footer
            pages.seek(_MAGIC_BYTES)
            while pages.tell() < end:
                pages.read(min(_STEP_BYTES, end - pages.tell()))
    return blob.digest.bytes


def _read_at(source: Any, count: int, at: int) -> bytes:  # noqa: ANN401 - as the stubs lack it
    data: bytes = source.read_at(count, at)
    return data


_STEP_BYTES: Final = 4 << 20
_WRONG: Final = "its checksum is not that of what was written"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """An object of which the footer was compared, and if it was read as a whole, all of it."""

    metadata: Any
    sums: Sums
    whole: pa.Buffer | None


def _open(source: pa.NativeFile, blob: Blob, digest: Digest) -> _Opened:
    body = digest.bytes - digest.footer
    whole = source.read_buffer() if body <= WHOLE_BYTES else None
    size = source.size() if whole is None else whole.size
    if size != digest.bytes:
        raise damaged(blob.path, f"it has {size} bytes, and {digest.bytes} were written")
    footer = _read_at(source, digest.footer, body) if whole is None else memoryview(whole)[body:]
    if xxhash.xxh3_64_intdigest(footer) != digest.value:
        raise damaged(blob.path, "its footer is not the one that was written")
    metadata, sums = _parsed(blob, footer)
    if whole is None and not sums.sizes:  # of a release that read larger ones as a whole
        whole = _pa.py_buffer(_read_at(source, digest.bytes, 0))
    if whole is not None:
        _compare_body(blob, memoryview(whole)[:body], sums)
    return _Opened(metadata=metadata, sums=sums, whole=whole)


def _parsed(blob: Blob, footer: bytes | memoryview) -> tuple[Any, Sums]:
    """Parse a footer whose digest was compared."""
    metadata = _pq.read_metadata(_pa.BufferReader(footer))
    text = (metadata.metadata or {}).get(SUMS_KEY.encode())
    if text is None:
        raise Bug("an object has a digest and no sums", where=blob.path)
    try:
        return metadata, Sums.decode(text)
    except ValueError as error:
        raise Bug("the sums of an object cannot be read", where=blob.path, why=str(error)) from None


def _compare_body(blob: Blob, body: memoryview, sums: Sums) -> None:
    if not sums.sizes:
        if zlib.crc32(body) != sums.body:
            raise damaged(blob.path, _WRONG)
        return
    if bytes(body[:_MAGIC_BYTES]) != _MAGIC:  # of a release that read only smaller ones as a whole
        raise damaged(blob.path, _WRONG)
    _compare_pages(blob, body, 0, list(accumulate(sums.sizes, initial=_MAGIC_BYTES)), sums.pages)


def _compare_pages(
    blob: Blob, data: memoryview, begin: int, bounds: Sequence[int], sums: Sequence[int]
) -> None:
    """Pages of an object, of which `data` has the bytes from `begin` on."""
    for sum_, (low, high) in zip(sums, pairwise(bounds), strict=True):
        if zlib.crc32(data[low - begin : high - begin]) != sum_:
            raise damaged(blob.path, f"{_WRONG}, in bytes {low} to {high}")


class _Pages:
    """The body of a large object, for Arrow, which asks for the pages of one column at a time."""

    closed = False

    def __init__(self, source: pa.NativeFile, blob: Blob, sums: Sums) -> None:
        self._source = source
        self._blob = blob
        self._begins = list(accumulate(sums.sizes, initial=_MAGIC_BYTES))
        """Where each page begins, and where the last one ends."""
        self._sums = sums.pages
        self._at = 0

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + to
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> memoryview:
        """Whole pages are read and compared, whatever part of them is asked for."""
        begin = self._at
        end = self._size if count < 0 else begin + count
        first = bisect_right(self._begins, begin) - 1
        last = bisect_left(self._begins, end)
        if first < 0 or last >= len(self._begins):
            raise Bug("something else than pages of an object is read", where=self._blob.path)
        low = self._begins[first]
        data = memoryview(_read_at(self._source, self._begins[last] - low, low))
        bounds, sums = self._begins[first : last + 1], self._sums[first:last]
        _compare_pages(self._blob, data, low, bounds, sums)
        self._at = end
        return data[begin - low : end - low]

    def size(self) -> int:
        return self._size

    @property
    def _size(self) -> int:
        assert self._blob.digest is not None  # noqa: S101 - asked before
        return self._blob.digest.bytes

    def close(self) -> None:
        """Do nothing: the caller closes the source."""


# ----------------------------------------------------------------------------------------- pages


def digest_of_page(data: bytes) -> int:
    """The digest of a page of records, which is always read as a whole."""
    return xxhash.xxh3_64_intdigest(data)


def read_page(blobs: BlobStore, page: Page, journal: str | None = None) -> tuple[Record, ...]:
    """The records of a page; raises CorruptBlob if they are not those that were written."""
    where = describe_offsets(journal, page.begin, page.end) if journal else None
    data = blobs.read(page.path)
    if page.digest is not None and digest_of_page(data) != page.digest:
        raise damaged(page.path, _WRONG, where=where)
    try:
        records = decode_page(data)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        raise damaged(page.path, f"it is no page of records: {error}", where=where) from None
    ends = [record.end for record in records[-1:]], [record.begin for record in records[:1]]
    if (len(records), *ends) != (page.records, [page.end], [page.begin]):
        why = f"it does not have the {page.records} records of offsets {page.begin} to {page.end}"
        raise damaged(page.path, why, where=where)
    return records
