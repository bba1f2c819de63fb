"""SPARK: values of Spark as JSON text, in the form that `canonical_json` gives them.

Everything is SQL text over a value's own text, which is short: a column, a member or a variable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import types as t

from penstock.native import sql
from penstock.native.arrow_types import ELEMENT, HIDDEN, JSON, NAMES

INTEGRAL: Final = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
FLOATING: Final = (t.FloatType, t.DoubleType)

EXACT_END: Final = 2**53


class NoJson(Exception):
    """A type that has no JSON form; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of a row: SQL, its type, and the metadata of the field it is."""

    sql: str
    type: t.DataType
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_json(self) -> bool:
        """True if it is JSON text, not a text."""
        return isinstance(self.type, t.StringType) and bool(self.metadata.get(JSON))

    def element(self, variable: str) -> Value:
        """An item of an array, or a value of a map, under the name of a variable."""
        below = self.metadata.get(ELEMENT, {})
        if isinstance(self.type, t.ArrayType):
            return Value(sql=variable, type=self.type.elementType, metadata=below)
        assert isinstance(self.type, t.MapType)  # noqa: S101 - only asked of these two
        return Value(sql=variable, type=self.type.valueType, metadata=below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """An object by its members, and what of it has no column of its own."""

    members: Mapping[str, Value | Object]
    nulls: tuple[str, tuple[str, ...]] | None = None
    """SQL of the positions of members that are null, and the names at those positions."""
    extra: str | None = None
    """SQL of a map from names of other members to JSON text."""
    there: str = sql.TRUE
    """SQL that is false if there is no such object."""

    def listed(self, name: str) -> str:
        """The condition that a member is explicitly null."""
        if self.nulls is None or name not in self.nulls[1]:
            return sql.FALSE
        at = self.nulls[1].index(name)
        return f"coalesce(array_contains({self.nulls[0]}, {at}S), false)"

    def leaves(self) -> Iterator[str]:
        """SQL of every value in it."""
        for member in self.members.values():
            if isinstance(member, Value):
                yield member.sql
            else:
                yield from member.leaves()


def members_of(value: Value) -> Object:
    """The members of a struct; hidden ones are known by their metadata."""
    assert isinstance(value.type, t.StructType)  # noqa: S101 - the caller's
    members: dict[str, Value | Object] = {}
    nulls: tuple[str, tuple[str, ...]] | None = None
    extra: str | None = None
    for each in value.type.fields:
        inside = f"{value.sql}.{sql.name(each.name)}"
        match each.metadata.get(HIDDEN):
            case "nulls":
                nulls = inside, tuple(each.metadata[NAMES])
            case "extra":
                extra = inside
            case _:
                members[each.name] = Value(sql=inside, type=each.dataType, metadata=each.metadata)
    return Object(members=members, nulls=nulls, extra=extra, there=f"({value.sql} IS NOT NULL)")


class JsonText:
    """Writes values as JSON text; NULL for NULL. Variables get names that no other has."""

    def __init__(self) -> None:
        self._variables = 0

    def variable(self) -> str:
        """A name that no other lambda function uses."""
        self._variables += 1
        return f"v{self._variables}"

    def of(self, value: Value | Object) -> str:
        """SQL of the JSON text of a value. Raises NoJson."""
        if isinstance(value, Object):
            return self._object(value)
        if value.is_json:
            return value.sql
        match value.type:
            case t.NullType():
                return "CAST(NULL AS STRING)"
            case t.StringType():
                return quoted(value.sql)
            case t.BooleanType() | t.ByteType() | t.ShortType() | t.IntegerType() | t.LongType():
                return f"CAST({value.sql} AS STRING)"
            case t.DecimalType():
                return _decimal(value.sql, value.type)
            case t.FloatType() | t.DoubleType():
                return _double(value.sql)
            case t.DateType() | t.TimestampType() | t.TimestampNTZType():
                return f"concat('\"', {moment(value)}, '\"')"
            case t.BinaryType():
                return f"concat('\"', base64({value.sql}), '\"')"
            case t.VariantType():
                return f"to_json({value.sql})"
            case t.ArrayType():
                return self._array(value)
            case t.MapType():
                return self._map(value)
            case t.StructType():
                return self._object(members_of(value))
            case _:
                raise NoJson(value.type.simpleString())

    def _array(self, value: Value) -> str:
        item = self.variable()
        text = self.of(value.element(item))
        items = f"transform({value.sql}, {item} -> coalesce({text}, 'null'))"
        return f"concat('[', array_join({items}, ','), ']')"

    def _map(self, value: Value) -> str:
        assert isinstance(value.type, t.MapType)  # noqa: S101 - the caller's
        if not isinstance(value.type.keyType, t.StringType):
            raise NoJson(f"{value.type.simpleString()}: names of members are texts")
        name = self.variable()
        text = self.of(value.element(f"element_at({value.sql}, {name})"))
        entry = f"concat({quoted(name)}, ':', coalesce({text}, 'null'))"
        entries = f"transform(array_sort(map_keys({value.sql})), {name} -> {entry})"
        return f"concat('{{', array_join({entries}, ','), '}}')"

    def _object(self, value: Object) -> str:
        names = sorted({*value.members, *(value.nulls[1] if value.nulls else ())})
        texts = {name: self.member(value, name) for name in names}
        if value.extra is None:
            parts = [
                f"concat({sql.text(_json_name(name))}, {text})" for name, text in texts.items()
            ]
            inside = f"concat_ws(',', {', '.join(parts)})" if parts else "''"
        else:
            inside = self._with_others(texts, value.extra)
        text = f"concat('{{', {inside}, '}}')"
        return text if value.there == sql.TRUE else f"CASE WHEN {value.there} THEN {text} END"

    def member(self, value: Object, name: str) -> str:
        """The text of a member; NULL if it is absent."""
        inner = value.members.get(name)
        text = "CAST(NULL AS STRING)" if inner is None else self.of(inner)
        if isinstance(inner, Object):
            some = sql.any_of(f"({leaf} IS NOT NULL)" for leaf in inner.leaves())
            text = f"CASE WHEN {some} THEN {text} END"
        listed = value.listed(name)
        return text if listed == sql.FALSE else f"CASE WHEN {listed} THEN 'null' ELSE {text} END"

    def _with_others(self, texts: Mapping[str, str], extra: str) -> str:
        entry, part = self.variable(), self.variable()
        own = ", ".join(f"{sql.text(name)}, {text}" for name, text in texts.items())
        named = f"map_entries(map({own}))" if own else "array()"
        others = f"map_entries(coalesce({extra}, CAST(map() AS MAP<STRING, STRING>)))"
        kept = f"filter(concat({named}, {others}), {entry} -> {entry}.value IS NOT NULL)"
        written = f"concat({quoted(f'{part}.key')}, ':', {part}.value)"
        return f"array_join(transform(array_sort({kept}), {part} -> {written}), ',')"


def quoted(text: str) -> str:
    """A text as JSON."""
    array = f"to_json(array({text}))"
    return f"CASE WHEN {text} IS NOT NULL THEN substring({array}, 2, length({array}) - 2) END"


def moment(value: Value, *, as_time: bool = False) -> str:
    """A date or a time as RFC 3339 has it; a session's time zone is always UTC."""
    text = f"CAST({value.sql} AS STRING)"
    if isinstance(value.type, t.DateType):
        return f"concat({text}, 'T00:00:00Z')" if as_time else text
    return f"concat(replace({text}, ' ', 'T'), 'Z')"


