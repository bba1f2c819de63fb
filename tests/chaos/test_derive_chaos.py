"""`penstock run` is killed while documents go through two derivations into a table.

The first derivation is Spark SQL; the second one is SQLite, and counts the documents of each
account in its state. Beside sums, which reveal anything lost or doubled on the way, the table has
the last count: it differs from the number of documents if the state lost or doubled anything.
The default run is short. With `PENSTOCK_CHAOS_SECONDS` it has 200,000 documents and 20 kills.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from chaos.process_tree import under_fire
from chaos.two_hops import CLEAN, COUNTED, ROWS, oracle
from runtime.derive.deriving import derived_inputs
from runtime.sessions import ACCOUNTS, Place, accounts, task

LONG = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0")) > 0
DOCUMENTS, KILLS, KEYS = (200_000, 20, 1000) if LONG else (3_000, 2, 50)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 3600 * LONG)]

Document = dict[str, Any]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_killing_the_process_tree_at_any_time_loses_and_doubles_nothing_over_two_hops(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place = Place(tmp_path, None)  # type: ignore[arg-type]
    config: Document = {"path": place.database()}
    url = "" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    if url:
        parts = conninfo_to_dict(url)
        config = {
            "address": f"{parts['host']}:{parts['port']}",
            "database": parts["dbname"],
            "user": parts["user"],
            "password": parts["password"],
        }
    views = task(kind, config, [{"source": "acme/counted", "resource": {"table": "accounts"}}])
    place.apply(
        {"acme/accounts": ACCOUNTS, "acme/clean": CLEAN, "acme/counted": COUNTED},
        {"acme/views": views},
    )

    def append(start: int, count: int) -> None:
        place.append({"acme/accounts": accounts(start, count, keys=KEYS)})

    fire = under_fire(place, append, documents=DOCUMENTS, kills=KILLS)
    if url:
        with psycopg.connect(url) as connection:
            rows = connection.execute(ROWS).fetchall()
    else:
        with contextlib.closing(sqlite3.connect(place.database())) as database:
            rows = database.execute(ROWS).fetchall()
    assert {account: tuple(map(int, row)) for account, *row in rows} == oracle(
        fire.appended, KEYS
    ), fire
    for name in ("acme/clean", "acme/counted"):
        assert derived_inputs(place, name) == fire.appended, f"{fire}: {name}"
