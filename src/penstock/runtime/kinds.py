"""The kinds of tasks that can be run: the only place outside a kind's package that imports it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.model.spec import Catalog, Endpoint, MaterializationSpec
from penstock.runtime.connector.materialize import Materialization
from penstock.runtime.materialize import build as materialize
from penstock.runtime.session import RunnableTask

TaskSpec = MaterializationSpec
"""A task that can be run, as a catalog declares it."""


def runnable_tasks(catalog: Catalog) -> list[TaskSpec]:
    """Return the tasks of a catalog that can be run, disabled ones too."""
    return list(catalog.materializations)


def build_task(
    catalog: Catalog,
    spec: TaskSpec,
    connect: Callable[[Endpoint, str], Materialization],
    *,
    shards: int | None = None,
    name: str | None = None,
) -> RunnableTask:
    """Build a task of any kind; see `materialize.build.build`. Asks its endpoint, and blocks."""
    return materialize.build(catalog, spec, connect, shards=shards, name=name)
