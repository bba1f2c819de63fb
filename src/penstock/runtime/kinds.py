"""The kinds of tasks that can be run: the only place outside a kind's package that imports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import Bug
from penstock.model.spec import (
    CaptureSpec,
    Catalog,
    CollectionSpec,
    Endpoint,
    MaterializationSpec,
    Shards,
)
from penstock.runtime.capture import build as capture
from penstock.runtime.connector.capture import Capture
from penstock.runtime.connector.materialize import Materialization
from penstock.runtime.derive import build as derive
from penstock.runtime.history import History
from penstock.runtime.materialize import build as materialize
from penstock.runtime.ops import TaskKindName
from penstock.runtime.session import RunnableTask

TaskSpec: TypeAlias = CaptureSpec | CollectionSpec | MaterializationSpec
"""A task that can be run, as a catalog declares it; a derivation is its collection."""


TaskDisabled = materialize.TaskDisabled
Outlook = materialize.Outlook
outlooks = materialize.outlooks
described = materialize.described
refill_fix = materialize.refill_fix


@dataclass(frozen=True, slots=True)
class Connect:
    """Makes the connectors of endpoints, each for the task that has this name."""

    capture: Callable[[Endpoint, str], Capture]
    materialization: Callable[[Endpoint, str], Materialization]


def runnable_tasks(catalog: Catalog) -> list[TaskSpec]:
    """Return the tasks of a catalog that can be run, disabled ones too."""
    return [*catalog.captures, *catalog.derivations, *catalog.materializations]


def kind_of(spec: TaskSpec) -> TaskKindName:
    """Return the kind of a task."""
    if isinstance(spec, CaptureSpec):
        return "capture"
    return "materialization" if isinstance(spec, MaterializationSpec) else "derivation"


def does_nothing(spec: TaskSpec) -> bool:
    """True for a task whose transforms or bindings are all disabled, which `check` warns of."""
    if isinstance(spec, CaptureSpec):
        return not writes_of(spec)
    return not reads_of(spec)


def shards_of(spec: TaskSpec) -> Shards:
    """Return how a task runs."""
    if isinstance(spec, CaptureSpec | MaterializationSpec):
        return spec.shards
    if spec.derivation is None:
        raise Bug(f"collection {spec.name} is not derived, and no task")
    return spec.derivation.shards


def reads_of(spec: TaskSpec) -> frozenset[str]:
    """Return the collections that a task reads."""
    if isinstance(spec, CaptureSpec):
        return frozenset()
    if isinstance(spec, MaterializationSpec):
        return frozenset(each.source.collection for each in spec.bindings if not each.disable)
    transforms = spec.derivation.transforms if spec.derivation else ()
    return frozenset(each.source.collection for each in transforms if not each.disable)


def writes_of(spec: TaskSpec) -> frozenset[str]:
    """Return the collections that a task writes to, beside those in which it reports on itself."""
    if isinstance(spec, CaptureSpec):
        return frozenset(each.target for each in spec.bindings if each.target and not each.disable)
    return frozenset() if isinstance(spec, MaterializationSpec) else frozenset({spec.name})


def steps_of(spec: TaskSpec) -> list[tuple[str, str]]:
    """Return the steps of a task in their order: what is done, and with which collection."""
    if isinstance(spec, CaptureSpec):
        targets = [each.target for each in spec.bindings if each.target and not each.disable]
        return [(word, each) for each in targets for word in ("capture", "publish")]
    if isinstance(spec, MaterializationSpec):
        sources = [each.source.collection for each in spec.bindings if not each.disable]
        return [(word, each) for each in sources for word in ("read", "reduce", "store")]
    transforms = spec.derivation.transforms if spec.derivation else ()
    read = [each.source.collection for each in transforms if not each.disable]
    steps = [(word, each) for each in read for word in ("read", "transform")]
    return [*steps, ("publish", spec.name)]


def build_task(
    catalog: Catalog,
    spec: TaskSpec,
    connect: Connect,
    *,
    shards: int | None = None,
    name: str | None = None,
    history: History | None = None,
) -> RunnableTask:
    """Build a task of any kind. May ask its endpoint, by what `connect` makes, and block."""
    if isinstance(spec, CaptureSpec):
        return capture.build(catalog, spec, connect.capture, name=name)
    if isinstance(spec, MaterializationSpec):
        return materialize.build(
            catalog, spec, connect.materialization, shards=shards, name=name, history=history
        )
    return derive.build(catalog, spec, shards=shards, name=name)
