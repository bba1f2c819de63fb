"""PURE: documents to the parameters of SQLite statements, and rows to documents.

Everything that the schemas and the statement say is decided once, before the first document. What
remains for each value is its type, which JSON and SQLite both know only then.

    null, absent       NULL
    boolean            0 or 1
    integer            INTEGER; beyond 64 bits, the document is refused
    number             REAL
    string             TEXT; INTEGER or REAL by `format: integer` or `number`, refused if that
                       is another number; BLOB by base64
    array, object      TEXT: canonical JSON

Equal documents bind equal values: where the schema allows any number, 2.0 is the integer 2.

    NULL               null, a member like others
    INTEGER            an integer; 0 and 1 are booleans where the target has only booleans
    REAL               a number; "NaN", "Infinity" or "-Infinity" if JSON cannot write it
    either             the text that writes it, where the target has `format: number` or `integer`
    TEXT               a string; the array or object that it spells, unless the target has neither
    BLOB               a string in base64
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from operator import itemgetter
from typing import NoReturn, TypeAlias

from penstock.model import pointer
from penstock.model.clock import DocumentId
from penstock.model.json_order import ABSENT, EXACT_MAX, Absent, Json, canonical_json
from penstock.model.shape import Shape, locate
from penstock.model.spec import Field
from penstock.runtime.derive.engine import Document
from penstock.runtime.derive.sqlite_code import is_whole_document, members
from penstock.runtime.stats import rfc3339

SqliteValue: TypeAlias = int | float | str | bytes | None
Bind: TypeAlias = Callable[[Document], SqliteValue]
BindAll: TypeAlias = Callable[[Document], Sequence[SqliteValue]]
MakeDocument: TypeAlias = Callable[[Sequence[SqliteValue]], Document]

_INTEGERS_END = 2**63
_DIGITS_MAX = len(str(_INTEGERS_END))
_PUBLISHED_AT = ("flow_published_at", "/_meta/uuid")
_OPENS = frozenset("{[ \t\r\n")
_UNCHANGED = frozenset({int, str, type(None)})
"""Types whose values SQLite and JSON have in common."""


class NotConvertible(ValueError):
    """A value that SQLite or JSON cannot hold."""


# --- documents to parameters ---


def binder(field: Field, shape: Shape) -> Bind:
    """Return what takes the parameter of a field from a document of `shape`."""
    if (field.name, field.location) == _PUBLISHED_AT:
        return _published_at
    if not field.location:
        return _whole
    tokens = pointer.parse(field.location)
    convert = _conversion(field, locate(shape, field.location)[0])
    if len(tokens) > 1:
        return lambda document: convert(pointer.get(document, tokens))
    (token,) = tokens
    return lambda document: convert(document.get(token))


def row_binder(fields: Sequence[Field], shape: Shape) -> BindAll:
    """Return what takes the parameters of fields from a document, all at once.

    Most values are parameters as they are, and then are not looked at one by one. So an integer may
    pass here that SQLite cannot hold; `each_binder` says which.
    """
    each = each_binder(fields, shape)
    names = [_unchanged_member(field, shape) for field in fields]
    if len(names) < 2 or None in names:
        return each
    take: Callable[[Document], tuple[Json, ...]] = itemgetter(*names)

    def bind(document: Document) -> Sequence[SqliteValue]:
        try:
            taken = take(document)
        except KeyError:  # a member is absent
            return each(document)
        return taken if _UNCHANGED.issuperset(map(type, taken)) else each(document)  # type: ignore[return-value]

    return bind


def each_binder(fields: Sequence[Field], shape: Shape) -> BindAll:
    """Return what takes the parameters of fields from a document, one by one."""
    binds = [binder(field, shape) for field in fields]
    return lambda document: [bind(document) for bind in binds]


def _unchanged_member(field: Field, shape: Shape) -> str | None:
    """Return the member that a field is, if integers and texts of it are parameters as they are."""
    tokens = pointer.parse(field.location)
    if len(tokens) != 1:
        return None
    found = locate(shape, field.location)[0]
    if found.not_null == {"number"} or _text_conversion(field, found) is not None:
        return None
    return tokens[0]


def _whole(document: Document) -> SqliteValue:
    return canonical_json(document)


def _published_at(document: Document) -> SqliteValue:
    meta = document.get("_meta")
    uuid = meta.get("uuid") if isinstance(meta, dict) else None
    return rfc3339(DocumentId.parse(uuid).clock) if isinstance(uuid, str) else None


def _conversion(field: Field, shape: Shape) -> Callable[[Json | Absent], SqliteValue]:
    text = _text_conversion(field, shape)
    numbers_are_real = shape.not_null == {"number"}

    def convert(value: Json | Absent) -> SqliteValue:
        if isinstance(value, str):
            return value if text is None else text(value)
        if value is None or value is ABSENT:
            return None
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, int):
            return _real(field, value) if numbers_are_real else _integer(field, value)
        if isinstance(value, float):
            return value if numbers_are_real else _number(value)
        return canonical_json(value)

    return convert


def _integer(field: Field, value: int) -> int:
    if -_INTEGERS_END <= value < _INTEGERS_END:
        return value
    raise NotConvertible(
        f"{field.location} is {_short(value)}, and an integer of SQLite has 64 bits"
    )


def _real(field: Field, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise NotConvertible(
            f"{field.location} is {_short(value)}, which is beyond every REAL of SQLite"
        ) from None


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < EXACT_MAX else value


def _short(value: int) -> str:
    return str(value) if value.bit_length() < 400 else f"an integer of {value.bit_length()} bits"


def _text_conversion(field: Field, shape: Shape) -> Callable[[str], SqliteValue] | None:
    if "string" not in shape.types:
        return None
    if shape.strings.content_encoding == "base64":
        return _blob
    if shape.strings.format == "integer":
        return lambda text: _integer_of(field, text)
    if shape.strings.format == "number":
        return lambda text: _real_of(field, text)
    return None


def _blob(text: str) -> SqliteValue:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text


def _integer_of(field: Field, text: str) -> SqliteValue:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return text
    if len(digits.lstrip("0")) > _DIGITS_MAX:
        raise NotConvertible(
            f"{field.location} has {len(digits)} digits, and an integer of SQLite has 64 bits"
        )
    return _integer(field, int(text))


def _real_of(field: Field, text: str) -> SqliteValue:
    """Return a number as REAL, if that is the same number. NaN stays text: it would be NULL."""
    try:
        value = float(text)
    except ValueError:
        return text
    if math.isnan(value):
        return text
    if math.isfinite(value) and Decimal(repr(value)) != Decimal(text):
        raise NotConvertible(
            f"{field.location} is {text[:100]}, and a REAL of SQLite does not keep all digits: "
            "take the text, json_extract($flow_document, …), and add with decimal_add"
        )
    return value


# --- rows to documents ---


def document_maker(columns: Sequence[str], fields: Iterable[Field], target: Shape) -> MakeDocument:
    """Return what makes a document of `target` of a row; `fields` are those of the source."""
    if is_whole_document(columns):
        return _whole_document
    names = members(columns, fields)
    shapes = [target.objects.member(member) for member in names]
    rules = [
        (member, shape.not_null == {"boolean"}, not shape.types.isdisjoint({"array", "object"}))
        for member, shape in zip(names, shapes, strict=True)
    ]
    numerals = frozenset(n for n, shape in zip(names, shapes, strict=True) if shape.is_numeric_text)
    plain = not numerals and not any(is_flag or embeds for _, is_flag, embeds in rules)

    def make(row: Sequence[SqliteValue]) -> Document:
        if plain and _UNCHANGED.issuperset(map(type, row)):
            return dict(zip(names, row))  # type: ignore[arg-type]  # noqa: B905 - as many
        document: Document = {}
        for (member, is_flag, embeds), value in zip(rules, row):  # noqa: B905 - as many, and quicker
            if isinstance(value, str):
                spells = embeds and value[:1] in _OPENS
                document[member] = _embedded(value) if spells else value
            elif member in numerals and isinstance(value, int | float) and math.isfinite(value):
                document[member] = canonical_json(value)
            elif isinstance(value, int):
                document[member] = value == 1 if is_flag and value in (0, 1) else value
            elif isinstance(value, float):
                document[member] = value if math.isfinite(value) else _not_finite(value)
            elif isinstance(value, bytes):
                document[member] = base64.b64encode(value).decode()
            else:
                document[member] = None
        return document

    return make


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _embedded(text: str) -> Json:
    """Return the array or object that a text spells, or the text."""
    try:
        value: Json = _decode(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list | dict) else text


def _whole_document(row: Sequence[SqliteValue]) -> Document:
    (text,) = row
    if not isinstance(text, str):
        found = "NULL" if text is None else f"a {type(text).__name__}"
        raise NotConvertible(f"the column that is the document is {found}, not JSON text")
    try:
        document: Json = _decode(text)
    except (ValueError, RecursionError) as e:
        raise NotConvertible(f"the column that is the document is not JSON: {e}") from None
    if not isinstance(document, dict):
        raise NotConvertible("the column that is the document is JSON, but not an object")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond every double")
    return value


_decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode
