"""SPARK: the columns of a result as the stored columns of a document, exactly or not at all.

A value that its column cannot hold raises an error that names the location; a type of which no
value fits raises `Unfit` when the query is put together. NULL becomes absence or null, as the
schema has it: see `Nulls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from pyspark.sql import types as t

from penstock.model import pointer
from penstock.model.columns import Column, Kind, Member
from penstock.native import sql
from penstock.native.spark_types import spark_schema
from penstock.runtime.derive.spark_columns import said
from penstock.runtime.derive.spark_json import (
    FLOATING,
    INTEGRAL,
    JsonText,
    NoJson,
    Object,
    Value,
    members_of,
    moment,
)

Nulls: TypeAlias = Literal["missing", "explicit"]
"""The meaning of a NULL where a member is optional and may be null: it is absent, or it is null."""

MARK: Final = "penstock: "
"""Begins the message of a value that does not fit."""

_LONG_END: Final = "double('9223372036854775808')"


class Unfit(Exception):
    """No value of a type can be stored at a location."""

    def __init__(self, at: str, found: str, wanted: str) -> None:
        super().__init__(at, found, wanted)
        self.at = at
        self.found = found
        self.wanted = wanted


class Converter:
    """Builds the SQL of stored columns."""

    def __init__(self, nulls: Nulls) -> None:
        self._explicit = nulls == "explicit"
        self._json = JsonText()

    def document(self, given: Object, root: Column) -> list[tuple[str, str, bool]]:
        """The columns of a document: name, SQL, and True if it is a stored value as it was."""
        return self._members(given, root, "")

    # --- one value ---

    def value(self, given: Value, column: Column, at: str) -> str:
        """SQL of a value as its column stores it; NULL stays NULL. Raises Unfit."""
        if column.kind is Kind.JSON:
            return self._text(given, at)
        if given.is_json:
            return self._from_json(given, column, at)
        if column.kind is Kind.STRUCT and given.type == _type(column):
            return given.sql  # with the same hidden members, which their metadata shows
        if isinstance(given.type, t.NullType):
            return f"CAST(NULL AS {_ddl(column)})"
        match column.kind, given.type:
            case Kind.BOOLEAN, t.BooleanType():
                return given.sql
            case Kind.LONG | Kind.DECIMAL | Kind.DOUBLE, t.NumericType():
                return self._number(given, column, at)
            case Kind.STRING, _:
                return self._string(given, column, at)
            case Kind.ARRAY, t.ArrayType():
                return self._array(given, column, at)
            case Kind.MAP, t.MapType():
                return self._map(given, column, at)
            case Kind.MAP, t.StructType():
                return self._struct_as_map(members_of(given), column, at)
            case Kind.STRUCT, t.StructType():
                return self._struct(members_of(given), column, at)
            case _:
                raise Unfit(at, given.type.simpleString(), said(column))

    def _text(self, given: Value | Object, at: str) -> str:
        try:
            return self._json.of(given)
        except NoJson as e:
            raise Unfit(at, str(e), "any value") from None

    def _number(self, given: Value, column: Column, at: str) -> str:
        value, kind = given.sql, given.type
        match column.kind:
            case Kind.LONG if isinstance(kind, INTEGRAL):
                return value if isinstance(kind, t.LongType) else f"CAST({value} AS BIGINT)"
            case Kind.LONG if isinstance(kind, t.DecimalType):
                fits = f"{value} = floor({value}) AND try_cast({value} AS BIGINT) IS NOT NULL"
                return _checked(value, fits, f"CAST({value} AS BIGINT)", at, "an integer")
            case Kind.LONG:
                back = f"CAST(try_cast({value} AS BIGINT) AS DOUBLE) = {value}"
                fits = f"{back} AND {value} < {_LONG_END}"
                return _checked(value, fits, f"CAST({value} AS BIGINT)", at, "an integer")
            case Kind.DOUBLE if isinstance(kind, FLOATING):
                fits = f"NOT isnan({value}) AND abs({value}) < double('Infinity')"
                return _checked(value, fits, f"CAST({value} AS DOUBLE)", at, "a number in JSON")
            case Kind.DOUBLE:
                return f"CAST({value} AS DOUBLE)"
            case _:
                return _decimal(given, column, at)

    def _string(self, given: Value, column: Column, at: str) -> str:
        logical, kind = column.logical, given.type
        text = f"CAST({given.sql} AS STRING)"
        match kind:
            case t.StringType():
                return given.sql
            case t.DateType():
                return moment(given, as_time=logical == "date-time")
            case t.TimestampType() | t.TimestampNTZType() if logical != "date":
                return moment(given)
            case t.BinaryType() if logical == "base64":
                return f"base64({given.sql})"
            case t.NumericType() if logical == "number":
                return text
            case t.NumericType() if logical == "integer" and isinstance(kind, INTEGRAL):
                return text
            case t.DecimalType() if logical == "integer" and not kind.scale:
                return text
            case _:
                raise Unfit(at, kind.simpleString(), said(column))

    def _from_json(self, given: Value, column: Column, at: str) -> str:
        """A value of any type, of which only the wanted type is taken."""
        value = f"nullif({given.sql}, 'null')"
        match column.kind:
            case Kind.BOOLEAN:
                return _checked(value, f"{value} RLIKE '^[tf]'", f"boolean({value})", at, "boolean")
            case Kind.STRING:
                text = f"CAST(variant_get(parse_json({value}), '$', 'string') AS STRING)"
                return _checked(value, f"{value} RLIKE '^\"'", text, at, "a string")
            case Kind.LONG | Kind.DECIMAL | Kind.DOUBLE:
                # A number with a fraction that is not zero is left to the check of doubles.
                number = Value(sql=f"double({value})", type=t.DoubleType())
                whole = f"{value} RLIKE '^-?[0-9]+$'"
                exact = f"CAST({value} AS {_ddl(column)})"
                rest = self._number(number, column, at)
                taken = f"CASE WHEN {whole} THEN {exact} ELSE {rest} END"
                return _checked(value, f"{value} RLIKE '^[-0-9]'", taken, at, "a number")
            case _:
                # Text is not taken apart: no expression of Spark keeps every number as it is.
                absent = f"CAST(NULL AS {_ddl(column)})"
                wanted = f"of the type that the schema of the target has: {said(column)}"
                return _checked(value, "false", absent, at, wanted)

    # --- containers ---

    def _element(self, given: Value, column: Column, at: str) -> str:
        """An item of an array or a value of a map, which is there: NULL is null."""
        text = self.value(given, column, at)
        if column.kind is Kind.JSON:
            return f"coalesce({text}, 'null')"
        if column.nullable:
            return text
        return f"CASE WHEN {given.sql} IS NULL THEN {_raised(at, 'null')} ELSE {text} END"

    def _array(self, given: Value, column: Column, at: str) -> str:
        item = self._json.variable()
        below = self._element(given.element(item), column.item, f"{at}/*")
        return given.sql if below == item else f"transform({given.sql}, {item} -> {below})"

    def _map(self, given: Value, column: Column, at: str) -> str:
        kind = given.type
        if not isinstance(kind, t.MapType) or not isinstance(kind.keyType, t.StringType):
            raise Unfit(at, kind.simpleString(), "object")
        name, item = self._json.variable(), self._json.variable()
        below = self._element(given.element(item), column.item, f"{at}/*")
        if below == item:
            return given.sql
        return f"transform_values({given.sql}, ({name}, {item}) -> {below})"

    def _struct_as_map(self, given: Object, column: Column, at: str) -> str:
        entries = [
            f"{sql.text(name)}, {self._inner(inner, column.item, pointer.child(at, name))}"
            for name, inner in given.members.items()
        ]
        name, item = self._json.variable(), self._json.variable()
        kept = f"map_filter(map({', '.join(entries)}), ({name}, {item}) -> {item} IS NOT NULL)"
        return kept if given.there == sql.TRUE else f"CASE WHEN {given.there} THEN {kept} END"

    def _inner(self, given: Value | Object, column: Column, at: str) -> str:
        if isinstance(given, Value):
            return self.value(given, column, at)
        match column.kind:
            case Kind.STRUCT:
                return self._struct(given, column, at)
            case Kind.MAP:
                return self._struct_as_map(given, column, at)
            case Kind.JSON:
                return self._text(given, at)
            case _:
                raise Unfit(at, "object", said(column))

    def _struct(self, given: Object, column: Column, at: str) -> str:
        parts = [f"{sql.text(name)}, {text}" for name, text, _ in self._members(given, column, at)]
        struct = f"named_struct({', '.join(parts)})"
        return struct if given.there == sql.TRUE else f"CASE WHEN {given.there} THEN {struct} END"

    def _members(self, given: Object, column: Column, at: str) -> list[tuple[str, str, bool]]:
        """Every stored column of an object: its members, then the hidden ones."""
        found: list[tuple[str, str, bool]] = []
        nulls: list[tuple[int, str]] = []
        named = {member.name for member in column.members}
        for position, member in enumerate(column.members):
            inner = given.members.get(member.name)
            if inner is None and given.extra is not None:
                other = f"try_element_at({given.extra}, {sql.text(member.name)})"
                inner = Value(sql=other, type=t.StringType(), metadata={"penstock.json": True})
            below = pointer.child(at, member.name)
            if member.column is not None:
                text, same = self._member(given, inner, member, member.column, below)
                found.append((member.name, text, same))
            elif isinstance(inner, Object) or not _may_be_null(inner):
                raise Unfit(below, "a value", "null")
            if member.listed:
                nulls.append((position, self._is_null(given, inner, member)))
        others = [name for name in given.members if name not in named]
        if column.nulls is not None:
            found.append((column.nulls, _positions(nulls), False))
        if column.extra is not None:
            found.append((column.extra, self._extra(given, others, named, at), False))
        elif others:
            raise Unfit(pointer.child(at, others[0]), "a value", "nothing: there is no such member")
        elif given.extra is not None:
            found[0] = (found[0][0], self._without_others(given, found[0][1], named, at), False)
        return found

    def _member(
        self, given: Object, inner: Value | Object | None, member: Member, column: Column, at: str
    ) -> tuple[str, bool]:
        """SQL of a member's column, and True if it is the given value as it was."""
        absent = f"CAST(NULL AS {_ddl(column)})"
        text = absent if inner is None else self._inner(inner, column, at)
        if isinstance(inner, Object) and not member.required:
            some = sql.any_of(f"({leaf} IS NOT NULL)" for leaf in inner.leaves())
            text = f"CASE WHEN {some} THEN {text} END"
        if column.kind is Kind.JSON:
            listed = given.listed(member.name)
            if listed != sql.FALSE:
                text = f"CASE WHEN {listed} THEN 'null' ELSE {text} END"
            explicit = self._explicit and isinstance(inner, Value)
            if member.nullable and (member.required or explicit):
                text = f"coalesce({text}, 'null')"
        return text, isinstance(inner, Value) and text == inner.sql

    def _is_null(self, given: Object, inner: Value | Object | None, member: Member) -> str:
        """The condition that an optional member is null, not absent."""
        conditions = [given.listed(member.name)]
        if isinstance(inner, Value):
            if inner.is_json:
                conditions.append(f"coalesce({inner.sql} = 'null', false)")
            if self._explicit and member.name in given.members:
                conditions.append(f"({inner.sql} IS NULL)")
        return sql.any_of(conditions)

    def _extra(self, given: Object, others: Sequence[str], named: set[str], at: str) -> str:
        """Members without a column of their own, by name; NULL if there are none."""
        entries = []
        for name in others:
            text = self._text_of_member(given, name, pointer.child(at, name))
            entries += [sql.text(name), text]
        own = f"map({', '.join(entries)})" if entries else None
        carried = None if given.extra is None else self._unnamed(given.extra, named)
        if own is None and carried is None:
            return "CAST(NULL AS MAP<STRING, STRING>)"
        whole = own or carried
        if own is not None and carried is not None:
            whole = f"map_concat({carried}, {own})"
        name, text, some = (self._json.variable() for _ in range(3))
        kept = f"map_filter({whole}, ({name}, {text}) -> {text} IS NOT NULL)"
        return f"try_element_at(filter(array({kept}), {some} -> size({some}) > 0), 1)"

    def _text_of_member(self, given: Object, name: str, at: str) -> str:
        try:
            text = self._json.member(given, name)
        except NoJson as e:
            raise Unfit(at, str(e), "any value") from None
        explicit = self._explicit and isinstance(given.members[name], Value)
        return f"coalesce({text}, 'null')" if explicit else text

    def _unnamed(self, extra: str, named: set[str]) -> str:
        whole = f"coalesce({extra}, CAST(map() AS MAP<STRING, STRING>))"
        if not named:
            return whole
        name, text = self._json.variable(), self._json.variable()
        listed = ", ".join(map(sql.text, sorted(named)))
        return f"map_filter({whole}, ({name}, {text}) -> {name} NOT IN ({listed}))"

    def _without_others(self, given: Object, text: str, named: set[str], at: str) -> str:
        """A column of an object that must not have other members than those that are named."""
        assert given.extra is not None  # noqa: S101 - the caller's
        rest = self._unnamed(given.extra, named)
        names = f"array_join(array_sort(map_keys({rest})), ', ')"
        raised = f"raise_error(concat({sql.text(f'{MARK}{at}/: there is no member ')}, {names}))"
        return f"CASE WHEN size({rest}) > 0 THEN {raised} ELSE {text} END"


