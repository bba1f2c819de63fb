"""A schema as one boolean Spark expression over stored columns, for what Spark can decide exactly.

`predicate` is the SQL text of whether a row's document is valid, with the very meaning that the
validator gives the schema; where it cannot be sure to, it gives None and the validator is asked.
There is nothing between: a partial answer would be paid for twice.

Types are half of the work and cost nothing, as the columns have them already. No condition is ever
NULL: each keyword is true of values that it does not speak about, as in JSON Schema.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

from penstock.model.columns import DIGITS_MAX, LONG_MAX, LONG_MIN, Column, Kind
from penstock.model.draft import Draft
from penstock.model.json_order import EXACT_MAX, Json, canonical_json
from penstock.model.refs import Place, Refs
from penstock.model.shape import Number
from penstock.native import sql
from penstock.native.regex import to_java
from penstock.native.sql import FALSE, TRUE

_DATE: Final = (
    r"^(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)\z"
)
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS: Final = {
    "date": _DATE,
    "uuid": r"^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\z",
    "ipv4": rf"^{_OCTET}(?:\.{_OCTET}){{3}}\z",
    "integer": r"^-?[0-9]+\z",
    "number": r"^(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|NaN|-?Infinity)\z",
}
_HARD_FORMATS: Final = frozenset(
    [
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
    ]
)
_ANNOTATIONS: Final = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "airbyte_secret",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "else",
        "examples",
        "readOnly",
        "redact",
        "reduce",
        "secret",
        "then",
        "title",
        "writeOnly",
    ]
)
"""Keywords that decide nothing by themselves; `then` and `else` belong to `if`."""

_JSON_TEXT: Final = {
    "null": r"^n",
    "boolean": r"^[tf]",
    "integer": r"^-?[0-9]+(?:\.0)?\z|^-?[0-9].*e\+",
    "number": r"^[-0-9]",
    "string": r'^"',
    "array": r"^\[",
    "object": r"^\{",
}
"""Patterns of canonical JSON text by type; no float of 2**53 or more has a fraction."""

_TYPES: Final = {
    Kind.BOOLEAN: "boolean",
    Kind.LONG: "integer",
    Kind.DOUBLE: "number",
    Kind.STRING: "string",
    Kind.STRUCT: "object",
    Kind.MAP: "object",
    Kind.ARRAY: "array",
}
_UNNAMED: Final = Column(kind=Kind.JSON)
"""The layout of values in `_x`."""

_Said: TypeAlias = Any
"""The value of a keyword in a schema."""


class _NotExactly(Exception):
    """Spark cannot decide this as the validator does."""


def predicate(schema: Mapping[str, Any], root: Column, struct: str = "") -> str | None:
    """The condition that the document of a row is valid, as SQL over columns laid out as `root`.

    The columns are those of the row, or the members of `struct`, which is SQL as well.
    """
    if Draft.of(schema) < Draft.DRAFT_2019_09:
        return None  # keywords mean other things there, and such schemas are rare
    try:
        return _Compiler(schema).document(root, struct)
    except _NotExactly:
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """A location of a row: its value, and conditions for it being there, and being JSON's null.

    `value` is NULL where the value is missing or null; in a JSON column only where it is missing.
    """

    column: Column
    value: str
    present: str
    null: str

    @property
    def type(self) -> str | None:
        """The JSON type of values that are not null; None in JSON text, where it varies."""
        if self.column.kind is Kind.DECIMAL:
            return "number" if self.column.scale else "integer"
        return _TYPES.get(self.column.kind)

    def unless(self, condition: str) -> str:
        """A condition on the value that is true where there is no value to speak of."""
        return condition if condition in (TRUE, FALSE) else f"coalesce({condition}, true)"

    def when_not_null(self, condition: str, of_null: bool) -> str:
        """One answer for values, another for null."""
        if condition == TRUE and of_null:
            return TRUE
        own = sql.all_of([sql.negated(self.null), condition])
        return sql.any_of([own, self.null]) if of_null else own

    def member(self, name: str) -> _Spot:
        """A member of a struct, by the name that documents have it under."""
        index = {member.name: at for at, member in enumerate(self.column.members)}
        if name not in index:
            if self.column.extra is None:
                return _Spot(column=_UNNAMED, value="NULL", present=FALSE, null=FALSE)
            found = f"try_element_at({self.field(self.column.extra)}, {sql.text(name)})"
            return _text_spot(_UNNAMED, found)
        member = self.column.members[index[name]]
        if member.column is not None and member.column.kind is Kind.JSON:
            return _text_spot(member.column, self.field(name))
        column = member.column or Column(kind=Kind.STRING, nullable=True)
        value = self.field(name) if member.column else "CAST(NULL AS STRING)"
        null = FALSE
        if member.required and member.nullable:
            null = sql.all_of([sql.negated(self.null), f"({value} IS NULL)"])
        elif member.listed and self.column.nulls is not None:
            listed = f"array_contains({self.field(self.column.nulls)}, {index[name]}S)"
            null = f"coalesce({listed}, false)"
        there = f"({value} IS NOT NULL)" if member.column else FALSE
        return _Spot(column=column, value=value, present=sql.any_of([there, null]), null=null)

    def field(self, name: str) -> str:
        return f"({self.value}).{sql.name(name)}" if self.value else sql.name(name)


def _text_spot(column: Column, value: str) -> _Spot:
    null = f"coalesce({value} = 'null', false)"
    return _Spot(column=column, value=value, present=f"({value} IS NOT NULL)", null=null)


def _element(column: Column, value: str) -> _Spot:
    """A spot that is surely there: an item, or the value of an entry."""
    spot = _text_spot(column, value)
    null = spot.null if column.kind is Kind.JSON else f"({value} IS NULL)"
    return dataclasses.replace(spot, present=TRUE, null=null)


class _Compiler:
    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._refs = Refs(schema)
        self._active: set[str] = set()
        self._variables = 0

    def document(self, root: Column, struct: str) -> str:
        whole = _Spot(column=root, value=struct, present=TRUE, null=FALSE)
        return self._valid(self._refs.root, whole)

    def _valid(self, place: Place, spot: _Spot) -> str:
        """The condition that a value, which is there, is valid under the schema at a place."""
        schema = place.schema
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        if place.pointer in self._active:
            raise _NotExactly  # a recursive schema
        self._active.add(place.pointer)
        conditions = [
            self._keyword(keyword, said, place, schema, spot)
            for keyword, said in schema.items()
            if keyword not in _ANNOTATIONS and not keyword.startswith("x-")
        ]
        self._active.remove(place.pointer)
        return sql.all_of(conditions)

    def _keyword(
        self, keyword: str, said: _Said, place: Place, schema: Mapping[str, Any], spot: _Spot
    ) -> str:
        match keyword:
            case "type":
                return _has_type(spot, [said] if isinstance(said, str) else said)
            case "enum":
                return _is_one_of(spot, said)
            case "const":
                return _is_one_of(spot, [said])
            case "$ref":
                return self._valid(self._refs.resolve(said, place.base), spot)
            case "allOf" | "anyOf" | "oneOf":
                branches = [self._valid(place.step(keyword, i), spot) for i in range(len(said))]
                return _combined(keyword, branches)
            case "not":
                return sql.negated(self._valid(place.step("not"), spot))
            case "if":
                condition = self._valid(place.step("if"), spot)
                then, otherwise = (
                    self._valid(place.step(word), spot) if word in schema else TRUE
                    for word in ("then", "else")
                )
                yes, no = sql.all_of([condition, then]), sql.negated(condition)
                return sql.any_of([yes, sql.all_of([no, otherwise])])
            case _ if spot.column.kind is Kind.JSON:
                raise _NotExactly  # about the inside of a text
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return _within(spot, keyword, said)
            case "multipleOf":
                return _multiple_of(spot, said)
            case "minLength" | "maxLength" | "pattern" | "format":
                return _text(spot, keyword, said)
            case "items" | "minItems" | "maxItems":
                return self._array(keyword, said, place, spot)
            case "properties" | "required" | "additionalProperties":
                named = frozenset(schema.get("properties", ()))
                if "patternProperties" in schema:
                    raise _NotExactly
                if spot.column.kind is Kind.STRUCT:
                    return self._struct(keyword, said, place, spot, named)
                return self._map(keyword, said, place, spot, named)
            case _:
                raise _NotExactly

    def _array(self, keyword: str, said: _Said, place: Place, spot: _Spot) -> str:
        if spot.column.kind is not Kind.ARRAY:
            return TRUE
        if keyword == "minItems":
            return spot.unless(f"size({spot.value}) >= {int(said)}")
        if keyword == "maxItems":
            return spot.unless(f"size({spot.value}) <= {int(said)}")
        if isinstance(said, list):
            raise _NotExactly
        item = self._variable()
        valid = self._valid(place.step("items"), _element(spot.column.item, item))
        return valid if valid == TRUE else spot.unless(f"forall({spot.value}, {item} -> {valid})")

    def _struct(
        self, keyword: str, said: _Said, place: Place, spot: _Spot, named: frozenset[str]
    ) -> str:
        match keyword:
            case "required":
                there = sql.all_of(spot.member(name).present for name in said)
                return sql.any_of([spot.null, there])
            case "properties":
                checked = [(spot.member(n), place.step("properties", n)) for n in said]
            case _:
                others = [m.name for m in spot.column.members if m.name not in named]
                checked = [(spot.member(n), place.step(keyword)) for n in others]
        conditions = [
            sql.any_of([sql.negated(m.present), self._valid(below, m)]) for m, below in checked
        ]
        if keyword == "additionalProperties" and spot.column.extra is not None:
            entries = dataclasses.replace(spot, value=spot.field(spot.column.extra))
            conditions.append(self._entries(entries, _UNNAMED, named, place.step(keyword)))
        return sql.all_of(conditions)

    def _map(
        self, keyword: str, said: _Said, place: Place, spot: _Spot, named: frozenset[str]
    ) -> str:
        if spot.column.kind is not Kind.MAP:
            return TRUE
        has = {
            name: spot.unless(f"map_contains_key({spot.value}, {sql.text(name)})")
            for name in (said if keyword != "additionalProperties" else ())
        }
        match keyword:
            case "required":
                return sql.all_of(has.values())
            case "properties":
                conditions: list[str] = []
                for name, there in has.items():
                    value = f"try_element_at({spot.value}, {sql.text(name)})"
                    below = place.step("properties", name)
                    valid = self._valid(below, _element(spot.column.item, value))
                    absent = sql.any_of([spot.null, sql.negated(there)])
                    conditions.append(sql.any_of([absent, valid]))
                return sql.all_of(conditions)
            case _:
                return self._entries(spot, spot.column.item, named, place.step(keyword))

    def _entries(self, spot: _Spot, column: Column, named: frozenset[str], place: Place) -> str:
        """The condition that every entry of a map, but those that `properties` names, is valid."""
        entry = self._variable()
        valid = self._valid(place, _element(column, f"{entry}.value"))
        known = f"{entry}.key IN ({', '.join(map(sql.text, sorted(named)))})" if named else FALSE
        all_valid = sql.any_of([known, valid])
        if all_valid == TRUE:
            return TRUE
        return spot.unless(f"forall(map_entries({spot.value}), {entry} -> {all_valid})")

    def _variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"


def _combined(keyword: str, branches: list[str]) -> str:
    match keyword:
        case "allOf":
            return sql.all_of(branches)
        case "anyOf":
            return sql.any_of(branches)
        case _:
            possible = [branch for branch in branches if branch != FALSE]
            if len(possible) < 2:
                return (possible or [FALSE])[0]
            return f"({' + '.join(f'CAST({b} AS INT)' for b in possible)} = 1)"


def _has_type(spot: _Spot, types: list[str]) -> str:
    if spot.type is None:
        looks = "|".join(_JSON_TEXT[name] for name in types)
        return spot.unless(f"{spot.value} RLIKE {sql.text(looks)}")
    own = TRUE if spot.type in types else FALSE
    if spot.type == "integer" and "number" in types:
        own = TRUE
    elif spot.type == "number" and "integer" in types and "number" not in types:
        own = spot.unless(f"{spot.value} % 1 = 0")
    return spot.when_not_null(own, of_null="null" in types)


def _is_one_of(spot: _Spot, values: list[Json]) -> str:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if any(abs(number) >= EXACT_MAX for number in numbers):
        raise _NotExactly
    match spot.column.kind:
        case Kind.JSON:
            listed = ", ".join(sql.text(canonical_json(v)) for v in values)
            return spot.unless(f"{spot.value} IN ({listed})")
        case Kind.BOOLEAN:
            own = [TRUE if v else FALSE for v in values if isinstance(v, bool)]
        case Kind.STRING:
            own = [sql.text(v) for v in values if isinstance(v, str)]
        case Kind.LONG:
            own = [sql.bigint(int(v)) for v in numbers if v == int(v)]
        case Kind.DOUBLE:
            own = [sql.double(float(v)) for v in numbers]
        case Kind.DECIMAL:
            own = [sql.decimal(_exact(v, spot.column)) for v in numbers]
        case _:
            if any(isinstance(v, dict | list) for v in values):
                raise _NotExactly
            own = []
    equal = [spot.unless(f"{spot.value} = {literal}") for literal in own]
    return spot.when_not_null(sql.any_of(equal), of_null=any(v is None for v in values))


def _within(spot: _Spot, keyword: str, limit: Number) -> str:
    if spot.type not in ("integer", "number"):
        return TRUE
    low, strict = keyword.endswith("inimum"), keyword.startswith("exclusive")
    if spot.type == "integer":
        # The least (greatest) integer that is allowed: exact, whatever the limit is written as.
        if low:
            bound = math.floor(limit) + 1 if strict else math.ceil(limit)
        else:
            bound = math.ceil(limit) - 1 if strict else math.floor(limit)
        strict = False
        if spot.column.kind is Kind.LONG:
            if not LONG_MIN <= bound <= LONG_MAX:
                return spot.when_not_null(TRUE if (bound < 0) == low else FALSE, of_null=True)
            edge = sql.bigint(bound)
        else:
            edge = sql.decimal(_exact(bound, spot.column))
    elif spot.column.kind is Kind.DOUBLE:
        if abs(limit) > EXACT_MAX:
            raise _NotExactly
        edge = sql.double(float(limit))
    else:
        edge = sql.decimal(_exact(limit, spot.column))
    sign = (">" if low else "<") + ("" if strict else "=")
    return spot.unless(f"{spot.value} {sign} {edge}")


def _exact(number: Number, column: Column) -> Decimal:
    """A number as a decimal that compares with a column without Spark rounding either."""
    exact = Decimal(repr(number)).normalize()
    _, digits, exponent = exact.as_tuple()
    if not isinstance(exponent, int):
        raise _NotExactly
    whole = max(len(digits) + exponent, column.precision - column.scale)
    if whole + max(-exponent, column.scale) > DIGITS_MAX:
        raise _NotExactly
    return exact


def _multiple_of(spot: _Spot, step: Number) -> str:
    if spot.type not in ("integer", "number"):
        return TRUE
    exact = Decimal(repr(step))
    if spot.column.kind is Kind.LONG:
        if exact % 1 == 0 and exact <= LONG_MAX:
            return spot.unless(f"{spot.value} % {sql.bigint(int(exact))} = 0")
        if 1 % exact == 0:
            return TRUE
    if spot.column.kind is Kind.DECIMAL and exact == Decimal((0, (1,), -spot.column.scale)):
        return TRUE  # what the column can hold
    raise _NotExactly


def _text(spot: _Spot, keyword: str, said: _Said) -> str:
    if spot.type != "string":
        return TRUE
    match keyword:
        case "minLength":
            return spot.unless(f"char_length({spot.value}) >= {int(said)}")
        case "maxLength":
            return spot.unless(f"char_length({spot.value}) <= {int(said)}")
        case "format":
            if said in _HARD_FORMATS:
                raise _NotExactly
            pattern = _FORMATS.get(said)
        case _:
            pattern = to_java(said)
            if pattern is None:
                raise _NotExactly
    return TRUE if pattern is None else spot.unless(f"{spot.value} RLIKE {sql.text(pattern)}")
