"""Documents as their sources have them, made rows: parsed, validated, redacted and laid out.

Two roads, one meaning. The **sure road** takes a whole batch by Arrow's kernels: its strict parser,
and conditions that are sufficient for the schema. A batch that it is not sure of, as a whole, takes
the **careful road**: each document is parsed and judged by the validator, which says what is wrong
with which. So the sure road never refuses, and never lets anything pass that the validator would
not.

Where a schema names `/_meta`, the source's word on each document is put there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.json

from penstock.garbage import gc_paused
from penstock.model.columns import Column, Kind, Member, columns, unstorable
from penstock.model.json_order import Json
from penstock.model.redact import has_redactions, redact
from penstock.model.schema import CompiledSchema, read_documents
from penstock.model.violations import Violation, is_hidden
from penstock.native.arrow import json_texts, to_arrow
from penstock.native.arrow_types import EXTRA_TYPE, NULLS_TYPE, arrow_schema, arrow_type
from penstock.native.plain import PADDED_SCALE, plain_rows, rows_as

pa: Any = pyarrow
pc: Any = pyarrow.compute

META: Final = "_meta"
"""The member in which a source says where a document comes from."""

TEXT_MAX: Final = 16 << 20
"""Bytes of a document's text."""

_KEPT_MAX: Final = 64 << 10
"""Bytes of a refused text that are kept."""

_EXACT_DIGITS: Final = 15
"""Decimal digits that a double gives back as they were."""

