"""The registry of connectors, by kind of task and by the name that a catalog gives as its image."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.model.spec import Catalog, Endpoint
from penstock.runtime.connector.materialize import Materialization

CONNECTORS: Final[Mapping[str, Mapping[str, str]]] = {
    "materialization": {
        "materialize-postgres": "penstock.connectors.postgres.sink:Postgres",
        "materialize-sqlite": "penstock.connectors.sqlite.sink:Sqlite",
    },
}
"""Module and class of each connector. A module is imported when a task needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTask:
    """A task that is recorded and cannot run."""

    kind: str
    name: str
    why: str


def idle_tasks(catalog: Catalog) -> list[IdleTask]:
    """Return the tasks of a catalog that are meant to run, and that this release cannot run."""
    planned = [
        *(("capture", spec.name, spec.shards) for spec in catalog.captures),
        *(
            ("derivation", spec.name, spec.derivation.shards)
            for spec in catalog.derivations
            if spec.derivation
        ),
    ]
    found = [
        IdleTask(kind=kind, name=name, why=f"{kind}s do not run yet")
        for kind, name, shards in planned
        if not shards.disable
    ]
    found += [
        IdleTask(kind="materialization", name=spec.name, why=_no_connector(spec.endpoint))
        for spec in catalog.materializations
        if not spec.shards.disable and _find("materialization", spec.endpoint) is None
    ]
    return found


def _name(endpoint: Endpoint) -> str:
    """Return the last part of an image, without its tag: the registry it comes from is ignored."""
    return (endpoint.image or "").rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]


def _find(kind: str, endpoint: Endpoint) -> str | None:
    return CONNECTORS[kind].get(_name(endpoint)) if endpoint.kind == "connector" else None


def _no_connector(endpoint: Endpoint) -> str:
    return f"there is no connector {endpoint.image or endpoint.kind}"


def locate(endpoint: Endpoint, task: str, resource: Json) -> tuple[str, ...] | None:
    """Return what tells a resource from all others; None if that is not known here."""
    try:
        return materialization(endpoint, task).location(resource)
    except UserError:
        return None  # reported when the task runs; or a secret that is set only there


def materialization(endpoint: Endpoint, task: str) -> Materialization:
    """Make the connector of a materialization's endpoint."""
    make: Callable[..., Materialization] = _load("materialization", endpoint, task)
    return make(endpoint.config.value, where=f"materialization {task}")


def _load(kind: str, endpoint: Endpoint, task: str) -> Any:  # noqa: ANN401 - a class by its name
    found = _find(kind, endpoint)
    if found is None:
        near = difflib.get_close_matches(_name(endpoint), CONNECTORS[kind], n=1)
        known = ", ".join(f"penstock/{name}" for name in CONNECTORS[kind])
        raise UserError(
            _no_connector(endpoint),
            where=f"{kind} {task}: endpoint",
            why=f"connectors for a {kind} are {known}",
            fix=f"did you mean penstock/{near[0]}?" if near else "use one of these",
        )
    module, _, attribute = found.partition(":")
    return getattr(importlib.import_module(module), attribute)
