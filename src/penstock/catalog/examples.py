"""Build catalog tests: their steps, and checks of the documents that they ingest."""

from __future__ import annotations

from penstock.catalog.nodes import Node
from penstock.catalog.scope import Known, Scope, build_selector, build_source
from penstock.model.columns import columns, unstorable
from penstock.model.spec import CatalogTest, Frozen, Selector, Step


def build_test(name: str, node: Node, scope: Scope) -> CatalogTest:
    """Build a test from either form: a list of steps, or a mapping with `steps`."""
    steps = node.get("steps") or node
    built = [_step(i, step, scope) for i, step in enumerate(steps.items)]
    return CatalogTest(
        name=name,
        description=node.text_of("description"),
        steps=tuple(step for step in built if step is not None),
    )


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
