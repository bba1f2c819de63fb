"""Check what materializations fill, as far as that is known without asking an endpoint.

Each active binding is settled as the leader of its task will do it, with the same code: which
fields become columns, and how documents are reduced. What would fail then is reported here, and so
is a projection that would be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.catalog.connectors import Connectors, schemas_of
from penstock.catalog.nodes import Node
from penstock.catalog.scope import Known, Scope, key_type
from penstock.errors import UserError
from penstock.model.columns import UUID_LOCATION
from penstock.model.shape import locate
from penstock.model.spec import CaptureSpec, MaterializationBinding, MaterializationSpec
from penstock.runtime.connector.materialize import (
    Constraint,
    FieldVerdict,
    Materialization,
    TargetField,
)
from penstock.runtime.materialize.fields import Selected, negotiate, standard_verdict


def check_targets(
    tasks: Sequence[MaterializationSpec], scope: Scope, connectors: Connectors
) -> None:
    """Report bindings that cannot be filled, or that fill what another one of the catalog fills."""
    first: dict[tuple[str, ...], tuple[str, Node]] = {}
    for task in tasks:
        bindings = scope.defined["materializations"][task.name].get("bindings")
        if task.shards.disable or bindings is None or len(bindings.items) != len(task.bindings):
            continue
        connector = connectors.materialization(task.endpoint, task.name)
        if connector is None:
            continue
        for node, binding in zip(bindings.items, task.bindings, strict=True):
            resource = node.get("resource")
            if binding.disable or resource is None:
                continue
            if connector.resource_schema.problems(binding.resource.value):
                continue  # reported already
            _check_place(task, resource, connector, first, scope)
            known = scope.collections.get(binding.source.collection)
            if known is not None:
                _Check(node, binding, known, connector, connectors, scope).run()


def check_listeners(tasks: Sequence[CaptureSpec], scope: Scope, connectors: Connectors) -> None:
    """Report captures that need the same thing of this machine for themselves: an address, say."""
    first: dict[str, tuple[str, Node]] = {}
    for task in tasks:
        endpoint = scope.defined["captures"][task.name].get("endpoint")
        schemas = schemas_of("capture", endpoint, connectors)
        if task.shards.disable or endpoint is None or schemas is None:
            continue
        for name, value in schemas.config.exclusive(task.endpoint.config.value):
            other, see = first.setdefault(f"{name}={value}", (task.name, endpoint))
            if other != task.name:
                message = f"{task.name} and {other} both have {name}: {value}"
                hint = "give each another one, or put their bindings into one capture"
                scope.sources.error(endpoint, "E-SHARED", message, hint=hint, see=see)


def _check_place(
    task: MaterializationSpec,
    resource: Node,
    connector: Materialization,
    first: dict[tuple[str, ...], tuple[str, Node]],
    scope: Scope,
) -> None:
    """Report a resource that another binding fills, however either is spelled."""
    try:
        location = connector.location(resource.plain())
    except UserError as refused:  # a limit that no schema can state
        scope.sources.error(resource, "E-CONFIG", refused.what, hint=refused.fix)
        return
    other, see = first.setdefault(location, (task.name, resource))
    if see is resource or (other == task.name and see.plain() == resource.plain()):
        return  # the same text in one task is reported where it is read
    other = "another binding" if other == task.name else other
    scope.sources.error(
        resource,
        "E-SHARED",
        f"{task.name} and {other} fill the same table",
        hint="give each its own table: two tasks in one table count everything twice",
        see=see,
    )


class _Check:
    """One binding, settled without its endpoint."""

    def __init__(
        self,
        node: Node,
        binding: MaterializationBinding,
        known: Known,
        connector: Materialization,
        connectors: Connectors,
        scope: Scope,
    ) -> None:
        self._at = node.get("fields") or node.get("source") or node
        self._binding = binding
        self._known = known
        self._collection = known.spec
        self._connector = connector
        self._connectors = connectors
        self._scope = scope
        self._delta = connector.delta_updates(binding.resource.value)
        self._verdicts: dict[str, FieldVerdict] = {}

    def run(self) -> None:
        group = [self._collection.field(name) for name in self._binding.fields.group_by]
        key = tuple(field.location for field in group if field) or self._collection.key
        selection = self._binding.fields
        shape = self._known.shape
        stored = {f.name for f in self._collection.fields if f.location != UUID_LOCATION}
        chosen = (*(name for name, _ in selection.require), *selection.exclude, *selection.group_by)
        keyed = all(locate(shape, at)[1] and key_type(shape, at) for at in key)
        if not keyed or not stored.issuperset(chosen):
            return  # reported already
        try:
            selected, _ = negotiate(
                self._collection,
                key,
                selection,
                self._asked,
                self._connector.can_reduce,
                delta_updates=self._delta,
                where="",
            )
        except UserError as refused:
            message = f"{refused.what}: {refused.why}" if refused.why else refused.what
            self._scope.sources.error(self._at, "E-FIELD", message, hint=refused.fix)
        else:
            self._report_left_out(selected)

    def _asked(self, fields: Sequence[TargetField]) -> Mapping[str, FieldVerdict]:
        said = self._connectors.verdicts(self._connector, fields, delta_updates=self._delta)
        standard = {f.name: standard_verdict(f, delta_updates=self._delta) for f in fields}
        self._verdicts = {**standard, **said}
        return said

    def _report_left_out(self, selected: Selected) -> None:
        """Report fields that become no column although nobody excluded them."""
        selection = self._binding.fields
        shown = {field.pointer for field in selected.fields}
        for field in self._collection.fields:
            verdict = self._verdicts.get(field.name)
            if verdict is None or field.name in selection.exclude:
                continue
            forbidden = verdict.constraint is Constraint.FORBIDDEN
            if field.location in shown and not (field.declared and forbidden):
                continue
            depth = selection.recommended_depth
            if depth is not None and field.location.count("/") > depth:
                continue
            if forbidden:
                code = "E-FIELD" if field.declared else "W-FIELD"
                hint = f"or leave it out: fields: {{exclude: [{field.name}]}}"
            elif field.declared:
                code, hint = "W-FIELD", f"ask for it: fields: {{require: {{{field.name}: {{}}}}}}"
            else:
                continue
            message = f'field "{field.name}" becomes no column: {verdict.reason}'
            self._scope.sources.error(self._at, code, message, hint=hint)
