"""A materialization, from what a catalog says of it to what its leader runs.

Here the two sides meet: the catalog's collections, keys and field selections, and what a connector
says of its endpoint. Nothing is changed anywhere yet; every mistake that can be seen is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from penstock.errors import UserError
from penstock.model import spec as specs
from penstock.model.clock import duration
from penstock.model.spec import Catalog, Frozen, MaterializationSpec
from penstock.native.plan import ReductionPlan
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector.materialize import (
    Constraint,
    FieldVerdict,
    Foresees,
    Materialization,
    SinkTask,
    TableChange,
    Target,
    TargetField,
)
from penstock.runtime.control import Control
from penstock.runtime.history import History
from penstock.runtime.materialize.fields import Incompatible, Mode, negotiate
from penstock.runtime.materialize.leader import run_session
from penstock.runtime.materialize.task import KIND, LeaderBinding, LeaderTask
from penstock.runtime.ops import TaskKindName
from penstock.runtime.recovery import Generation, Wanted, split_state_key
from penstock.runtime.session import Ended, World
from penstock.runtime.task_log import LEVELS
from penstock.runtime.triggers import Webhooks
from penstock.shuffle.binding import (
    Binding,
    columns_of,
    materialization_bindings,
    resource_name,
)

_log = logging.getLogger("penstock.runtime")


class TaskDisabled(UserError):
    """A schema change does not fit the endpoint, and the catalog says to leave the task out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTarget:
    """A binding: what is read, how it is reduced, what is stored, and how it gets there."""

    binding: Binding
    target: Target
    plan: ReductionPlan
    mode: Mode
    because: str
    """Why not a cheaper mode."""
    columns: tuple[str, ...] | None
    """Top-level columns of documents that are needed; None is all."""
    wanted: Wanted | None = None
    """What its generation was chosen for; None if the catalog's counter is the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializationTask:
    """A materialization that can be run (`session.RunnableTask`)."""

    sink_task: SinkTask
    """As its connector sees it."""
    leader_task: LeaderTask
    """As its leader's machine sees it."""
    targets: tuple[BoundTarget, ...]
    log_level: int = logging.INFO
    connector: Materialization = field(repr=False)
    webhooks: Webhooks = field(repr=False)
    history: History | None = field(default=None, repr=False)
    """What it was built from, beside the catalog."""
    settle: Callable[[History | None], MaterializationTask] = field(repr=False)
    """Builds it again, from another history. Asks the endpoint, and blocks."""

    @property
    def name(self) -> str:
        return self.sink_task.name

    @property
    def kind(self) -> TaskKindName:
        return KIND

    async def run_session(self, world: World, control: Control) -> Ended:
        return await run_session(self, world, control)

    def resumed(self, bindings: frozenset[int]) -> MaterializationTask:
        """Return the same task, knowing which bindings have stored documents before."""
        return replace(self, sink_task=replace(self.sink_task, resumed=bindings))

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return tuple(target.binding for target in self.targets)

    @property
    def collections(self) -> tuple[str, ...]:
        return tuple(binding.collection.name for binding in self.bindings)

    @property
    def wanted(self) -> dict[int, Wanted]:
        """What generations were chosen for, by binding."""
        return {each.binding.index: each.wanted for each in self.targets if each.wanted is not None}

    @property
    def renamed(self) -> dict[int, str]:
        """The former names of resources, by binding."""
        return {
            each.binding: resource_name(each.renamed_from)
            for each in self.sink_task.targets
            if each.renamed_from is not None
        }

    @property
    def applied(self) -> bytes:
        """The spec that `apply` brings the endpoint to; equal tasks have equal bytes.

        Targets that were applied before and are not the task's now, because their bindings are
        disabled, say, stay as they were: they are compared with when they come back.
        """
        last = None if self.history is None else self.history.last_applied
        if last is None:
            return encode_task(self.sink_task)
        mine = {target.path for target in self.sink_task.targets}
        mine |= {target.renamed_from for target in self.sink_task.targets if target.renamed_from}
        others = tuple(each for each in decode_task(last).targets if each.path not in mine)
        return encode_task(replace(self.sink_task, targets=(*self.sink_task.targets, *others)))

    def decode_applied(self, data: bytes) -> SinkTask:
        """Return the task that was applied before, from its bytes."""
        return decode_task(data)


