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
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow
import pyarrow.compute
import pyarrow.json

from penstock.garbage import gc_paused
from penstock.model.columns import Column, Kind, Member, columns, unstorable
from penstock.model.json_order import Json
from penstock.model.redact import has_redactions, redact
from penstock.model.schema import CompiledSchema, read_documents
from penstock.model.violations import Violation, is_hidden
from penstock.native.arrow import to_arrow
from penstock.native.arrow_types import arrow_schema, arrow_type
from penstock.native.plain import plain_rows

pa: Any = pyarrow
pc: Any = pyarrow.compute

META: Final = "_meta"
"""The member in which a source says where a document comes from."""

TEXT_MAX: Final = 16 << 20
"""Bytes of a document's text."""

_KEPT_MAX: Final = 64 << 10
"""Bytes of a refused text that are kept."""

_decode: Final = msgspec.json.Decoder().decode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
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
    refused: tuple[Refused, ...] = ()


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
        meta = meta if self.wants_meta else None
        with gc_paused():
            rows = self._sure_texts(texts, meta)
            return Taken(rows=rows) if rows is not None else self._careful(texts, meta)

    def take_columns(
        self, batch: pyarrow.RecordBatch, meta: pyarrow.RecordBatch | None = None
    ) -> Taken:
        """Take in documents whose members are columns; NULL is a member that is absent."""
        meta = meta if self.wants_meta else None
        with gc_paused():
            if self._sure is not None and not self._hides:
                laid = _laid_out(batch, self.root)
                rows = None if laid is None else self._with_meta(laid, meta)
                if rows is not None and self._sure.holds(rows):
                    return Taken(rows=rows)
            texts = [msgspec.json.encode(row) for row in plain_rows(batch)]
            return self._careful(texts, meta)

    # ------------------------------------------------------------------------------ the sure road

    def _sure_texts(
        self, texts: Sequence[bytes], meta: pyarrow.RecordBatch | None
    ) -> pyarrow.RecordBatch | None:
        sure = self._sure
        if sure is None or sure.parsed is None or self._hides or not texts:
            return None
        parsed = _parsed(texts, sure.parsed)
        if parsed is None:
            return None
        rows = self._with_meta(parsed, meta)
        return rows if rows is not None and sure.holds(rows) else None

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
        documents = self._valid(texts, metas)
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
        refused: list[Refused] = []
        for at, text in enumerate(texts):
            document, violations = self._judge(text, None if metas is None else metas[at])
            if violations:
                shown = text[:_KEPT_MAX].decode(errors="replace")
                refused.append(Refused(at=at, text=shown, violations=violations))
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


def _whole(message: str) -> tuple[Violation, ...]:
    return (Violation(pointer="", schema_pointer="", message=message),)


# ------------------------------------------------------------------------------ parsing by Arrow


def _parsed(texts: Sequence[bytes], schema: pyarrow.Schema) -> pyarrow.RecordBatch | None:
    """The members of the texts, if each is one document of these members, and none is null.

    Every text begins and ends with a brace. Where one ends and the next one begins, inside of a
    document, there would be `}` and then `{`, which no document has: so each text is whole
    documents, and there are as many of them as texts. Arrow reads null as absent. It also reads
    `NaN`, which is no JSON, and which `_holds` refuses.
    """
    joined = b"\n".join(texts)
    if b"null" in joined or not all(text[:1] == b"{" and text[-1:] == b"}" for text in texts):
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
}
"""Texts that are surely of a format; others may be, too."""


@dataclasses.dataclass(frozen=True)
class _Sure:
    """Conditions over columns that are sufficient for a schema."""

    schema: Mapping[str, Any]
    root: Column
    parsed: pyarrow.Schema | None
    """The members that Arrow's parser reads; None if it cannot read all of them."""

    @classmethod
    def of(cls, schema: CompiledSchema, root: Column) -> _Sure | None:
        if not _is_plain(schema.schema, root):
            return None
        fields = [
            pa.field(member.name, kind)
            for member in root.members
            if member.name != META and (kind := _parsed_type(member.column)) is not None
        ]
        names = {member.name for member in root.members if member.name != META}
        readable = len(fields) == len(names)
        return cls(schema.schema, root, pa.schema(fields) if readable else None)

    def holds(self, rows: pyarrow.RecordBatch) -> bool:
        struct = pa.StructArray.from_arrays(rows.columns, names=rows.schema.names)
        return _holds(self.schema, self.root, struct)


