"""`penstock run` is killed while files are captured, derived from in two hops, and stored.

The default run is short. With `PENSTOCK_CHAOS_SECONDS` it has 200,000 documents and 20 kills.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from chaos.process_tree import under_fire
from chaos.two_hops import CLEAN, COUNTED, ROWS, oracle
from runtime.capture.captures import write_lines
from runtime.sessions import ACCOUNTS, Place, accounts, task

LONG = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0")) > 0
DOCUMENTS, KILLS, KEYS = (200_000, 20, 1000) if LONG else (3_000, 2, 50)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 3600 * LONG)]


def test_killing_the_process_tree_while_files_are_captured_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, None)  # type: ignore[arg-type]
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    config = {"path": str(incoming), "settle": 0}
    capture = {
        "endpoint": {"connector": {"image": "penstock/source-files", "config": config}},
        "bindings": [{"resource": {"path": "*.jsonl"}, "target": "acme/accounts"}],
    }
    bindings = [{"source": "acme/counted", "resource": {"table": "accounts"}}]
    place.apply(
        {"acme/accounts": ACCOUNTS, "acme/clean": CLEAN, "acme/counted": COUNTED},
        {"acme/views": task("sqlite", {"path": place.database()}, bindings)},
        {"acme/files": capture},
    )

    def arrive(start: int, count: int) -> None:
        hidden = tmp_path / f"{start}.part"
        write_lines(hidden, accounts(start, count, keys=KEYS))
        hidden.rename(incoming / f"{start:09}.jsonl")

    fire = under_fire(place, arrive, documents=DOCUMENTS, kills=KILLS)
    with contextlib.closing(sqlite3.connect(place.database())) as database:
        rows = database.execute(ROWS).fetchall()
    found = {account: tuple(map(int, row)) for account, *row in rows}
    assert found == oracle(fire.appended, KEYS), fire
    published = sum(
        counts["out"]["docsTotal"]
        for stats in place.read("ops/stats")
        for counts in stats.get("capture", {}).values()
    )
    assert published == fire.appended, fire