def build(
    catalog: Catalog,
    spec: MaterializationSpec,
    connect: Callable[[specs.Endpoint, str], Materialization],
    *,
    shards: int | None = None,
    name: str | None = None,
    history: History | None = None,
) -> MaterializationTask:
    """Negotiate the fields of every active binding, and choose how each is kept.

    `connect` makes the connector of an endpoint; the second argument names the task, for errors.
    Asks the endpoint what is there. Blocks. `name` is what the task is called, there and in its
    log, if that is not what the catalog calls it. Without a history, a table that does not fit is
    refused; with it, what the catalog says is done (`onIncompatibleSchemaChange`).
    """
    connector = connect(spec.endpoint, spec.name)

    def settle(history: History | None) -> MaterializationTask:
        return _built(catalog, spec, connector, shards, name, history, settle)

    return settle(history)


def _built(
    catalog: Catalog,
    spec: MaterializationSpec,
    connector: Materialization,
    shards: int | None,
    name: str | None,
    history: History | None,
    settle: Callable[[History | None], MaterializationTask],
) -> MaterializationTask:
    bindings = materialization_bindings(catalog, spec, path=connector.path)
    if not bindings:
        raise UserError(
            f"materialization {spec.name} has nothing to do",
            why="all of its bindings are disabled, or it has none",
            fix="add a binding, or enable one",
        )
    settled = (_settled(spec, binding, connector, history) for binding in bindings)
    targets = tuple(target for target in settled if target is not None)
    bindings = tuple(target.binding for target in targets)
    if not targets:
        raise TaskDisabled(
            f"{spec.name} is not run: none of its tables fits",
            why="onIncompatibleSchemaChange: disableBinding",
            fix="raise `backfill` of the bindings, or take the schema change back",
        )
    _check_locations(spec, targets, connector)
    webhooks = Webhooks(spec.name, spec.triggers.hooks if spec.triggers else ())
    return MaterializationTask(
        sink_task=SinkTask(
            name=name or spec.name,
            config=spec.endpoint.config,
            targets=tuple(target.target for target in targets),
            renamed_from=spec.renamed_from,
        ),
        leader_task=LeaderTask(
            name=name or spec.name,
            build=specs.fingerprint(spec)[:16],
            image=spec.endpoint.image or "",
            bindings=_leader_bindings(spec, bindings),
            shards=shards or spec.shards.count or 1,
            policy=ClosePolicy(
                open_age=Band(
                    min=duration(spec.shards.min_txn_s), max=duration(spec.shards.max_txn_s)
                )
            ),
            pattern=connector.pattern,
            flush_barrier=connector.flush_barrier,
            has_triggers=bool(webhooks),
        ),
        targets=targets,
        log_level=LEVELS[spec.shards.log_level],
        connector=connector,
        webhooks=webhooks,
        history=history,
        settle=settle,
    )


def _leader_bindings(
    spec: MaterializationSpec, bindings: Sequence[Binding]
) -> tuple[LeaderBinding, ...]:
    """Return bindings by index: disabled ones have a place, and nothing is reported of them."""
    active = {binding.index: binding.state_key for binding in bindings}
    return tuple(
        LeaderBinding(collection=given.source.collection, state_key=active.get(index, ""))
        for index, given in enumerate(spec.bindings)
    )


# ------------------------------------------------------------------------------ schema changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What running a binding will do to its table, because the catalog has changed."""

    binding: int
    table: str
    changes: tuple[TableChange, ...]
    refilled: bool
    """It is filled again anyway: its `backfill` was raised, or somebody has asked for it."""
    backfill: int
    """The counter that fills the table again."""
    on_incompatible: specs.OnIncompatible

    @property
    def misfits(self) -> tuple[TableChange, ...]:
        """The changes that the table cannot follow as it is."""
        return () if self.refilled else tuple(each for each in self.changes if each.rebuild)


