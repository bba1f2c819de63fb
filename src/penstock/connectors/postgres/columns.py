"""The PostgreSQL types of fields, the live columns that can hold them, and the format of rows.

    integer               BIGINT; beyond 64 bits NUMERIC
    number                DOUBLE PRECISION; NUMERIC where the schema names the digits, all of them
    boolean, string       BOOLEAN, TEXT
    date-time             TIMESTAMPTZ: the same instant, to the microsecond
    date, uuid            DATE, UUID
    format number,        NUMERIC: the same number, with all of its digits
      integer
    everything else       JSONB, and the whole document JSON, which keeps it letter by letter

Key columns are different: two keys must not become one, so texts in a key are TEXT whatever their
format, as `…Z` and `…+00:00` are two keys of one instant. Other formats stay TEXT everywhere: no
type of PostgreSQL has all of their values and no others.

Rows travel as CSV, which Arrow writes and COPY reads, both without a step in Python per row: a NULL
is nothing at all, and a text is in quotes. Few rows travel as arrays, one for each column, which a
statement can carry.

PostgreSQL has no text with U+0000 in it. Any character that could stand for it may be in a text as
well, so such a document is refused by name, not quietly changed.
"""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow
import pyarrow.compute
import pyarrow.csv

from penstock.connectors.sql.dialect import Fit, LiveTable
from penstock.connectors.sql.statements import quoted
from penstock.errors import Bug
from penstock.model.columns import Kind
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import DELETE, TargetField

_pa: Any = pyarrow
_pc: Any = pyarrow.compute
_csv: Any = pyarrow.csv

NAME_BYTES_MAX: Final = 63
"""PostgreSQL cuts longer names off, and two of them could become one."""

_BIGINT, _NUMERIC, _DOUBLE = "bigint", "numeric", "double precision"
_TEXT, _TIMESTAMPTZ, _DATE, _UUID = "text", "timestamp with time zone", "date", "uuid"
_JSON, _JSONB = "json", "jsonb"

_SCALARS: Final = {
    Kind.BOOLEAN: "boolean",
    Kind.LONG: _BIGINT,
    Kind.DOUBLE: _DOUBLE,
    Kind.DECIMAL: _NUMERIC,
    Kind.STRING: _TEXT,
}
_FORMATS: Final = {
    "date-time": _TIMESTAMPTZ,
    "date": _DATE,
    "uuid": _UUID,
    "number": _NUMERIC,
    "integer": _NUMERIC,
}


def type_of(field: TargetField) -> str:
    """Return the type of a field's column, in PostgreSQL's own spelling."""
    if field.is_document:
        return _JSON
    kind = field.column.kind
    if field.is_key:
        return _SCALARS.get(kind, _TEXT)
    if kind is Kind.STRING:
        # A text that was redacted is a digest, whatever its format is.
        plain = field.column.redact is None
        return _FORMATS.get(field.column.logical or "", _TEXT) if plain else _TEXT
    return _SCALARS.get(kind, _JSONB)


# ---------------------------------------------------------------------------------- live columns


_HOLD: Final[Mapping[str, frozenset[str]]] = {
    _BIGINT: frozenset({_NUMERIC}),
    _TEXT: frozenset({"character varying"}),
    _TIMESTAMPTZ: frozenset({_TEXT, "character varying"}),
    _DATE: frozenset({_TEXT, "character varying"}),
    _UUID: frozenset({_TEXT, "character varying"}),
    _NUMERIC: frozenset({_TEXT, "character varying"}),
    _JSON: frozenset({_JSONB}),
    _JSONB: frozenset({_JSON}),
}
_WIDEN: Final[Mapping[str, frozenset[str]]] = {
    _BIGINT: frozenset({"smallint", "integer"}),
    _NUMERIC: frozenset({"smallint", "integer", "bigint"}),
    _DOUBLE: frozenset({"smallint", "integer", "real"}),
}
_LIMITED_TEXT: Final = re.compile(r"character varying\(\d+\)")
_LIMITED_NUMBER: Final = re.compile(r"numeric\((\d+),(-?\d+)\)")