_decode: Final = msgspec.json.Decoder().decode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusedText:
    """A document that does not fit its schema."""

    at: int
    """Its position in the batch."""
    text: str
    """As it came, or the beginning of that."""
    violations: tuple[Violation, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch after it was taken in."""

    rows: pyarrow.RecordBatch
    """The valid documents, in order, laid out and redacted."""
    refused: tuple[RefusedText, ...] = ()


class Taker:
    """Takes in the documents of one collection."""

    def __init__(self, schema: CompiledSchema, *, salt: bytes = b"") -> None:
        self.root: Column = columns(schema.shape)
        self._schema = schema
        self._salt = salt
        self._hides = has_redactions(schema.shape)
        self._sure = _Sure.of(schema, self.root)

    @property
    def wants_meta(self) -> bool:
        """True if the schema names `/_meta`."""
        return any(member.name == META for member in self.root.members)

    def take_texts(self, texts: Sequence[bytes], meta: pyarrow.RecordBatch | None = None) -> Taken:
        """Take in documents that are JSON texts; `meta` has the members of `/_meta`, row by row."""
        meta = self._wanted(meta)
        with gc_paused():
            rows = self._sure_texts(texts, meta)
            return Taken(rows=rows) if rows is not None else self._careful(texts, meta)

    def take_columns(
        self, batch: pyarrow.RecordBatch, meta: pyarrow.RecordBatch | None = None
    ) -> Taken:
        """Take in documents whose members are columns.

        NULL is a member that is absent, or null where it must be there and may be null.
        """
        meta = self._wanted(meta)
        with gc_paused():
            if self._sure is not None and not self._hides:
                laid = _laid_out(batch, self.root)
                rows = None if laid is None else self._with_meta(laid, meta)
                if rows is not None and self._sure.holds(rows, nulls=Nulls.FILLED):
                    return Taken(rows=rows)
            texts = [msgspec.json.encode(row) for row in rows_as(batch, self.root)]
            return self._careful(texts, meta)

    def _wanted(self, meta: pyarrow.RecordBatch | None) -> pyarrow.RecordBatch | None:
        """The members of `/_meta` that the schema names; all of them if it names none of them."""
        member = next((m for m in self.root.members if m.name == META), None)
        if meta is None or member is None or member.column is None:
            return None
        named = {below.name for below in member.column.members}
        kept = [name for name in meta.schema.names if name in named]
        return meta.select(kept) if named else meta

    # ------------------------------------------------------------------------------ the sure road

    def _sure_texts(
        self, texts: Sequence[bytes], meta: pyarrow.RecordBatch | None
    ) -> pyarrow.RecordBatch | None:
        sure = self._sure
        parsed_as = None if sure is None else sure.parsed[meta is None]
        if sure is None or parsed_as is None or self._hides or not texts:
            return None
        if _is_any_too_long(texts):
            return None
        joined = b"\n".join(texts)
        parsed = _parsed(texts, joined, parsed_as)
        if parsed is None:
            return None
        nulls = _Nulls.of(joined, self.root)
        if nulls is None:
            return None
        struct = pa.StructArray.from_arrays(parsed.columns, fields=list(parsed.schema))
        stored = _stored_struct(self.root, struct, nulls, apart=META if meta is not None else None)
        if stored is None:
            return None
        batch = pa.RecordBatch.from_struct_array(stored)
        rows = batch if meta is None else self._with_meta(batch, meta)
        judged = Nulls.JUDGED if nulls.are_judged else Nulls.ABSENT
        return rows if rows is not None and sure.holds(rows, nulls=judged) else None

    def _with_meta(
        self, parsed: pyarrow.RecordBatch, meta: pyarrow.RecordBatch | None
    ) -> pyarrow.RecordBatch | None:
        """The rows as they are stored, hidden columns and `/_meta` among them."""
        schema = arrow_schema(self.root)
        arrays = []
        for field in schema:
            if field.name == META and meta is not None:
                member = next(m for m in self.root.members if m.name == META)
                laid = None if member.column is None else _meta_column(meta, member.column)
                if laid is None:
                    return None
                arrays.append(laid)
            elif field.name in parsed.schema.names:
                arrays.append(parsed.column(field.name))
            else:
                arrays.append(pa.nulls(parsed.num_rows, field.type))
        rows: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return rows

    # --------------------------------------------------------------------------- the careful road

    def _careful(self, texts: Sequence[bytes], meta: pyarrow.RecordBatch | None) -> Taken:
        metas = plain_rows(meta) if meta is not None else None
        documents = None if _is_any_too_long(texts) else self._valid(texts, metas)
        if documents is not None:
            try:
                return Taken(rows=self._stored(documents))
            except (ValueError, OverflowError):
                pass  # ArrowInvalid is a ValueError: a number that does not fit its column
        return self._judged(texts, metas)

    def _valid(
        self, texts: Sequence[bytes], metas: Sequence[dict[str, Json]] | None
    ) -> list[Any] | None:
        """All documents, if all are valid."""
        try:
            documents: list[Any] = list(map(_decode, texts))
            if metas is not None:
                for document, meta in zip(documents, metas, strict=True):
                    document[META] = meta
            return documents if all(map(self._schema.is_valid, documents)) else None
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
            return None

    def _judged(self, texts: Sequence[bytes], metas: Sequence[dict[str, Json]] | None) -> Taken:
        """Document by document."""
        documents: list[Any] = []
        refused: list[RefusedText] = []
        for at, text in enumerate(texts):
            document, violations = self._judge(text, None if metas is None else metas[at])
            if violations:
                shown = text[:_KEPT_MAX].decode(errors="replace")
                refused.append(RefusedText(at=at, text=shown, violations=violations))
            else:
                documents.append(document)
        return Taken(rows=self._stored(documents), refused=tuple(refused))

    def _judge(
        self, text: bytes, meta: dict[str, Json] | None
    ) -> tuple[Json, tuple[Violation, ...]]:
        if len(text) > TEXT_MAX:
            return None, _whole(f"is longer than {TEXT_MAX} bytes")
        ((document, violations),) = read_documents(self._schema, (text,))
        if isinstance(document, dict) and meta is not None:
            document = {**document, META: meta}
            violations = self._schema.violations(document)
        if not violations and (misfit := unstorable(document, self.root)) is not None:
            at, why = misfit
            if is_hidden(self._schema.shape, at):
                why = "a number, which is secret, does not fit its column"
            violations = (Violation(pointer=at, schema_pointer="", message=why),)
        return document, violations

    def _stored(self, documents: list[Any]) -> pyarrow.RecordBatch:
        if self._hides:
            shape, salt = self._schema.shape, self._salt
            documents = [redact(document, shape, salt) for document in documents]
        return to_arrow(documents, self.root)


def _is_any_too_long(texts: Sequence[bytes]) -> bool:
    return max(map(len, texts), default=0) > TEXT_MAX


def _whole(message: str) -> tuple[Violation, ...]:
    return (Violation(pointer="", schema_pointer="", message=message),)


# ------------------------------------------------------------------------------ parsing by Arrow


def _parsed(
    texts: Sequence[bytes], joined: bytes, schema: pyarrow.Schema
) -> pyarrow.RecordBatch | None:
    """The members of the texts, if each is one document of these members; null is as absent.

    Every text begins and ends with a brace. Where one ends and the next one begins, inside of a
    document, there would be `}` and then `{`, which no document has: so each text is whole
    documents, and there are as many of them as texts. Arrow also reads `NaN`, which is no JSON,
    and which `_holds` refuses.
    """
    if not all(text[:1] == b"{" and text[-1:] == b"}" for text in texts):
        return None
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(joined),
            read_options=pyarrow.json.ReadOptions(
                use_threads=False, block_size=max(len(joined) + 1, 1 << 10)
            ),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="error"
            ),
        )
        if table.num_rows != len(texts):
            return None
        table.validate(full=True)  # UTF-8, which the parser lets pass
    except (ValueError, pa.ArrowException, OverflowError):
        return None
    combined = table.combine_chunks()
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
        [
            column.chunk(0) if column.num_chunks else pa.nulls(0, column.type)
            for column in combined.columns
        ],
        schema=combined.schema,
    )
    return batch


@dataclasses.dataclass(frozen=True, slots=True)
class _Nulls:
    """Tells nulls from members that are absent, which Arrow's parser does not.

    A member that some documents do not have a value for is null in all of these, or absent from all
    of them: that is seen by counting its name. Where it is neither, nobody is sure.
    """

    text: bytes | None
    """The documents; None if nothing in them is null."""
    names: Mapping[str, int]
    """How often the layout uses a name."""

    @classmethod
    def of(cls, joined: bytes, root: Column) -> _Nulls | None:
        """None if names cannot be counted: they are escaped, or not followed by a colon."""
        if b"null" not in joined:
            return cls(None, {})
        if any(odd in joined for odd in (b"\\u00", b'" ', b'"\t', b'"\r', b'"\n:')):
            return None
        return cls(joined, _names(root))

    @property
    def are_judged(self) -> bool:
        """True if members without a value were told apart, and those that must be there are."""
        return self.text is not None

    def explicit(self, member: Member, missing: int, parents: int) -> bool | None:
        """True if a member is null where it has no value, False if it is absent; None: not sure."""
        if self.text is None:
            return False
        if self.names.get(member.name) != 1 or not member.name.isascii():
            return None
        there = self.text.count(b'"%s":' % member.name.encode())
        if there == parents:
            return True if member.nullable else None
        return False if there == parents - missing and not member.required else None


@functools.cache
def _names(column: Column) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for member in column.members:
        counts[member.name] = counts.get(member.name, 0) + 1
        for name, count in _names(member.column).items() if member.column is not None else ():
            counts[name] = counts.get(name, 0) + count
    if column.element is not None:
        for name, count in _names(column.element).items():
            counts[name] = counts.get(name, 0) + count
    return counts


def _stored_struct(
    column: Column,
    values: Any,  # noqa: ANN401 - an Arrow array
    nulls: _Nulls,
    *,
    apart: str | None = None,
) -> Any | None:  # noqa: ANN401
    """Parsed members as they are stored, with hidden columns; None if nobody is sure of nulls.

    The member `apart` is not among them, and is stored as absent for now.
    """
    parents = len(values) - values.null_count
    listed: list[tuple[int, Any]] = []
    stored: dict[str, Any] = {}
    for at, member in enumerate(column.members):
        if member.column is None or member.name == apart:
            continue
        found = values.field(member.name)
        if member.column.kind is Kind.STRUCT:
            found = _stored_struct(member.column, found, nulls)
            if found is None:
                return None
        missing = found.null_count - values.null_count
        if missing:
            explicit = nulls.explicit(member, missing, parents)
            if explicit is None:
                return None
            if explicit and member.listed:
                listed.append((at, pc.and_(found.is_null(), values.is_valid())))
        stored[member.name] = found
    if column.nulls is not None:
        stored[column.nulls] = _listed_nulls(len(values), listed)
    arrays = [
        stored[field.name] if field.name in stored else pa.nulls(len(values), field.type)
        for field in arrow_schema(column)
    ]
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(arrays, fields=list(arrow_schema(column)), mask=mask)


def _listed_nulls(count: int, listed: Sequence[tuple[int, Any]]) -> Any:  # noqa: ANN401
    """For each object, the positions of its members that are null; NULL if there are none."""
    if not listed:
        return pa.nulls(count, NULLS_TYPE)
    masks = np.stack([mask.to_numpy(zero_copy_only=False) for _, mask in listed])
    positions = np.array([at for at, _ in listed], np.int16)
    lengths = masks.sum(axis=0)
    items = np.broadcast_to(positions[:, None], masks.shape).T[masks.T]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(np.ascontiguousarray(items), pa.int16()),
        type=NULLS_TYPE,
        mask=pa.array(lengths == 0),
    )


# ------------------------------------------------------------------------------- sure conditions

_IGNORED: Final = frozenset(
    [
        "$comment",
        "$id",
        "$schema",
        "airbyte_secret",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "reduce",
        "secret",
        "title",
        "writeOnly",
    ]
)
_DAY: Final = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
_ZONE: Final = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS: Final = {
    "date": rf"^{_DAY}$",
    "date-time": rf"^{_DAY}T{_TIME}{_ZONE}$",
    "uuid": r"^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
    "integer": r"^-?[0-9]+$",
    "number": r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$",
}
"""Texts that are surely of a format; others may be, too."""


class Nulls(enum.Enum):
    """What a NULL of a column stands for."""

    ABSENT = "a member that is not there"
    JUDGED = "whatever it was found to be, and it may be that"
    FILLED = "a member that is not there; or null, where it must be there and may be null"


@dataclasses.dataclass(frozen=True)
class _Sure:
    """Conditions over columns that are sufficient for a schema."""

    schema: Mapping[str, Any]
    root: Column

    parsed: Mapping[bool, pyarrow.Schema | None]
    """The members that Arrow's parser reads, with `/_meta` or without; None if it cannot."""

    @classmethod
    def of(cls, schema: CompiledSchema, root: Column) -> _Sure | None:
        if not _is_plain(schema.schema, root):
            return None
        return cls(schema.schema, root, {meta: _parsed_as(root, meta) for meta in (True, False)})

    def holds(self, rows: pyarrow.RecordBatch, *, nulls: Nulls) -> bool:
        struct = pa.StructArray.from_arrays(rows.columns, names=rows.schema.names)
        return _holds(self.schema, self.root, struct, nulls)


def _parsed_as(root: Column, meta: bool) -> pyarrow.Schema | None:
    members = [member for member in root.members if member.name != META or meta]
    kinds = {member.name: _parsed_type(member.column) for member in members}
    if None in kinds.values():
        return None
    made: pyarrow.Schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    return made


@functools.cache
def _parsed_type(column: Column | None) -> Any:  # noqa: ANN401 - an Arrow type
    """The type under which Arrow's parser reads a column exactly; None if there is none."""
    if column is None:
        return None
    match column.kind:
        case Kind.BOOLEAN | Kind.LONG | Kind.DOUBLE | Kind.STRING:
            return arrow_type(column)
        case Kind.ARRAY if column.item.kind is not Kind.STRUCT:
            item = _parsed_type(column.item)
            return None if item is None else pa.list_(pa.field("element", item))
        case Kind.STRUCT:
            kinds = {member.name: _parsed_type(member.column) for member in column.members}
            if None in kinds.values():
                return None
            return pa.struct([pa.field(name, kind) for name, kind in kinds.items()])
        case _:
            return None


def _is_plain(schema: Any, column: Column | None) -> bool:  # noqa: ANN401 - JSON
    """True if `_holds` can be sure of every keyword of a schema."""
    if schema is True:
        return True
    if not isinstance(schema, Mapping) or column is None or not _has_one_type(schema.get("type")):
        return False
    members = {member.name: member.column for member in column.members}
    for keyword, value in schema.items():
        match keyword, column.kind:
            case "type", _:
                continue
            case name, _ if _says_nothing(name, value):
                continue
            case "properties", Kind.STRUCT:
                if not all(_is_plain(each, members.get(name)) for name, each in value.items()):
                    return False
            case "required", Kind.STRUCT:
                if not set(value) <= set(members):
                    return False
            case "additionalProperties", Kind.STRUCT if isinstance(value, bool):
                continue  # members that have no name are never read here
            case "items", Kind.ARRAY:
                if not _is_plain(value, column.item):
                    return False
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", (
                Kind.LONG | Kind.DOUBLE
            ) if not isinstance(value, bool) and isinstance(value, int | float):
                if abs(value) >= 2**53:
                    return False
            case "minLength" | "maxLength", Kind.STRING:
                continue
            case "enum", Kind.STRING if all(isinstance(each, str) for each in value):
                continue
            case "const", Kind.STRING if isinstance(value, str):
                continue
            case "format", Kind.STRING if value in _FORMATS:
                continue
            case _:
                return False
    return True