def outlooks(
    catalog: Catalog, spec: MaterializationSpec, connector: Materialization, history: History
) -> list[Outlook]:
    """Return what changes for tables that were filled before. Asks nothing of the endpoint."""
    if not isinstance(connector, Foresees):
        return []
    offline = connector.offline()
    found = []
    for binding in materialization_bindings(catalog, spec, path=connector.path):
        known, was = _past(spec, binding, connector, history)
        if known is None or was is None:
            continue
        wanted = _wanted(spec, binding, history)
        generation = known.next(backfill=wanted.backfill, request=wanted.request)
        target = _bound(spec, binding.at_generation(generation), offline, history).target
        found.append(
            Outlook(
                binding=binding.index,
                table=".".join(target.path),
                changes=tuple(connector.foresee(was, target)),
                refilled=generation > split_state_key(was.state_key)[1],
                backfill=max(known.seen, wanted.backfill) + 1,
                on_incompatible=spec.bindings[binding.index].on_incompatible,
            )
        )
    return found


def _wanted(spec: MaterializationSpec, binding: Binding, history: History) -> Wanted:
    resource, _ = split_state_key(binding.state_key)
    request = history.refills.requests.get(resource, 0)
    return Wanted(backfill=spec.bindings[binding.index].backfill, request=request)


def _past(
    spec: MaterializationSpec, binding: Binding, connector: Materialization, history: History
) -> tuple[Generation | None, Target | None]:
    """Return what is known of a binding, under its former name if it has a new one."""
    given = spec.bindings[binding.index]
    paths = [connector.path(given.resource.value)]
    if given.renamed_from is not None:
        paths.append(connector.path(given.renamed_from.value))
    last = None if history.last_applied is None else decode_task(history.last_applied)
    applied = {} if last is None else {tuple(each.path): each for each in last.targets}
    known = (history.generations.get(resource_name(path)) for path in paths)
    was = (applied.get(tuple(path)) for path in paths)
    return next(filter(None, known), None), next(filter(None, was), None)


def _settled(
    spec: MaterializationSpec,
    binding: Binding,
    connector: Materialization,
    history: History | None,
) -> BoundTarget | None:
    """Bind a target under the generation that its history asks for; None if it is left out."""
    if history is None:
        return _bound(spec, binding, connector)
    known, was = _past(spec, binding, connector, history)
    wanted = _wanted(spec, binding, history)
    if known is None:
        return replace(_bound(spec, binding, connector, history), wanted=wanted)
    generation = known.next(backfill=wanted.backfill, request=wanted.request)
    try:
        bound = _bound(spec, binding.at_generation(generation), connector, history)
        misfits = _misfits(connector, was, bound.target)
    except Incompatible as error:
        # A table that fits no better under another generation was not made by this task.
        anew = _anew(spec, binding.at_generation(generation + 1), connector, history)
        if anew is None:
            raise
        bound, misfits = anew, error.why or error.what
    if not misfits:
        return replace(bound, wanted=wanted)
    table = ".".join(bound.target.path)
    where = f"materialization {spec.name}, binding {binding.index} ({table})"
    fix = refill_fix(binding.index, table, max(known.seen, wanted.backfill) + 1)
    match spec.bindings[binding.index].on_incompatible:
        case "abort":
            raise UserError(
                f"table {table} does not fit: {misfits}",
                where=where,
                why="onIncompatibleSchemaChange: abort",
                fix=fix,
            )
        case "disableTask":
            raise TaskDisabled(
                f"{spec.name} is not run: table {table} does not fit: {misfits}",
                where=where,
                why="onIncompatibleSchemaChange: disableTask",
                fix=fix,
            )
        case "disableBinding":
            _log.warning(
                "%s: binding %d is left out: table %s does not fit: %s "
                "(onIncompatibleSchemaChange: disableBinding); %s",
                spec.name,
                binding.index,
                table,
                misfits,
                fix,
            )
            return None
        case "backfill":
            _log.info("%s: rebuilding %s: %s", spec.name, table, misfits)
            anew = _bound(spec, binding.at_generation(generation + 1), connector, history)
            return replace(anew, wanted=wanted)


def refill_fix(binding: int, table: str, backfill: int) -> str:
    """Return the ways out of a change that a table cannot follow, for people."""
    return (
        f"set backfill: {backfill} on binding {binding}; this rebuilds {table}; "
        "or take the change back"
    )


