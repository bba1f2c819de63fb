"""Resolve names while a catalog is built, and build the parts that several kinds of task share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.catalog import reading
from penstock.catalog.connectors import Connectors
from penstock.catalog.diagnostics import did_you_mean
from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.model import pointer as pointers
from penstock.model.columns import Column, Kind, columns, member_at
from penstock.model.routing import SHARDS_MAX
from penstock.model.schema import CompiledSchema
from penstock.model.shape import ANY, Shape, locate
from penstock.model.spec import (
    CollectionSpec,
    Field,
    FieldValues,
    Scalar,
    Selector,
    Shards,
    Source,
)
from penstock.model.violations import one_of_types

KEY_TYPES = ("boolean", "integer", "string")


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A built collection, with what references to it need."""

    spec: CollectionSpec
    shape: Shape
    """Shape of documents as readers see them."""
    writes: CompiledSchema


class Scope:
    """Every name in the catalog, and the collections built so far.

    `defined` holds the definitions by kind and name, including those that could not be built: a
    reference to such a definition is not a second mistake.
    """

    def __init__(
        self,
        sources: Sources,
        defined: Mapping[str, Mapping[str, Node]],
        connectors: Connectors | None = None,
    ) -> None:
        self.sources = sources
        self.defined = defined
        self.connectors = connectors
        self.collections: dict[str, Known] = {}

    def collection(self, node: Node | None) -> Known | None:
        """Return the collection that `node` names."""
        if node is None or not self.refer(node, "collections", "collection"):
            return None
        return self.collections.get(node.text or "")

    def refer(self, node: Node, kind: str, what: str) -> bool:
        """True if `node` names a definition that is not marked for deletion; else report it."""
        if node.text is None:
            return False
        found = self.defined[kind].get(node.text)
        if found is None:
            known = self.defined[kind]
            self.sources.error(
                node,
                "E-REF",
                f'{what} "{node.text}" is not defined',
                hint=did_you_mean(node.text, known, _listing(kind, known)),
            )
            return False
        if reading.flag(found, "delete"):
            self.sources.error(
                node, "E-REF", f'{what} "{node.text}" is marked delete: true', see=found
            )
            return False
        return True


def _listing(kind: str, names: Mapping[str, Node]) -> str:
    return f"{kind}: {', '.join(sorted(names)[:5])}" if names else f"there are no {kind}"


def key_type(shape: Shape, pointer: str) -> str | None:
    """Return the type of a location if keys may have it: exactly one of three, null aside."""
    found, _ = locate(shape, pointer)
    types = found.not_null
    return next(iter(types)) if len(types) == 1 and types <= set(KEY_TYPES) else None


def check_key(
    node: Node, what: str, pointer: str, shape: Shape, sources: Sources, *, must_exist: bool = True
) -> bool:
    """True if a location may be part of a key; else report why. `what` introduces the message."""
    found, exists = locate(shape, pointer)
    if must_exist and not exists:
        absent, hint = _why_absent(shape, pointer)
        sources.error(node, "E-KEY-MISSING", f"{what} may be absent: {absent}", hint=hint)
        return False
    if key_type(shape, pointer) is None:
        types: list[str] = sorted(found.not_null)
        undeclared = found.not_null == ANY.not_null
        described = "of any type" if undeclared else one_of_types(types) if types else "always null"
        sources.error(
            node,
            "E-KEY-TYPE",
            f"{what} is {described}; keys are boolean, integer or string",
            hint="declare its type in the schema" if undeclared else None,
        )
        return False
    if (why := _why_no_column(columns(shape), pointer)) is not None:
        message, hint = why
        sources.error(node, "E-KEY-TYPE", f"{what} {message}", hint=hint)
        return False
    return True


def _why_no_column(column: Column, pointer: str) -> tuple[str, str] | None:
    """Return why a location has no column of its own, by which Spark could tell documents apart."""
    above = ""
    for token in pointers.parse(pointer):
        if column.kind is Kind.ARRAY:
            return f"is an item of the list {above}; keys are members of objects", (
                "have the writer put it into a member of its own"
            )
        inner = member_at(column, token)
        if inner is None or token not in [member.name for member in column.members]:
            where = f" of {above}" if above else ""
            return f"is not named by the schema{where}", f"add {token} to properties{where}"
        column, above = inner, pointers.child(above, token)
    return None


def _why_absent(shape: Shape, pointer: str) -> tuple[str, str | None]:
    """Return the first step of a location that documents may lack, and what to do."""
    above = ""
    for token in pointers.parse(pointer):
        here, _ = locate(shape, above)
        where = f" of {above}" if above else ""
        if here.types != {"object"}:
            return f"{above or 'the document'} is not always an object", None
        if token not in here.properties:
            hint = did_you_mean(token, here.properties, f"add it to properties{where}")
            return f'the schema{where} has no property "{token}"', hint
        if not here.objects.required(token):
            return f'"{token}" is not in required{where}', f"add required: [{token}]{where}"
        above = pointers.child(above, token)
    return "it has no value", None


def build_source(node: Node | None, scope: Scope) -> tuple[Source | None, Known | None]:
    """Build the source of a transform or binding: a name, or `{name, partitions, …}`."""
    if node is None:
        return None, None
    name = node if node.text is not None else node.get("name")
    known = scope.collection(name)
    if name is None or name.text is None:
        return None, known
    not_before, not_after = _moment(node, "notBefore", scope), _moment(node, "notAfter", scope)
    if not_before and not_after and not_before > not_after:
        scope.sources.error(
            node.members["notAfter"], "E-SELECTOR", "notAfter is earlier than notBefore"
        )
    return (
        Source(
            collection=name.text,
            selector=build_selector(node.get("partitions"), known, scope),
            not_before=not_before,
            not_after=not_after,
        ),
        known,
    )


def _moment(node: Node, name: str, scope: Scope) -> str | None:
    member = node.get(name)
    if member is None or member.text is None:
        return None
    read = reading.moment(member)
    if read is None and "-" in member.text and ":" in member.text:
        scope.sources.error(member, "E-TYPE", f"{member.text} is not a valid time")
    return read


def build_selector(node: Node | None, known: Known | None, scope: Scope) -> Selector:
    """Build a partition selector: partition fields, with values of their type."""
    if node is None:
        return Selector()
    return Selector(
        include=_field_values(node.get("include"), known, scope),
        exclude=_field_values(node.get("exclude"), known, scope),
    )


def _field_values(node: Node | None, known: Known | None, scope: Scope) -> tuple[FieldValues, ...]:
    chosen = []
    for name, values in node.members.items() if node else ():
        field = _partition(name, values, known, scope)
        if isinstance(values.value, tuple) and not values.items:
            message = f'no value of partition "{name}" is listed'
            scope.sources.error(values, "E-SELECTOR", message, hint="list some, or leave it out")
        scalars = [v.value for v in values.items if isinstance(v.value, bool | int | str | None)]
        if known and field:
            wanted = key_type(known.shape, field.location)
            for item in values.items:
                if item.value is not None and _type_name(item.value) != wanted:
                    scope.sources.error(
                        item,
                        "E-SELECTOR",
                        f'partition "{name}" is a {wanted}, found {item.describe()}',
                    )
        chosen.append(FieldValues(field=name, values=_distinct(scalars)))
    return tuple(sorted(chosen, key=lambda c: c.field))


def _partition(name: str, at: Node, known: Known | None, scope: Scope) -> Field | None:
    if known is None:
        return None
    partitions = {f.name: f for f in known.spec.partitions}
    if name not in partitions:
        listed = ", ".join(partitions) or "none"
        scope.sources.error(
            at,
            "E-SELECTOR",
            f'"{name}" is not a partition of {known.spec.name}',
            hint=did_you_mean(name, partitions, f"partitions: {listed}"),
        )
    return partitions.get(name)


def _type_name(value: object) -> str:
    return {bool: "boolean", int: "integer", str: "string"}.get(type(value), "other")


def _distinct(values: Sequence[Scalar]) -> tuple[Scalar, ...]:
    """Return each value once. True and 1 differ here, though Python calls them equal."""
    return tuple({(type(v), v): v for v in values}.values())


def build_shards(node: Node | None, scope: Scope, *, max_txn_s: int) -> Shards:
    """Build a task's shard settings; `max_txn_s` is the default of its kind."""
    if node is None:
        return Shards(max_txn_s=max_txn_s)
    shortest = reading.seconds(node, "minTxnDuration", 0)
    longest = reading.seconds(node, "maxTxnDuration", max(max_txn_s, shortest))
    if shortest > longest:
        scope.sources.error(
            node.members["minTxnDuration"],
            "E-TYPE",
            "minTxnDuration is longer than maxTxnDuration",
        )
    return Shards(
        disable=reading.flag(node, "disable"),
        min_txn_s=shortest,
        max_txn_s=longest,
        log_level=reading.word(
            node, "logLevel", ("error", "warn", "info", "debug", "trace"), "info"
        ),
        count=_count(node, scope),
    )


def _count(node: Node, scope: Scope) -> int | None:
    count = reading.whole(node, "count", None)
    if count is not None and count > SHARDS_MAX:
        message = f"a task has between 1 and {SHARDS_MAX} shards"
        scope.sources.error(node.members["count"], "E-TYPE", message)
    return count