def _has_one_type(types: Any) -> bool:  # noqa: ANN401 - JSON
    """True for one type, perhaps beside null."""
    listed = [types] if isinstance(types, str) else types
    return isinstance(listed, list) and len([each for each in listed if each != "null"]) == 1


def _says_nothing(keyword: str, value: Any) -> bool:  # noqa: ANN401 - JSON
    """True if a keyword has no say in what is valid."""
    if keyword in ("then", "else"):
        return isinstance(value, Mapping) and all(_says_nothing(n, v) for n, v in value.items())
    return keyword in _IGNORED or keyword == "if" or keyword.startswith("x-")


def _holds(schema: Any, column: Column, values: Any, nulls: Nulls) -> bool:  # noqa: ANN401
    """True if every value that is there surely fits its schema."""
    if schema is True:
        return True
    match column.kind:
        case Kind.STRUCT:
            return _members_hold(schema, column, values, nulls)
        case Kind.ARRAY:
            items = values.flatten()
            if items.null_count:
                return False
            return _holds(schema.get("items", True), column.item, items, nulls)
        case Kind.STRING:
            return _strings_hold(schema, values)
        case Kind.LONG | Kind.DOUBLE:
            return _numbers_hold(schema, column.kind, values)
        case _:
            return True


def _members_hold(schema: Any, column: Column, values: Any, nulls: Nulls) -> bool:  # noqa: ANN401
    there = values.filter(values.is_valid()) if values.null_count else values
    required = frozenset(schema.get("required", ()))
    for member in column.members:
        below = schema.get("properties", {}).get(member.name, True)
        if member.column is None:
            return False
        found = pc.struct_field(there, member.name)
        # What the source says of a document is put there afterwards.
        missing = found.null_count and (nulls is not Nulls.JUDGED or member.name == META)
        must = member.name in required or (member.required and member.nullable)
        filled = nulls is Nulls.FILLED and member.name != META and _may_be_null(below)
        if missing and must and not filled:
            return False
        if not _holds(below, member.column, found, nulls):
            return False
    return True