def _anew(
    spec: MaterializationSpec, binding: Binding, connector: Materialization, history: History
) -> BoundTarget | None:
    try:
        return _bound(spec, binding, connector, history)
    except Incompatible:
        return None


def _misfits(connector: Materialization, was: Target | None, target: Target) -> str:
    """Return the changes that a table cannot follow, if it was applied as this generation's."""
    if was is None or not isinstance(connector, Foresees):
        return ""
    if split_state_key(was.state_key)[1] != split_state_key(target.state_key)[1]:
        return ""
    found = [each for each in connector.foresee(was, target) if each.rebuild]
    return "; ".join(described(each) for each in found)


def described(change: TableChange) -> str:
    """Return a change as a sentence about its column."""
    return change.says if change.column is None else f"column {change.column}: {change.says}"


# ------------------------------------------------------------------------------------- targets


def _bound(
    spec: MaterializationSpec,
    binding: Binding,
    connector: Materialization,
    history: History | None = None,
) -> BoundTarget:
    given = spec.bindings[binding.index]
    where = f"materialization {spec.name}, binding {binding.index} ({given.source.collection})"
    resource = given.resource.value
    path = connector.path(resource)
    delta = connector.delta_updates(resource)
    was = None if history is None else _past(spec, binding, connector, history)[1]

    def verdicts(fields: Sequence[TargetField]) -> Mapping[str, FieldVerdict]:
        found = connector.validate(path, fields, delta_updates=delta, state_key=binding.state_key)
        return found if was is None else _without_renamed(found, fields, was)

    selected, plan = negotiate(
        binding.collection,
        binding.key,
        given.fields,
        verdicts,
        connector.can_reduce,
        delta_updates=delta,
        where=where,
    )
    stored = selected.fields
    needed = None if selected.mode is not Mode.PUSHDOWN else [f.pointer for f in stored]
    return BoundTarget(
        binding=binding,
        target=Target(
            binding=binding.index,
            state_key=binding.state_key,
            collection=binding.collection.name,
            path=path,
            resource=given.resource,
            fields=stored,
            delta_updates=delta,
            pushdown=selected.mode is Mode.PUSHDOWN,
            takeover=given.takeover
            or (history is not None and resource_name(path) in history.refills.takeovers),
            renamed_from=None
            if given.renamed_from is None
            else tuple(connector.path(given.renamed_from.value)),
        ),
        plan=plan,
        mode=selected.mode,
        because=selected.because,
        columns=None if needed is None else columns_of(binding.collection, needed),
    )


def _without_renamed(
    found: Mapping[str, FieldVerdict], fields: Sequence[TargetField], was: Target
) -> dict[str, FieldVerdict]:
    """Drop objections to another name of a location whose column the task has filled.

    An endpoint would rather keep the column that it has; but this one is renamed with its values.
    """
    names = {field.name for field in was.fields}
    shown = {field.pointer for field in was.fields}
    renamed = {f.name for f in fields if f.name not in names and f.pointer in shown}
    return {
        name: verdict
        for name, verdict in found.items()
        if name not in renamed or verdict.constraint is not Constraint.OPTIONAL
    }


def _check_locations(
    spec: MaterializationSpec, targets: Sequence[BoundTarget], connector: Materialization
) -> None:
    first: dict[tuple[str, ...], int] = {}
    for each in targets:
        location = connector.location(each.target.resource.value)
        other = first.setdefault(location, each.binding.index)
        if other != each.binding.index:
            raise UserError(
                f"bindings {other} and {each.binding.index} store to the same place",
                where=f"materialization {spec.name}: {'.'.join(each.target.path)}",
                fix="give each binding a table of its own",
            )


# ------------------------------------------------------------------------------ applied, as bytes

_encoder = msgspec.json.Encoder(order="deterministic", enc_hook=lambda frozen: frozen.value)
_decoder = msgspec.json.Decoder(SinkTask, dec_hook=lambda kind, value: kind(value))
_NO_CONFIG = Frozen({})


def encode_task(task: SinkTask) -> bytes:
    """Encode a task to be compared and kept, without its configuration and progress."""
    return _encoder.encode(replace(task, config=_NO_CONFIG, resumed=frozenset()))


def decode_task(data: bytes) -> SinkTask:
    """Decode what `encode_task` wrote."""
    return _decoder.decode(data)
