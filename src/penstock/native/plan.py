"""The Spark plan that reduces a collection: a pure choice, made from its schema when it is built.

Every location gets the cheapest way that means the same as the reference reducer:

    N1 last       the whole document of the greatest `ord`
    N2 flat       one aggregate per location under an object that merges
    N3 nested     elements of maps, merged arrays and sets, each a row of a first aggregate
    N4 barrier    documents before the last one that starts over are dropped
    N5 extremum   values that are not the smallest (greatest) by their key are masked
    PY fold       the reference reducer itself, in Python

They nest: N3 to N5 prepare rows for N2, and a value under N2 that only Python can reduce takes only
that value there. A choice that needs the whole document in Python says why.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.model import columns, pointer
from penstock.model.columns import Column
from penstock.model.infer import infer
from penstock.model.reduce import Rule, Strategy, acting_rules, fixed_rule, why_not_combined
from penstock.model.schema import CompiledSchema
from penstock.model.shape import ANY, Shape
from penstock.native import sql
from penstock.native.predicate import predicate


class PlanKind(enum.Enum):
    """The plans, by the names that `--explain` prints."""

    LAST = "N1 last"
    FLAT = "N2 flat"
    NESTED = "N3 nested"
    BARRIER = "N4 barrier"
    EXTREMUM = "N5 extremum"
    FOLD = "PY fold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A location reduced as a whole, by one aggregate."""

    at: str
    strategy: Strategy
    column: Column | None
    """None: it is null whenever it is there."""
    ordered: bool = False
    """True if a sum of floats adds in read order, so that it is the same under any partitioning."""

    @property
    def sums_texts(self) -> bool:
        """True if texts that write numbers are added: those of many digits go through Python."""
        text = self.column is not None and self.column.is_numeric_text
        return text and self.strategy is Strategy.SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """An object that merges: a plan per named member; of members without a name the last wins."""

    at: str
    column: Column
    members: Mapping[str, Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """A map or an array whose elements are reduced one by one.

    Elements of a map are known by name, items of an array by `key` (paths into the item), or
    without a key by position.
    """

    at: str
    column: Column
    key: tuple[tuple[str, ...], ...]
    element: Value | Members

    @property
    def known_by(self) -> str:
        """The identity of an element, for people."""
        if self.column.kind is columns.Kind.MAP:
            return "name"
        return "key" if self.key else "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementSet:
    """A set without `intersect`: names are added and removed, added values are reduced."""

    at: str
    column: Column
    element: Value | Members
    removed: Value | Members | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """An object of which only the least or greatest by key count; those of equal key merge."""

    at: str
    greatest: bool
    key: tuple[tuple[str, ...], ...]
    body: Members


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A location that only the reference reducer can reduce."""

    at: str
    why: str
    column: Column
    shape: Shape


Node: TypeAlias = Value | Members | Elements | ElementSet | Extreme | Fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """When a document starts over: as the new start (`replaces`), or as nothing (`deletes`).

    Both are SQL over the columns of documents, all hidden ones included.
    """

    replaces: str
    deletes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPlan:
    """The way documents of one key become one.

    `root` None takes the last document whole. `fold` says why whole documents must go through
    Python, and then neither root nor barrier counts. `apart` says why a partial reduction leaves
    documents as they are: they are reduced in order once the stored one is known.
    """

    schema: CompiledSchema
    key: tuple[str, ...]
    columns: Column
    root: Members | Extreme | None
    barrier: Barrier | None = None
    fold: str | None = None
    apart: str | None = None

    @property
    def kind(self) -> PlanKind:
        """The plan of the document; locations below may have their own."""
        if self.fold is not None:
            return PlanKind.FOLD
        if self.barrier is not None:
            return PlanKind.BARRIER
        if self.root is None:
            return PlanKind.LAST
        if isinstance(self.root, Extreme):
            return PlanKind.EXTREMUM
        return PlanKind.NESTED if self.has_elements else PlanKind.FLAT

    @property
    def has_elements(self) -> bool:
        """True if some container must be taken apart, which takes a second aggregate."""
        return any(isinstance(node, Elements | ElementSet) for node in walk(self.root))

    def explain(self) -> str:
        """The plan of each location, for people."""
        if self.fold is not None:
            lines = [
                f"{PlanKind.FOLD.value}: whole documents go through Python, because {self.fold}"
            ]
        else:
            lines = [f"{self.kind.value}: {_SAID[self.kind]}"]
            lines += [f"  {node.at or '/'}: {_how(node)}" for node in walk(self.root)]
        if self.apart is not None:
            lines.append(f"  documents stay apart until the stored one is known: {self.apart}")
        return "\n".join(lines)


_SAID = {
    PlanKind.LAST: "the last document is taken whole",
    PlanKind.FLAT: "one aggregate per location",
    PlanKind.NESTED: "elements of containers first, then one aggregate per location",
    PlanKind.BARRIER: "documents before the last one that starts over are dropped",
    PlanKind.EXTREMUM: "documents that are not extreme by key are dropped",
}


def walk(node: Node | None) -> Iterator[Node]:
    """The nodes of a plan that reduce something, in document order."""
    match node:
        case None:
            return
        case Members():
            for member in node.members.values():
                yield from walk(member)
        case Extreme():
            yield node
            yield from walk(node.body)
        case _:
            yield node


def _how(node: Node) -> str:
    match node:
        case Value():
            kind = "null" if node.column is None else node.column.kind.value
            return f"{node.strategy.value} of {kind}"
        case Elements():
            return f"{PlanKind.NESTED.value}, elements by {node.known_by}"
        case ElementSet():
            return f"{PlanKind.NESTED.value}, elements added and removed by name"
        case Extreme():
            return (
                f"{PlanKind.EXTREMUM.value}, the {'greatest' if node.greatest else 'least'} by key"
            )
        case Fold():
            return f"{PlanKind.FOLD.value} of this value, because {node.why}"
        case Members():
            return "merge"


class _NeedsFold(Exception):
    """There is no native plan for the document; says why."""


def compile_reduction(schema: CompiledSchema, key: Sequence[str]) -> ReductionPlan:
    """Choose the plan of a collection. Pure: needs no Spark session, and starts none."""
    shape = schema.shape
    layout = columns.columns(shape)
    root: Members | Extreme | None = None
    barrier: Barrier | None = None
    fold: str | None = None
    try:
        if shape.fixed_reduction() == "conditional":
            barrier, root = _barrier(schema.schema, layout)
        else:
            root = _root(shape, layout)
    except _NeedsFold as why:
        fold = str(why)
    return ReductionPlan(
        schema=schema,
        key=tuple(key),
        columns=layout,
        root=root,
        barrier=barrier,
        fold=fold,
        apart=why_not_combined(shape),
    )


def _root(shape: Shape, layout: Column) -> Members | Extreme | None:
    rule = fixed_rule(shape)
    if rule is None or rule.delete:
        raise _NeedsFold("every document deletes")
    match rule.strategy:
        case Strategy.LAST_WRITE_WINS:
            return None
        case Strategy.MERGE:
            return _members(shape, layout, "")
        case Strategy.MINIMIZE | Strategy.MAXIMIZE if rule.key:
            if isinstance(node := _extreme(rule, shape, layout, ""), Extreme):
                return node
            raise _NeedsFold(node.why)
        case _:
            raise _NeedsFold(f"{rule.strategy.value} acts on the whole document")


def _barrier(schema: Mapping[str, Any], layout: Column) -> tuple[Barrier, Members | None]:
    """Split a conditional root into what starts over, and the one way in which the rest merges."""
    replaces: list[str] = []
    deletes: list[str] = []
    merging: list[Members] = []
    for condition, branch in _branches(schema, layout):
        shape = infer(branch)
        rule = fixed_rule(shape)
        if rule is None:
            raise _NeedsFold("conditions on the document are nested")
        if rule.delete:
            deletes.append(condition)
        elif rule.strategy is Strategy.LAST_WRITE_WINS:
            replaces.append(condition)
        elif rule.strategy is Strategy.MERGE:
            merging.append(_members(shape, layout, ""))
        else:
            raise _NeedsFold(f"{rule.strategy.value} acts on whole documents under a condition")
    if any(other != merging[0] for other in merging[1:]):
        raise _NeedsFold("documents merge in several ways")
    root = merging[0] if merging else None
    if replaces and not all(isinstance(node, Value) for node in walk(root)):
        # It is taken as it is, whereas containers that merge are brought into order.
        raise _NeedsFold("a document that replaces others meets containers that merge")
    return Barrier(replaces=sql.any_of(replaces), deletes=sql.any_of(deletes)), root


def _branches(schema: Mapping[str, Any], layout: Column) -> list[tuple[str, dict[str, Any]]]:
    """The cases of a root schema, of which a valid document is in exactly one: when each holds,
    and the schema that then applies."""
    match "if" in schema, "oneOf" in schema:
        case True, False:
            base = {word: schema[word] for word in schema if word not in ("if", "then", "else")}
            test = _condition(schema, schema["if"], layout)
            then, otherwise = schema.get("then", True), schema.get("else", True)
            return [(test, _also(base, then)), (sql.negated(test), _also(base, otherwise))]
        case False, True:
            base = {word: schema[word] for word in schema if word != "oneOf"}
            return [
                (_condition(schema, case, layout), _also(base, case)) for case in schema["oneOf"]
            ]
        case _:
            raise _NeedsFold("what acts on the document depends on it")


def _condition(schema: Mapping[str, Any], branch: Any, layout: Column) -> str:  # noqa: ANN401
    context = {word: schema[word] for word in schema.keys() & _CONTEXT}
    condition = predicate({**context, "allOf": [branch]}, layout)
    if condition is None:
        raise _NeedsFold("a condition on the document cannot be said in SQL")
    return condition


_CONTEXT = {"$schema", "$id", "$defs", "definitions"}
"""Keywords that a branch needs of the schema around it."""


def _also(base: Mapping[str, Any], branch: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**base, "allOf": [*base.get("allOf", []), branch]}


def _node(shape: Shape, column: Column | None, at: str) -> Node:
    """The plan of one location below a merging object."""
    rule = fixed_rule(shape)
    if rule is None:
        raise _NeedsFold(f"what acts at {at} depends on the document")
    if rule.delete:
        raise _NeedsFold(f"{at} is deleted whenever it is there")
    why = _why_not_one_aggregate(rule, column)
    if why is None:
        ordered = shape.extensions.get("x-penstock-ordered") is True
        return Value(at=at, strategy=rule.strategy, column=column, ordered=ordered)
    if column is None:
        raise _NeedsFold(f"{at} can only be null, on which {rule.strategy.value} fails")
    if column.nullable:
        return _fold(f"{rule.strategy.value} may meet null", shape, column, at)
    match rule.strategy, column.kind:
        case Strategy.MERGE, columns.Kind.STRUCT if _unnamed_are_replaced(shape):
            return _members(shape, column, at)
        case Strategy.MERGE, columns.Kind.MAP | columns.Kind.ARRAY:
            return _elements(rule, shape, column, at)
        case Strategy.SET, columns.Kind.STRUCT:
            return _set(shape, column, at)
        case ((Strategy.MINIMIZE | Strategy.MAXIMIZE), columns.Kind.STRUCT) if rule.key:
            return _extreme(rule, shape, column, at)
        case _:
            return _fold(why, shape, column, at)


_SCALARS = (
    columns.Kind.BOOLEAN,
    columns.Kind.LONG,
    columns.Kind.DECIMAL,
    columns.Kind.DOUBLE,
    columns.Kind.STRING,
)
_NUMBERS = (columns.Kind.LONG, columns.Kind.DECIMAL, columns.Kind.DOUBLE)


def _why_not_one_aggregate(rule: Rule, column: Column | None) -> str | None:
    kind = None if column is None else column.kind
    nullable = column is None or column.nullable
    match rule.strategy:
        case Strategy.LAST_WRITE_WINS | Strategy.FIRST_WRITE_WINS:
            return None
        case Strategy.MINIMIZE | Strategy.MAXIMIZE if not rule.key and kind in (None, *_SCALARS):
            return None
        case Strategy.SUM if kind in _NUMBERS and not nullable:
            return None
        case Strategy.SUM if column is not None and column.is_numeric_text and not nullable:
            return None
        case Strategy.APPEND if kind is columns.Kind.ARRAY and not nullable:
            return None
        case _:
            return f"{rule.strategy.value} of {'null' if kind is None else kind.value}"


def _unnamed_are_replaced(shape: Shape) -> bool:
    """True if members without a name, which are stored as text, are taken as they come."""
    objects = shape.objects
    unnamed = [below for _, below in objects.patterns] + [objects.additional or ANY]
    return all(fixed_rule(below) == Rule() for below in unnamed)


def _members(shape: Shape, column: Column, at: str) -> Members:
    if not _unnamed_are_replaced(shape):
        raise _NeedsFold(f"members of {at or 'the document'} without a name have a strategy")
    members = {
        member.name: _node(
            shape.objects.member(member.name), member.column, pointer.child(at, member.name)
        )
        for member in column.members
    }
    return Members(at=at, column=column, members=members)


def _elements(rule: Rule, shape: Shape, column: Column, at: str) -> Node:
    is_map = column.kind is columns.Kind.MAP
    inner = _only_unnamed(shape) if is_map else shape.arrays.rest
    element = _element(inner, column.item, f"{at}/*")
    key = tuple(pointer.parse(part) for part in rule.key)
    if element is None:
        return _fold("its elements need containers or Python themselves", shape, column, at)
    if not is_map and key and not all(_is_ordered(column.item, path) for path in key):
        return _fold("Spark orders the key of items differently", shape, column, at)
    return Elements(at=at, column=column, key=() if is_map else key, element=element)


def _only_unnamed(shape: Shape) -> Shape:
    """The one shape of the members of a map."""
    unnamed = [below for _, below in shape.objects.patterns] + [shape.objects.additional or ANY]
    return next(below for below in unnamed if not below.impossible)


def _element(shape: Shape, column: Column, at: str) -> Value | Members | None:
    """The plan of an element, if it holds no container that would need elements of its own."""
    try:
        node = _node(shape, column, at)
    except _NeedsFold:
        return None
    if isinstance(node, Members) and not all(isinstance(below, Value) for below in walk(node)):
        return None
    if any(isinstance(below, Value) and below.sums_texts for below in walk(node)):
        return None
    return node if isinstance(node, Value | Members) else None


def _set(shape: Shape, column: Column, at: str) -> Node:
    terms = {member.name: member.column for member in column.members}
    if column.extra is not None or not terms.keys() <= {"add", "remove"} or "add" not in terms:
        return _fold("a set may intersect, or hold members it must not", shape, column, at)
    plans: dict[str, Value | Members] = {}
    for name, term in terms.items():
        if term is None or term.nullable or term.kind is not columns.Kind.MAP:
            return _fold("the terms of a set are not maps of one type", shape, column, at)
        inner = _only_unnamed(shape.objects.member(name))
        element = _element(inner, term.item, pointer.child(at, name) + "/*")
        if element is None:
            return _fold("its elements need containers or Python themselves", shape, column, at)
        plans[name] = element
    return ElementSet(at=at, column=column, element=plans["add"], removed=plans.get("remove"))


def _extreme(rule: Rule, shape: Shape, column: Column, at: str) -> Extreme | Fold:
    key = tuple(pointer.parse(part) for part in rule.key)
    if not all(_is_ordered(column, path) for path in key):
        return _fold("Spark orders its key differently", shape, column, at)
    greatest = rule.strategy is Strategy.MAXIMIZE
    if not _unnamed_are_replaced(shape):
        return _fold("members without a name have a strategy", shape, column, at)
    body = _members(shape, column, at)
    if not all(isinstance(node, Value) for node in walk(body)):
        return _fold("what merges on equal keys holds containers", shape, column, at)
    return Extreme(at=at, greatest=greatest, key=key, body=body)


def _is_ordered(column: Column, path: tuple[str, ...]) -> bool:
    """True if the columns at `path` sort as the values do: absent, null, then by value."""
    for name in path:
        member = next((member for member in column.members if member.name == name), None)
        if member is None or member.column is None or member.listed:
            return False
        column = member.column
    return column.kind in _SCALARS


def _fold(why: str, shape: Shape, column: Column, at: str) -> Fold:
    """Python for one location: possible where no condition decides what acts below it."""
    if any(rule is None or rule.delete for rule in acting_rules(shape)):
        raise _NeedsFold(f"what acts at or below {at} deletes, or depends on the document")
    return Fold(at=at, why=why, column=column, shape=shape)