def _may_be_null(schema: Any) -> bool:  # noqa: ANN401 - JSON
    """True if a plain schema surely admits null."""
    if not isinstance(schema, Mapping) or {"enum", "const"} & schema.keys():
        return False
    return isinstance(schema.get("type"), list) and "null" in schema["type"]


def _strings_hold(schema: Any, values: Any) -> bool:  # noqa: ANN401
    conditions = []
    if "format" in schema:
        conditions.append(pc.match_substring_regex(values, _FORMATS[schema["format"]]))
    if "enum" in schema:
        conditions.append(pc.is_in(values, pa.array(schema["enum"], pa.utf8())))
    if "const" in schema:
        conditions.append(pc.equal(values, schema["const"]))
    if "minLength" in schema:
        conditions.append(pc.greater_equal(pc.utf8_length(values), schema["minLength"]))
    if "maxLength" in schema:
        conditions.append(pc.less_equal(pc.utf8_length(values), schema["maxLength"]))
    return all(_all_true(values, condition) for condition in conditions)


def _numbers_hold(schema: Any, kind: Kind, values: Any) -> bool:  # noqa: ANN401
    if kind is Kind.DOUBLE:
        if not _all_true(values, pc.is_finite(values)):
            return False
        zeros = values.filter(pc.equal(values, 0.0))
        if len(zeros) and pc.min(pc.divide(1.0, zeros)).as_py() < 0:
            return False  # -0 is an integer, and has no sign then
    bounds = (
        ("minimum", pc.greater_equal),
        ("maximum", pc.less_equal),
        ("exclusiveMinimum", pc.greater),
        ("exclusiveMaximum", pc.less),
    )
    return all(
        _all_true(values, compare(values, pa.scalar(schema[name])))
        for name, compare in bounds
        if name in schema
    )


