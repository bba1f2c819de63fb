"""`penstock check --explain` says how each transform of a derivation runs."""

from pathlib import Path

from penstock.catalog.build import load_catalog
from penstock.catalog.explain import explain_collection

CATALOG = """
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
    path.write_text(CATALOG)
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
