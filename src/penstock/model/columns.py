"""The column layout of documents of a shape.

A column is typed wherever the shape names one type, and JSON text for sub-trees where it does not.
The layout is decided here, without Spark or Arrow, because three places must agree on it exactly:
the types, the conversion of documents, and the expressions over stored columns.

Missing is not null. A column's NULL means *missing*, except where a location is always present and
may be null. When a location that is both optional and nullable is null, a hidden member `_n` of its
object lists its position among the members. Members of an open object that the schema does not name
are kept, as JSON text by name, in a hidden member `_x`. JSON text columns need neither: there, null
is the text `null`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final, TypeGuard

from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.model.shape import Number, Redact, Shape
from penstock.model.violations import Problem

DEPTH_MAX = 16
LEAVES_MAX = 2_000
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1
UUID_LOCATION = "/_meta/uuid"
"""The stamp of a document, which is kept apart from its columns."""
DIGITS_MAX = 38
"""Digits of a DECIMAL, in Spark and in Arrow."""
DOUBLE_END = 2**1024 - 2**970
"""The smallest integer that rounds to infinity as a double."""
FLOAT_DIGITS = 15
"""Decimal digits that a double always keeps, and with it a JSON number that has a fraction."""

MEANINGS: Final = frozenset({"date", "date-time", "integer", "number"})
"""Formats of strings that write a moment or a number, and have a type of their own elsewhere."""
READ_DECIMALS: Final[Mapping[str, tuple[int, int]]] = {"integer": (38, 0), "number": (38, 18)}
"""Digits and scale under which Spark reads texts that write numbers, as it reads NUMERIC."""


class Kind(enum.Enum):
    """The physical type of a column."""

    BOOLEAN = "boolean"
    LONG = "bigint"
    DECIMAL = "decimal"
    DOUBLE = "double"
    STRING = "string"
    JSON = "json"
    STRUCT = "struct"
    MAP = "map"
    ARRAY = "array"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column, or one level of a nested one."""

    kind: Kind
    nullable: bool = False
    """True if the JSON value may be null. That is not a column's NULL: see `Member`."""
    precision: int = 0
    scale: int = 0
    logical: str | None = None
    """The format, or content encoding, of a string."""
    redact: Redact | None = None
    members: tuple[Member, ...] = ()
    """Of a STRUCT: every named member, in name order. `_n` refers to their positions."""
    nulls: str | None = None
    """Of a STRUCT: the name of its hidden `_n`, if a member needs it."""
    extra: str | None = None
    """Of a STRUCT: the name of its hidden `_x`, if the object is open."""
    element: Column | None = None
    """Of an ARRAY: its items. Of a MAP: its values."""

    @property
    def meaning(self) -> str | None:
        """The format of a text that writes a moment or a number; redacted text writes neither."""
        means = self.kind is Kind.STRING and self.redact is None and self.logical in MEANINGS
        return self.logical if means else None

    @property
    def is_numeric_text(self) -> bool:
        return self.meaning in READ_DECIMALS

    @property
    def item(self) -> Column:
        assert self.element is not None  # noqa: S101 - only asked of arrays and maps
        return self.element


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A named member of a STRUCT.

    A member with `column` None is never stored: it is null whenever present, or never present.
    """

    name: str
    column: Column | None
    required: bool
    nullable: bool

    @property
    def listed(self) -> bool:
        """True if the object's `_n` must distinguish an explicit null from absence."""
        json = self.column is not None and self.column.kind is Kind.JSON
        return self.nullable and not self.required and not json


def columns(shape: Shape) -> Column:
    """Return the layout of whole documents. The root is always a STRUCT."""
    root = _object(shape, 0, root=True)
    while _leaves(root) > LEAVES_MAX and (widest := _widest(root)) is not None:
        root = _fold(root, widest)
    return root


