"""The languages of derivations: which code runs the transforms of one.

The modules of languages are imported when they are needed: their libraries take longer to load than
most commands run.
"""

from __future__ import annotations

from penstock.errors import Bug, UserError
from penstock.model.spec import Catalog, CollectionSpec
from penstock.runtime.derive.engine import RowEngine


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