def _positions(nulls: Sequence[tuple[int, str]]) -> str:
    """The positions of members that are null; NULL if none is."""
    cases = [f"CASE WHEN {when} THEN {at}S END" for at, when in nulls if when != sql.FALSE]
    if not cases:
        return "CAST(NULL AS ARRAY<SMALLINT>)"
    return f"nullif(array_compact(array({', '.join(cases)})), CAST(array() AS ARRAY<SMALLINT>))"


def _decimal(given: Value, column: Column, at: str) -> str:
    wanted, value, kind = _ddl(column), given.sql, given.type
    cast = f"CAST({value} AS {wanted})"
    if isinstance(kind, INTEGRAL) or (
        isinstance(kind, t.DecimalType) and kind.scale <= column.scale
    ):
        return _checked(value, f"try_cast({value} AS {wanted}) IS NOT NULL", cast, at, wanted)
    if isinstance(kind, t.DecimalType):
        precise = f"DECIMAL(38, {kind.scale})"
        rounded = f"CAST(CAST({value} AS DECIMAL(38, {column.scale})) AS {precise})"
        fits = (
            f"{rounded} = CAST({value} AS {precise}) AND try_cast({value} AS {wanted}) IS NOT NULL"
        )
        return _checked(value, fits, cast, at, wanted)
    fits = f"CAST(try_cast({value} AS {wanted}) AS DOUBLE) = {value}"
    return _checked(value, fits, cast, at, wanted)


def _checked(value: str, fits: str, taken: str, at: str, wanted: str) -> str:
    raised = _raised(at, f"', CAST({value} AS STRING), ' is not {wanted}", nested=True)
    return f"CASE WHEN {value} IS NULL THEN NULL WHEN {fits} THEN {taken} ELSE {raised} END"


def _raised(at: str, what: str, *, nested: bool = False) -> str:
    begin = sql.text(f"{MARK}{at}: ")
    if nested:
        return f"raise_error(concat({begin}, '{what}'))"
    return f"raise_error(concat({begin}, {sql.text(f'{what} is not allowed here')}))"


def _may_be_null(inner: Value | None) -> bool:
    return inner is None or inner.is_json or isinstance(inner.type, t.NullType)


def _type(column: Column) -> t.DataType:
    member = Member(name="_", column=column, required=False, nullable=False)
    return spark_schema(Column(kind=Kind.STRUCT, members=(member,))).fields[0].dataType


def _ddl(column: Column) -> str:
    """The type of a column, as SQL writes it."""
    return _type(column).simpleString()
