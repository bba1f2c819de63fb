"""PURE: can the documents in the journals be read under a changed collection?

Fragments stay as they were written, so every document admitted by the old write schema must have a
reading under the new read schema. What adds to a schema has one: members, types, wider numbers.
What takes away has none, and is refused before it is applied, with the location and the reason:
a value that no column holds any more, or another key.

Not everything a schema can say is judged. Bounds, formats, enumerations and members that become
required are left to the documents: those that violate them are errors when they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from penstock.model import pointer
from penstock.model.columns import Column, Kind, columns
from penstock.model.schema import compiled
from penstock.model.shape import ANY, JsonType, Shape, union
from penstock.model.spec import CollectionSpec
from penstock.model.violations import Problem

_RESET = "to start over, use a collection of another name"


def incompatible(old: CollectionSpec, new: CollectionSpec) -> list[Problem]:
    """Why journals of `old` cannot go on as journals of `new`; `W-` findings do not prevent it."""
    found: list[Problem] = []
    if old.key != new.key:
        found.append(
            Problem(
                code="E-KEY-CHANGE",
                pointer="",
                message=f"the key was {_listed(old.key)} and is {_listed(new.key)}",
                hint=f"stored documents were routed by the old key; {_RESET}",
            )
        )
    before = {(field.name, field.location) for field in old.partitions}
    after = {(field.name, field.location) for field in new.partitions}
    for name, location in sorted(before ^ after):
        verb = "is no longer" if (name, location) in before else "has become"
        found.append(
            Problem(
                code="E-PARTITION-CHANGE",
                pointer=location,
                message=f"the field {name} {verb} a partition",
                hint=f"journals are named by their partitions; {_RESET}",
            )
        )
    written, read = (compiled(s.text).shape for s in (old.write_schema, new.read_schema))
    found += narrowed(written, read)
    if _reductions(written) != _reductions(read):
        found.append(
            Problem(
                code="W-REDUCE-CHANGED",
                pointer="",
                message="reductions have changed",
                hint="they act from now on; backfill what was made with the old ones",
            )
        )
    return found


def narrowed(written: Shape, read: Shape) -> list[Problem]:
    """Return the locations at which documents of one shape cannot be read as the other."""
    found = list(_types(written, read, ""))
    judged = {problem.pointer for problem in found}
    numbers = _numbers(written, columns(written), columns(read), "")
    return found + [problem for problem in numbers if problem.pointer not in judged]


# ----------------------------------------------------------------------------------------- types


def _types(old: Shape, new: Shape, at: str) -> Iterator[Problem]:
    if old.impossible:
        return
    lost = sorted(kind for kind in old.types if not _admitted(kind, new))
    if lost:
        was, now = (" or ".join(sorted(shape.types)) or "nothing" for shape in (old, new))
        yield Problem(
            code="E-TYPE-CHANGE",
            pointer=at,
            message=f"was {was} and is {now}: stored documents may hold {' or '.join(lost)}",
            hint=f"let the read schema admit both; {_RESET}",
        )
        return
    if "object" in old.types:
        yield from _objects(old, new, at)
    if "array" in old.types:
        length = max(len(old.arrays.prefix), len(new.arrays.prefix))
        for i in range(length):
            yield from _types(old.arrays.item(i), new.arrays.item(i), pointer.child(at, i))
        if old.arrays.items is not None:
            below = pointer.child(at, "*")
            yield from _types(old.arrays.item(length), new.arrays.item(length), below)


def _objects(old: Shape, new: Shape, at: str) -> Iterator[Problem]:
    for name, member in old.properties.items():
        below = pointer.child(at, name)
        wanted = new.objects.member(name)
        if not wanted.impossible:
            yield from _types(member.shape, wanted, below)
        elif not member.shape.impossible:
            yield Problem(
                code="W-DROP",
                pointer=below,
                message="is no longer read: the object has no room for it",
                hint="allow additionalProperties to keep it",
            )
    for name, member in new.properties.items():
        # Where any member was allowed, a new one is judged document by document.
        if name not in old.properties and old.objects.additional is not None:
            yield from _types(old.objects.member(name), member.shape, pointer.child(at, name))
    unnamed = [s for _, s in old.objects.patterns]
    if old.objects.additional is not None:
        unnamed.append(old.objects.additional)
    if unnamed and not new.objects.closed:
        others = [s for _, s in new.objects.patterns] + [new.objects.additional or ANY]
        wider = functools.reduce(union, others)
        yield from _types(functools.reduce(union, unnamed), wider, pointer.child(at, "*"))


def _admitted(kind: JsonType, new: Shape) -> bool:
    return kind in new.types or (kind == "integer" and "number" in new.types)


# --------------------------------------------------------------------------------------- numbers


def _numbers(shape: Shape, old: Column, new: Column, at: str) -> Iterator[Problem]:
    """Numbers whose types agree and whose columns do not: only bounds make such a difference."""
    if shape.impossible:
        return  # no document has one
    match old.kind, new.kind:
        case Kind.STRUCT, Kind.STRUCT:
            wanted = {member.name: member.column for member in new.members}
            for member in old.members:
                column = wanted.get(member.name)
                if member.column is not None and column is not None:
                    inner = shape.objects.member(member.name)
                    below = pointer.child(at, member.name)
                    yield from _numbers(inner, member.column, column, below)
        case Kind.ARRAY, Kind.ARRAY:
            yield from _numbers(shape.arrays.rest, old.item, new.item, pointer.child(at, "*"))
        case Kind.MAP, Kind.MAP:
            unnamed = [s for _, s in shape.objects.patterns] + [shape.objects.additional or ANY]
            inner = functools.reduce(union, unnamed)
            yield from _numbers(inner, old.item, new.item, pointer.child(at, "*"))
        case ((Kind.LONG | Kind.DECIMAL | Kind.DOUBLE | Kind.JSON), (Kind.LONG | Kind.DECIMAL)):
            if not _fits(shape, old, new):
                yield Problem(
                    code="E-NARROWED",
                    pointer=at,
                    message=f"was stored as {_named(old)}, and {_named(new)} cannot hold all of it",
                    hint=f"keep the bounds as wide as they were; {_RESET}",
                )
        case _:
            return


def _fits(shape: Shape, old: Column, new: Column) -> bool:
    """True if every number of the old column has a place in the new one."""
    if old.kind is new.kind is Kind.LONG:
        return True
    if old.kind not in (Kind.LONG, Kind.DECIMAL) or new.kind is Kind.LONG:
        return False
    bounds = [b for b in (shape.numbers.minimum, shape.numbers.maximum) if b is not None]
    stored = _LONG_DIGITS if old.kind is Kind.LONG else old.precision - old.scale
    digits = min(stored, max(len(str(abs(int(b)))) for b in bounds)) if len(bounds) > 1 else stored
    return old.scale <= new.scale and digits <= new.precision - new.scale


_LONG_DIGITS = 19


def _named(column: Column) -> str:
    if column.kind is Kind.DECIMAL:
        return f"DECIMAL({column.precision},{column.scale})"
    return {Kind.LONG: "BIGINT", Kind.DOUBLE: "DOUBLE"}.get(column.kind, "text")


# ---------------------------------------------------------------------------------------- details


def _reductions(shape: Shape, at: str = "") -> dict[str, tuple[object, ...]]:
    """Every reduction by its location."""
    found: dict[str, tuple[object, ...]] = {}
    if shape.reductions:
        found[at] = tuple((r.annotation, r.depth, r.always) for r in shape.reductions)
    below = [(name, member.shape) for name, member in shape.properties.items()]
    below += [(pattern, s) for pattern, s in shape.objects.patterns]
    below += [(str(i), s) for i, s in enumerate(shape.arrays.prefix)]
    below += [("*", s) for s in (shape.objects.additional, shape.arrays.items) if s is not None]
    for name, inner in below:
        found |= _reductions(inner, pointer.child(at, name))
    return found


def _listed(key: tuple[str, ...]) -> str:
    return f"[{', '.join(key)}]"
