"""Fragments: rows to Parquet objects, or to a few bytes of the journal's state, and back.

Writing streams: rows are gathered to row groups, each is compressed and sent on its way, and what a
reader must know of them is counted as they pass (`statistics`). Memory is one row group, whatever
the length of the fragment. A fragment that turns out tiny never becomes an object: its rows travel
in the record itself.

Objects get a random name that ends in the attempt, below the path of their partition. So two
attempts at the same work never meet, and the path of an object says which partition it belongs to.

All of it runs in Spark tasks as well: `FragmentLayout` and `BlobStore` survive pickling.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from penstock.errors import Bug
from penstock.journal.blobs import BlobStore, spark_root
from penstock.journal.committed import VisibleRows
from penstock.journal.integrity import (
    SUMS_KEY,
    SummingSink,
    UnreadableBlob,
    damaged,
    open_parquet,
)
from penstock.journal.names import KEY_HASH_MAX
from penstock.journal.rows import STAMPS, row_schema, stamp_names, visible_batches
from penstock.journal.schemas import layout
from penstock.journal.state import INLINE_BYTES_MAX, Blob, Fragment, Inline
from penstock.journal.statistics import Statistics
from penstock.model.columns import Column
from penstock.model.spec import Codec, CollectionSpec, fingerprint

_pa: Any = pa  # the published stubs lack much of this
_pq: Any = pyarrow.parquet

LENGTH_BYTES: Final = 256 << 20
"""Length at which a fragment ends and the next begins, unless the collection says otherwise."""

GROUP_ROWS: Final = 128 * 1024
GROUP_BYTES: Final = 32 << 20
"""A row group: large enough to compress and scan well, small enough to hold a few in memory."""

FEW_ROWS: Final = 1024
"""Rows of a group that are worth dictionaries, a compressor for numbers, and statistics."""

DICTIONARY_BYTES: Final = 256 << 10
"""A larger dictionary of a column is given up: it costs more to make and to read than it saves."""

RUNS_MAX: Final = 1024
"""Runs are part of the record: a fragment with more of them ends early."""

BATCH_ROWS: Final = 16 * 1024

_INLINE_TRIED_BYTES: Final = 16 * INLINE_BYTES_MAX
"""Rows in memory above this are not going to be compressed to the size of inline data."""

_ATTEMPT: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CODECS: Final = {"NONE": "none", "GZIP": "gzip", "ZSTANDARD": "zstd", "SNAPPY": "snappy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentLayout:
    """The layout of one journal's fragments: columns, key, and the collection's file settings."""

    schema: str
    """Fingerprint of the schema that `root` is the layout of."""
    root: Column
    key: tuple[str, ...]
    key_begin: int = 0
    key_end: int = KEY_HASH_MAX
    """The key hashes of the journal: those of every row lie in here."""
    codec: Codec = "ZSTANDARD"
    length_bytes: int = LENGTH_BYTES

    @classmethod
    def of(
        cls, collection: CollectionSpec, key_begin: int = 0, key_end: int = KEY_HASH_MAX
    ) -> Self:
        """The layout of what is written to a collection now."""
        return cls(
            schema=fingerprint(collection.write_schema),
            root=layout(collection.write_schema.text),
            key=collection.key,
            key_begin=key_begin,
            key_end=key_end,
            codec=collection.fragments.codec or "ZSTANDARD",
            length_bytes=collection.fragments.length_bytes or LENGTH_BYTES,
        )


# --------------------------------------------------------------------------------------- writing


COMPACTION: Final = "compacted"
COMPACTED: Final = f"-{COMPACTION}.parquet"
"""The end of the names of objects that compaction writes; they hold several fragments."""


class FragmentWriter:
    """One fragment in the making: `write` batches of rows, then `finish`, or leave by an error.

    `prefix` is the path of the partition (`JournalName.prefix`), `attempt` names the writer. As a
    context manager it removes what it began to write unless it was finished. With `inline` false,
    rows become an object however few they are. `claim` comes before the object, if there is one.
    """

    def __init__(
        self,
        blobs: BlobStore,
        prefix: str,
        layout: FragmentLayout,
        attempt: str,
        *,
        inline: bool = True,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        if not _ATTEMPT.fullmatch(attempt):
            raise Bug(f"{attempt!r} cannot be part of an object's name")
        self.path = f"{prefix.rstrip('/')}/{secrets.token_hex(16)}-{attempt}.parquet"
        self._blobs = blobs
        self._layout = layout
        self._may_inline = inline
        self._claim = claim
        self._schema = row_schema(layout.root)
        self._statistics = Statistics(layout.root, layout.key, layout.key_begin, layout.key_end)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._object = contextlib.ExitStack()
        self._sink: SummingSink | None = None
        self._parquet: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._sink is None:
            return
        with contextlib.suppress(OSError, pa.ArrowException):
            self._parquet.close()  # or it would try to when it is collected
        unfinished = error or _Unfinished()
        self._object.__exit__(type(unfinished), unfinished, traceback)

    @property
    def rows(self) -> int:
        return self._statistics.rows

    @property
    def full(self) -> bool:
        """True if the fragment has reached its length, and the next rows belong in another one."""
        written = 0 if self._sink is None else self._sink.tell()
        return written >= self._layout.length_bytes or self._statistics.runs_count >= RUNS_MAX

    @property
    def held_bytes(self) -> int:
        """Rows that wait in memory for their row group."""
        return self._waiting_bytes

    def write(self, rows: pa.RecordBatch) -> None:
        """The next rows, in the columns of `rows.row_schema`."""
        if rows.schema.names != self._schema.names:
            raise Bug(f"columns {rows.schema.names} are not those of {self._schema.names}")
        if not rows.schema.equals(self._schema):
            rows = rows.cast(self._schema)  # Spark has other names for what is inside of lists
        self._statistics.add(rows)
        while rows.num_rows:
            head = rows.slice(0, GROUP_ROWS - self._waiting_rows)
            rows = rows.slice(head.num_rows)
            self._waiting.append(head)
            self._waiting_rows += head.num_rows
            self._waiting_bytes += head.nbytes
            if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
                self._write_group()

    def finish(self) -> Fragment | None:
        """Make the rows durable; None if there were none. Nothing can be written afterwards."""
        if not self.rows:
            return None
        at: Blob | Inline
        if self._parquet is None and (data := self._inline()) is not None:
            at, size = Inline(data=data), len(data)
        else:
            if self._waiting:
                self._write_group()
            assert self._sink is not None  # noqa: S101 - opened with the Parquet writer
            self._parquet.add_key_value_metadata({SUMS_KEY: self._sink.end_body().encode()})
            self._parquet.close()
            digest = self._sink.digest(self.rows)
            at, size = Blob(path=self.path, digest=digest), digest.bytes
            self._sink = None
            self._object.close()
        low, high = self._statistics.key_hashes
        return Fragment(
            rows=self.rows,
            bytes=size,
            at=at,
            schema=self._layout.schema,
            runs=self._statistics.runs,
            key_hash_min=low,
            key_hash_max=high,
        )

    def _inline(self) -> bytes | None:
        if not self._may_inline or self._waiting_bytes > _INLINE_TRIED_BYTES:
            return None
        data = encode_inline(self._waiting, self._schema)
        return data if len(data) <= INLINE_BYTES_MAX else None

    def _write_group(self) -> None:
        if self._parquet is None:
            self._claim()
            created = self._object.enter_context(self._blobs.create(self.path))
            self._sink = SummingSink(created)
            # The first group is short if it is the only one.
            few = self._waiting_rows < FEW_ROWS
            leaves = list(_leaves(list(self._schema)[:-STAMPS]))
            # A member "a.b" and a member "b" of "a" have one path: what it says is true of both.
            other = {path for path, kind in leaves if not _pa.types.is_integer(kind)}
            packed = {path for path, _ in leaves} - other
            compressed = other if few else other | packed
            names = stamp_names(self._layout.root)
            self._parquet = _pq.ParquetWriter(
                _pa.PythonFile(self._sink, "w"),
                self._schema,
                # What is not listed is not compressed: it is short as it is.
                compression=dict.fromkeys(compressed, _CODECS[self._layout.codec]),
                use_dictionary=[*(() if few else other), names.producer, names.flags],
                dictionary_pagesize_limit=DICTIONARY_BYTES,
                # Half as long as dictionaries of integers that are mostly different, and read and
                # written in half the time. Few different values take more, but little.
                column_encoding=dict.fromkeys([*packed, names.clock], "DELTA_BINARY_PACKED"),
                write_statistics=not few,
                write_page_checksum=True,  # which Spark's reader compares
                store_schema=False,  # the fingerprint names the schema
            )
        group = _pa.Table.from_batches(self._waiting, self._schema)
        self._parquet.write_table(group, row_group_size=GROUP_ROWS)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0


class _Unfinished(Exception):
    """Ends an object that was not finished."""


def _leaves(schema: Iterable[Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The paths of Parquet's columns, and what is in them."""
    for field in schema:
        path = f"{above}{field.name}"
        kind: Any = field.type
        if _pa.types.is_struct(kind):
            yield from _leaves(kind, f"{path}.")
        elif _pa.types.is_map(kind):
            yield from _leaves([kind.key_field, kind.item_field], f"{path}.key_value.")
        elif _pa.types.is_list(kind):
            yield from _leaves([kind.value_field], f"{path}.list.")
        else:
            yield path, kind


