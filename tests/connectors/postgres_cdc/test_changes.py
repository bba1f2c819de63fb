"""Snapshots and changes of a real server, session by session."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator

import psycopg
import pytest

from connectors.postgres_cdc.changing import Driver, live_rows, ran, reduced
from penstock.model.schema import compiled
from penstock.runtime.connector.capture import CaptureSequence

pytestmark = pytest.mark.postgres

ITEMS = "CREATE TABLE items (id int PRIMARY KEY, name text, amount int)"
FILLED = "INSERT INTO items SELECT i, 'n' || i, i FROM generate_series(1, 10) i"


def slots(url: str) -> list[str]:
    """The slots of a database."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
        ).fetchall()
    return [name for (name,) in rows]


def ops(driver: Driver, table: str = "items") -> str:
    return "".join(each["_meta"]["op"] for each in driver.documents.get(table, ()))


def test_a_snapshot_and_the_changes_after_it_equal_the_table(url: str) -> None:
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items"])
    driver.run()
    assert len(driver.documents["items"]) == 10
    assert all(each["_meta"]["source"]["snapshot"] for each in driver.documents["items"])
    driver.check()
    ran(
        url,
        "INSERT INTO items VALUES (11, NULL, 11)",
        "UPDATE items SET amount = 0 WHERE id < 4",
        "DELETE FROM items WHERE id = 5",
    )
    driver.run()
    assert ops(driver)[10:] == "cuuud"
    driver.check()
    driver.run()
    assert len(driver.documents["items"]) == 15, "nothing is given twice"


def test_documents_fit_the_schema_that_is_discovered(url: str) -> None:
    ran(
        url,
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN cents AS numeric(12, 0)",
        "CREATE TABLE items (id bigint PRIMARY KEY, b boolean, s smallint, f real, d double "
        "precision, n numeric(12, 2) NOT NULL, c cents, t text, v varchar(5), u uuid, day date, "
        "at timestamp, atz timestamptz, span interval, j json, jb jsonb, raw bytea, tags text[], "
        "nums int[], m mood, ms mood[], net inet, made int GENERATED ALWAYS AS (1) STORED)",
        "SET timezone = 'Asia/Tokyo'",
    )
    insert = (
        "INSERT INTO items VALUES (1, true, -3, 1.5, 'Infinity', 12.50, 100, 'a\"b', 'x', "
        "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '2026-11-17', '2026-11-17 08:30', "
        "'2026-11-17 08:30:00.25+09', '1 day 02:00', '{\"a\":\n1}', '{\"b\": [null]}', '\\x00ff', "
        "'{a,\"b c\",NULL}', '{1,2}', 'ok', '{sad,ok}', '10.0.0.1')"
    )
    driver = Driver(url, ["items"])
    ran(url, insert)
    driver.run()
    ran(url, "DELETE FROM items", insert, "UPDATE items SET d = 1.25")
    driver.run()
    snapshot, gone, made, updated = driver.documents["items"]
    assert gone.keys() == {"id", "_meta"}
    for each in (snapshot, made):
        values = {name: value for name, value in each.items() if name != "_meta"}
        assert values == {
            "id": 1,
            "b": True,
            "s": -3,
            "f": 1.5,
            "d": "Infinity",
            "n": "12.50",
            "c": 100,
            "t": 'a"b',
            "v": "x",
            "u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            "day": "2026-11-17",
            "at": "2026-11-17T08:30:00",
            "atz": "2026-11-16T23:30:00.25Z",
            "span": "P1DT2H",
            "j": {"a": 1},
            "jb": {"b": [None]},
            "raw": "AP8=",
            "tags": ["a", "b c", None],
            "nums": [1, 2],
            "m": "ok",
            "ms": ["sad", "ok"],
            "net": "10.0.0.1",
        }
    (proposed,) = driver.source.discover()
    assert proposed.key == ("/id",)
    schema = compiled(json.dumps(proposed.schema))
    assert schema.is_valid(updated)
    assert schema.is_valid(gone)
    assert not schema.is_valid(made), "an infinity is not a number"


# ------------------------------------------------------------------------------------------ changes


