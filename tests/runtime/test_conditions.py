"""Reductions that a condition chooses, through real runs: any split gives the same rows."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

import penstock
from penstock.model.json_order import ABSENT
from support.reductions import EXAMPLES

pytestmark = pytest.mark.spark

APART = [
    example for example in EXAMPLES if example.name.split()[0] in ("F-15", "R-11", "R-12", "R-13")
]
"""A condition on the document by a barrier and by the fold, and on a member of it."""


def _catalog(directory: Path) -> Path:
    names = [f"acme/e{at}" for at in range(len(APART))]
    catalog = {
        "collections": {
            name: {"key": ["/id"], "schema": example.schema}
            for name, example in zip(names, APART, strict=True)
        },
        "materializations": {
            "acme/views": {
                "endpoint": {
                    "connector": {
                        "image": "penstock/materialize-sqlite",
                        "config": {"path": str(directory / "views.db"), "hardDelete": True},
                    }
                },
                "bindings": [
                    {"source": name, "resource": {"table": name.replace("/", "_")}}
                    for name in names
                ],
            }
        },
    }
    path = directory / "catalog.json"
    path.write_text(json.dumps(catalog))
    return path


@pytest.mark.parametrize(
    "runs_after",
    [
        pytest.param((), id="one transaction"),
        pytest.param((0,), id="a tail"),
        pytest.param((0, 1, 2, 3), id="one by one"),
    ],
)
def test_rows_do_not_depend_on_how_documents_are_split_into_transactions(
    tmp_path: Path, runs_after: Sequence[int]
) -> None:
    with penstock.open(data=tmp_path / "data") as p:
        p.apply(_catalog(tmp_path))
        for step in range(max(len(example.documents) for example in APART)):
            for at, example in enumerate(APART):
                if step < len(example.documents):
                    p.append(f"acme/e{at}", [example.documents[step]])
            if step in runs_after:
                p.run()
        p.run()
    with sqlite3.connect(tmp_path / "views.db") as database:
        for at, example in enumerate(APART):
            rows = database.execute(f"SELECT flow_document FROM acme_e{at}").fetchall()  # noqa: S608
            want = [] if example.states[-1] is ABSENT else [example.states[-1]]
            assert [json.loads(text) for (text,) in rows] == want, example.name
    database.close()