def column_at(layout: Column, location: str, *, declared: bool) -> Column | None:
    """The column of a location; inside of JSON text, JSON text. None if it is never stored.

    Items of lists and members that the schema does not name are shown where the catalog
    `declared` a field for them, and are no columns otherwise.
    """
    column, declared = layout, declared and location != UUID_LOCATION
    for name in pointer.parse(location):
        inner = member_at(column, name)
        if inner is None or (column.kind in (Kind.MAP, Kind.ARRAY) and not declared):
            return None
        if column.kind is Kind.STRUCT and not declared and not _names(column, name):
            return None
        column = inner
    return column


def member_at(column: Column, name: str) -> Column | None:
    """The column of a member or an item; None if there is none, or if it is never stored."""
    match column.kind:
        case Kind.JSON:
            return Column(kind=Kind.JSON, nullable=True)
        case Kind.MAP:
            return column.item
        case Kind.ARRAY:
            return None if pointer.index(name) is None else column.item
        case Kind.STRUCT if _names(column, name):
            return next(m.column for m in column.members if m.name == name)
        case Kind.STRUCT if column.extra is not None:
            return Column(kind=Kind.JSON, nullable=True)
        case _:
            return None


def _names(column: Column, name: str) -> bool:
    return any(member.name == name for member in column.members)


def check_columns(shape: Shape) -> list[Problem]:
    """Return warnings and errors about the layout."""
    whole = _object(shape, 0, root=True)
    if not whole.members and whole.extra is None:
        return [
            Problem(
                code="E-SPARK-TYPE",
                pointer="",
                message="no Spark type fits: documents cannot have any member",
                hint="name the members in properties, or allow additionalProperties",
            )
        ]
    folded: list[Problem] = []
    while (leaves := _leaves(whole)) > LEAVES_MAX:
        widest = _widest(whole)
        where = pointer.render(widest) if widest else "the document"
        folded.append(
            Problem(
                code="W-WIDE",
                pointer="",
                message=f"{leaves} columns exceed the limit of {LEAVES_MAX}"
                + (f": {where} is kept as JSON text" if widest else ""),
                hint="describe fewer members, or leave some to additionalProperties",
            )
        )
        if widest is None:
            break
        whole = _fold(whole, widest)
    return folded


def _column(shape: Shape, depth: int) -> Column:
    """Return the layout of one location below the root."""
    kinds = shape.not_null
    if depth > DEPTH_MAX or len(kinds) != 1:
        return _json(shape)
    (kind,) = kinds
    match kind:
        case "boolean":
            return _scalar(shape, Kind.BOOLEAN)
        case "integer":
            return _integer(shape)
        case "number":
            return _number(shape)
        case "string":
            logical = shape.strings.content_encoding or shape.strings.format
            return dataclasses.replace(_scalar(shape, Kind.STRING), logical=logical)
        case "array":
            if shape.arrays.prefix:
                return _json(shape)
            item = _column(shape.arrays.rest, depth + 1)
            return dataclasses.replace(_scalar(shape, Kind.ARRAY), element=item)
        case _:
            return _object(shape, depth)


def _scalar(shape: Shape, kind: Kind) -> Column:
    return Column(kind=kind, nullable=shape.nullable, redact=shape.redact)


def _json(shape: Shape) -> Column:
    return _scalar(shape, Kind.JSON)


def _integer(shape: Shape) -> Column:
    bounds = [b for b in (shape.numbers.minimum, shape.numbers.maximum) if b is not None]
    if all(LONG_MIN <= bound <= LONG_MAX for bound in bounds):
        return _scalar(shape, Kind.LONG)
    if max(map(_digits, bounds)) > DIGITS_MAX:
        return _json(shape)
    return dataclasses.replace(_scalar(shape, Kind.DECIMAL), precision=DIGITS_MAX)