def test_a_transaction_over_tables_is_one_sequence(url: str) -> None:
    ran(url, ITEMS, "CREATE TABLE others (id int PRIMARY KEY, amount int)")
    driver = Driver(url, ["items", "others"])
    driver.run()
    items, others = "INSERT INTO items VALUES ({}, 'x', -1)", "INSERT INTO others VALUES ({}, 1)"
    for at in range(50):
        ran(url, f"BEGIN; {items.format(at)}; {others.format(at)}; COMMIT")
    driver.run()
    driver.check()
    for had in driver.sequences:
        totals = [each["amount"] for documents in had.values() for each in documents]
        assert sum(totals) == 0


def test_large_values_that_did_not_change_are_kept(url: str) -> None:
    ran(
        url,
        "CREATE TABLE items (id int PRIMARY KEY, big text, small int)",
        "ALTER TABLE items ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO items VALUES (1, repeat('x', 100000), 1)",
    )
    driver = Driver(url, ["items"])
    driver.run()
    ran(url, "UPDATE items SET small = 2")
    driver.run()
    assert "big" not in driver.documents["items"][-1]
    driver.check()


def test_a_row_that_gets_another_key_is_deleted_and_created(url: str) -> None:
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items"])
    driver.run()
    ran(url, "UPDATE items SET id = id + 100 WHERE id > 8")
    driver.run()
    assert ops(driver)[10:] == "dcdc"
    driver.check()


def test_another_key_of_a_row_with_a_large_value_asks_for_a_backfill(url: str) -> None:
    ran(
        url,
        "CREATE TABLE items (id int PRIMARY KEY, big text)",
        "ALTER TABLE items ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO items VALUES (1, repeat('x', 100000))",
    )
    driver = Driver(url, ["items"])
    driver.run()
    ran(url, "UPDATE items SET id = 2")
    with pytest.raises(Exception, match="does not repeat its big") as raised:
        driver.run()
    assert "REPLICA IDENTITY FULL" in str(raised.value)
    driver.backfill["items"] = 1
    driver.run()
    assert driver.rows("items")[2] == live_rows(url, "items")[2]


def test_a_whole_identity_shows_rows_as_they_were(url: str) -> None:
    ran(url, ITEMS, FILLED, "ALTER TABLE items REPLICA IDENTITY FULL")
    driver = Driver(url, ["items"])
    driver.run()
    ran(url, "UPDATE items SET amount = -1 WHERE id = 1", "DELETE FROM items WHERE id = 2")
    driver.run()
    updated, deleted = driver.documents["items"][10:]
    assert updated["_meta"]["before"] == {"id": 1, "name": "n1", "amount": 1}
    assert deleted["_meta"]["before"] == {"id": 2, "name": "n2", "amount": 2}
    assert deleted.keys() == {"id", "_meta"}
    driver.check()


def test_columns_that_are_added_appear(url: str) -> None:
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items"])
    driver.run()
    ran(
        url,
        "UPDATE items SET amount = 1",
        "ALTER TABLE items ADD extra numeric(10, 2), DROP name",
        "UPDATE items SET extra = 1.10",
    )
    driver.run()
    assert driver.documents["items"][-1].keys() == {"id", "amount", "extra", "_meta"}
    assert driver.documents["items"][-1]["extra"] == "1.10"
    schema = driver.schemas["items"]
    assert schema["properties"]["extra"] == {  # type: ignore[index,call-overload]
        "type": ["string", "null"],
        "format": "number",
    }


@pytest.mark.parametrize("ignores", [False, True])
def test_a_truncate_stops_unless_it_is_ignored(url: str, ignores: bool) -> None:
    ran(url, ITEMS, FILLED)
    resources = {"items": {"onTruncate": "ignore"}} if ignores else {}
    driver = Driver(url, ["items"], resources=resources)
    driver.run()
    ran(url, "TRUNCATE items", "INSERT INTO items VALUES (1, 'new', 1)")
    if ignores:
        driver.run()
        assert len(driver.rows("items")) == 10
        return
    with pytest.raises(Exception, match=r"public\.items was truncated") as raised:
        driver.run()
    assert "backfill" in str(raised.value)
    driver.backfill["items"] = 1
    driver.run()
    assert driver.rows("items")[1] == {"id": 1, "name": "new", "amount": 1}


