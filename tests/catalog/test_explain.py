"""`penstock check --explain` says how each transform of a derivation runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.catalog.build import load_catalog
from penstock.catalog.explain import explain_collection

CATALOG = """
collections:
  acme/events:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}, of: {type: string}}
  acme/derived:
    key: [/id]
    schema:
      type: object
      required: [id]
      reduce: {strategy: merge}
      properties: {id: {type: integer}, n: {type: integer, reduce: {strategy: sum}}}
    derive:
      using: USING
      transforms: [TRANSFORMS]
"""
COPY = "lambda: 'select $id'"
TWICE = "lambda: 'select $id; select $id'"
NATIVE = "native: runs as Spark SQL"


@pytest.mark.parametrize(
    ("using", "transforms", "explained"),
    [
        pytest.param("{sqlite: {}}", [COPY, COPY], [NATIVE, NATIVE], id="twins in Spark SQL"),
        pytest.param(
            "{sqlite: {}}",
            [COPY, TWICE],
            [
                "row by row in SQLite: it has a twin in Spark, but b has none",
                "row by row in SQLite: it has several statements",
            ],
            id="one without a twin",
        ),
        pytest.param(
            "{sqlite: {}}",
            [COPY, f"disable: true, {TWICE}"],
            [NATIVE, "disabled"],
            id="a disabled one does not count",
        ),
        pytest.param(
            "{sqlite: {migrations: ['create table t (n integer primary key)']}}",
            [COPY],
            ["row by row in SQLite: it keeps tables"],
            id="tables",
        ),
        pytest.param(
            "{spark: {}}",
            [
                "lambda: select id from source",
                "lambda: 'select id, sum(1) as n from source group by id'",
            ],
            [
                "native Spark SQL: acts on each document by itself "
                "(at most one row per document); order does not matter",
                "native Spark SQL: adds up the documents of a transaction; order does not matter",
            ],
            id="Spark SQL",
        ),
        pytest.param(
            '{python: {module: "class Derivation:\\n def a(self, read): ..."}}',
            ["shuffle: any"],
            ["document by document, in python"],
            id="Python",
        ),
    ],
)
def test_a_transform_is_explained(
    using: str, transforms: list[str], explained: list[str], tmp_path: Path
) -> None:
    listed = (
        f"{{name: {name}, source: acme/events, {each}}}"
        for name, each in zip("abc", transforms, strict=False)
    )
    text = CATALOG.replace("USING", using).replace("TRANSFORMS", ", ".join(listed))
    (tmp_path / "catalog.yaml").write_text(text)
    catalog = load_catalog([tmp_path], environ=None)
    spec = catalog.collection("acme/derived")
    assert spec is not None
    assert [how for _, how in explain_collection(spec, catalog).derivation] == explained


LISTED = """
collections:
  acme/in:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}, tags: {type: array}}}
  acme/out:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {spark: {nonlinear: allow}}
      transforms:
        - {name: copy, source: acme/in, lambda: select id from source}
        - {name: some, source: acme/in, lambda: select id from source limit 1}
        - {name: off, source: acme/in, lambda: select id from source, disable: true}
"""


def test_a_line_for_each_transform(tmp_path: Path) -> None:
    path = tmp_path / "catalog.yaml"
    path.write_text(LISTED)
    catalog = load_catalog([path], environ=None)
    found = catalog.collection("acme/out")
    assert found is not None
    lines = explain_collection(found, catalog).render().splitlines()
    assert lines[lines.index("  derivation") :] == [
        "  derivation",
        "    copy  native Spark SQL: acts on each document by itself"
        " (at most one row per document); order is kept",
        "    some  native Spark SQL: sees the documents of one transaction together; order is kept",
        "    off   disabled",
    ]