def fit(field: TargetField, live: str) -> Fit:
    """Compare a field with a column of type `live`, as `format_type` spells it."""
    needed = type_of(field)
    if live == needed:
        return Fit.HOLDS
    if live in _HOLD.get(needed, ()) and (needed != _NUMERIC or field.column.is_numeric_text):
        return Fit.HOLDS
    if live in _WIDEN.get(needed, ()):
        return Fit.WIDENS
    if needed == _DOUBLE and live == _BIGINT:
        return Fit.CONVERTS  # rounded as a document is that is read with a number there
    if needed == _TEXT and _LIMITED_TEXT.fullmatch(live):
        return Fit.WIDENS
    if needed == _NUMERIC and (limited := _LIMITED_NUMBER.fullmatch(live)):
        digits, scale = int(limited[1]), int(limited[2])
        column = field.column
        enough = column.precision - column.scale <= digits - scale and column.scale <= scale
        return Fit.HOLDS if enough and not column.is_numeric_text else Fit.WIDENS
    return Fit.FAILS


# ------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The format of a target's rows in transit: fields, and the types of their live columns."""

    table: str
    fields: tuple[TargetField, ...]
    types: tuple[str, ...]

    @classmethod
    def of(cls, table: str, fields: Sequence[TargetField], live: LiveTable) -> RowLayout:
        """Lay rows of these fields out for a live table."""
        types = tuple(live.columns[field.name].type for field in fields)
        return cls(table=table, fields=tuple(fields), types=types)

    def csv(self, rows: pyarrow.RecordBatch) -> bytes:
        """Encode rows as COPY reads them: the fields in order, then `DELETE` if it is there."""
        columns = self._columns(rows)
        sink = io.BytesIO()
        table = _pa.Table.from_arrays(columns, names=[str(i) for i in range(len(columns))])
        _csv.write_csv(table, sink, _csv.WriteOptions(include_header=False))
        return sink.getvalue()

    def literals(self, rows: pyarrow.RecordBatch) -> list[str]:
        """Encode the same columns as PostgreSQL writes arrays, for a statement to carry."""
        return [_literal(column) for column in self._columns(rows)]

    def _columns(self, rows: pyarrow.RecordBatch) -> list[Any]:
        batch: Any = rows
        columns = [
            self._column(batch, field, live)
            for field, live in zip(self.fields, self.types, strict=True)
        ]
        if DELETE in batch.schema.names:
            columns.append(batch.column(DELETE))
        return columns

    def _column(self, batch: Any, field: TargetField, live: str) -> Any:  # noqa: ANN401
        values = batch.column(field.name)
        if field.column.kind is Kind.DECIMAL:
            return values.cast(_pa.utf8())
        if not _pa.types.is_string(values.type):
            return values
        # A NUL in JSON text is an escape, which JSON keeps and JSONB refuses.
        if live == _JSONB:
            self._refuse(_pc.match_substring_regex(values, _ESCAPED_NUL), batch, field)
        elif live != _JSON:
            self._refuse(_pc.match_substring(values, "\0"), batch, field)
        if live == _TIMESTAMPTZ:
            return _replaced(values, _PLAIN_INSTANT, _instant)
        return _replaced(values, _PLAIN_DATE, _date) if live == _DATE else values

    def _refuse(self, found: Any, batch: Any, field: TargetField) -> None:  # noqa: ANN401
        if not _pc.any(found).as_py():
            return
        first = found.index(_pa.scalar(True)).as_py()
        key = {f.name: batch.column(f.name)[first].as_py() for f in self.fields if f.is_key}
        raise ConnectorError(
            f"{self.table}, column {field.name}: a text has the character U+0000 in it, which "
            "PostgreSQL cannot store",
            where=f"the row of key {key!r}",
            fix="exclude the field, forbid the character by a `pattern` in the schema, or remove "
            "it at the source",
        )

    @property
    def key(self) -> RowLayout:
        """The same for keys alone."""
        pairs = [pair for pair in zip(self.fields, self.types, strict=True) if pair[0].is_key]
        return RowLayout(
            table=self.table,
            fields=tuple(field for field, _ in pairs),
            types=tuple(live for _, live in pairs),
        )

    @property
    def ddl(self) -> str:
        """Column definitions of a table for such rows."""
        pairs = zip(self.fields, self.types, strict=True)
        return ", ".join(f"{quoted(field.name)} {live}" for field, live in pairs)


