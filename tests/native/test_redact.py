"""Redaction of columns does what the reference does to documents."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.model.columns import as_stored, columns, unstorable
from penstock.model.json_order import canonical_json
from penstock.model.redact import redact
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow, to_json, to_struct
from penstock.native.redact import redact_rows, redaction
from penstock.native.sql import name, text
from support import strategies_schema as strategies

pytestmark = pytest.mark.spark

SALT = b"salt'n"


@st.composite
def marked(draw: st.DrawFn, schema: Any, required: bool = True) -> Any:  # noqa: ANN401
    """The schema with `redact` here and there, where `check_schema` allows it."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if "properties" in made:
        made["properties"] = {
            n: draw(marked(below, n in made.get("required", ())))
            for n, below in made["properties"].items()
        }
    if isinstance(made.get("items"), dict):
        made["items"] = draw(marked(made["items"], False))
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = draw(marked(made["additionalProperties"], False))
    texts = made.get("type") == "string" or "type" not in made
    choices = [None, None] + ["block"] * (not required) + ["sha256"] * texts
    if (strategy := draw(st.sampled_from(choices))) is not None:
        made["redact"] = {"strategy": strategy}
    return made


@st.composite
def marked_cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    schema, documents = draw(strategies.cases(documents_max=4, bodies=strategies.plain_bodies))
    made = draw(marked({**schema, "type": "object"}))
    return {k: v for k, v in made.items() if k != "redact"}, documents


@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(marked_cases(), min_size=25, max_size=25))
def test_columns_are_redacted_like_documents(
    spark: SparkSession, batch: list[tuple[dict[str, Any], list[dict[str, Any]]]]
) -> None:
    asked = []
    for at, (schema, documents) in enumerate(batch):
        compiled = CompiledSchema(schema)
        root = columns(compiled.shape)
        changed = redaction(compiled.shape, root, SALT, f"c{at}")
        rows = [d for d in documents if compiled.is_valid(d) and unstorable(d, root) is None]
        if rows and changed:
            asked.append((f"c{at}", compiled, root, rows, changed))
    if not asked:
        return
    height = max(len(rows) for *_, rows, _ in asked)
    table = pa.table(
        {c: to_struct([*rows, *[None] * (height - len(rows))], r) for c, _, r, rows, _ in asked}
    )
    frame = spark.createDataFrame(table)
    fields = {
        c: ", ".join(
            f"{text(f)}, {changed.get(f, f'{c}.{name(f)}')}" for f in frame.schema[c].dataType.names
        )
        for c, _, _, _, changed in asked
    }
    made = frame.selectExpr(*(f"named_struct({fields[c]}) AS {c}" for c in fields)).toArrow()
    for c, compiled, root, rows, _ in asked:
        struct = made.column(c).combine_chunks()
        got = to_json(pa.RecordBatch.from_struct_array(struct), root)[: len(rows)]
        want = [redact(as_stored(row, root), compiled.shape, SALT) for row in rows]
        assert got == [canonical_json(document) for document in want], compiled.schema


@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(
            {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, id="in SQL"
        ),
        pytest.param({"additionalProperties": {}}, id="members without a name, by the reference"),
    ],
)
def test_rows_lose_what_the_schema_hides(spark: SparkSession, hidden: dict[str, Any]) -> None:
    (keyword, said), *_ = hidden.items()
    sha, block = {"redact": {"strategy": "sha256"}}, {"redact": {"strategy": "block"}}
    if keyword == "properties":
        said = {"a": {**said["a"], **sha}, "b": {**said["b"], **block}}
    else:
        said = sha
    schema = CompiledSchema({"type": "object", keyword: said})
    root = columns(schema.shape)
    documents: list[dict[str, Any]] = [{"a": "x", "b": 1, "é": None}, {"a": 'q"'}]
    rows = spark.createDataFrame(pa.Table.from_batches([to_arrow(documents, root)]))
    kept = redact_rows(rows.selectExpr("*", "1 AS origin"), schema, root, SALT)
    (batch,) = kept.toArrow().combine_chunks().to_batches()
    assert sorted(to_json(batch, root)) == sorted(
        canonical_json(redact(d, schema.shape, SALT)) for d in documents
    )
    assert batch.column("origin").to_pylist() == [1, 1]
