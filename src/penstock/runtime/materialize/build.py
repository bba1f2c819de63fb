"""A materialization, from what a catalog says of it to what its leader runs.

Here the two sides meet: the catalog's collections, keys and field selections, and what a connector
says of its endpoint. Nothing is changed anywhere yet; every mistake that can be seen is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from penstock.errors import UserError
from penstock.model import spec as specs
from penstock.model.clock import duration
from penstock.model.spec import Catalog, Frozen, MaterializationSpec
from penstock.native.plan import ReductionPlan
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector.materialize import Materialization, SinkTask, Target
from penstock.runtime.control import Control
from penstock.runtime.materialize.fields import Mode, negotiate
from penstock.runtime.materialize.leader import run_session
from penstock.runtime.materialize.task import KIND, LeaderBinding, LeaderTask
from penstock.runtime.ops import TaskKindName
from penstock.runtime.session import Ended, World
from penstock.runtime.task_log import LEVELS
from penstock.runtime.triggers import Webhooks
from penstock.shuffle.binding import Binding, columns_of, materialization_bindings


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
    def applied(self) -> bytes:
        """The spec that `apply` brings the endpoint to; equal tasks have equal bytes."""
        return encode_task(self.sink_task)

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
) -> MaterializationTask:
    """Negotiate the fields of every active binding, and choose how each is kept.

    `connect` makes the connector of an endpoint; the second argument names the task, for errors.
    Asks the endpoint what is there. Blocks. `name` is what the task is called, there and in its
    log, if that is not what the catalog calls it.
    """
    connector = connect(spec.endpoint, spec.name)
    bindings = materialization_bindings(catalog, spec, path=connector.path)
    if not bindings:
        raise UserError(
            f"materialization {spec.name} has nothing to do",
            why="all of its bindings are disabled, or it has none",
            fix="add a binding, or enable one",
        )
    targets = tuple(_bound(spec, binding, connector) for binding in bindings)
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


def _bound(spec: MaterializationSpec, binding: Binding, connector: Materialization) -> BoundTarget:
    given = spec.bindings[binding.index]
    where = f"materialization {spec.name}, binding {binding.index} ({given.source.collection})"
    resource = given.resource.value
    path = connector.path(resource)
    delta = connector.delta_updates(resource)
    selected, plan = negotiate(
        binding.collection,
        binding.key,
        given.fields,
        partial(connector.validate, path, delta_updates=delta, state_key=binding.state_key),
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
            takeover=given.takeover,
        ),
        plan=plan,
        mode=selected.mode,
        because=selected.because,
        columns=None if needed is None else columns_of(binding.collection, needed),
    )


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