def _all_true(values: Any, condition: Any) -> bool:  # noqa: ANN401
    """True if a condition is true of every value that is there."""
    found = pc.all(condition if not values.null_count else condition.filter(values.is_valid()))
    return found.as_py() is not False


# ------------------------------------------------------------------------------------- columns


def _meta_column(meta: pyarrow.RecordBatch, column: Column) -> Any | None:  # noqa: ANN401
    """`/_meta` as its column; members that the schema does not name are left out."""
    if column.kind is not Kind.STRUCT or column.nulls is not None:
        return None
    arrays = []
    for field in arrow_schema(column):
        if field.name not in meta.schema.names:
            arrays.append(pa.nulls(meta.num_rows, field.type))
            continue
        member = next((m for m in column.members if m.name == field.name), None)
        if member is None or member.column is None:
            return None
        laid = _laid_column(meta.column(field.name), member.column)
        if laid is None:
            return None
        arrays.append(laid)
    return pa.StructArray.from_arrays(arrays, fields=list(arrow_schema(column)))


def _laid_out(batch: pyarrow.RecordBatch, root: Column) -> pyarrow.RecordBatch | None:
    """Columns as the layout has them; None if a column would change its meaning by that."""
    laid = _laid_members(dict(zip(batch.schema.names, batch.columns, strict=True)), root)
    if laid is None or len(set(batch.schema.names)) < len(batch.schema.names):
        return None
    names = list(laid)
    made: pyarrow.RecordBatch = pa.RecordBatch.from_arrays([laid[name] for name in names], names)
    return made


