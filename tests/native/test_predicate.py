"""A schema as a Spark expression agrees with the validator on every row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.model.columns import Column, as_stored, columns, unstorable
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_struct
from penstock.native.predicate import predicate
from penstock.testing import strategies_schema as strategies

Case = tuple[dict[str, Any], list[dict[str, Any]]]

STRUCTURE = {"type", "properties", "items", "additionalProperties"}


def loose(schema: Any) -> Any:  # noqa: ANN401
    """The same structure without what narrows it: rows that its columns hold may break `schema`."""
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k in STRUCTURE}
    if "properties" in kept:
        kept["properties"] = {name: loose(below) for name, below in kept["properties"].items()}
    for keyword in ("items", "additionalProperties"):
        if keyword in kept:
            kept[keyword] = True if isinstance(kept[keyword], list) else loose(kept[keyword])
    return kept


PLAIN = strategies.cases(documents_max=5, bodies=strategies.plain_bodies, widened=loose)
ANYTHING = strategies.cases(documents_max=5, widened=loose)


def rows_of(case: Case) -> tuple[Column, list[dict[str, Any]]]:
    schema, documents = case
    wide = CompiledSchema(loose(schema))
    root = columns(wide.shape)
    return root, [d for d in documents if wide.is_valid(d) and unstorable(d, root) is None]


def judged(session: SparkSession, batch: list[Case]) -> list[tuple[Case, dict[str, Any], bool]]:
    """What the expressions say of every row, all in one job: each case is a struct column of it."""
    asked = []
    for at, case in enumerate(batch):
        root, rows = rows_of(case)
        if rows and (expression := predicate(case[0], root, f"c{at}")) is not None:
            asked.append((f"c{at}", case, root, rows, expression))
    if not asked:
        return []
    height = max(len(rows) for _, _, _, rows, _ in asked)
    table = pa.table(
        {
            name: to_struct([*rows, *[None] * (height - len(rows))], root)
            for name, _, root, rows, _ in asked
        }
    )
    answers = session.createDataFrame(table).selectExpr(*(e for *_, e in asked)).collect()
    return [
        (case, as_stored(row, root), answers[at][i])
        for i, (_, case, root, rows, _) in enumerate(asked)
        for at, row in enumerate(rows)
    ]


@pytest.mark.spark
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.one_of(PLAIN, PLAIN, ANYTHING), min_size=25, max_size=25))
def test_the_expression_and_the_validator_agree(spark: SparkSession, batch: list[Case]) -> None:
    for (schema, _), document, ok in judged(spark, batch):
        assert ok == CompiledSchema(schema).is_valid(document), (schema, document)
