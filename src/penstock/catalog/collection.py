"""Build collections: schemas, keys, fields, partitions, journals."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.catalog import reading
from penstock.catalog.diagnostics import did_you_mean
from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.catalog.schema_bundle import (
    RELAXED,
    WRITE,
    BuiltSchema,
    Schema,
    bundle,
    relaxed,
)
from penstock.catalog.scope import Known, check_key
from penstock.journal.names import SEGMENT_BYTES_MAX, encode_value
from penstock.model import pointer as pointers
from penstock.model.columns import UUID_LOCATION, Column, Kind, column_at, columns, member_at
from penstock.model.infer import infer
from penstock.model.schema import CompiledSchema
from penstock.model.schema_check import check_schema
from penstock.model.shape import Shape, locate
from penstock.model.spec import CollectionSpec, Field, Fragments, Frozen

FIELD_DEPTH_MAX = 16
FIELDS_MAX = 10_000

DOCUMENT_FIELD = "flow_document"
PUBLISHED_FIELD = "flow_published_at"

_SHAPELESS = ("E-SCHEMA", "E-SCHEMA-REF", "E-ROOT", "E-IMPOSSIBLE", "E-SPARK-TYPE")
_MAY_FOLLOW = ("E-ROOT", "E-REDUCE-PARENT")
"""Problems that may be mere consequences of a dangling reference."""


def build_collection(
    name: str, node: Node, sources: Sources, inferred: Schema = None
) -> Known | None:
    """Build a collection without its derivation; None if it has no usable schema.

    `inferred` is the schema of its documents so far, if it is known.
    """
    key = _key(node, sources)
    schemas = _schemas(node, key, sources, inferred)
    if schemas is None:
        return None
    write, read = schemas
    shape = infer(read.value)
    _check_keys(node.get("key"), shape, infer(write.value) if write is not read else shape, sources)
    spec = CollectionSpec(
        name=name,
        key=key,
        write_schema=Frozen(write.value),
        read_schema=Frozen(read.value),
        reads_inferred=read.uses_inferred,
        fields=_fields(node.get("projections"), key, shape, sources),
        fragments=_fragments(node, sources),
    )
    return Known(spec, shape, CompiledSchema(write.value))


def _check_keys(key: Node | None, read: Shape, write: Shape, sources: Sources) -> None:
    seen: set[str] = set()
    for item in key.items if key else ():
        location = item.text
        if location is None or not location.startswith("/") or location in seen:
            continue  # not a pointer, or twice: reported elsewhere
        seen.add(location)
        if check_key(item, f"key {location}", location, read, sources) and write is not read:
            check_key(item, f"key {location} (in writeSchema)", location, write, sources)


def _key(node: Node, sources: Sources) -> tuple[str, ...]:
    key: dict[str, Node] = {}
    key_node = node.get("key")
    for item in key_node.items if key_node else ():
        if item.text is None or not item.text.startswith("/"):
            continue
        if item.text in key:
            sources.error(item, "E-DUP", f"key {item.text} is listed twice", see=key[item.text])
        key[item.text] = item
    return tuple(key)


def _schemas(
    node: Node, key: tuple[str, ...], sources: Sources, inferred: Schema
) -> tuple[BuiltSchema, BuiltSchema] | None:
    """Return the write schema and the read schema, if both are sound."""
    single = node.get("schema")
    write_node, read_node = node.get("writeSchema"), node.get("readSchema")
    if single is not None:
        built = bundle(single, sources)
        return (built, built) if built and _is_sound(built, key, sources) else None
    if write_node is None or read_node is None:
        if write_node is None and read_node is None:
            sources.error(
                node,
                "E-REQUIRED",
                'a collection needs "schema"',
                hint="or both writeSchema and readSchema, if they differ",
                at=node.key_at,
            )
        return None
    write = bundle(write_node, sources)
    if write is None or not _is_sound(write, key, sources):
        return None
    provided = {WRITE: write, RELAXED: relaxed(write, infer(write.value), key)}
    read = bundle(read_node, sources, provided, inferred)
    return (write, read) if read and _is_sound(read, key, sources) else None


def _is_sound(schema: BuiltSchema, key: tuple[str, ...], sources: Sources) -> bool:
    """Report what is wrong with a schema; True if it has a shape to continue with."""
    problems = check_schema(schema.value, key)
    for problem in problems:
        if schema.broken and problem.code in _MAY_FOLLOW:
            continue
        node = schema.node_at(problem.pointer)
        sources.error(node, problem.code, problem.message, hint=problem.hint, at=node.key_at)
    return not schema.broken and not any(p.code in _SHAPELESS for p in problems)


def _fields(
    projections: Node | None, key: tuple[str, ...], shape: Shape, sources: Sources
) -> tuple[Field, ...]:
    """Return every location that the schema names, and the projections of the catalog.

    A projection may have the name that a location has by itself; that one has no name then.
    """
    fields = {
        DOCUMENT_FIELD: Field(name=DOCUMENT_FIELD, location=""),
        PUBLISHED_FIELD: Field(name=PUBLISHED_FIELD, location=UUID_LOCATION),
    }
    for location in _named_locations(shape, "", 0):
        if len(fields) >= FIELDS_MAX:
            break
        field = Field(name=location[1:], location=location)
        fields.setdefault(field.name, field)
    layout = columns(shape)
    hidden: list[tuple[Field, Node]] = []
    for name, node in projections.members.items() if projections else ():
        declared = _projection(name, node, fields, shape, layout, sources)
        if declared is None:
            continue
        if name in fields and fields[name].location != declared.location:
            hidden.append((fields[name], node))
        fields[name] = declared
    _check_hidden(hidden, key, fields, sources)
    _warn_about_case(projections, fields, sources)
    return tuple(sorted(fields.values(), key=lambda f: f.name))


def _named_locations(shape: Shape, at: str, depth: int) -> Iterator[str]:
    if depth == FIELD_DEPTH_MAX:
        return
    for name, member in shape.properties.items():
        location = pointers.child(at, name)
        yield location
        yield from _named_locations(member.shape, location, depth + 1)
    for i, item in enumerate(shape.arrays.prefix):
        location = pointers.child(at, i)
        yield location
        yield from _named_locations(item, location, depth + 1)


def _projection(
    name: str,
    node: Node,
    fields: dict[str, Field],
    shape: Shape,
    layout: Column,
    sources: Sources,
) -> Field | None:
    at = node if node.text is not None else node.get("location")
    location = at.text if at else None
    if at is None or location is None or not location.startswith("/"):
        return None
    known = fields.get(name)
    if known is not None and name in (DOCUMENT_FIELD, PUBLISHED_FIELD):
        names = "the document" if name == DOCUMENT_FIELD else "the time of publication"
        message = f'field "{name}" names {names}; it cannot name {location}'
        sources.error(at, "E-FIELD", message, hint="choose another name")
        return None
    found, _ = locate(shape, location)
    if found.impossible:
        sources.error(at, "E-FIELD", f"no document has {location}: the schema forbids it")
        return None
    if location == UUID_LOCATION:
        message = f"{location} becomes no column: only lambdas can read it"
        sources.error(at, "W-FIELD", message, hint=f"as ${name}, or as ${PUBLISHED_FIELD}")
    elif column_at(layout, location, declared=True) is None:
        hint = "remove the projection, or declare another type in the schema"
        sources.error(at, "E-FIELD", f"{location} is null in all documents", hint=hint)
        return None
    _warn_about_unknown(at, location, layout, sources)
    partition = reading.flag(node, "partition")
    if partition:
        check_key(at, f'partition field "{name}" ({location})', location, shape, sources)
        if len(encode_value(name)) > SEGMENT_BYTES_MAX // 2:
            sources.error(
                at,
                "E-FIELD",
                f'"{name[:40]}…" is too long for a partition: it is part of journal names',
                hint=f"at most {SEGMENT_BYTES_MAX // 2} bytes; letters beyond ASCII count more",
            )
    return Field(name=name, location=location, declared=True, partition=partition)


def _warn_about_unknown(at: Node, location: str, layout: Column, sources: Sources) -> None:
    """Warn of a location that the schema allows, and does not name: it may be a typing mistake."""
    column: Column | None = layout
    above = ""
    for token in pointers.parse(location):
        if column is None or location == UUID_LOCATION:
            return
        names = [member.name for member in column.members]
        if column.kind is Kind.STRUCT and token not in names:
            where = f"the schema of {above}" if above else "the schema"
            message = f'{where} does not name "{token}": its values are kept as JSON text'
            hint = did_you_mean(token, names, "add it to properties, with its type")
            sources.error(at, "W-FIELD", message, hint=hint)
            return
        above = pointers.child(above, token)
        column = member_at(column, token)


def _check_hidden(
    hidden: list[tuple[Field, Node]],
    key: tuple[str, ...],
    fields: dict[str, Field],
    sources: Sources,
) -> None:
    """Report locations that have no field any more, because a projection has their name."""
    named = {field.location for field in fields.values()}
    for field, node in hidden:
        if field.location in named:
            continue
        is_key = field.location in key
        sources.error(
            node,
            "E-FIELD" if is_key else "W-FIELD",
            f"{'key ' if is_key else ''}{field.location} has no field, and becomes no column: "
            f'this projection has its name, "{field.name}"',
            hint=f"give it another name, as in projections: {{{field.name}_: {field.location}}}",
        )


def _warn_about_case(projections: Node | None, fields: dict[str, Field], sources: Sources) -> None:
    folded: dict[str, str] = {}
    for name in sorted(fields):
        other = folded.setdefault(name.casefold(), name)
        node = projections.get(name) or projections.get(other) if projections else None
        if other != name and node is not None:
            sources.error(
                node,
                "W-CASE",
                f'fields "{other}" and "{name}" differ only in case',
                hint="many endpoints treat such columns as the same",
            )


def _fragments(node: Node, sources: Sources) -> Fragments:
    journals = node.get("journals")
    fragments = journals.get("fragments") if journals else None
    if fragments is None:
        return Fragments()
    retention = fragments.get("retention")
    if retention is not None and reading.seconds(fragments, "retention", None) == 0:
        sources.error(
            retention,
            "E-TYPE",
            "a retention of nothing would forget every document",
            hint="leave it out to keep them for ever, or write a time such as 30d",
        )
    codec = (fragments.text_of("compressionCodec") or "").removesuffix("_OFFLOAD_DECOMPRESSION")
    return Fragments(
        codec=next((c for c in ("NONE", "GZIP", "ZSTANDARD", "SNAPPY") if c == codec), None),
        length_bytes=reading.whole(fragments, "length", None),
        retention_s=reading.seconds(fragments, "retention", None),
    )
