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
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema, ConnectorSchemas
from penstock.model.schema_check import check_schema
from penstock.model.spec import SECRET_REFERENCE, Endpoint
from penstock.runtime.connector.materialize import FieldVerdict, Materialization, TargetField

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

    def refusal(self, kind: str, endpoint: Endpoint) -> UserError | None:
        """Return why the connector of an endpoint cannot be made; None if it can."""
        ...

    def materialization(self, endpoint: Endpoint, task: str) -> Materialization | None:
        """Make the connector of a materialization; None if its configuration does not suffice."""
        ...

    def verdicts(
        self, connector: Materialization, fields: Sequence[TargetField], *, delta_updates: bool
    ) -> Mapping[str, FieldVerdict]:
        """Return what a connector says of fields, without asking its endpoint."""
        ...


def schemas_of(
    kind: TaskKind, endpoint: Node | None, connectors: Connectors | None
) -> ConnectorSchemas | None:
    """Return what the connector of an endpoint accepts; None if there is none, or it is unknown."""
    if endpoint is None or connectors is None or len(endpoint.members) != 1:
        return None
    (name,) = endpoint.members
    connector = endpoint.get("connector")
    if connector is None:
        return connectors.endpoint_schemas(kind, name)
    return connectors.schemas(kind, connector.text_of("image") or "")


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
    close = _meant(image.text or "", images)
    instead = _instead(kind, images)
    other = "capture" if kind == "materialization" else "materialization"
    known = kind != "derivation" and connectors.schemas(other, image.text or "") is not None
    sources.error(
        image,
        "E-CONN-IMAGE",
        f'"{image.text}" is a connector for a {other}, not for a {kind}'
        if known
        else f'there is no connector "{image.text}" for a {kind}',
        hint=f'did you mean "{close}"?\n{instead}' if close else instead,
    )


def _meant(image: str, images: Sequence[str]) -> str | None:
    """Return the image that was meant: one spelled alike, or with the word that was given."""
    protocols = [each.removesuffix("…") for each in images if each.endswith("…")]
    given, separator, package = image.partition(":" if ":" in image.split("/")[0] else "/")
    if separator and package and (protocol := nearest(f"{given}:", protocols)):
        return protocol[0] + package.split(":")[0]
    word = image.rsplit("/", 1)[-1].split(":")[0].lower()
    close = nearest(image, images) or [each for each in images if word and word in each]
    return close[0] if close else None


def _check_config(connector: Node, schema: ConfigSchema, sources: Sources) -> None:
    """Check a configuration where it is written: in the catalog, or in a file of its own."""
    given = connector.get("config")
    target = sources.follow(given) if given else None
    if given and (
        target is None or (target.node is given and not isinstance(given.value, Mapping))
    ):
        return  # the grammar reports what is neither a mapping nor a file
    _report_config(target.node if target else None, connector, schema, sources)


def _report_config(
    config: Node | None, endpoint: Node, schema: ConfigSchema, sources: Sources
) -> None:
    if config is not None:
        report(config, schema, sources)
        return
    for problem in schema.problems({}):
        message = f"config: {problem.message}"
        sources.error(endpoint, problem.code, message, hint=problem.hint, at=endpoint.key_at)


def report(given: Node, schema: ConfigSchema, sources: Sources) -> None:
    """Report everything about a value that its schema does not allow."""
    if given.pointer and not isinstance(given.value, Mapping):
        return  # reported by the grammar
    for problem in schema.problems(given.plain()):
        node = given.closest(problem.pointer)
        at = node.key_at if problem.message.startswith("unknown key") else node.at
        sources.error(node, problem.code, problem.message, hint=problem.hint, at=at)


def check_made(
    kind: TaskKind,
    endpoint: Node | None,
    spec: Endpoint | None,
    sources: Sources,
    connectors: Connectors | None,
) -> None:
    """Report a configuration that fits its schema, and that its connector refuses all the same."""
    schemas = schemas_of(kind, endpoint, connectors)
    if endpoint is None or spec is None or schemas is None or connectors is None:
        return
    if SECRET_REFERENCE.search(spec.config.text):
        return  # what they stand for is only known where the task runs
    (inner,) = endpoint.members.values()
    if spec.kind != "python" and schemas.config.problems(spec.config.value):
        return  # reported already
    refused = connectors.refusal(kind, spec)
    if refused is not None:
        message = f"{refused.what}: {refused.why}" if refused.why else refused.what
        image = inner.get("image")
        of_package = image is not None and ":" in (image.text or "")
        at = (image if of_package else inner.get("config")) or inner
        sources.error(at, "E-CONFIG", message, hint=refused.fix, at=at.key_at)


def check_own_schema(config: Node | None, schema: Node, module: Node, sources: Sources) -> None:
    """Compare the configuration of a module with the schema that is given for it."""
    plain = schema.plain()
    wrong = [p for p in check_schema(plain) if p.code in ("E-SCHEMA", "E-SCHEMA-REF")]
    for problem in wrong:
        node = schema.closest(problem.pointer)
        sources.error(node, problem.code, problem.message, hint=problem.hint, at=node.key_at)
    if not wrong and isinstance(plain, dict):
        _report_config(config, module, ConfigSchema.of(plain), sources)


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