def _laid_members(found: Mapping[str, Any], column: Column) -> dict[str, Any] | None:
    """The members of an object as its layout has them; hidden columns that are empty are gone."""
    members = {m.name: m.column for m in column.members}
    laid: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name, values in found.items():
        below = members.get(name)
        if name not in members and values.null_count == len(values):
            continue  # absent, whatever it would be called
        if name not in members and name not in (column.extra, column.nulls):
            unknown[name] = values
            continue
        made = None if below is None else _laid_column(values, below)
        if made is None:
            return None
        laid[name] = made
    if unknown:
        extra = None if column.extra is None else _laid_extra(unknown)
        if column.extra is None or extra is None:
            return None
        laid[column.extra] = extra
    return laid


def _laid_extra(unknown: Mapping[str, Any]) -> Any | None:  # noqa: ANN401
    """Columns that the schema does not name as JSON text by name, for each object."""
    names = sorted(unknown)
    texts = [made for name in names if (made := _json_texts(unknown[name])) is not None]
    if len(texts) < len(names):
        return None
    there = np.stack([each.is_valid().to_numpy(zero_copy_only=False) for each in texts]).T
    rows, columns = np.nonzero(there)
    lengths = there.sum(axis=1)
    return pa.MapArray.from_arrays(
        pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32()),
        pa.array(names, pa.utf8()).take(pa.array(columns)),
        pa.concat_arrays(texts).take(pa.array(columns * there.shape[0] + rows)),
        type=EXTRA_TYPE,
        mask=pa.array(lengths == 0),
    )