def _json_name(name: str) -> str:
    return f"{json.dumps(name, ensure_ascii=False)}:"


def _decimal(value: str, kind: t.DecimalType) -> str:
    text = f"CAST({value} AS STRING)"
    return (
        text
        if kind.scale == 0
        else f"regexp_replace({text}, '(?:[.]0*|([.][0-9]*[1-9])0+)$', '$1')"
    )


def _double(value: str) -> str:
    """A number as Python writes it: Java's notation begins elsewhere, and its exponents differ.

    Java before version 19 does not always find the shortest digits. They are the same number to
    whoever reads them.
    """
    whole = f"{value} = rint({value})"
    plain = f"regexp_replace(CAST(CAST({value} AS DECIMAL(38, 21)) AS STRING), '0+$', '')"
    mantissa = f"regexp_replace(CAST({value} AS STRING), '[.]0E', 'E')"
    small = f"regexp_replace(regexp_replace({mantissa}, 'E-([0-9])$', 'E-0$1'), 'E', 'e')"
    large = f"regexp_replace({mantissa}, 'E', 'e+')"
    return (
        f"CASE WHEN isnan({value}) OR abs({value}) = double('Infinity')"
        f" THEN raise_error(concat('penstock: ', {value}, ' is no number in JSON'))"
        f" WHEN {whole} AND abs({value}) < {EXACT_END} THEN CAST(CAST({value} AS BIGINT) AS STRING)"
        f" WHEN abs({value}) < 1e16 AND {whole}"
        f" THEN concat(CAST(CAST({value} AS BIGINT) AS STRING), '.0')"
        f" WHEN abs({value}) >= 1e16 THEN {large}"
        f" WHEN abs({value}) >= 1e-4 THEN {plain} ELSE {small} END"
    )