def _number(shape: Shape) -> Column:
    """DOUBLE, unless `multipleOf` and bounds limit the decimal digits."""
    low, high, step = shape.numbers.minimum, shape.numbers.maximum, shape.numbers.multiple_of
    wanted = shape.extensions.get("x-penstock-type") != "double"
    if wanted and low is not None and high is not None and step is not None and step <= 0.1:
        sign, digits, exponent = Decimal(repr(step)).normalize().as_tuple()
        if not sign and digits == (1,) and isinstance(exponent, int):
            precision = max(_digits(low), _digits(high)) - exponent
            if precision <= DIGITS_MAX:
                decimal = _scalar(shape, Kind.DECIMAL)
                return dataclasses.replace(decimal, precision=precision, scale=-exponent)
    return _scalar(shape, Kind.DOUBLE)


def is_decimal(shape: Shape) -> bool:
    """True if all values are numbers of a fixed number of digits after the point."""
    return shape.not_null == {"number"} and bool(_number(shape).scale)


def inexact_digits(shape: Shape) -> int | None:
    """Return the digits of a DECIMAL with a fraction, if they are more than a JSON number keeps."""
    column = _number(shape)
    return column.precision if is_decimal(shape) and column.precision > FLOAT_DIGITS else None


def _digits(bound: Number) -> int:
    return len(str(abs(int(bound))))


def _object(shape: Shape, depth: int, *, root: bool = False) -> Column:
    objects = shape.objects
    if not objects.properties and not root:
        return _map(shape, depth)
    members = tuple(
        Member(
            name=name,
            column=_column(member.shape, depth + 1) if member.shape.not_null else None,
            required=member.required,
            nullable=member.shape.nullable,
        )
        for name, member in sorted(objects.properties.items())
        if not member.shape.impossible
    )
    names = {member.name for member in members if member.column is not None}
    column = dataclasses.replace(
        _scalar(shape, Kind.STRUCT),
        members=members,
        nulls=_hidden("_n", names) if any(m.listed for m in members) else None,
        extra=None if objects.closed else _hidden("_x", names),
    )
    named = any(m.column for m in members) or column.nulls
    return column if named or root else _json(shape)


def _map(shape: Shape, depth: int) -> Column:
    """An object without named members: a MAP if all its members share one known shape."""
    additional = shape.objects.additional
    if additional is None:
        return _json(shape)  # anything goes
    unnamed = [s for _, s in shape.objects.patterns] + [additional]
    possible = [s for s in unnamed if not s.impossible]
    if len(possible) != 1:
        return _json(shape)
    return dataclasses.replace(_scalar(shape, Kind.MAP), element=_column(possible[0], depth + 1))


def _hidden(name: str, taken: set[str]) -> str:
    """Name a hidden member, adding underscores until no member has that name."""
    while name in taken:
        name = f"_{name}"
    return name


def _leaves(column: Column) -> int:
    if column.kind is Kind.STRUCT:
        return sum(_leaves(m.column) for m in column.members if m.column is not None)
    return _leaves(column.element) if column.element is not None else 1


def _widest(root: Column) -> tuple[str, ...] | None:
    """Return the path to the object with the most members below the root; of equals, the deeper."""
    found = [
        (len(column.members), len(path), path)
        for path, column in walk_columns(root)
        if path and column.kind is Kind.STRUCT
    ]
    return max(found)[2] if found else None


def walk_columns(
    column: Column, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Column]]:
    """Yield a column and every column inside it; the path step of items and map values is `*`."""
    yield path, column
    for member in column.members:
        if member.column is not None:
            yield from walk_columns(member.column, (*path, member.name))
    if column.element is not None:
        yield from walk_columns(column.element, (*path, "*"))


