"""Connectors by the name that a catalog gives as its image."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.model.spec import Catalog, Endpoint
from penstock.runtime.connector import Materialization

_MATERIALIZATIONS: Final = {
    "materialize-postgres": "penstock.connectors.postgres:Postgres",
    "materialize-sqlite": "penstock.connectors.sqlite:Sqlite",
}

_Make = Callable[..., Materialization]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A task that is recorded and cannot run."""

    kind: str
    name: str
    why: str


def idle_tasks(catalog: Catalog) -> list[Idle]:
    """The tasks of a catalog that are meant to run, and that this release does not run."""
    planned = [
        *(("capture", spec.name, spec.shards) for spec in catalog.captures),
        *(
            ("derivation", spec.name, spec.derivation.shards)
            for spec in catalog.derivations
            if spec.derivation
        ),
    ]
    found = [
        Idle(kind=kind, name=name, why=f"{kind}s do not run yet")
        for kind, name, shards in planned
        if not shards.disable
    ]
    found += [
        Idle(kind="materialization", name=spec.name, why=_no_connector(spec.endpoint))
        for spec in catalog.materializations
        if not spec.shards.disable and _place(spec.endpoint) is None
    ]
    return found


def _name(endpoint: Endpoint) -> str:
    """A registry path counts by its last part, without its tag."""
    return (endpoint.image or "").rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]


def _place(endpoint: Endpoint) -> str | None:
    return _MATERIALIZATIONS.get(_name(endpoint)) if endpoint.kind == "connector" else None


def _no_connector(endpoint: Endpoint) -> str:
    return f"there is no connector {endpoint.image or endpoint.kind}"


def locate(endpoint: Endpoint, task: str, resource: Json) -> tuple[str, ...] | None:
    """What tells a resource from all others; None if its connector cannot say that here."""
    try:
        return materialization(endpoint, task).location(resource)
    except UserError:
        return None  # said when the task is run, or a secret that is set there


def materialization(endpoint: Endpoint, task: str) -> Materialization:
    """The connector of an endpoint."""
    place = _place(endpoint)
    if place is None:
        near = difflib.get_close_matches(_name(endpoint), _MATERIALIZATIONS, n=1)
        raise UserError(
            _no_connector(endpoint),
            where=f"materialization {task}: endpoint",
            fix=f"did you mean penstock/{near[0]}?"
            if near
            else f"one of {', '.join(f'penstock/{known}' for known in _MATERIALIZATIONS)}",
        )
    module, _, attribute = place.partition(":")
    make: _Make = getattr(importlib.import_module(module), attribute)
    config: Json = endpoint.config.value
    return make(config, where=f"materialization {task}")
