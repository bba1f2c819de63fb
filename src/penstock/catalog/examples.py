"""Build catalog tests: their steps, and checks of the documents that they ingest."""

from __future__ import annotations

import msgspec

from penstock.catalog.nodes import Node
from penstock.catalog.scope import Known, Scope, build_selector, build_source
from penstock.model.columns import columns, unstorable
from penstock.model.json_order import Json
from penstock.model.spec import CatalogTest, Frozen, Selector, Step


def build_test(name: str, node: Node, scope: Scope) -> CatalogTest:
    """Build a test from either form: a list of steps, or a mapping with `steps`."""
    steps = node.get("steps") or node
    built: list[Step | None] = []
    for number, step in enumerate(steps.items):
        if (sample := step.get("capture")) is not None:
            built += _sampled(sample, step, scope)
        else:
            built.append(_step(number, step, scope))
    return CatalogTest(
        name=name,
        description=node.text_of("description"),
        steps=tuple(step for step in built if step is not None),
    )


def _sampled(node: Node, step: Node, scope: Scope) -> list[Step]:
    """The documents that a capture gave when it was recorded: a step for each collection."""
    name, sample = node.get("name"), node.get("sample")
    if name is None or name.text is None or sample is None:
        return []
    file = scope.sources.file(sample)
    if not scope.refer(name, "captures", "capture") or file is None:
        return []
    targets = _targets(scope.defined["captures"][name.text])
    found: dict[str, list[Json]] = {}
    for number, line in enumerate(file.text.splitlines(), start=1):
        if not line.strip():
            continue
        read = _recorded(line)
        known = None if read is None else scope.collections.get(read[0])
        if read is None or known is None or read[0] not in targets:
            message = f"line {number} of the sample is not a document of {name.text}"
            hint = "record it: penstock preview --source CATALOG --name CAPTURE > sample.jsonl"
            scope.sources.error(sample, "E-DOC", message, hint=hint)
            return []
        collection, document = read
        for violation in known.writes.violations(document):
            message = f"line {number} of the sample: {violation}"
            hint = f"it does not fit the schema of {collection}"
            scope.sources.error(sample, "E-DOC", message, hint=hint)
        found.setdefault(collection, []).append(document)
    return [
        Step(
            action="ingest",
            collection=collection,
            documents=Frozen(documents),
            description=node.text_of("description"),
            origin=f"{step.at.file}:{step.at.line}",
        )
        for collection, documents in found.items()
    ]


def _targets(capture: Node) -> set[str]:
    bindings = capture.get("bindings")
    texts = (binding.text_of("target") for binding in (bindings.items if bindings else ()))
    return {text for text in texts if text is not None}


def _recorded(line: str) -> tuple[str, dict[str, Json]] | None:
    """A collection and a document, as a preview prints them."""
    try:
        value = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return None
    match value:
        case [str() as collection, dict() as document]:
            return collection, document
        case _:
            return None


def _step(number: int, node: Node, scope: Scope) -> Step | None:
    ingest, verify = node.get("ingest"), node.get("verify")
    inner = ingest or verify
    if inner is None:
        return None
    source, known = build_source(inner.get("collection"), scope)
    documents_node = inner.get("documents")
    documents = scope.sources.follow(documents_node) if documents_node else None
    if documents is None or source is None:
        return None
    if documents_node is not documents.node and not isinstance(documents.node.value, tuple):
        message = f"expected a list of documents, found {documents.node.describe()}"
        scope.sources.error(documents.node, "E-TYPE", message)
    if ingest is not None and known is not None:
        _check_documents(number, documents.node, known, scope)
    selector = build_selector(inner.get("partitions"), known, scope)
    return Step(
        action="ingest" if ingest is not None else "verify",
        collection=source.collection,
        documents=Frozen(documents.node.plain()),
        selector=source.selector if selector == Selector() else selector,
        description=inner.text_of("description"),
        origin=f"{node.at.file}:{node.at.line}",
    )


def _check_documents(number: int, documents: Node, known: Known, scope: Scope) -> None:
    layout = columns(known.writes.shape)
    for i, document in enumerate(documents.items):
        if not document.members:
            continue  # not a document: reported by the grammar
        value = document.plain()
        what = f"document {i} of step {number}"
        violations = known.writes.violations(value)
        for violation in violations:
            scope.sources.error(
                document.closest(violation.pointer),
                "E-DOC",
                f"{what}: {violation}",
                hint=f"it does not fit the schema of {known.spec.name}",
            )
        if not violations and (too_large := unstorable(value, layout)):
            at, why = too_large
            scope.sources.error(
                document.closest(at),
                "E-INT-RANGE",
                f"{what}: {at}: {why}",
                hint="declare minimum and maximum, or use a string with format: integer",
            )
