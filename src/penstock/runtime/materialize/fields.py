"""PURE: which fields of a collection become columns of a target, and how their values get there.

**Selection.** Every location that a schema names is a field. The connector says what it thinks of
each (`Verdict`), the catalog may require and exclude some, and what is left is chosen: keys, then
what either side requires, then what is recommended down to a depth, one field per location. Of
several fields of one location, one that the catalog declares wins over the schema's own.

**Mode.** How a document that is stored and the new ones of a transaction become one:

    REPLACE   the schema takes the last document whole: nothing needs to be known of the stored one
    PUSHDOWN  every column has a reduction that the endpoint can do in its own update
    LOAD      the stored document is looked up, and reduced with the new ones in Spark
    DELTA     the binding asks for the new ones as they are

PUSHDOWN drops the stored document: the columns are all there is. So it is taken only if they show
every location that the schema names, or if the catalog excludes the document itself; and if every
column has *one* value to say nothing, its NULL: not for a location that is optional and may be null
as well, since "absent" keeps what is stored and "null" replaces it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import UserError
from penstock.model import pointer
from penstock.model.columns import Column, Kind, column_at, columns
from penstock.model.reduce import Strategy
from penstock.model.schema import CompiledSchema, compiled
from penstock.model.shape import Shape, locate
from penstock.model.spec import CollectionSpec, Field, FieldSelection
from penstock.native.plan import Members, Node, ReductionPlan, Value, compile_reduction
from penstock.runtime.connector.materialize import Constraint, FieldVerdict, TargetField

DOCUMENT: Final = "flow_document"
"""The field of the whole document."""

_CONTAINERS: Final = frozenset({Kind.STRUCT, Kind.MAP, Kind.ARRAY, Kind.JSON})


class Mode(enum.Enum):
    """The way in which stored documents and new ones become one."""

    REPLACE = "the last document is stored as it is"
    PUSHDOWN = "the endpoint reduces stored and new values"
    LOAD = "stored documents are loaded, reduced and stored"
    DELTA = "documents are stored as they come"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The columns of a target and how they are kept."""

    fields: tuple[TargetField, ...]
    mode: Mode
    because: str
    """Why not a cheaper mode, for people."""


class Incompatible(UserError):
    """A field does not fit the column that its table has."""


def candidates(
    collection: CollectionSpec, schema: CompiledSchema, layout: Column, key: Sequence[str]
) -> tuple[TargetField, ...]:
    """Every field that could be a column; of the stamp, none is stored.

    In the order of preference: the key in its own order, then what the catalog declares, by name.
    """

    def preference(field: Field) -> tuple[int, bool, str]:
        position = key.index(field.location) if field.location in key else len(key)
        return position, not field.declared, field.name

    found = []
    for field in sorted(collection.fields, key=preference):
        column = column_at(layout, field.location, declared=field.declared)
        if column is None:
            continue
        shape, exists = locate(schema.shape, field.location)
        found.append(
            TargetField(
                name=field.name,
                pointer=field.location,
                column=column,
                is_key=field.location in key,
                required=exists and "null" not in shape.types,
                default=_default(shape) if field.location in key else None,
            )
        )
    return tuple(found)


def _default(shape: Shape) -> bool | int | str | None:
    return shape.default if isinstance(shape.default, bool | int | str) else None


def standard_verdict(field: TargetField, *, delta_updates: bool) -> FieldVerdict:
    """Return the verdict of an endpoint with typed columns that has no reason to differ."""
    if field.is_document:
        if delta_updates:
            return FieldVerdict(constraint=Constraint.OPTIONAL, reason="nothing is loaded")
        return FieldVerdict(
            constraint=Constraint.RECOMMENDED, reason="stored documents are loaded from it"
        )
    if field.is_key:
        return FieldVerdict(constraint=Constraint.REQUIRED, reason="it is a part of the key")
    if field.column.kind in _CONTAINERS:
        return FieldVerdict(constraint=Constraint.OPTIONAL, reason="it is stored as JSON")
    return FieldVerdict(constraint=Constraint.RECOMMENDED, reason="it has one type")


