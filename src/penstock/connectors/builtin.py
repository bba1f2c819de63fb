"""The registry of connectors, by kind of task and by the name that a catalog gives as its image."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.errors import UserError
from penstock.model.config_schema import ConnectorSchemas
from penstock.model.json_order import Json
from penstock.model.spec import Endpoint
from penstock.runtime.connector.materialize import Materialization

CONNECTORS: Final[Mapping[str, Mapping[str, str]]] = {
    "materialization": {
        "materialize-postgres": "penstock.connectors.postgres.sink:Postgres",
        "materialize-sqlite": "penstock.connectors.sqlite.sink:Sqlite",
    },
}
"""Module and class of each connector. A module is imported when a task needs it."""


class BuiltinConnectors:
    """What building a catalog asks about connectors (`penstock.catalog.connectors.Connectors`)."""

    def images(self, kind: str) -> tuple[str, ...]:
        """Return the images of a kind of task."""
        return tuple(f"penstock/{name}" for name in CONNECTORS.get(kind, ()))

    def schemas(self, kind: str, image: str) -> ConnectorSchemas | None:
        """Return what the connector of an image accepts; None if there is no such connector."""
        found = CONNECTORS.get(kind, {}).get(_name(image))
        if found is None:
            return None
        connector = _load(found)
        return ConnectorSchemas(config=connector.config_schema, resource=connector.resource_schema)

    def locate(self, endpoint: Endpoint, task: str, resource: Json) -> tuple[str, ...] | None:
        """Return what tells a resource from all others; None if the configuration does not say.

        Raises `UserError` if the endpoint cannot have such a resource.
        """
        try:
            connector = materialization(endpoint, task)
        except UserError:
            return None  # reported by its schema; or a secret that is set only where the task runs
        return connector.location(resource)


BUILTIN: Final = BuiltinConnectors()


def materialization(endpoint: Endpoint, task: str) -> Materialization:
    """Make the connector of a materialization's endpoint."""
    image = endpoint.image if endpoint.kind == "connector" else None
    found = CONNECTORS["materialization"].get(_name(image or ""))
    if found is None:
        known = ", ".join(BUILTIN.images("materialization"))
        raise UserError(
            f"there is no connector {image or endpoint.kind}",
            where=f"materialization {task}: endpoint",
            fix=f"connectors for a materialization: {known}",
        )
    make: Callable[..., Materialization] = _load(found)
    return make(endpoint.config.value, where=f"materialization {task}")


def _name(image: str) -> str:
    """Return the last part of an image, without its tag: the registry it comes from is ignored."""
    return image.rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]


def _load(place: str) -> Any:  # noqa: ANN401 - a class by its name
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
