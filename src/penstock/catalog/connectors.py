"""Check endpoints against the connectors there are: can a task run here, and is its config right.

The catalog knows no connector. Whoever builds one passes `Connectors`; without them, on a machine
that only looks at a catalog say, endpoints are not checked. A task that cannot run is an error
unless it is disabled: else it would be recorded, and nothing would ever happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from penstock.catalog import reading
from penstock.catalog.diagnostics import nearest
from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.model.config_schema import ConfigSchema, ConnectorSchemas
from penstock.model.json_order import Json
from penstock.model.spec import Endpoint

TaskKind: TypeAlias = Literal["capture", "derivation", "materialization"]


class Connectors(Protocol):
    """The connectors that tasks can use."""

    def images(self, kind: str) -> Sequence[str]:
        """Return the images of a kind of task."""
        ...

    def schemas(self, kind: str, image: str) -> ConnectorSchemas | None:
        """Return what the connector of an image accepts; None if there is no such connector."""
        ...

    def endpoint_schemas(self, kind: str, endpoint: str) -> ConnectorSchemas | None:
        """Return what an endpoint that is no connector's accepts; None if that is anything."""
        ...

    def locate(self, endpoint: Endpoint, task: str, resource: Json) -> tuple[str, ...] | None:
        """Return what tells a resource from all others; None if that is not known here.

        Raises `UserError` if the endpoint cannot have such a resource.
        """
        ...


def check_endpoint(
    kind: TaskKind,
    endpoint: Node | None,
    bindings: Sequence[Node],
    sources: Sources,
    connectors: Connectors | None,
    *,
    disabled: bool,
) -> None:
    """Report an endpoint, or an engine of a derivation, that no task can use as it is."""
    if endpoint is None or connectors is None or len(endpoint.members) != 1:
        return
    runs = ("python", "ingest") if kind == "capture" else ()
    for name in ("local", "python", "ingest"):
        if (inner := endpoint.get(name)) is not None and not disabled and name not in runs:
            message = f"{_subject(kind, name)} cannot run here"
            hint = _instead(kind, connectors.images(kind))
            sources.error(inner, "E-CANNOT-RUN", message, hint=hint, at=inner.key_at)
        if inner is not None and name in runs:
            _check_special(kind, name, inner, bindings, sources, connectors)
    connector = endpoint.get("connector")
    image = connector.get("image") if connector else None
    if connector is None or image is None or image.text is None:
        return
    schemas = connectors.schemas(kind, image.text)
    if schemas is None:
        if not disabled:
            _unknown_image(kind, image, connectors, sources)
        return
    _check_config(connector, schemas.config, sources)
    for binding in bindings:
        for key in ("resource", "renamedFrom"):
            if (resource := binding.get(key)) is not None:
                report(resource, schemas.resource, sources)


def _check_special(
    kind: TaskKind,
    name: str,
    inner: Node,
    bindings: Sequence[Node],
    sources: Sources,
    connectors: Connectors,
) -> None:
    """Check an endpoint without an image. The configuration of a Python module is its own."""
    schemas = connectors.endpoint_schemas(kind, name)
    if schemas is None:
        return
    if name == "ingest":
        report(inner, schemas.config, sources)
    for binding in bindings:
        if (resource := binding.get("resource")) is not None:
            report(resource, schemas.resource, sources)


def _subject(kind: TaskKind, name: str) -> str:
    if kind == "derivation":
        return f"a derivation using {name}"
    return f"a {kind} with a {name} endpoint"


def _instead(kind: TaskKind, images: Sequence[str]) -> str:
    if kind == "derivation":
        instead = "write it for using: sqlite, spark or python"
    else:
        instead = f"connectors for a {kind}: {', '.join(images)}"
    return f"{instead}; or add shards: {{disable: true}}"


def _unknown_image(kind: TaskKind, image: Node, connectors: Connectors, sources: Sources) -> None:
    images = connectors.images(kind)
    close = nearest(image.text or "", images)
    instead = _instead(kind, images)
    sources.error(
        image,
        "E-CONN-IMAGE",
        f'there is no connector "{image.text}" for a {kind}',
        hint=f'did you mean "{close[0]}"?\n{instead}' if close else instead,
    )


def _check_config(connector: Node, schema: ConfigSchema, sources: Sources) -> None:
    """Check a configuration where it is written: in the catalog, or in a file of its own."""
    given = connector.get("config")
    if given is None:
        for problem in schema.problems({}):
            message = f"config: {problem.message}"
            sources.error(connector, problem.code, message, hint=problem.hint, at=connector.key_at)
        return
    target = sources.follow(given)
    if target is None or (target.node is given and not isinstance(given.value, Mapping)):
        return  # the grammar reports what is neither a mapping nor a file
    report(target.node, schema, sources)


def report(given: Node, schema: ConfigSchema, sources: Sources) -> None:
    """Report everything about a value that its schema does not allow."""
    for problem in schema.problems(given.plain()):
        node = given.closest(problem.pointer)
        at = node.key_at if problem.message.startswith("unknown key") else node.at
        sources.error(node, problem.code, problem.message, hint=problem.hint, at=at)


def check_followed(
    task: Node, sources: Sources, connectors: Connectors | None, *, disabled: bool
) -> None:
    """Report a materialization that leaves its bindings to a capture: there would be none."""
    source = task.get("source") or task.get("sourceCapture")
    if source is None or connectors is None or disabled or reading.flag(task, "delete"):
        return
    sources.error(
        source,
        "E-CANNOT-RUN",
        "bindings that follow a capture cannot run here",
        hint="remove it and list the bindings; or add shards: {disable: true}",
    )