@functools.cache
def _parsed_type(column: Column | None) -> Any:  # noqa: ANN401 - an Arrow type
    """The type under which Arrow's parser reads a column exactly; None if there is none."""
    if column is None:
        return None
    match column.kind:
        case Kind.BOOLEAN | Kind.LONG | Kind.DOUBLE | Kind.STRING:
            return arrow_type(column)
        case Kind.ARRAY:
            item = _parsed_type(column.item)
            return None if item is None else pa.list_(pa.field("element", item))
        case Kind.STRUCT:
            kinds = {member.name: _parsed_type(member.column) for member in column.members}
            if None in kinds.values() or column.nulls is not None or column.extra is not None:
                return None
            return pa.struct(list(arrow_schema(column)))
        case _:
            return None


def _is_plain(schema: Any, column: Column | None) -> bool:  # noqa: ANN401 - JSON
    """True if `_holds` can be sure of every keyword of a schema."""
    if schema is True:
        return True
    if not isinstance(schema, Mapping) or column is None or not isinstance(schema.get("type"), str):
        return False
    members = {member.name: member.column for member in column.members}
    for keyword, value in schema.items():
        match keyword, column.kind:
            case "type", _:
                continue
            case name, _ if name in _IGNORED or name.startswith("x-"):
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


def _holds(schema: Any, column: Column, values: Any) -> bool:  # noqa: ANN401 - JSON, and Arrow
    """True if every value that is there surely fits its schema; NULL is absent."""
    if schema is True:
        return True
    match column.kind:
        case Kind.STRUCT:
            return _members_hold(schema, column, values)
        case Kind.ARRAY:
            items = values.flatten()
            if items.null_count:
                return False
            return _holds(schema.get("items", True), column.item, items)
        case Kind.STRING:
            return _strings_hold(schema, values)
        case Kind.LONG | Kind.DOUBLE:
            return _numbers_hold(schema, column.kind, values)
        case _:
            return True


def _members_hold(schema: Any, column: Column, values: Any) -> bool:  # noqa: ANN401
    there = values.filter(values.is_valid()) if values.null_count else values
    required = frozenset(schema.get("required", ()))
    for member in column.members:
        below = schema.get("properties", {}).get(member.name, True)
        if member.column is None:
            return False
        found = pc.struct_field(there, member.name)
        if found.null_count and (member.name in required or _is_null_listed(member)):
            return False
        if not _holds(below, member.column, found):
            return False
    return True


def _is_null_listed(member: Member) -> bool:
    """A column that is always there and may be null has NULL for null, and not for absent."""
    return member.required and member.nullable


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
    members = {m.name: m.column for m in root.members if m.column is not None}
    if len(set(batch.schema.names)) < len(batch.schema.names):
        return None
    arrays, fields = [], []
    for name in batch.schema.names:
        column = members.get(name)
        laid = None if column is None else _laid_column(batch.column(name), column)
        if laid is None:
            return None
        arrays.append(laid)
        fields.append(pa.field(name, laid.type))
    made: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return made


def _laid_column(values: Any, column: Column) -> Any | None:  # noqa: ANN401
    kind, wanted = values.type, arrow_type(column)
    try:
        match column.kind:
            case Kind.BOOLEAN:
                return values if pa.types.is_boolean(kind) else None
            case Kind.LONG:
                return values.cast(wanted) if pa.types.is_integer(kind) else None
            case Kind.DOUBLE:
                fits = pa.types.is_floating(kind) or pa.types.is_integer(kind)
                return values.cast(wanted) if fits else None
            case Kind.DECIMAL:
                fits = pa.types.is_decimal(kind) or pa.types.is_integer(kind)
                return values.cast(wanted) if fits else None
            case Kind.STRING:
                if pa.types.is_dictionary(kind):
                    values, kind = values.dictionary_decode(), kind.value_type
                text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
                return values.cast(wanted) if text or pa.types.is_date(kind) else None
            case _:
                return None
    except (pa.ArrowException, ValueError):
        return None
