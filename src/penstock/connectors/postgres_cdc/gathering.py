"""Changes of the log become the documents of a sequence, transaction by transaction.

A sequence is one transaction of the source or more, over all tables, and never a part of one. Its
documents are held in memory until they are many; then all of them go to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.connectors.postgres_cdc import wire
from penstock.connectors.postgres_cdc.progress import moved
from penstock.connectors.postgres_cdc.rows import KeyLost, RowTexts, Stamp, stamp
from penstock.connectors.postgres_cdc.spool import Origin, Spool
from penstock.connectors.postgres_cdc.tables import TableName
from penstock.connectors.postgres_cdc.wire import Begin, Commit, Relation, lsn_text
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import (
    GIVEN_BYTES_MAX,
    CaptureSequence,
    Documents,
    Given,
)

JOINED_BYTES: Final = 2 << 20
"""Bytes of documents after which a sequence takes no further transaction in."""


@dataclass(slots=True, kw_only=True)
class Route:
    """A binding, and what of its table it is given."""

    binding: int
    oid: int
    table: TableName
    key: Sequence[str]
    """Members of documents that its collection's key is in."""
    ignores_truncate: bool = False
    since: int = 0
    """Changes of transactions that committed before this position are not given."""
    pending: list[bytes] = field(default_factory=list)

    @property
    def about(self) -> str:
        return ".".join(self.table)


@dataclass(slots=True)
class _Target:
    route: Route
    texts: RowTexts


class Truncated(ValueError):
    """A table was truncated, and its binding does not ignore that."""


class Replaced(ValueError):
    """A table of this name is another one than the one that is captured."""


class ValueLost(ValueError):
    """A row got another key, and a value of it is unknown: the table, and the column."""


class ChangeGathering:
    """The sequence that is being gathered."""

    def __init__(
        self,
        routes: Sequence[Route],
        bases: Callable[[Sequence[int]], Mapping[int, tuple[int, int]]],
        spool: Callable[[], Spool],
    ) -> None:
        self._routes = routes
        self._bases = bases
        self._make_spool = spool
        self._names: dict[int, TableName] = {}
        self._targets: dict[int, list[_Target]] = {}
        """By relation."""
        self._stamps: dict[int, Stamp] = {}
        self._schemas: dict[int, Json] = {}
        self._spool: Spool | None = None
        self._begun: Begin | None = None
        self.bytes = 0
        """Of documents that are held in memory."""
        self.end = 0
        """The position after the last transaction, whole."""

    @property
    def in_transaction(self) -> bool:
        return self._begun is not None

    @property
    def is_full(self) -> bool:
        """True if it is to be given now, whatever else there is."""
        return self._spool is not None or self.bytes >= JOINED_BYTES

    @property
    def is_empty(self) -> bool:
        return self._spool is None and not self.bytes

    # ------------------------------------------------------------------------------- transactions

    def begin(self, message: Begin) -> None:
        self._begun = message
        self._stamps.clear()

    def commit(self, message: Commit) -> None:
        self._begun = None
        self.end = message.end

    def relation(self, message: Relation) -> None:
        """Rows of a table look like this from here on."""
        table = (message.schema, message.table)
        self._names[message.oid] = table
        self._stamps.pop(message.oid, None)
        # A table keeps its number if it is renamed, and one that is made anew has another one.
        routes = [route for route in self._routes if route.oid == message.oid]
        if not routes:
            for route in self._routes:
                if route.table == table and self._is_given(route):
                    raise Replaced(route.about)
            self._targets[message.oid] = []
            return
        bases = self._bases([column.type for column in message.columns])
        made = [_Target(route, RowTexts(message.columns, route.key, bases)) for route in routes]
        self._targets[message.oid] = made
        for target in made:
            self._schemas[target.route.binding] = target.texts.schema()

    def truncate(self, relations: Sequence[int]) -> None:
        for oid in relations:
            for target in self._targets.get(oid, ()):
                if self._is_given(target.route) and not target.route.ignores_truncate:
                    raise Truncated(target.route.about)

    # ------------------------------------------------------------------------------------ changes

    def change(self, kind: int, message: bytes) -> None:
        """An insert, an update or a delete."""
        oid = wire.relation_of(message)
        for target in self._targets[oid]:
            route = target.route
            if not self._is_given(route):
                continue
            marked = self._stamps.get(oid) or self._stamped(oid)
            if kind == wire.INSERT:
                text = target.texts.created(wire.inserted(message), marked)
                route.pending.append(text)
                self.bytes += len(text)
            else:
                for text in self._texts(kind, message, target, marked):
                    route.pending.append(text)
                    self.bytes += len(text)
        if self.bytes > GIVEN_BYTES_MAX:
            self._put_on_disk()

    def _texts(
        self, kind: int, message: bytes, target: _Target, marked: Stamp
    ) -> tuple[bytes, ...]:
        if kind == wire.DELETE:
            known, old = wire.deleted(message)
            return (target.texts.deleted(old, marked, whole=known == wire.OLD),)
        was, old, new = wire.updated(message)
        try:
            return target.texts.updated(
                None if was is None else old, new, marked, whole=was == wire.OLD
            )
        except KeyLost as error:
            raise ValueLost(target.route.about, str(error)) from error

    def _is_given(self, route: Route) -> bool:
        return self._begun is not None and self._begun.commit >= route.since

    def _stamped(self, oid: int) -> Stamp:
        if self._begun is None:
            raise wire.Malformed("a change is outside of a transaction")
        schema, table = self._names[oid]
        made = stamp(
            schema, table, self._begun.commit, xid=self._begun.xid, time_us=self._begun.time_us
        )
        self._stamps[oid] = made
        return made

    def _put_on_disk(self) -> None:
        if self._spool is None:
            self._spool = self._make_spool()
        for route in self._routes:
            self._spool.add(route.binding, route.pending)
            route.pending = []
        self.bytes = 0

    # ------------------------------------------------------------------------------------ sequences

    def take(self) -> tuple[CaptureSequence, Spool | None] | None:
        """The sequence of what was gathered, and where it is on disk.

        None if there is nothing to give: transactions that did not touch these tables count for
        nothing, or if one has not come to its end.
        """
        if self.in_transaction or self.is_empty:
            return None
        spool, self._spool = self._spool, None
        schemas, self._schemas = self._schemas, {}
        patches: tuple[Json, ...] = (moved(self.end),)
        if spool is not None:
            for route in self._routes:
                spool.add(route.binding, route.pending)
                route.pending = []
            about = {route.binding: self._about(route) for route in self._routes}
            self.bytes = 0
            reads = spool.finish(about)
            return CaptureSequence(reads=reads, patches=patches, schemas=schemas), spool
        given = tuple(self._given(route) for route in self._routes if route.pending)
        self.bytes = 0
        return CaptureSequence(given=given, patches=patches, schemas=schemas), None

    def discard(self) -> None:
        """Forget what is on disk."""
        if self._spool is not None:
            self._spool.remove()
            self._spool = None

    def _given(self, route: Route) -> Given:
        texts, route.pending = route.pending, []
        return Given(
            binding=route.binding,
            documents=Documents(texts=texts, origin=Origin(self._about(route))),
            bytes=sum(map(len, texts)),
        )

    def _about(self, route: Route) -> str:
        return f"{route.about}, changes up to {lsn_text(self.end)}"
