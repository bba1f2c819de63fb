"""PURE: rows as JSON documents.

What a table's documents have in common is worked out once, from its description: names,
conversions, which columns are the key. A document is pieces of text, joined.

    create, update   all columns, but large values that an update did not touch
    delete           the key
    another key      a delete of the old key, and a create of the new one

Each has `/_meta`: what happened, and where.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.connectors.postgres_cdc.values import Convert, TypeOf, nullable, type_of
from penstock.connectors.postgres_cdc.wire import (
    POSTGRES_EPOCH_S,
    UNCHANGED,
    ColumnOf,
    Row,
    lsn_text,
)
from penstock.model import pointer
from penstock.model.json_order import Json

_json: Final = msgspec.json.encode
_EPOCH: Final = datetime.datetime.fromtimestamp(POSTGRES_EPOCH_S, datetime.UTC)

META_SCHEMA: Final[Mapping[str, Json]] = {
    "type": "object",
    "description": "What happened to the row, and where.",
    "required": ["op", "source"],
    "properties": {
        "op": {
            "type": "string",
            "enum": ["c", "u", "d"],
            "description": "c: created, u: updated, d: deleted",
        },
        "source": {
            "type": "object",
            "required": ["lsn", "schema", "table"],
            "properties": {
                "lsn": {"type": "string", "description": "Where its commit is in the log."},
                "txid": {"type": "integer", "description": "The transaction that changed it."},
                "ts": {
                    "type": "string",
                    "format": "date-time",
                    "description": "When that was committed.",
                },
                "schema": {"type": "string"},
                "table": {"type": "string"},
                "snapshot": {
                    "type": "boolean",
                    "description": "Read from the table, and not from the log.",
                },
            },
        },
        "before": {
            "type": "object",
            "description": "The row before the change, if the table has REPLICA IDENTITY FULL.",
        },
    },
}


class KeyLost(ValueError):
    """A row has another key now, and a value that the log does not repeat is unknown there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What the documents of one table say of one transaction."""

    create: bytes
    update: bytes
    delete: bytes


def stamp(
    schema: str,
    table: str,
    lsn: int,
    *,
    xid: int | None = None,
    time_us: int | None = None,
    snapshot: bool = False,
) -> Stamp:
    """Make the ends of documents, from `/_meta` on; what follows may be its `before`."""
    source: dict[str, Json] = {"lsn": lsn_text(lsn)}
    if xid is not None:
        source["txid"] = xid
    if time_us is not None:
        source["ts"] = time_text(time_us)
    source |= {"schema": schema, "table": table}
    if snapshot:
        source["snapshot"] = True
    text = _json(source)
    return Stamp(
        create=b',"_meta":{"op":"c","source":%b' % text,
        update=b',"_meta":{"op":"u","source":%b' % text,
        delete=b',"_meta":{"op":"d","source":%b' % text,
    )


def time_text(time_us: int) -> str:
    """A time as RFC 3339 has it, from microseconds since 2000."""
    return (_EPOCH + datetime.timedelta(microseconds=time_us)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def key_members(pointers: Sequence[str]) -> tuple[str, ...]:
    """The members of the document that a collection's key is in."""
    return tuple(dict.fromkeys(pointer.parse(each)[0] for each in pointers))


class RowTexts:
    """Makes the documents of one table, as long as its columns stay as they are."""

    def __init__(
        self,
        columns: Sequence[ColumnOf],
        key: Sequence[str],
        bases: Mapping[int, tuple[int, int]],
    ) -> None:
        self.columns = tuple(columns)
        self._types = [type_of(each.type, each.modifier, bases) for each in columns]
        names = [b",%b:" % _json(each.name) for each in columns]
        self._parts: list[tuple[bytes, bytes, Convert]] = [
            (name, name + b"null", kind.convert)
            for name, kind in zip(names, self._types, strict=True)
        ]
        at = {each.name: index for index, each in enumerate(columns)}
        self._key = [at[name] for name in key if name in at]

    @property
    def types(self) -> Sequence[tuple[str, TypeOf]]:
        return [(each.name, kind) for each, kind in zip(self.columns, self._types, strict=True)]

    def schema(self) -> dict[str, Json]:
        """What the source says of documents: any column may be null or absent, but the key."""
        keys = {self.columns[at].name for at in self._key}
        return {
            "type": "object",
            "required": [name for name, _ in self.types if name in keys],
            "properties": {
                name: dict(kind.schema) if name in keys else nullable(kind.schema)
                for name, kind in self.types
            },
        }

    def created(self, row: Row, stamp: Stamp) -> bytes:
        """The document of a row that is new here."""
        return b"{%b%b}}" % (self._members(row)[1:], stamp.create)

    def updated(self, old: Row | None, new: Row, stamp: Stamp, *, whole: bool) -> tuple[bytes, ...]:
        """The documents of an update. Of the old row is known nothing, its key, or the whole."""
        if old is None:
            return (b"{%b%b}}" % (self._members(new)[1:], stamp.update),)
        if whole:
            new = [was if now is UNCHANGED else now for was, now in zip(old, new, strict=True)]
        before = self._before(old) if whole else b""
        if all(old[at] == new[at] for at in self._key):
            return (b"{%b%b%b}}" % (self._members(new)[1:], stamp.update, before),)
        if any(value is UNCHANGED for value in new):
            unknown = next(
                each.name
                for each, value in zip(self.columns, new, strict=True)
                if value is UNCHANGED
            )
            raise KeyLost(unknown)
        return self.deleted(old, stamp, whole=whole), self.created(new, stamp)

    def deleted(self, old: Row, stamp: Stamp, *, whole: bool) -> bytes:
        """The document of a row that is gone: its key."""
        before = self._before(old) if whole else b""
        return b"{%b%b%b}}" % (self._key_members(old)[1:], stamp.delete, before)

    def _before(self, row: Row) -> bytes:
        return b',"before":{%b}' % self._members(row)[1:]

    def _key_members(self, row: Row) -> bytes:
        pieces = []
        for at in self._key:
            value = row[at]
            name, null, convert = self._parts[at]
            pieces.append(name + convert(value) if isinstance(value, bytes) else null)
        return b"".join(pieces)

    def _members(self, row: Row) -> bytes:
        pieces: list[bytes] = []
        add = pieces.append
        for value, (name, null, convert) in zip(row, self._parts, strict=True):
            if value is None:
                add(null)
            elif value is not UNCHANGED:
                add(name)
                add(convert(value))  # type: ignore[arg-type]
        return b"".join(pieces)
