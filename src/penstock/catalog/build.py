"""Build specs from catalog files, and find every mistake in one run.

Nothing here starts Spark or opens a connection. Each phase continues with what the previous one
understood: files and imports, the grammar, names, collections with their schemas, then everything
that refers to collections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.catalog import reading
from penstock.catalog.collection import build_collection
from penstock.catalog.connectors import Connectors
from penstock.catalog.derivation import build_derivation
from penstock.catalog.diagnostics import Diagnostic, Diagnostics
from penstock.catalog.examples import build_test
from penstock.catalog.forms import check
from penstock.catalog.grammar import CATALOG
from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.catalog.scope import Scope
from penstock.catalog.targets import check_listeners, check_targets
from penstock.catalog.tasks import build_capture, build_materialization
from penstock.errors import UserError
from penstock.model.observed import Observed
from penstock.model.spec import Catalog
from penstock.runtime.ops import OPS

_T = TypeVar("_T")
_KINDS = {
    "collections": "collection",
    "captures": "capture",
    "materializations": "materialization",
    "tests": "test",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """A built catalog. If the diagnostics hold an error, `catalog` is incomplete."""

    catalog: Catalog
    diagnostics: tuple[Diagnostic, ...]
    files: tuple[str, ...]
    collections: Mapping[str, Node]
    """Where each collection is written, also one that could not be built."""

    @property
    def ok(self) -> bool:
        return not any(d.is_error for d in self.diagnostics)


class InvalidCatalog(UserError):
    """A catalog with errors; the message lists all of them."""


def build_catalog(
    mains: Sequence[Path],
    *,
    environ: Mapping[str, str] | None,
    allow_outside: bool = False,
    connectors: Connectors | None = None,
    inferred: Mapping[str, Observed] | None = None,
) -> BuildResult:
    """Read catalogs and their imports, check everything, and build what is valid.

    `environ` is where secrets must be set; None skips that check, on machines that check catalogs
    but never run them. `connectors` are those that tasks run with; None skips all checks of
    endpoints. `inferred` are the schemas of documents so far, by collection.
    """
    diagnostics = Diagnostics()
    sources = Sources(diagnostics, allow_outside=allow_outside)
    sources.load(mains)
    for root in sources.catalogs:
        if root.value is not None:  # an empty file is an empty catalog
            check(root, CATALOG, diagnostics)
    scope = Scope(sources, {kind: _definitions(kind, sources) for kind in _KINDS}, connectors)
    _check_names(scope)
    catalog = _build(scope, environ, inferred or {})
    if connectors is not None:
        check_listeners(catalog.captures, scope, connectors)
        check_targets(catalog.materializations, scope, connectors)
    return BuildResult(
        catalog=catalog,
        diagnostics=tuple(diagnostics),
        files=tuple(root.at.file for root in sources.catalogs),
        collections=scope.defined["collections"],
    )


def build_valid(
    mains: Sequence[Path],
    *,
    environ: Mapping[str, str] | None,
    allow_outside: bool = False,
    connectors: Connectors | None = None,
    inferred: Mapping[str, Observed] | None = None,
) -> BuildResult:
    """Build the catalog; raises InvalidCatalog with every error in it."""
    result = build_catalog(
        mains,
        environ=environ,
        allow_outside=allow_outside,
        connectors=connectors,
        inferred=inferred,
    )
    errors = [d for d in result.diagnostics if d.is_error]
    if errors:
        count = f"{len(errors)} errors" if len(errors) > 1 else "1 error"
        listed = "\n".join(d.render() for d in errors)
        raise InvalidCatalog(f"the catalog has {count}\n{listed}")
    return result


def load_catalog(
    mains: Sequence[Path],
    *,
    environ: Mapping[str, str] | None,
    allow_outside: bool = False,
    connectors: Connectors | None = None,
) -> Catalog:
    """Return a catalog without errors; raises InvalidCatalog."""
    return build_valid(
        mains, environ=environ, allow_outside=allow_outside, connectors=connectors
    ).catalog


def _definitions(kind: str, sources: Sources) -> dict[str, Node]:
    """Return all definitions of one kind by name. Of two with one name, the first counts."""
    found: dict[str, Node] = {}
    what = _KINDS[kind]
    for root in sources.catalogs:
        section = root.get(kind)
        for name, node in section.members.items() if section else ():
            if name in found:
                message = f'{what} "{name}" is defined twice'
                sources.error(node, "E-DUP", message, see=found[name], at=node.key_at)
            else:
                found[name] = node
    if kind in ("collections", "captures", "materializations"):
        for name, inner in _prefixes(found):
            sources.error(
                found[name],
                "E-PREFIX",
                f'"{name}" is a prefix of {what} "{inner}"',
                hint="rename one of them: each name is a separate directory",
                see=found[inner],
                at=found[name].key_at,
            )
    return found


def _check_names(scope: Scope) -> None:
    """Report names that are taken: by Penstock's own collections, or by a task of another kind.

    What a task remembers is kept under its name, whatever its kind.
    """
    tasks: dict[str, tuple[str, Node]] = {}
    for name, node in scope.defined["collections"].items():
        if own := next((ops.name for ops in OPS if f"{name}/".startswith(f"{ops.name}/")), None):
            message = f"{own} is a collection of Penstock's own"
            hint = "choose another name"
            scope.sources.error(node, "E-NAME", message, hint=hint, at=node.key_at)
        if "derive" in node.members:
            tasks[name] = "derivation", node
    for kind in ("captures", "materializations"):
        for name, node in scope.defined[kind].items():
            other, see = tasks.setdefault(name, (_KINDS[kind], node))
            if see is not node:
                message = f'{_KINDS[kind]} "{name}" has the name of a {other}'
                hint = "rename it: what a task remembers is kept under its name"
                scope.sources.error(node, "E-DUP", message, hint=hint, see=see, at=node.key_at)


def _prefixes(names: Mapping[str, Node]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        parts = name.split("/")
        for i in range(1, len(parts)):
            if (above := "/".join(parts[:i])) in names:
                yield above, name


def _build(
    scope: Scope, environ: Mapping[str, str] | None, inferred: Mapping[str, Observed]
) -> Catalog:
    for name, node in scope.defined["collections"].items():
        known = build_collection(name, node, scope.sources, inferred.get(name))
        if known is not None:
            scope.collections[name] = known
    collections = []
    for name, node in scope.defined["collections"].items():
        derive, deleted = node.get("derive"), reading.flag(node, "delete")
        target = scope.collections.get(name)
        derivation = (
            build_derivation(derive, target, scope, environ, deleted=deleted) if derive else None
        )
        if target is not None and not deleted:
            collections.append(dataclasses.replace(target.spec, derivation=derivation))
    captures = [
        (node, build_capture(name, node, scope, environ))
        for name, node in scope.defined["captures"].items()
    ]
    materializations = [
        (node, build_materialization(name, node, scope, environ))
        for name, node in scope.defined["materializations"].items()
    ]
    tests = [
        build_test(name, node, scope)
        for name, node in scope.defined["tests"].items()
        if not reading.flag(node, "delete")
    ]
    return Catalog(
        collections=tuple(sorted(collections, key=lambda c: c.name)),
        captures=tuple(sorted(_kept(captures), key=lambda c: c.name)),
        materializations=tuple(sorted(_kept(materializations), key=lambda m: m.name)),
        tests=tuple(sorted(tests, key=lambda t: t.name)),
    )


def _kept(built: Sequence[tuple[Node, _T | None]]) -> list[_T]:
    """Return what could be built, without definitions that are to be removed."""
    return [spec for node, spec in built if spec is not None and not reading.flag(node, "delete")]
