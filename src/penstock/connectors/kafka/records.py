"""PURE: the records of a topic as documents.

    json    the value is a document
    text    the value is UTF-8 text: the member `value`
    raw     the value is any bytes: the member `value`, in base64

A record without a value is a tombstone: it says that its key is gone. It becomes a document whose
`/_meta/op` is `d`, if the collection has `/_meta`, and if it has a key: the members of the record's
own key, if that is a JSON object, or members of `/_meta`. Every other tombstone says nothing about
any document of the collection, and is left out.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

import msgspec
import pyarrow
import pyarrow.compute

from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.runtime.connector.capture import Documents, SourceBinding

pa: Any = pyarrow
pc: Any = pyarrow.compute

Format = Literal["json", "text", "raw"]

META_MEMBERS: Final[dict[str, Json]] = {
    "op": {"type": "string", "enum": ["u", "d"], "description": "d: a tombstone; u: any other"},
    "topic": {"type": "string"},
    "partition": {"type": "integer", "minimum": 0},
    "offset": {"type": "integer", "minimum": 0},
    "timestamp": {"type": "string", "format": "date-time"},
    "key": {"type": "string", "description": "The record's key, if it is UTF-8"},
    "keyBase64": {"type": "string", "description": "The record's key, if it is not UTF-8"},
    "headers": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "value": {"type": "string", "description": "If it is UTF-8"},
                "valueBase64": {"type": "string", "description": "If it is not UTF-8"},
            },
        },
    },
}
"""The members of `/_meta`, and their schemas."""

_YEAR_10000_MS: Final = 253_402_300_800_000

_HEADERS: Final = pa.list_(
    pa.struct([("name", pa.utf8()), ("value", pa.utf8()), ("valueBase64", pa.utf8())])
)


class Record(Protocol):
    """A record as the client gives it."""

    def partition(self) -> int | None: ...

    def offset(self) -> int | None: ...

    def key(self) -> bytes | None: ...

    def value(self) -> bytes | None: ...

    def timestamp(self) -> tuple[int, int]: ...

    def headers(self) -> Any: ...  # noqa: ANN401 - pairs in a list, or in a mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the records of a topic become documents; picklable."""

    topic: str
    format: Format
    members: tuple[str, ...] = ()
    """Of `/_meta`, those that are filled. None of them: there is no `/_meta`."""
    keyed_by_meta: bool = False
    """The collection's key is in `/_meta` as a whole."""

    @classmethod
    def of(cls, binding: SourceBinding) -> Form:
        """The form of a binding: of `/_meta`, what its schema names, or all if it names nothing."""
        resource: dict[str, Any] = binding.resource.value
        members: tuple[str, ...] = ()
        if binding.wants_meta:
            shape = compiled(binding.collection.write_schema.text).shape
            named = shape.objects.properties["_meta"].shape.objects.properties
            members = tuple(name for name in META_MEMBERS if name in named or not named)
        return cls(
            topic=resource["topic"],
            format=resource.get("format", "json"),
            members=members,
            keyed_by_meta=all(key.startswith("/_meta/") for key in binding.collection.key),
        )

    def documents(self, records: Sequence[Record]) -> Documents:
        """Make documents, in order."""
        if None in (values := [record.value() for record in records]):
            records = [record for record in records if self._says_something(record)]
            values = [record.value() for record in records]
        texts = [
            self._tombstone(record) if value is None else value
            for record, value in zip(records, values, strict=True)
        ]
        if self.format != "json":
            encode = _text if self.format == "text" else _raw
            texts = [b"{}" if value is None else encode(value) for value in values]
        places = [(record.partition(), record.offset()) for record in records]
        return Documents(
            texts=texts, meta=self._meta(records), origin=lambda at: self.origin(*places[at])
        )

    def origin(self, partition: int | None, offset: int | None) -> str:
        """Where a record is, for people."""
        return f"topic {self.topic}, partition {partition}, offset {offset}"

    # ------------------------------------------------------------------------------- tombstones

    def _says_something(self, record: Record) -> bool:
        if record.value() is not None:
            return True
        if not self.members:
            return False
        return self.keyed_by_meta or (self.format == "json" and _is_object(record.key()))

    def _tombstone(self, record: Record) -> bytes:
        key = record.key()
        return key if key is not None and _is_object(key) else b"{}"

    # ------------------------------------------------------------------------------------- meta

    def _meta(self, records: Sequence[Record]) -> pyarrow.RecordBatch | None:
        if not self.members:
            return None
        return cast(
            pyarrow.RecordBatch,
            pa.RecordBatch.from_arrays(
                [_COLUMNS[name](self, records) for name in self.members], names=list(self.members)
            ),
        )


def _timestamps(records: Sequence[Record]) -> Any:  # noqa: ANN401 - an Arrow array
    """RFC 3339, to the millisecond, as Kafka has it; nothing for one that no calendar has.

    A producer may write any number.
    """
    stamps = [record.timestamp() for record in records]
    known = [at if kind and 0 <= at < _YEAR_10000_MS else None for kind, at in stamps]
    instants = pa.array(known, pa.timestamp("ms", "UTC"))
    return pc.strftime(instants, format="%Y-%m-%dT%H:%M:%SZ", locale="C")


def _header(name: str, value: bytes | str | None) -> dict[str, str]:
    if value is None:
        return {"name": name}
    data = value.encode() if isinstance(value, str) else value
    text = _utf8(data)
    if text is None:
        return {"name": name, "valueBase64": base64.b64encode(data).decode()}
    return {"name": name, "value": text}


def _headers(record: Record) -> list[dict[str, str]]:
    return [_header(name, value) for name, value in record.headers() or ()]


def _key_in_base64(record: Record) -> str | None:
    key = record.key()
    return None if key is None or _utf8(key) is not None else base64.b64encode(key).decode()


_Column = Callable[[Form, Sequence[Record]], Any]

_COLUMNS: Final[dict[str, _Column]] = {
    "op": lambda _, rs: pa.array(["d" if r.value() is None else "u" for r in rs], pa.utf8()),
    "topic": lambda form, rs: pa.array([form.topic] * len(rs), pa.utf8()),
    "partition": lambda _, rs: pa.array([r.partition() for r in rs], pa.int64()),
    "offset": lambda _, rs: pa.array([r.offset() for r in rs], pa.int64()),
    "timestamp": lambda _, rs: _timestamps(rs),
    "key": lambda _, rs: pa.array([_utf8(r.key()) for r in rs], pa.utf8()),
    "keyBase64": lambda _, rs: pa.array([_key_in_base64(r) for r in rs], pa.utf8()),
    "headers": lambda _, rs: pa.array([_headers(r) for r in rs], _HEADERS),
}


def _utf8(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def _is_object(key: bytes | None) -> bool:
    if key is None or key.lstrip()[:1] != b"{":
        return False
    try:
        return isinstance(msgspec.json.decode(key), dict)
    except (msgspec.MsgspecError, ValueError):
        return False


def _text(value: bytes) -> bytes:
    """What is no UTF-8 is refused with the document, and not changed here."""
    text = _utf8(value)
    return b'{"value":"%b"}' % value if text is None else msgspec.json.encode({"value": text})


def _raw(value: bytes) -> bytes:
    return b'{"value":"%b"}' % base64.b64encode(value)
