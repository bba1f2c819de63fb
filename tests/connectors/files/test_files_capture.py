"""Captures of files, from the catalog to the collection: sequences that people do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.batch import TaskRun, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.connectors.files import source as files_source
from penstock.connectors.files import splits
from penstock.runtime.capture.build import build
from penstock.runtime.control import Control
from penstock.runtime.ops import QUARANTINE
from penstock.runtime.supervise import supervise
from runtime.sessions import Place, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ORDERS = {
    "key": ["/id"],
    "schema": {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "amount": {"type": "number"},
            "zip": {"type": "string"},
            "_meta": {
                "type": "object",
                "properties": {"file": {"type": "string"}, "row": {"type": "integer"}},
            },
        },
    },
}


@pytest.fixture(params=["by the leader", "by Spark"])
def place(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    if request.param == "by Spark":
        monkeypatch.setattr(files_source, "GIVEN_BYTES_MAX", -1)
    (tmp_path / "in").mkdir()
    return Place(tmp_path, spark)


def declare(
    place: Place,
    *,
    path: str = "",
    config: dict[str, Any] | None = None,
    tables: dict[str, Any] | None = None,
    **binding: object,
) -> None:
    config = {"path": str(place.directory / "in"), "settle": 0, **(config or {})}
    resource = {"path": path, **binding.pop("resource", {})}  # type: ignore[dict-item]
    capture = {
        "endpoint": {"connector": {"image": "penstock/source-files", "config": config}},
        "bindings": [{"resource": resource, "target": "acme/orders", **binding}],
    }
    place.apply({"acme/orders": ORDERS}, tables or {}, {"acme/files": capture})


def run(place: Place) -> TaskRun:
    (made,) = run_all(place)
    return made


def run_all(place: Place) -> list[TaskRun]:
    async def go() -> list[TaskRun]:
        async with place.store() as store:
            catalog = await desired.load(store)
            return await run_graph(catalog, tasks_to_run(catalog), place.world(store))

    return asyncio.run(go())


def lines(*ids: int, **members: object) -> str:
    return "".join(f"{json.dumps({'id': at, **members})}\n" for at in ids)


def ids(place: Place) -> list[int]:
    return sorted(doc["id"] for doc in place.read("acme/orders"))


def test_each_file_is_read_once_and_says_where_documents_come_from(place: Place) -> None:
    declare(place)
    incoming = place.directory / "in"
    (incoming / "a.jsonl").write_text(lines(1, 2))
    assert run(place).error is None
    (incoming / "b.jsonl").write_text(lines(3))
    made = run(place)
    assert (made.error, made.documents, made.transactions) == (None, 1, 1)
    assert run(place).transactions == 0
    assert [(d["id"], d["_meta"]) for d in place.read("acme/orders")] == [
        (1, {"file": "a.jsonl", "row": 1}),
        (2, {"file": "a.jsonl", "row": 2}),
        (3, {"file": "b.jsonl", "row": 1}),
    ]


def test_csv_and_parquet_beside_json_lines(place: Place) -> None:
    declare(place)
    incoming = place.directory / "in"
    (incoming / "a.jsonl").write_text(lines(1, amount=12345678901234567, zip="007"))
    (incoming / "b.csv").write_text("id,amount,zip\n2,1.5,007\n3,,\n")
    pq.write_table(pa.table({"id": [4], "amount": [2.5], "zip": ["007"]}), incoming / "c.parquet")
    assert run(place).error is None
    found = sorted(place.read("acme/orders"), key=lambda doc: doc["id"])
    assert [{k: v for k, v in doc.items() if k != "_meta"} for doc in found] == [
        {"id": 1, "amount": 12345678901234568, "zip": "007"},
        {"id": 2, "amount": 1.5, "zip": "007"},
        {"id": 3},
        {"id": 4, "amount": 2.5, "zip": "007"},
    ]


def test_a_bad_line_stops_the_capture_and_nothing_is_captured(place: Place) -> None:
    declare(place)
    file = place.directory / "in" / "a.jsonl"
    file.write_text(lines(1) + '{"id": "two"}\n{"id": 3\n' + lines(4))
    error = run(place).error
    assert error is not None
    text = str(error)
    assert "2 documents do not fit the schema of acme/orders" in text
    assert f"{file}:2: /id:" in text
    assert f"{file}:3: " in text
    assert "onInvalid" in text
    assert ids(place) == []
    file.write_text(lines(1, 2, 3, 4))
    assert run(place).error is None
    assert ids(place) == [1, 2, 3, 4]


def test_bad_lines_are_skipped_if_the_binding_says_so(place: Place) -> None:
    declare(place, onInvalid="skip")
    (place.directory / "in" / "a.jsonl").write_text(lines(1) + '{"id": "two"}\n' + lines(3))
    made = run(place)
    assert (made.error, made.stored) == (None, 2)
    assert ids(place) == [1, 3]
    (stats,) = [doc["capture"] for doc in place.read("ops/stats")]
    assert stats["acme/orders"]["refusedTotal"] == 1


def test_bad_lines_go_to_quarantine_where_people_can_read_them(place: Place) -> None:
    declare(place, onInvalid="quarantine")
    file = place.directory / "in" / "a.csv"
    file.write_text("id,zip\n1,a\nx,b\n3,c,d\n4,e\n")
    assert run(place).error is None
    assert ids(place) == [1, 4]
    found = place.read(QUARANTINE.name)
    assert {doc["collection"] for doc in found} == {"acme/orders"}
    told = sorted((doc["origin"], doc["reasons"][0], doc["text"]) for doc in found)
    assert [(o.removeprefix(str(file)), t) for o, _, t in told] == [
        (", line 4", "3,c,d"),
        (", row 2", '{"id":"x","zip":"b"}'),
    ]
    assert "fields" in told[0][1]
    assert "/id" in told[1][1]
    assert run(place).transactions == 0


def test_a_changed_file_is_named_and_not_read_again(place: Place) -> None:
    declare(place)
    file = place.directory / "in" / "a.jsonl"
    file.write_text(lines(1))
    assert run(place).error is None
    file.write_text(lines(1, 2))
    error = run(place).error
    assert error is not None
    assert "changed after it was read" in str(error)
    assert str(file) in str(error)
    declare(place, config={"onChanged": "ignore"})
    assert run(place).error is None
    assert ids(place) == [1]
    declare(place, config={"onChanged": "ignore"}, backfill=1)
    assert run(place).error is None
    assert ids(place) == [1, 1, 2]


def test_a_file_that_is_gone_after_it_was_read_is_no_problem(place: Place) -> None:
    declare(place)
    file = place.directory / "in" / "a.jsonl"
    file.write_text(lines(1))
    assert run(place).error is None
    file.unlink()
    assert run(place).error is None
    assert ids(place) == [1]


def test_a_directory_that_is_missing_is_a_clear_error(place: Place) -> None:
    declare(place)
    shutil.rmtree(place.directory / "in")
    error = run(place).error
    assert error is not None
    assert "no such file or directory" in str(error)
    assert str(place.directory / "in") in str(error)


def test_of_documents_of_one_key_the_later_file_wins(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "SPLIT_BYTES", 64)  # a task for each file, and more
    bindings = [{"source": "acme/orders", "resource": {"table": "orders"}}]
    declare(place, tables={"acme/views": task("sqlite", {"path": place.database()}, bindings)})
    incoming = place.directory / "in"
    for at, name in enumerate(("z", "m", "a")):
        file = incoming / f"{name}.jsonl"
        file.write_text("".join(lines(*range(20), amount=at)))
        os.utime(file, ns=(at * 10**9, at * 10**9))
    assert [made.error for made in run_all(place)] == [None, None]
    with contextlib.closing(sqlite3.connect(place.database())) as database:
        rows = database.execute("SELECT id, amount FROM orders").fetchall()
    assert dict(rows) == dict.fromkeys(range(20), 2)


def test_a_split_with_more_rows_than_planned_is_read_by_one_task(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "_DENSE", 0)
    declare(place)
    import gzip

    text = "".join(lines(*range(500)))
    (place.directory / "in" / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert run(place).error is None
    assert ids(place) == list(range(500))


def test_a_capture_that_goes_on_sees_new_files(place: Place) -> None:
    """With notifications: the next listing would be after a minute."""
    declare(place, config={"pollInterval": 60})
    incoming = place.directory / "in"
    (incoming / "a.jsonl").write_text(lines(1))

    async def go() -> None:
        from penstock.connectors.builtin import capture

        async with place.store() as store:
            catalog = await desired.load(store)
            built = build(catalog, catalog.captures[0], capture)
            seen: asyncio.Queue[int] = asyncio.Queue()
            control = Control(on_progress=lambda made: seen.put_nowait(made.documents))
            running = asyncio.create_task(supervise(built, place.world(store), control))
            async with asyncio.timeout(60):
                assert await seen.get() == 1
                (incoming / "b.jsonl").write_text(lines(2, 3))
                assert await seen.get() == 2
            control.stop()
            await running

    asyncio.run(go())
    assert ids(place) == [1, 2, 3]


def test_the_schema_of_documents_is_learnt_and_becomes_columns(place: Place) -> None:
    """A collection that names its key alone: members appear in tables as they were seen."""
    inferred = {
        "key": ["/id"],
        "writeSchema": {
            "type": "object",
            "required": ["id"],
            "properties": {"id": {"type": "integer"}},
        },
        "readSchema": {
            "allOf": [{"$ref": "flow://write-schema"}, {"$ref": "flow://inferred-schema"}]
        },
    }
    config = {"path": str(place.directory / "in"), "settle": 0}
    capture = {
        "endpoint": {"connector": {"image": "penstock/source-files", "config": config}},
        "bindings": [{"resource": {"path": ""}, "target": "acme/orders"}],
    }
    bindings = [{"source": "acme/orders", "resource": {"table": "orders"}}]
    views = {"acme/views": task("sqlite", {"path": place.database()}, bindings)}
    (place.directory / "in" / "a.jsonl").write_text(lines(1, name="x", at="2026-01-02"))

    def applied() -> None:
        catalog = {
            "collections": {"acme/orders": inferred},
            "captures": {"acme/files": capture},
            "materializations": views,
        }
        (place.directory / "catalog.json").write_text(json.dumps(catalog))
        with penstock.open(data=place.settings.data) as opened:
            opened.apply(place.directory / "catalog.json")

    applied()
    assert [made.error for made in run_all(place)] == [None, None]
    applied()
    (place.directory / "in" / "b.jsonl").write_text(lines(2, name="y", size=2.5))
    assert [made.error for made in run_all(place)] == [None, None]
    applied()
    assert [made.error for made in run_all(place)] == [None, None]
    with contextlib.closing(sqlite3.connect(place.database())) as database:
        names = [name for _, name, *_ in database.execute("PRAGMA table_info(orders)")]
        assert {"id", "name", "at", "size"} <= set(names)
        rows = database.execute("SELECT id, name, flow_document FROM orders ORDER BY id").fetchall()
    # What was stored before a column was there has its member in the document.
    assert [row[:2] for row in rows] == [(1, None), (2, "y")]
    assert [json.loads(row[2])["name"] for row in rows] == ["x", "y"]