def _json_texts(values: Any) -> Any | None:  # noqa: ANN401
    """JSON of each value, as `plain` makes it; None if that is not sure."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind, types = values.type, pa.types
    try:
        if types.is_boolean(kind):
            return json_texts(Column(kind=Kind.BOOLEAN), values)
        if types.is_integer(kind):
            return json_texts(Column(kind=Kind.LONG), values.cast(pa.int64()))
        if types.is_floating(kind):
            doubles = values.cast(pa.float64())
            sure = _numbers_hold({}, Kind.DOUBLE, doubles)
            return json_texts(Column(kind=Kind.DOUBLE), doubles) if sure else None
        if types.is_decimal(kind):
            return None  # a number or a text
        text = _laid_text(values, None)
        return None if text is None else json_texts(Column(kind=Kind.STRING), text)
    except (pa.ArrowException, ValueError):
        return None


def _laid_column(values: Any, column: Column) -> Any | None:  # noqa: ANN401
    kind, wanted = values.type, arrow_type(column)
    if pa.types.is_null(kind):
        return pa.nulls(len(values), wanted)
    number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
    try:
        match column.kind:
            case Kind.BOOLEAN:
                return values if pa.types.is_boolean(kind) else None
            case Kind.LONG:
                whole = pa.types.is_decimal(kind) and kind.scale == 0
                return values.cast(wanted) if number or whole else None
            case Kind.DOUBLE:
                if pa.types.is_decimal(kind) and kind.precision <= _EXACT_DIGITS:
                    return values.cast(pa.utf8()).cast(wanted)  # Arrow rounds on the direct way
                return values.cast(wanted) if number else None
            case Kind.DECIMAL:
                fits = pa.types.is_decimal(kind) or pa.types.is_integer(kind)
                return values.cast(wanted) if fits else None
            case Kind.STRING:
                return _laid_text(values, column.logical)
            case Kind.STRUCT if pa.types.is_struct(kind):
                return _laid_struct(values, column)
            case Kind.ARRAY if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                return _laid_list(values, column)
            case _:
                return None
    except (pa.ArrowException, ValueError):
        return None


def _laid_text(values: Any, logical: str | None) -> Any | None:  # noqa: ANN401
    """Values as the text that `plain_as` makes of them."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind, types = values.type, pa.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return values.cast(pa.utf8())
    if types.is_date(kind):
        return values.cast(pa.utf8())
    if types.is_timestamp(kind) and logical != "date":
        return _instants(values)
    if types.is_integer(kind) and logical in ("integer", "number"):
        return values.cast(pa.utf8())
    if types.is_decimal(kind):
        texts = values.cast(pa.utf8())
        if not _all_true(texts, pc.match_substring_regex(texts, r"^[-0-9.]+$")):
            return None  # very small ones have an exponent there
        padded = kind.scale == PADDED_SCALE
        return pc.replace_substring_regex(texts, r"\.?0+$", "") if padded else texts
    return None


def _instants(values: Any) -> Any:  # noqa: ANN401
    """Timestamps in RFC 3339, in UTC, with six digits of a second, or nine, or none."""
    unit = "ns" if values.type.unit == "ns" else "us"
    utc = values.cast(pa.timestamp(unit, values.type.tz)).cast(pa.timestamp(unit))
    texts = pc.strftime(utc, "%Y-%m-%dT%H:%M:%SZ")
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})000Z$", r"\1Z")
    return pc.replace_substring_regex(texts, r"\.0+Z$", "Z")


def _laid_struct(values: Any, column: Column) -> Any | None:  # noqa: ANN401
    names = [values.type.field(at).name for at in range(values.type.num_fields)]
    if len(set(names)) < len(names):
        return None
    laid = _laid_members({name: pc.struct_field(values, name) for name in names}, column)
    if laid is None:
        return None
    fields = list(arrow_schema(column))
    arrays = [laid.get(f.name, pa.nulls(len(values), f.type)) for f in fields]
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


def _laid_list(values: Any, column: Column) -> Any | None:  # noqa: ANN401
    items = _laid_column(values.flatten(), column.item)
    if items is None:
        return None
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    mask = values.is_null() if values.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=arrow_type(column), mask=mask)