def _fold(column: Column, path: tuple[str, ...]) -> Column:
    """Return the same layout with JSON text at `path`."""
    if not path:
        return Column(kind=Kind.JSON, nullable=column.nullable, redact=column.redact)
    step, *rest = path
    if column.element is not None:
        return dataclasses.replace(column, element=_fold(column.element, tuple(rest)))
    members = tuple(
        dataclasses.replace(m, column=_fold(m.column, tuple(rest)))
        if m.name == step and m.column is not None
        else m
        for m in column.members
    )
    listed = any(m.listed for m in members)
    return dataclasses.replace(column, members=members, nulls=column.nulls if listed else None)


def as_stored(value: Json, column: Column) -> Json:
    """Return the value with its numbers as columns keep them: 1e17 an integer, 2**60 + 1 a double.

    The result equals `value` as JSON Schema compares, unless a double cannot hold an integer
    exactly. This is the definition that storing and reading back is tested against.
    """
    match column.kind:
        case Kind.LONG | Kind.DECIMAL if isinstance(value, float) and value.is_integer():
            return int(value)
        case Kind.DOUBLE if _is_number(value):
            return float(value)
        case Kind.STRUCT if isinstance(value, dict):
            inner = {m.name: m.column for m in column.members if m.column is not None}
            return {n: as_stored(v, inner[n]) if n in inner else v for n, v in value.items()}
        case Kind.ARRAY if isinstance(value, list):
            return [as_stored(item, column.item) for item in value]
        case Kind.MAP if isinstance(value, dict):
            return {name: as_stored(item, column.item) for name, item in value.items()}
        case _:
            return value


def unstorable(value: Json, column: Column) -> tuple[str, str] | None:
    """Return the first location of a valid document that its column cannot hold, and why.

    Only numbers can fail: JSON does not limit them, columns do.
    """
    return _unstorable(value, column, "")


def _unstorable(value: Json, column: Column, at: str) -> tuple[str, str] | None:
    inner: list[tuple[str | int, Json, Column]] = []
    match column.kind:
        case Kind.LONG if _is_number(value) and not LONG_MIN <= value <= LONG_MAX:
            return at, f"{_plain(value)} does not fit 64 bits"
        case Kind.DECIMAL if _is_number(value) and not _fits(value, column):
            return at, _misfit(value, column)
        case Kind.DOUBLE if isinstance(value, int) and abs(value) >= DOUBLE_END:
            return at, f"{_plain(value)} does not fit a double"
        case Kind.STRUCT if isinstance(value, dict):
            inner = [
                (m.name, value[m.name], m.column)
                for m in column.members
                if m.column is not None and m.name in value
            ]
        case Kind.ARRAY if isinstance(value, list):
            inner = [(i, item, column.item) for i, item in enumerate(value)]
        case Kind.MAP if isinstance(value, dict):
            inner = [(name, item, column.item) for name, item in value.items()]
        case _:
            pass
    for token, below, inner_column in inner:
        if (found := _unstorable(below, inner_column, pointer.child(at, token))) is not None:
            return found
    return None


def _misfit(value: float, column: Column) -> str:
    kind = f"DECIMAL({column.precision},{column.scale})"
    if is_beyond_doubles(value, column) and abs(value) < 10 ** (column.precision - column.scale):
        return (
            f"{_plain(value)} may have lost digits, of which a JSON number keeps {FLOAT_DIGITS}: "
            "write numbers of more digits as strings with format: number"
        )
    return f"{_plain(value)} does not fit {kind}"


def _is_number(value: Json) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: float, column: Column) -> bool:
    exact = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    _, digits, exponent = exact.as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - JSON has no NaN
    whole = max(len(digits) + exponent, 0)
    within = -exponent <= column.scale and whole <= column.precision - column.scale
    return within and not (isinstance(value, float) and is_beyond_doubles(value, column))


def is_beyond_doubles(value: float, column: Column) -> bool:
    """True if two numbers of a DECIMAL's scale may be this double: one of them was written."""
    return bool(column.scale) and abs(value) * 10**column.scale > 2**52


def _plain(value: float) -> str:
    return str(value) if abs(value) < 10**40 else f"{Decimal(value):.6e}"
