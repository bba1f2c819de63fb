"""The registry of connectors, by kind of task and by the name that a catalog gives as its image."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.errors import UserError
from penstock.model.config_schema import ConnectorSchemas
from penstock.model.spec import Endpoint
from penstock.runtime.connector.capture import Capture
from penstock.runtime.connector.materialize import FieldVerdict, Materialization, TargetField

CONNECTORS: Final[Mapping[str, Mapping[str, str]]] = {
    "capture": {
        "source-files": "penstock.connectors.files.source:Files",
        "source-http-ingest": "penstock.connectors.http_ingest.source:HttpIngest",
        "source-kafka": "penstock.connectors.kafka.source:Kafka",
        "source-postgres": "penstock.connectors.postgres_cdc.source:PostgresChanges",
    },
    "materialization": {
        "materialize-postgres": "penstock.connectors.postgres.sink:Postgres",
        "materialize-sqlite": "penstock.connectors.sqlite.sink:Sqlite",
    },
}
"""Module and class of each connector. A module is imported when a task needs it."""

PACKAGES: Final[Mapping[str, str]] = {
    "airbyte": "penstock.connectors.packages.airbyte:Airbyte",
    "singer": "penstock.connectors.packages.singer:Singer",
}
"""Of captures by packages that are installed apart: `airbyte:source-faker`, `singer:tap-github`."""

PYTHON_CAPTURE: Final = "penstock.connectors.python_source.source:PythonSource"


class BuiltinConnectors:
    """What building a catalog asks about connectors (`penstock.catalog.connectors.Connectors`)."""

    def images(self, kind: str) -> tuple[str, ...]:
        """Return the images of a kind of task."""
        images = [f"penstock/{name}" for name in CONNECTORS.get(kind, ())]
        packages = [f"{protocol}:…" for protocol in PACKAGES] if kind == "capture" else []
        return (*images, *packages)

    def schemas(self, kind: str, image: str) -> ConnectorSchemas | None:
        """Return what the connector of an image accepts; None if there is no such connector."""
        found = CONNECTORS.get(kind, {}).get(_name(image))
        if found is None and kind == "capture":
            found = PACKAGES.get(image.partition(":")[0])
        if found is None:
            return None
        connector = _load(found)
        return ConnectorSchemas(config=connector.config_schema, resource=connector.resource_schema)

    def endpoint_schemas(self, kind: str, endpoint: str) -> ConnectorSchemas | None:
        """Return what an endpoint of another kind than a connector's accepts."""
        places = {"ingest": CONNECTORS["capture"]["source-http-ingest"], "python": PYTHON_CAPTURE}
        if kind != "capture" or endpoint not in places:
            return None
        connector = _load(places[endpoint])
        return ConnectorSchemas(config=connector.config_schema, resource=connector.resource_schema)

    def refusal(self, kind: str, endpoint: Endpoint) -> UserError | None:
        """Return why the connector of an endpoint cannot be made; None if it can."""
        try:
            (capture if kind == "capture" else materialization)(endpoint, "")
        except UserError as refused:
            return refused
        return None

    def materialization(self, endpoint: Endpoint, task: str) -> Materialization | None:
        """Make the connector of a materialization; None if its configuration does not suffice."""
        try:
            return materialization(endpoint, task)
        except UserError:
            return None  # reported by its schema; or a secret that is set only where the task runs

    def verdicts(
        self, connector: Materialization, fields: Sequence[TargetField], *, delta_updates: bool
    ) -> Mapping[str, FieldVerdict]:
        """Return what a connector says of fields, without asking its endpoint."""
        from penstock.connectors.sql.sink import SqlSink

        if not isinstance(connector, SqlSink):
            return {}
        return connector.verdicts(fields, delta_updates=delta_updates)


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


def capture(endpoint: Endpoint, task: str) -> Capture:
    """Make the connector of a capture's endpoint."""
    where = f"capture {task}"
    if endpoint.kind == "ingest":
        ingest: Callable[..., Capture] = _load(CONNECTORS["capture"]["source-http-ingest"])
        return ingest(endpoint.config.value, where=where)
    if endpoint.kind == "python":
        python: Callable[..., Capture] = _load(PYTHON_CAPTURE)
        return python(
            endpoint.config.value,
            where=where,
            module=endpoint.module or "",
            file=endpoint.module_file,
        )
    image = endpoint.image or "" if endpoint.kind == "connector" else ""
    protocol, _, package = image.partition(":")
    if protocol in PACKAGES:
        hosted: Callable[..., Capture] = _load(PACKAGES[protocol])
        return hosted(endpoint.config.value, where=where, package=package)
    found = CONNECTORS["capture"].get(_name(image))
    if found is None:
        raise UserError(
            f"there is no connector {image or endpoint.kind}",
            where=f"{where}: endpoint",
            fix=f"connectors for a capture: {', '.join(BUILTIN.images('capture'))}",
        )
    make: Callable[..., Capture] = _load(found)
    return make(endpoint.config.value, where=where)


def _name(image: str) -> str:
    """Return the last part of an image, without its tag: the registry it comes from is ignored."""
    return image.rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]


def _load(place: str) -> Any:  # noqa: ANN401 - a class by its name
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