# ------------------------------------------------------------------------------------- selection


def select(
    given: Sequence[TargetField],
    verdicts: Mapping[str, FieldVerdict],
    selection: FieldSelection,
    *,
    where: str,
) -> tuple[TargetField, ...]:
    """The fields to store: the key first and in its own order, then by name, the document last.

    `given` is in the order of preference (`candidates`).
    """
    by_name = {field.name: field for field in given}
    required = dict(selection.require)
    for name in (*required, *selection.exclude):
        if name not in by_name:
            raise _refused(name, where, "the collection has no such field", "check its spelling")
    chosen: dict[str, TargetField] = {}
    locations: set[str] = set()
    for field in sorted(given, key=lambda f: (not f.is_key, f.name not in required)):
        verdict = verdicts.get(field.name, standard_verdict(field, delta_updates=False))
        excluded = field.name in selection.exclude
        match verdict.constraint:
            case Constraint.REQUIRED if excluded:
                raise _refused(field.name, where, verdict.reason, "do not exclude it")
            case Constraint.INCOMPATIBLE if field.name in required or field.is_key:
                raise _incompatible(field.name, where, verdict.reason)
            case Constraint.FORBIDDEN if field.name in required or field.is_key:
                raise _refused(
                    field.name,
                    where,
                    f"{verdict.constraint.value}: {verdict.reason}",
                    "change the column, or exclude the field",
                )
            case Constraint.REQUIRED:
                wanted = True
            case Constraint.RECOMMENDED:
                wanted = field.name in required or (
                    not excluded
                    and field.pointer not in locations
                    and _within(field, selection.recommended_depth)
                )
            case Constraint.INCOMPATIBLE if not excluded and _within(
                field, selection.recommended_depth
            ):
                raise _incompatible(field.name, where, verdict.reason)
            case _:
                wanted = field.name in required
        # One field per location, but a key may also be shown under the names it was asked for.
        if wanted and (field.pointer not in locations or field.name in required):
            chosen[field.name] = field
            locations.add(field.pointer)
    _check_folding(chosen, where)
    keys = [field for field in given if field.is_key and field.name in chosen]
    others = [field for field in chosen.values() if not field.is_key]
    return (*keys, *sorted(others, key=lambda f: (f.is_document, f.name)))


def _within(field: TargetField, depth: int | None) -> bool:
    if field.is_document:
        return True
    return depth is None or field.pointer.count("/") <= depth


def _check_folding(chosen: Mapping[str, TargetField], where: str) -> None:
    folded: dict[str, str] = {}
    for name in chosen:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise _refused(
                name, where, f"field {other} would have the same column", "exclude one of them"
            )


def _incompatible(name: str, where: str, why: str) -> Incompatible:
    return Incompatible(
        f"field {name} cannot be stored as asked",
        where=where,
        why=why,
        fix="exclude the field, or raise `backfill`",
    )


def _refused(name: str, where: str, why: str, fix: str) -> UserError:
    return UserError(f"field {name} cannot be stored as asked", where=where, why=why, fix=fix)


def negotiate(
    collection: CollectionSpec,
    key: Sequence[str],
    selection: FieldSelection,
    verdicts: Callable[[Sequence[TargetField]], Mapping[str, FieldVerdict]],
    can_reduce: Callable[[TargetField], bool],
    *,
    delta_updates: bool,
    where: str,
) -> tuple[Selected, ReductionPlan]:
    """Settle the fields of a binding, and how they are kept; raises `UserError`.

    `verdicts` asks the connector for those that differ from the standard's.
    """
    schema = compiled(collection.read_schema.text)
    offered = candidates(collection, schema, columns(schema.shape), key)
    shown = {field.pointer for field in offered}
    if missing := [location for location in key if location not in shown]:
        raise UserError(
            f"no field shows {missing[0]}",
            where=where,
            why="it is a part of the key of the rows",
            fix="give it a name in projections of the collection",
        )
    standard = {f.name: standard_verdict(f, delta_updates=delta_updates) for f in offered}
    chosen = select(offered, {**standard, **verdicts(offered)}, selection, where=where)
    plan = compile_reduction(schema, key)
    required = any(name == DOCUMENT for name, _ in selection.require)
    try:
        selected = choose(
            chosen,
            plan,
            delta_updates=delta_updates,
            document_required=required,
            can_reduce=can_reduce,
        )
    except UserError as error:
        raise UserError(error.what, where=where, why=error.why, fix=error.fix) from None
    return selected, plan


