"""Tables read whole, as they were at one position of the log.

A slot that is made exports a snapshot: it has exactly the transactions that committed before the
slot's start. Small tables are read by the leader. Of large ones, Spark tasks read ranges of blocks,
each on a connection of its own. The snapshot lives as long as the connection that exported it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.connectors.postgres.locks import LOCK_S, PostgresConnection
from penstock.connectors.postgres.server import Server
from penstock.connectors.postgres_cdc.faults import explained
from penstock.connectors.postgres_cdc.replication import connect
from penstock.connectors.postgres_cdc.rows import RowTexts, stamp
from penstock.connectors.postgres_cdc.spool import BATCH_ROWS, Origin
from penstock.connectors.postgres_cdc.tables import Leaf, Table
from penstock.connectors.postgres_cdc.wire import ColumnOf, Row
from penstock.connectors.sql.statements import quoted
from penstock.runtime.connector.capture import GIVEN_BYTES_MAX, Documents, Given

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

Texts = list[bytes]

SPLIT_BYTES: Final = 32 << 20
SPLITS_MAX: Final = 1_000

_escaped: Final = re.compile(rb"\\(.)", re.DOTALL).sub
_ESCAPES: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def copied_row(line: bytes) -> Row:
    """PURE: the columns of a line that COPY has written."""
    values = line.split(b"\t")
    if b"\\" not in line:
        return list(values)
    return [None if value == b"\\N" else _unescaped(value) for value in values]


def _unescaped(value: bytes) -> bytes:
    if b"\\" not in value:
        return value
    return _escaped(lambda found: _ESCAPES.get(found[1], found[1]), value)


@dataclass(frozen=True, slots=True)
class TablePart:
    """A range of a table's blocks; `end` is None for all that follow."""

    source: str
    start: int = 0
    end: int | None = None

    @property
    def where(self) -> str:
        if self.start == 0 and self.end is None:
            return ""
        above = f"ctid >= '({self.start},0)'::tid"
        return f" WHERE {above}" + (
            "" if self.end is None else f" AND ctid < '({self.end},0)'::tid"
        )


def splits_of(leaves: Sequence[Leaf], *, by_blocks: bool) -> tuple[TablePart, ...]:
    """PURE: cut where a table's rows are into ranges of about `SPLIT_BYTES`."""
    wanted = max(SPLIT_BYTES, sum(leaf.bytes for leaf in leaves) // SPLITS_MAX)
    made: list[TablePart] = []
    for leaf in leaves:
        count = max(1, min(leaf.blocks, -(-leaf.bytes // wanted))) if by_blocks else 1
        edges = [leaf.blocks * at // count for at in range(count)]
        ends: list[int | None] = [*edges[1:], None]
        made += [TablePart(leaf.quoted, *range_) for range_ in zip(edges, ends, strict=True)]
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """A table as a snapshot shows it, for a binding (`SparkRead`)."""

    binding: int
    server: Server = field(repr=False)
    snapshot: str
    lsn: int
    schema: str
    table: str
    columns: tuple[ColumnOf, ...]
    key: tuple[str, ...]
    bases: Mapping[int, tuple[int, int]] = field(repr=False)
    splits: tuple[TablePart, ...]
    size: int
    rows_max: None = None
    """A key has one row, so no two ranges have it."""

    @property
    def bytes(self) -> int:
        return self.size

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.range(0, len(self.splits), 1, len(self.splits))

    def documents(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Documents]:
        for batch in batches:
            for at in map(int, batch.column(0).to_numpy()):
                with contextlib.closing(connect(self.server)) as connection:
                    for texts, first in self.texts(connection, self.splits[at]):
                        about = f"{self.schema}.{self.table}, part {at + 1} of its snapshot"
                        yield Documents(texts=texts, origin=Origin(about, first))

    def texts(
        self, connection: PostgresConnection, split: TablePart
    ) -> Iterator[tuple[Texts, int]]:
        """Read a range: documents, and how many came before them."""
        makes = RowTexts(self.columns, self.key, self.bases)
        marked = stamp(self.schema, self.table, self.lsn, snapshot=True)
        names = ", ".join(quoted(column.name) for column in self.columns)
        name = self.snapshot.replace("'", "''")
        with explained(self.server):
            connection.run(
                "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "
                f"SET TRANSACTION SNAPSHOT '{name}'; SET LOCAL lock_timeout = '{LOCK_S}s'; "
                "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
            )
            query = f"COPY (SELECT {names} FROM ONLY {split.source}{split.where}) TO STDOUT"
            texts: Texts = []
            first = 0
            with connection.cursor().copy(query.encode()) as rows:
                for line in rows:
                    texts.append(makes.created(copied_row(bytes(line)[:-1]), marked))
                    if len(texts) >= BATCH_ROWS:
                        yield texts, first
                        first += len(texts)
                        texts = []
            yield texts, first
            connection.run("ROLLBACK")


def plan_read(
    connection: PostgresConnection,
    table: Table,
    leaves: Sequence[Leaf],
    *,
    binding: int,
    server: Server,
    snapshot: str,
    lsn: int,
    key: Sequence[str],
    bases: Mapping[int, tuple[int, int]],
) -> TableRead:
    """Plan to read a table."""
    by_blocks = connection.info.server_version >= 140000  # before, a range of blocks reads them all
    return TableRead(
        binding=binding,
        server=server,
        snapshot=snapshot,
        lsn=lsn,
        schema=table.schema,
        table=table.name,
        columns=table.columns,
        key=tuple(key),
        bases=_used(bases, table.columns),
        splits=splits_of(leaves, by_blocks=by_blocks),
        size=sum(leaf.bytes for leaf in leaves),
    )


def read_here(
    connection: PostgresConnection, reads: Sequence[TableRead]
) -> tuple[list[Given], list[TableRead]]:
    """Read tables that are small, as long as all of them are; leave the others to Spark."""
    given: list[Given] = []
    left: list[TableRead] = []
    room = GIVEN_BYTES_MAX
    for read in sorted(reads, key=lambda each: each.bytes):
        if read.bytes > room:
            left.append(read)
            continue
        texts = [
            text
            for split in read.splits
            for some, _ in read.texts(connection, split)
            for text in some
        ]
        size = sum(map(len, texts))
        room -= max(size, read.bytes)
        if texts:
            documents = Documents(
                texts=texts, origin=Origin(f"{read.schema}.{read.table}, its snapshot")
            )
            given.append(Given(binding=read.binding, documents=documents, bytes=size))
    return given, left


def _used(
    bases: Mapping[int, tuple[int, int]], columns: Sequence[ColumnOf]
) -> dict[int, tuple[int, int]]:
    return {column.type: bases[column.type] for column in columns if column.type in bases}
