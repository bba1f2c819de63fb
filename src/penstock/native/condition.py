"""Conditions of a schema that SQL can decide over stored columns, as values.

A condition is built without Spark (`compile_condition`) and turned into an expression where rows
are (`holds`). It means exactly what validation means, for documents that are valid: a keyword says
nothing about a location that is absent, or of a type that it does not constrain. What cannot be
said exactly is not compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from penstock.model.columns import LONG_MAX, LONG_MIN, Column, Kind, Member
from penstock.model.json_order import Json, sort_key
from penstock.model.shape import JsonType, type_of

if TYPE_CHECKING:
    from pyspark.sql import Column as Expression

Bound: TypeAlias = Literal[
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
]

_NUMERIC: Final = {Kind.LONG, Kind.DECIMAL, Kind.DOUBLE}
_BOUNDS: Final[Mapping[str, set[Kind]]] = {
    "minimum": _NUMERIC,
    "maximum": _NUMERIC,
    "exclusiveMinimum": _NUMERIC,
    "exclusiveMaximum": _NUMERIC,
    "minLength": {Kind.STRING},
    "maxLength": {Kind.STRING},
    "minItems": {Kind.ARRAY},
    "maxItems": {Kind.ARRAY},
}
_TYPES: Final[Mapping[Kind, JsonType]] = {
    Kind.BOOLEAN: "boolean",
    Kind.LONG: "integer",
    Kind.DOUBLE: "number",
    Kind.STRING: "string",
    Kind.STRUCT: "object",
    Kind.MAP: "object",
    Kind.ARRAY: "array",
}
_SILENT: Final = {"$comment", "default", "description", "examples", "reduce", "title"}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A stored location: the steps to it, each with the object it is a member of."""

    steps: tuple[tuple[Column, Member], ...]

    @property
    def column(self) -> Column | None:
        return self.steps[-1][1].column