# ------------------------------------------------------------------------------------------ mode


def choose(
    fields: Sequence[TargetField],
    plan: ReductionPlan,
    *,
    delta_updates: bool,
    document_required: bool,
    can_reduce: Callable[[TargetField], bool],
) -> Selected:
    """Choose how the selected fields are kept: the cheapest mode that is right.

    `document_required`: the catalog asks for the document itself, which a push-down cannot keep.
    """
    fields = tuple(fields)
    if delta_updates:
        return Selected(fields=fields, mode=Mode.DELTA, because="the binding asks for it")
    if plan.fold is None and plan.barrier is None and plan.root is None:
        return Selected(
            fields=fields, mode=Mode.REPLACE, because="the schema takes the last document"
        )
    why = _why_not_pushdown(plan)
    if why is None and document_required:
        why = f"{DOCUMENT} is required"
    if why is None and any(field.is_document for field in fields):
        shown = {field.pointer for field in fields if not field.is_document}
        if (lost := _first_hidden(plan.columns, "", shown)) is not None:
            why = f"no column shows {lost}"
    if why is None:
        reduced: list[TargetField] = []
        for field in fields:
            if field.is_document:
                continue
            found = _reduced(field, plan, can_reduce)
            if isinstance(found, str):
                why = f"{field.name}: {found}"
                break
            reduced.append(found)
        else:
            return Selected(
                fields=tuple(reduced), mode=Mode.PUSHDOWN, because="every column can be reduced"
            )
    if not any(field.is_document for field in fields):
        raise UserError(
            f"{DOCUMENT} must be stored",
            why=f"documents are loaded from it, because the endpoint cannot reduce: {why}",
            fix=f"do not exclude {DOCUMENT}, or exclude what stands in the way",
        )
    return Selected(fields=fields, mode=Mode.LOAD, because=why)


def _first_hidden(column: Column, at: str, shown: set[str]) -> str | None:
    """The first location that the schema names and that no column shows."""
    for member in column.members:
        place = pointer.child(at, member.name)
        if member.column is None or place in shown:
            continue
        if member.column.kind is not Kind.STRUCT:
            return place
        if (lost := _first_hidden(member.column, place, shown)) is not None:
            return lost
    return None


def _why_not_pushdown(plan: ReductionPlan) -> str | None:
    if plan.fold is not None:
        return f"whole documents are reduced one by one, because {plan.fold}"
    if plan.apart is not None:
        return f"documents are reduced one after the other, because {plan.apart}"
    if not isinstance(plan.root, Members):
        return "only the extreme documents of a key count"
    return None


def _reduced(
    field: TargetField, plan: ReductionPlan, can_reduce: Callable[[TargetField], bool]
) -> TargetField | str:
    """The field with its reduction, or why the endpoint cannot do it."""
    if field.is_key:
        return field
    node: Node | None = plan.root
    for name in pointer.parse(field.pointer):
        if not isinstance(node, Members):
            return "a container around it is reduced as a whole"
        node = node.members.get(name)
    if not isinstance(node, Value):
        return "it is a container of which each member is reduced"
    nullable = field.column.nullable and field.column.kind is not Kind.JSON
    if nullable and not field.required:
        return "it may be absent, and may be null as well"
    pushed = replace(field, reduction=node.strategy)
    if node.strategy is not Strategy.LAST_WRITE_WINS and field.column.kind in _CONTAINERS:
        return f"{node.strategy.value} of JSON"
    if not can_reduce(pushed):
        return f"{node.strategy.value} of {field.column.kind.value}"
    return pushed