# ---------------------------------------------------------------------------------------- inline

_INLINE_FORMAT: Final = 1
_INLINE_HEAD: Final = struct.Struct("<BI")
_ZSTD: Final = _pa.Codec("zstd")


def encode_inline(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> bytes:
    """Rows as bytes: one Arrow record batch without its schema, compressed as a whole.

    The schema would be several times the data, and the record names it by its fingerprint. What is
    left is mostly padding and lengths, which only a compressor of the whole message takes away.
    """
    table = _pa.Table.from_batches(batches, schema).combine_chunks()
    (batch,) = table.to_batches()
    plain = batch.serialize()
    packed: bytes = _ZSTD.compress(plain, asbytes=True)
    return _INLINE_HEAD.pack(_INLINE_FORMAT, plain.size) + packed


def decode_inline(data: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """The rows that `encode_inline` wrote under this schema."""
    version, size = _INLINE_HEAD.unpack_from(data)
    if version != _INLINE_FORMAT:
        raise Bug(f"inline rows of format {version}; this release reads {_INLINE_FORMAT}")
    plain = _ZSTD.decompress(data[_INLINE_HEAD.size :], size)
    batch: pa.RecordBatch = pa.ipc.read_record_batch(plain, schema)
    return batch


# --------------------------------------------------------------------------------------- reading


class Placed(Protocol):
    """Rows in some place: all that reading has to know of a fragment."""

    @property
    def at(self) -> Blob | Inline: ...

    @property
    def rows(self) -> int: ...


def read_fragment(
    blobs: BlobStore,
    fragment: Placed,
    root: Column,
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """The rows of a fragment, in the layout they were written in.

    `columns` are the top-level columns to read, all by default: stamps are no exception.
    """
    names = row_schema(root).names if columns is None else columns
    return _read(blobs, fragment, root, 0, fragment.rows, names, batch_rows)


def read_visible(
    blobs: BlobStore,
    rows: VisibleRows,
    root: Column,
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """The rows of a run that are to be shown, as `read_fragment` would give them."""
    begin, end = rows.run.first_offset, rows.run.last_offset + 1
    every = row_schema(root).names
    stamp = every[-STAMPS:]
    names = every if columns is None else [*(n for n in columns if n not in stamp), *stamp]
    shown = visible_batches(rows, _read(blobs, rows.fragment, root, begin, end, names, batch_rows))
    return shown if columns is None else (batch.select(list(columns)) for batch in shown)


def _read(
    blobs: BlobStore,
    fragment: Placed,
    root: Column,
    begin: int,
    end: int,
    names: Sequence[str],
    batch_rows: int,
) -> Iterator[pa.RecordBatch]:
    """These columns of rows `[begin, end)` of a fragment, counted from its first."""
    if isinstance(fragment.at, Inline):
        batch = decode_inline(fragment.at.data, row_schema(root)).select(list(names))
        for at in range(begin, end, batch_rows):
            yield batch.slice(at, min(batch_rows, end - at))
        return
    first = fragment.at.row
    with blobs.open(fragment.at.path) as source:
        try:
            file = open_parquet(source, fragment.at)
            yield from _read_object(file, names, first + begin, first + end, batch_rows)
        except (OSError, pa.ArrowException) as error:
            why = " ".join(str(error).split())
            if _is_damage(blobs, error):
                raise damaged(fragment.at.path, why) from None
            raise UnreadableBlob(
                f"an object cannot be read: {blobs.url_of(fragment.at.path)}",
                why=why,
                fix="check the disk, or the object store and its credentials; if the object is "
                "lost, restore it from a backup",
            ) from None


def _is_damage(blobs: BlobStore, error: Exception) -> bool:
    """True if the content is wrong. An error of reading it has an errno, from the disk."""
    if isinstance(error, OSError):
        return error.errno is None and (spark_root(blobs) or "").startswith("file:")
    return isinstance(error, pa.ArrowInvalid)


def _read_object(
    file: Any,  # noqa: ANN401 - the stubs lack it
    names: Sequence[str],
    begin: int,
    end: int,
    batch_rows: int,
) -> Iterator[pa.RecordBatch]:
    """Rows `[begin, end)` of an object, group by group, so that groups outside are not read."""
    if end > file.metadata.num_rows:
        raise pa.ArrowInvalid(f"it has {file.metadata.num_rows} rows, and row {end - 1} is wanted")
    at = 0
    for group in range(file.num_row_groups):
        group_begin, at = at, at + file.metadata.row_group(group).num_rows
        if at <= begin:
            continue
        if group_begin >= end:
            return
        row = group_begin
        large = at - group_begin > batch_rows  # for fewer rows, threads cost more than they save
        for batch in file.iter_batches(
            batch_rows, row_groups=[group], columns=list(names), use_threads=large
        ):
            low, high = max(begin - row, 0), min(end - row, batch.num_rows)
            row += batch.num_rows
            if low < high:
                yield batch.select(list(names)).slice(low, high - low)
            if row >= end:
                return
