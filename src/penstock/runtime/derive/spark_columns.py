"""PURE: the columns that a Spark lambda reads and writes, and which types fit where.

`source` has a column for each field of the collection that is read, by the name of the field. Its
top-level members are columns as they are stored, so `*` is the document: fields below the top, the
document as a struct and the time of publishing are there by name only.

A column of the result is a field of the target, or a location: `a/b` writes /a/b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from penstock.journal.rows import META, stamp_names
from penstock.journal.schemas import layout
from penstock.model import pointer
from penstock.model.clock import UNIX_EPOCH
from penstock.model.columns import Column, Kind, Member
from penstock.model.schema import compiled
from penstock.model.shape import Shape, locate
from penstock.model.spec import CollectionSpec
from penstock.native import sql

UUID_LOCATION: Final = "/_meta/uuid"

Word: TypeAlias = Literal[
    "null",
    "boolean",
    "integer",
    "decimal",
    "double",
    "string",
    "json",
    "date",
    "timestamp",
    "binary",
    "struct",
    "array",
    "map",
]

NUMBERS: Final = ("integer", "decimal", "double")


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlType:
    """The type of an expression, as far as it matters here."""

    word: Word
    members: tuple[tuple[str, SqlType | None], ...] | None = None
    """Of a struct; None if they are not known."""
    element: SqlType | None = None
    """Of an array or a map; None if it is not known."""
    numeral: bool = field(default=False, compare=False)
    """Text that writes a number, by its format: Spark would add it up as DOUBLE."""

    def member(self, name: str) -> SqlType | None:
        return dict(self.members or ()).get(name)

    def __str__(self) -> str:
        return {"json": "any value", "binary": "bytes"}.get(self.word, self.word)


NULL: Final = SqlType(word="null")
BOOLEAN: Final = SqlType(word="boolean")
INTEGER: Final = SqlType(word="integer")
DECIMAL: Final = SqlType(word="decimal")
DOUBLE: Final = SqlType(word="double")
STRING: Final = SqlType(word="string")
JSON: Final = SqlType(word="json")
TIMESTAMP: Final = SqlType(word="timestamp")

_SCALARS: Final[Mapping[Kind, SqlType]] = {
    Kind.BOOLEAN: BOOLEAN,
    Kind.LONG: INTEGER,
    Kind.DECIMAL: DECIMAL,
    Kind.DOUBLE: DOUBLE,
    Kind.JSON: JSON,
}


def type_of(column: Column) -> SqlType:
    """The type of a stored column."""
    match column.kind:
        case Kind.STRUCT:
            named = [(m.name, type_of(m.column)) for m in column.members if m.column is not None]
            hidden = [(name, None) for name in (column.nulls, column.extra) if name is not None]
            return SqlType(word="struct", members=(*named, *hidden))
        case Kind.MAP | Kind.ARRAY:
            word: Word = "map" if column.kind is Kind.MAP else "array"
            return SqlType(word=word, element=type_of(column.item))
        case Kind.STRING:
            return SqlType(word="string", numeral=column.is_numeric_text)
        case _:
            return _SCALARS[column.kind]


def read_layout(spec: CollectionSpec) -> Column:
    """The columns of documents as readers of a collection see them."""
    return layout(spec.read_schema.text)


def write_layout(spec: CollectionSpec) -> Column:
    """The columns of documents as they are written to a collection."""
    return layout(spec.write_schema.text)


# --- source ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceColumn:
    """A column of `source`: SQL over the stored columns, and its type."""

    sql: str
    type: SqlType


class SourceColumns:
    """The columns of `source`, by name."""

    def __init__(self, spec: CollectionSpec) -> None:
        self.layout = read_layout(spec)
        self._shape = compiled(spec.read_schema.text).shape
        self._locations = {field.name: field.location for field in spec.fields}
        self._clock = stamp_names(self.layout).clock
        stored = [m.name for m in self.layout.members if m.column is not None]
        hidden = [name for name in (self.layout.nulls, self.layout.extra) if name is not None]
        self.hidden = tuple(hidden)
        self.star = tuple(name for name in (*stored, *hidden) if name != META)
        """The columns that `*` stands for: members of the document, and where others are kept."""
        self.renamed = tuple(
            name
            for name in stored
            if self._locations.get(name, name) not in (name, pointer.child("", name))
        )
        """Members whose name is a field of another location."""

    @property
    def names(self) -> list[str]:
        """Every name that people may write."""
        return sorted(self._locations)

    def __contains__(self, name: object) -> bool:
        return name in self._locations or name in self.star

    def column(self, name: str) -> SourceColumn:
        """Return a column that `source` has."""
        if name not in self._locations:
            return SourceColumn(sql=sql.name(name), type=SqlType(word="map"))
        location = self._locations[name]
        if location == "":
            return self._document()
        if location == UUID_LOCATION:
            return self._published_at()
        return _extracted(pointer.parse(location), location, self.layout, self._shape)

    def type(self, name: str) -> SqlType | None:
        return self.column(name).type if name in self._locations else None

    def _document(self) -> SourceColumn:
        stored = [m.name for m in self.layout.members if m.column is not None]
        parts = ", ".join(sql.name(name) for name in (*stored, *self.hidden))
        return SourceColumn(sql=f"struct({parts})", type=type_of(self.layout))

    def _published_at(self) -> SourceColumn:
        since = f"(shiftright({sql.name(self._clock)}, 4) - {UNIX_EPOCH >> 4}L)"
        return SourceColumn(sql=f"timestamp_micros({since} div 10)", type=TIMESTAMP)


def _extracted(path: tuple[str, ...], location: str, root: Column, shape: Shape) -> SourceColumn:
    """The value at a location, as an expression over the columns of documents."""
    value, column = "", root
    for at, token in enumerate(path):
        match column.kind:
            case Kind.STRUCT:
                member = _member(column, token)
                if member is not None:
                    if member.column is None:
                        return SourceColumn(sql="CAST(NULL AS STRING)", type=NULL)
                    value = f"{value}.{sql.name(token)}" if value else sql.name(token)
                    column = member.column
                elif column.extra is None:
                    return SourceColumn(sql="CAST(NULL AS STRING)", type=NULL)
                else:
                    extra = sql.name(column.extra)
                    held = f"{value}.{extra}" if value else extra
                    value = f"try_element_at({held}, {sql.text(token)})"
                    column = Column(kind=Kind.JSON, nullable=True)
            case Kind.MAP:
                value, column = f"try_element_at({value}, {sql.text(token)})", column.item
            case Kind.ARRAY if (index := pointer.index(token)) is not None:
                value, column = f"try_element_at({value}, {index + 1})", column.item
            case Kind.JSON:
                return _inside_json(value, path[at:], locate(shape, location)[0])
            case _:
                return SourceColumn(sql="CAST(NULL AS STRING)", type=NULL)
    return SourceColumn(sql=value, type=type_of(column))


def _member(column: Column, name: str) -> Member | None:
    return next((m for m in column.members if m.name == name), None)


_VARIANT_TYPES: Final[Mapping[str, tuple[str, SqlType]]] = {
    "boolean": ("boolean", BOOLEAN),
    "integer": ("bigint", INTEGER),
    "number": ("double", DOUBLE),
    "string": ("string", STRING),
}


def _inside_json(value: str, path: tuple[str, ...], shape: Shape) -> SourceColumn:
    """The value below a location that is kept as JSON text, typed if the schema names one type."""
    steps = "".join(
        f"[{token}]" if pointer.index(token) is not None else f'["{token}"]' for token in path
    )
    at = sql.text(f"${steps}")
    only = next(iter(shape.not_null)) if len(shape.not_null) == 1 else ""
    if only in _VARIANT_TYPES:
        name, kind = _VARIANT_TYPES[only]
        return SourceColumn(sql=f"try_variant_get(parse_json({value}), {at}, '{name}')", type=kind)
    whole = f"try_variant_get(parse_json({value}), {at}, 'variant')"
    return SourceColumn(sql=f"to_json({whole})", type=JSON)


# --- target ---


def output_location(name: str, target: CollectionSpec) -> str:
    """Return the location that a column of the result writes."""
    field = target.field(name)
    if field is not None:
        return field.location
    return f"/{name}" if "/" in name else pointer.child("", name)


def target_column(location: str, root: Column) -> Column | None:
    """Return the column at a location of the target; None if nothing but null is stored there."""
    column = root
    for token in pointer.parse(location):
        match column.kind:
            case Kind.STRUCT:
                member = _member(column, token)
                if member is None:
                    return Column(kind=Kind.JSON, nullable=True)
                if member.column is None:
                    return None
                column = member.column
            case Kind.MAP:
                column = column.item
            case _:
                return Column(kind=Kind.JSON, nullable=True)
    return column


_TEXTS: Final[Mapping[str, tuple[Word, ...]]] = {
    "date": ("string", "date"),
    "integer": ("string", "integer", "decimal"),
    "number": ("string", "integer", "decimal", "double"),
    "base64": ("string", "binary"),
}


def fits(found: SqlType | None, column: Column | None) -> bool:
    """False if no value of a type can be stored in a column; True if some can, or nobody knows."""
    if found is None or found.word == "null":
        return True
    if column is None:
        return False
    match column.kind:
        case Kind.JSON:
            return True
        case Kind.BOOLEAN:
            return found.word in ("boolean", "json")
        case Kind.LONG | Kind.DECIMAL | Kind.DOUBLE:
            return found.word in (*NUMBERS, "json")
        case Kind.STRING:
            allowed = _TEXTS.get(column.logical or "", ("string", "date", "timestamp"))
            return found.word in (*allowed, "json")
        case Kind.ARRAY:
            return found.word == "array" and fits(found.element, column.item)
        case Kind.MAP:
            inner = [t for _, t in found.members or ()] if found.word == "struct" else []
            inner += [found.element]
            return found.word in ("map", "struct") and all(fits(t, column.item) for t in inner)
        case Kind.STRUCT:
            return found.word == "struct" and all(
                fits(inner, member.column)
                for name, inner in found.members or ()
                if (member := _member(column, name)) is not None
            )


_SAID: Final[Mapping[Kind, str]] = {
    Kind.BOOLEAN: "boolean",
    Kind.LONG: "integer",
    Kind.DECIMAL: "number",
    Kind.DOUBLE: "number",
    Kind.STRING: "string",
    Kind.STRUCT: "object",
    Kind.MAP: "object",
    Kind.ARRAY: "array",
    Kind.JSON: "any value",
}


def said(column: Column | None) -> str:
    """A column's type, for people."""
    if column is None:
        return "null"
    of = f" ({column.logical})" if column.logical else ""
    return f"{_SAID[column.kind]}{of}"


def cast_hint(column: Column | None) -> str | None:
    """Return what to write for a value of another type."""
    if column is None:
        return None
    if column.kind is Kind.DECIMAL:
        return f"cast(… as decimal({column.precision},{column.scale}))"
    words = {Kind.BOOLEAN: "boolean", Kind.LONG: "bigint", Kind.DOUBLE: "double"}
    texts = {"date": "date", "date-time": "timestamp"}
    if column.kind is Kind.STRING:
        return f"cast(… as {texts.get(column.logical or '', 'string')})"
    return f"cast(… as {words[column.kind]})" if column.kind in words else None