def _literal(column: Any) -> str:  # noqa: ANN401
    texts = column.cast(_pa.utf8())
    if _pa.types.is_string(column.type):
        for special in ("\\", '"'):
            texts = _pc.replace_substring(texts, special, f"\\{special}")
        texts = _pc.binary_join_element_wise('"', texts, '"', "")
    return "{" + ",".join(_pc.fill_null(texts, "NULL").to_pylist()) + "}"


_ESCAPED_NUL: Final = r"(^|[^\\])(\\\\)*\\u0000"
_PLAIN_INSTANT: Final = (
    r"^(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?"
    r"(Z|[+-](0\d|1[0-4]):\d\d)$"
)
"""Instants that PostgreSQL reads itself: years from 1 on, and offsets in use somewhere."""
_PLAIN_DATE: Final = r"^(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})-"
_INSTANT: Final = re.compile(
    r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[Tt](?P<hour>\d\d):(?P<minute>\d\d)"
    r":(?P<second>\d\d)(?P<fraction>\.\d+)?([Zz]|(?P<sign>[+-])(?P<hours>\d\d):(?P<minutes>\d\d))"
)
_CYCLE_YEARS: Final = 400
"""The calendar repeats itself after these, so that a near year can stand for a distant one."""


def _replaced(values: Any, plain: str, read: Any) -> Any:  # noqa: ANN401
    """Rewrite the values, mostly none, that PostgreSQL would not read as they are."""
    odd = _pc.invert(_pc.match_substring_regex(values, plain))
    if not _pc.any(odd).as_py():
        return values
    texts = [read(text) if is_odd else text for text, is_odd in _pairs(values, odd)]
    return _pa.array(texts, values.type)


def _pairs(values: Any, flags: Any) -> Any:  # noqa: ANN401
    return zip(values.to_pylist(), flags.to_pylist(), strict=True)


def _instant(text: str) -> str:
    """Rewrite a date-time of RFC 3339 in UTC. A leap second is the one after it, as there."""
    found = _INSTANT.fullmatch(text)
    if found is None:
        raise Bug(f"{text!r} is valid, and not a date-time")
    year = int(found["year"])
    near = 2000 + year % _CYCLE_YEARS
    offset = datetime.timedelta(
        hours=int(found["hours"] or 0), minutes=int(found["minutes"] or 0)
    ) * (-1 if found["sign"] == "-" else 1)
    month, day, hour, minute, second = (
        int(found[part]) for part in ("month", "day", "hour", "minute", "second")
    )
    then = datetime.datetime(near, month, day, hour, minute, tzinfo=datetime.UTC)
    then += datetime.timedelta(seconds=second) - offset
    fraction = (found["fraction"] or "")[:10]
    return _dated(then.year + year - near, f"{then:-%m-%d %H:%M:%S}{fraction}+00")


def _date(text: str) -> str:
    return _dated(int(text[:4]), text[4:])


def _dated(year: int, rest: str) -> str:
    """Write a year as PostgreSQL does, which counts as historians do: before 1 comes 1 BC."""
    return f"{year:04}{rest}" if year > 0 else f"{1 - year:04}{rest} BC"
