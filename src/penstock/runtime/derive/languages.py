"""The languages of derivations: which code runs the transforms of one.

The modules of languages are imported when they are needed: their libraries take longer to load than
most commands run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import Bug, UserError
from penstock.model.spec import Catalog, CollectionSpec, Transform
from penstock.runtime.derive.engine import RowEngine

if TYPE_CHECKING:
    from penstock.runtime.derive.spark_sql import SparkLambda


PACKAGES: Final = Path("~/.cache/penstock/packages")
"""Where packages are installed that derivations in Python import."""


def install_packages(catalog: Catalog) -> list[str]:
    """Install the packages that derivations import; return the derivations that need some."""
    from penstock.runtime.derive.python_dependencies import install_dependencies

    found = []
    for spec in catalog.derivations:
        if spec.derivation is not None and spec.derivation.using == "python":
            path = install_dependencies(spec.derivation, PACKAGES.expanduser())
            found += [spec.name] if path is not None else []
    return found


def row_engine(catalog: Catalog, collection: CollectionSpec) -> RowEngine | None:
    """Return the code of a derivation that works on documents; None if it works on frames."""
    derivation = collection.derivation
    if derivation is None:
        raise Bug(f"{collection.name} is not derived")
    match derivation.using:
        case "sqlite":
            from penstock.runtime.derive.sqlite_engine import SqliteEngine

            return SqliteEngine.of(catalog, collection)
        case "python":
            from penstock.runtime.derive.python_dependencies import dependencies_path
            from penstock.runtime.derive.python_engine import PythonEngine

            packages = dependencies_path(derivation, PACKAGES.expanduser())
            return PythonEngine.of(
                catalog, collection, packages=None if packages is None else str(packages)
            )
        case "spark":
            return None
        case "local" | "connector":
            raise UserError(
                f"derivations by `using: {derivation.using}` do not run here",
                where=f"derivation {collection.name}",
                why="only sqlite, spark and python are known",
                fix="write its transforms in one of them",
            )


def needs_one_shard(collection: CollectionSpec, engine: RowEngine | None) -> bool:
    """True if a derivation cannot have several shards: it says so, or has one state for all."""
    derivation = collection.derivation
    if derivation is None or derivation.shards.count == 1:
        return True
    if derivation.using != "python":
        return False
    from penstock.runtime.derive.python_engine import PythonEngine

    return isinstance(engine, PythonEngine) and engine.keeps_state


def spark_lambdas(catalog: Catalog, collection: CollectionSpec) -> dict[int, SparkLambda] | None:
    """Return the queries that Spark runs for a derivation, by transform; None if it runs none.

    Those of `using: spark`, and of SQLite lambdas that have exact twins, all of them.
    """
    derivation = collection.derivation
    if derivation is None:
        raise Bug(f"{collection.name} is not derived")
    if derivation.using not in ("spark", "sqlite") or derivation.migrations:
        return None
    found = {}
    for at, transform in enumerate(derivation.transforms):
        source = catalog.collection(transform.source.collection)
        if transform.disable or source is None:
            continue
        text = transform.code or ""
        if derivation.using == "sqlite":
            native = _native(text, source, collection)
            if native is None:
                return None
            text = native
        found[at] = _judged(text, source, collection, transform)
    return found


def _native(text: str, source: CollectionSpec, target: CollectionSpec) -> str | None:
    from penstock.runtime.derive.sqlite_native import NativeLambda, compile_to_spark

    compiled = compile_to_spark(text, source, target)
    return compiled.sql if isinstance(compiled, NativeLambda) else None


def _judged(
    text: str, source: CollectionSpec, target: CollectionSpec, transform: Transform
) -> SparkLambda:
    from penstock.runtime.derive.spark_sql import judge_lambda

    derivation = target.derivation
    judged = judge_lambda(
        text,
        source=source,
        target=target,
        views=dict(derivation.views) if derivation else {},
        nonlinear=derivation is not None and derivation.nonlinear,
    )
    if not isinstance(judged, list):
        return judged
    raise UserError(
        judged[0].message,
        where=f"derivation {target.name}, transform {transform.name}",
        why="`penstock check` shows the place",
        fix=judged[0].hint,
    )