def test_partitions_are_one_table(url: str) -> None:
    ran(
        url,
        "CREATE TABLE items (id int PRIMARY KEY, name text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF items FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF items FOR VALUES FROM (10) TO (20)",
        "INSERT INTO items SELECT i, 'n' FROM generate_series(5, 15) i",
    )
    driver = Driver(url, ["items"])
    driver.run()
    driver.check()
    ran(url, "UPDATE items SET name = 'm'", "UPDATE items SET id = 19 WHERE id = 5")
    driver.run()
    driver.check()


# ----------------------------------------------------------------------------- large and under load


def test_a_large_transaction_is_one_sequence_from_disk(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connectors.postgres_cdc.spool.PART_BYTES", 1 << 20)
    ran(url, ITEMS)
    driver = Driver(url, ["items"])
    driver.run()
    ran(
        url,
        "BEGIN; INSERT INTO items SELECT i, repeat('x', 50), i FROM generate_series(1, 60000) i; "
        "UPDATE items SET amount = 1 WHERE id % 7 = 0; COMMIT",
        "UPDATE items SET amount = 2 WHERE id = 7",
    )
    driver.run()
    assert driver.spark_reads == 1
    assert len(driver.sequences[-2]["items"]) == 60000 + 60000 // 7
    driver.check()


def test_memory_is_flat_however_large_a_transaction_is(url: str) -> None:
    ran(url, ITEMS)
    driver = Driver(url, ["items"])
    driver.run()
    ran(url, "INSERT INTO items SELECT i, repeat('x', 200), i FROM generate_series(1, 100000) i")
    session = driver.open(ends=False)
    tracemalloc.start()
    try:
        polled = session.poll(0.5)
        while not (isinstance(polled, CaptureSequence) and polled.bytes):
            polled = session.poll(0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        session.close()
    assert polled.bytes > 30 << 20
    assert not polled.given
    assert peak < 16 << 20


def test_a_large_table_is_read_in_parts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connectors.postgres_cdc.snapshot.SPLIT_BYTES", 1 << 20)
    ran(
        url,
        ITEMS,
        "INSERT INTO items SELECT i, repeat('x', 100), i FROM generate_series(1, 40000) i",
    )
    driver = Driver(url, ["items"])
    session = driver.open()
    try:
        driver.drive(session, sequences_max=1)
        polled = session.poll(0.5)
        while not isinstance(polled, CaptureSequence):
            polled = session.poll(0.5)
        (read,) = polled.reads
        assert len(read.splits) > 4  # type: ignore[attr-defined]
        ran(url, "UPDATE items SET amount = 0")  # the snapshot is of before
        driver.commit(polled)
        assert sum(each["amount"] for each in driver.documents["items"]) == 40000 * 40001 // 2
    finally:
        session.close()


@contextlib.contextmanager
def load(
    url: str, *tables: str, outlives: type[BaseException] | None = None
) -> Iterator[threading.Event]:
    """Somebody changes tables, each transaction all of them, until the block ends."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                while not stop.is_set():
                    at = rng.randrange(200)
                    deadlock = contextlib.suppress(psycopg.errors.DeadlockDetected)
                    with deadlock, connection.transaction():
                        for table in sorted(tables):
                            _change(connection, table, at, rng)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(outlives is not None and isinstance(error, outlives) for error in failed), failed


def _change(connection: psycopg.Connection, table: str, at: int, rng: random.Random) -> None:
    value = rng.randrange(1000)
    match rng.randrange(4):
        case 0:
            connection.execute(f"DELETE FROM {table} WHERE id = {at}".encode())  # noqa: S608
        case 1:
            connection.execute(f"UPDATE {table} SET amount = {value} WHERE id = {at}".encode())  # noqa: S608
        case _:
            connection.execute(
                f"INSERT INTO {table} VALUES ({at}, 'n', {value}) "  # noqa: S608
                "ON CONFLICT (id) DO UPDATE SET amount = excluded.amount".encode()
            )


def test_tables_under_load_are_captured_as_they_are(url: str) -> None:
    others = ITEMS.replace("items", "others")
    ran(url, ITEMS, others, FILLED)
    driver = Driver(url, ["items", "others"])
    until = time.monotonic() + 4
    with load(url, "items", "others"):
        time.sleep(0.2)
        while time.monotonic() < until:
            driver.run(until=lambda d: len(d.sequences) % 7 == 6)  # sessions end at any time
            driver.run()
    driver.run()
    driver.check()


def test_tables_are_added_and_read_again_under_load(url: str) -> None:
    ran(url, ITEMS, ITEMS.replace("items", "others"), FILLED)
    driver = Driver(url, ["items"])
    with load(url, "items", "others"):
        driver.run()
        driver.tables = ["items", "others"]
        time.sleep(0.3)
        driver.run()
        driver.documents["items"] = []  # as if it were lost
        driver.backfill["items"] = 1
        time.sleep(0.3)
        driver.run()
    driver.run()
    driver.check()
    assert len(slots(url)) == 1, "slots of backfills are temporary"


def test_a_snapshot_that_is_added_waits_for_the_changes_before_it(url: str) -> None:
    """Tables are as of one position at every commit: money is never seen twice or not at all."""
    ran(
        url,
        "CREATE TABLE items (id int PRIMARY KEY, amount int)",
        "CREATE TABLE others (id int PRIMARY KEY, amount int)",
        "INSERT INTO items VALUES (1, 100)",
        "INSERT INTO others VALUES (1, 0)",
    )
    driver = Driver(url, ["items"])
    driver.run()
    ran(
        url,
        "BEGIN; UPDATE items SET amount = 60; UPDATE others SET amount = 40; COMMIT",
        "BEGIN; UPDATE items SET amount = 50; UPDATE others SET amount = 50; COMMIT",
    )
    driver.tables = ["items", "others"]
    seen: list[int] = []

    session = driver.open()
    try:
        while True:
            polled = session.poll(0.5)
            if isinstance(polled, CaptureSequence):
                driver.commit(polled)
                session.acknowledge(1)
                if "others" in driver.documents:
                    items, others = driver.rows("items"), driver.rows("others")
                    seen.append(items[1]["amount"] + others[1]["amount"])
            elif seen:
                break
    finally:
        session.close()
    assert set(seen) == {100}
    driver.check()


def test_a_binding_that_was_away_is_read_again(url: str) -> None:
    ran(url, ITEMS, ITEMS.replace("items", "others"), FILLED)
    driver = Driver(url, ["items", "others"])
    driver.run()
    driver.tables = ["others"]
    driver.run()
    ran(url, "DELETE FROM items WHERE id = 1", "UPDATE items SET amount = 77 WHERE id = 2")
    driver.run()
    driver.tables = ["others", "items"]
    driver.run()
    assert driver.rows("items")[2]["amount"] == 77
    assert 1 in driver.rows("items"), "nobody saw that it was deleted: the page says so"


def test_a_task_that_was_renamed_goes_on_with_its_slot_and_publication(url: str) -> None:
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items"])
    driver.run()
    before = slots(url)
    ran(url, "UPDATE items SET amount = 0 WHERE id < 4")
    driver.task = "acme/renamed"
    driver.run()
    assert ops(driver)[10:] == "uuu", "nothing is read again, and nothing is missed"
    assert slots(url) == before
    driver.check()


def test_a_log_that_others_fill_is_let_go_of(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connectors.postgres_cdc.session.HEARTBEAT_S", 0.2)
    ran(url, ITEMS, "CREATE TABLE noise (id int)")
    driver = Driver(url, ["items"])
    driver.run()
    before = driver.state["cursor"]  # type: ignore[index,call-overload]
    ran(url, "INSERT INTO noise SELECT generate_series(1, 10000)")
    driver.run(until=lambda d: d.state["cursor"] != before)  # type: ignore[index,call-overload]
    driver.run()
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT confirmed_flush_lsn > %s::pg_lsn FROM pg_replication_slots "
            "WHERE slot_name = %s",
            (before, driver.state["slot"]),  # type: ignore[index,call-overload]
        ).fetchone()
    assert row == (True,)


def test_reduction_in_these_tests_deletes() -> None:
    made = {"id": 1, "_meta": {"op": "c"}}
    assert reduced([made, {"id": 1, "_meta": {"op": "d"}}]) == {}
