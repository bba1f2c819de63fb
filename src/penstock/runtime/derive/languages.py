"""The languages of derivations: which code runs the transforms of one.

The modules of languages are imported when they are needed: their libraries take longer to load than
most commands run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import Bug, UserError
from penstock.model.spec import Catalog, CollectionSpec
from penstock.runtime.derive.engine import RowEngine

if TYPE_CHECKING:
    from penstock.runtime.derive.spark_sql import SparkLambda


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
            from penstock.runtime.derive.python_engine import PythonEngine

            return PythonEngine.of(catalog, collection)
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


def spark_lambdas(catalog: Catalog, collection: CollectionSpec) -> dict[int, SparkLambda]:
    """Return the queries of a derivation that works on frames, by transform."""
    from penstock.runtime.derive.spark_sql import judge_lambda

    derivation = collection.derivation
    if derivation is None:
        raise Bug(f"{collection.name} is not derived")
    found = {}
    for at, transform in enumerate(derivation.transforms):
        source = catalog.collection(transform.source.collection)
        if transform.disable or source is None:
            continue
        judged = judge_lambda(
            transform.code or "",
            source=source,
            target=collection,
            views=dict(derivation.views),
            nonlinear=derivation.nonlinear,
        )
        if isinstance(judged, list):
            raise UserError(
                judged[0].message,
                where=f"derivation {collection.name}, transform {transform.name}",
                why="`penstock check` shows the place",
                fix=judged[0].hint,
            )
        found[at] = judged
    return found
