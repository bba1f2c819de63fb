"""The languages of derivations: what runs the code of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.model.spec import Catalog, CollectionSpec
from penstock.runtime.derive.engine import RowEngine

if TYPE_CHECKING:
    from penstock.runtime.derive.spark_sql import SparkLambda


def row_engine(catalog: Catalog, collection: CollectionSpec) -> RowEngine | None:
    """Return what runs a derivation's code one by one; None if Spark runs it as queries."""
    raise NotImplementedError


def spark_lambdas(catalog: Catalog, collection: CollectionSpec) -> Mapping[int, SparkLambda]:
    """Return the queries of a derivation, by transform."""
    raise NotImplementedError