@dataclasses.dataclass(frozen=True, slots=True)
class Is:
    """The value is one of these; an absent location passes."""

    place: Place
    values: tuple[Json, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """The value keeps a bound; so does whatever has no such measure."""

    place: Place
    bound: Bound
    limit: float


@dataclasses.dataclass(frozen=True, slots=True)
class Present:
    """The location is there, null included."""

    place: Place


@dataclasses.dataclass(frozen=True, slots=True)
class Both:
    """All parts hold; holds if there are none."""

    parts: tuple[Condition, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Either:
    """Some part holds; never holds if there are none."""

    parts: tuple[Condition, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Not:
    """The part does not hold."""

    part: Condition


Condition: TypeAlias = Is | Within | Present | Both | Either | Not

ALWAYS: Final = Both(())
NEVER: Final = Either(())


def compile_condition(schema: Json, root: Column) -> Condition | None:
    """The condition under which a document passes `schema`; None if SQL cannot decide it."""
    return _compile(schema, Place(()), root)


def _compile(schema: Json, place: Place, column: Column | None) -> Condition | None:
    if isinstance(schema, bool):
        return ALWAYS if schema else NEVER
    if not isinstance(schema, dict):
        return None
    parts: list[Condition] = []
    for keyword, value in schema.items():
        if keyword in _SILENT or keyword.startswith("x-"):
            continue
        part = _keyword(keyword, value, place, column)
        if part is None:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else Both(tuple(parts))


def _keyword(keyword: str, value: Any, place: Place, column: Column | None) -> Condition | None:  # noqa: ANN401
    match keyword:
        case "allOf" | "anyOf":
            parts = [_compile(part, place, column) for part in value]
            found = tuple(part for part in parts if part is not None)
            if len(found) < len(parts):
                return None
            return Both(found) if keyword == "allOf" else Either(found)
        case "not":
            part = _compile(value, place, column)
            return None if part is None else Not(part)
        case "properties" if column is not None and column.kind is Kind.STRUCT:
            members = [_member(column, place, name, inner) for name, inner in value.items()]
            found = tuple(part for part in members if part is not None)
            return Both(found) if len(found) == len(members) else None
        case "required" if column is not None and column.kind is Kind.STRUCT:
            inside = [_step(column, place, name) for name in value]
            places = tuple(Present(at) for at in inside if at is not None)
            # At the root every object is there; elsewhere an absent one requires nothing.
            return Both(places) if len(places) == len(inside) and not place.steps else None
        case "const":
            return _is(place, column, (value,))
        case "enum":
            return _is(place, column, tuple(value))
        case "type":
            return _of_type(place, column, [value] if isinstance(value, str) else value)
        case _ if column is not None and column.kind in _BOUNDS.get(keyword, ()) and place.steps:
            bound: Any = keyword
            return Within(place, bound, value) if isinstance(value, int | float) else None
        case _:
            return None


def _step(column: Column, place: Place, name: str) -> Place | None:
    for member in column.members:
        if member.name == name:
            return Place((*place.steps, (column, member)))
    return None


def _member(column: Column, place: Place, name: str, schema: Json) -> Condition | None:
    inside = _step(column, place, name)
    return None if inside is None else _compile(schema, inside, inside.column)


def _type(column: Column | None) -> JsonType | None:
    """The type of the values in a column, null aside; None for JSON text, which has several."""
    if column is None:
        return "null"
    if column.kind is Kind.DECIMAL:
        return "number" if column.scale else "integer"
    return _TYPES.get(column.kind)


def _is(place: Place, column: Column | None, values: tuple[Json, ...]) -> Condition | None:
    scalar = column is None or column.kind in (Kind.BOOLEAN, Kind.STRING, *_NUMERIC)
    return Is(place, values) if scalar and place.steps else None


def _of_type(place: Place, column: Column | None, types: list[str]) -> Condition | None:
    if not place.steps:
        return ALWAYS if "object" in types else NEVER
    own = _type(column)
    if own is None:
        return None
    if own == "number" and "integer" in types and "number" not in types:
        return None  # some of its values are integers
    passes = own in types or (own == "integer" and "number" in types)
    null = Is(place, (None,))
    if passes:
        return ALWAYS if "null" in types else Either((Not(null), Not(Present(place))))
    return null if "null" in types else Not(Present(place))


def excludes(a: Any, b: Any, root: Column) -> bool:  # noqa: ANN401
    """Whether no document passes both, proven by constants at a member that every document has."""
    left, right = _constants(a, root), _constants(b, root)
    return any(left[name].isdisjoint(right[name]) for name in left.keys() & right.keys())


def _constants(schema: Any, root: Column) -> dict[str, set[tuple[Any, ...]]]:  # noqa: ANN401
    """The values to which a schema limits members that are always present."""
    if not isinstance(schema, dict):
        return {}
    limits: dict[str, set[tuple[Any, ...]]] = {}
    required = {member.name for member in root.members if member.required}
    required.update(schema.get("required", []))
    for name, inner in schema.get("properties", {}).items():
        if name in required and isinstance(inner, dict):
            if "const" in inner:
                limits[name] = {sort_key(inner["const"])}
            elif "enum" in inner:
                limits[name] = {sort_key(value) for value in inner["enum"]}
    return limits


def holds(condition: Condition) -> Expression:
    """The condition over the columns of documents; never NULL."""
    from pyspark.sql import functions as f

    match condition:
        case Both(parts):
            return functools.reduce(lambda a, b: a & b, map(holds, parts), f.lit(True))
        case Either(parts):
            return functools.reduce(lambda a, b: a | b, map(holds, parts), f.lit(False))
        case Not(part):
            return ~holds(part)
        case Present(place):
            return present(place)
        case Is(place, values):
            return ~present(place) | functools.reduce(
                lambda a, b: a | b, (_equals(place, value) for value in values), f.lit(False)
            )
        case Within(place, bound, limit):
            return f.coalesce(_within(value_at(place), bound, limit), f.lit(True))


def value_at(place: Place) -> Expression:
    """The stored column of a location."""
    from pyspark.sql import functions as f

    names = [member.name for _, member in place.steps]
    first = f.col(f"`{names[0].replace('`', '``')}`")
    return functools.reduce(lambda at, name: at.getField(name), names[1:], first)


def present(place: Place) -> Expression:
    """Whether the location is there, null included."""
    from pyspark.sql import functions as f

    parent, member = place.steps[-1]
    above = Place(place.steps[:-1])
    if member.required:
        return value_at(above).isNotNull() if above.steps else f.lit(True)
    if member.listed:
        at = [m.name for m in parent.members].index(member.name)
        nulls = Member(name=str(parent.nulls), column=None, required=False, nullable=False)
        listed = value_at(Place((*above.steps, (parent, nulls))))
        null = f.coalesce(f.array_contains(listed, f.lit(at).cast("smallint")), f.lit(False))
        return null if member.column is None else null | value_at(place).isNotNull()
    return value_at(place).isNotNull() if member.column is not None else f.lit(False)


def _equals(place: Place, value: Json) -> Expression:
    from pyspark.sql import functions as f

    if value is None:
        is_null = f.lit(True) if place.column is None else value_at(place).isNull()
        return present(place) & is_null
    own, kind = _type(place.column), type_of(value)
    if own != kind and not (own == "number" and kind == "integer"):
        return f.lit(False)
    return f.coalesce(value_at(place) == _literal(value), f.lit(False))


def _literal(value: Json) -> Expression:
    from pyspark.sql import functions as f

    if isinstance(value, int) and not LONG_MIN <= value <= LONG_MAX:
        return f.lit(str(value)).cast("decimal(38,0)")
    return f.lit(value)


def _within(value: Expression, bound: Bound, number: float) -> Expression:
    from pyspark.sql import functions as f

    limit = _literal(number)
    match bound:
        case "minimum":
            return value >= limit
        case "maximum":
            return value <= limit
        case "exclusiveMinimum":
            return value > limit
        case "exclusiveMaximum":
            return value < limit
        case "minLength":
            return f.char_length(value) >= limit
        case "maxLength":
            return f.char_length(value) <= limit
        case "minItems":
            return f.size(value) >= limit
        case "maxItems":
            return f.size(value) <= limit
