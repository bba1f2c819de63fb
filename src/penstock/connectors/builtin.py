"""Connectors by the name that a catalog gives as its image."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Final

from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.model.spec import Endpoint
from penstock.runtime.connector import Materialization

_MATERIALIZATIONS: Final = {
    "materialize-postgres": "penstock.connectors.postgres:Postgres",
    "materialize-sqlite": "penstock.connectors.sqlite:Sqlite",
}

_Make = Callable[..., Materialization]


def locate(endpoint: Endpoint, task: str, resource: Json) -> tuple[str, ...] | None:
    """What tells a resource from all others; None if its connector cannot say that here."""
    try:
        return materialization(endpoint, task).location(resource)
    except UserError:
        return None  # said when the task is run, or a secret that is set there


def materialization(endpoint: Endpoint, task: str) -> Materialization:
    """The connector of an endpoint. A registry path counts by its last part, without its tag."""
    name = (endpoint.image or "").rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]
    place = _MATERIALIZATIONS.get(name)
    if endpoint.kind != "connector" or place is None:
        near = difflib.get_close_matches(name, _MATERIALIZATIONS, n=1)
        raise UserError(
            f"there is no connector {endpoint.image or endpoint.kind}",
            where=f"materialization {task}: endpoint",
            fix=f"did you mean penstock/{near[0]}?"
            if near
            else f"one of {', '.join(f'penstock/{known}' for known in _MATERIALIZATIONS)}",
        )
    module, _, attribute = place.partition(":")
    make: _Make = getattr(importlib.import_module(module), attribute)
    config: Json = endpoint.config.value
    return make(config, where=f"materialization {task}")
