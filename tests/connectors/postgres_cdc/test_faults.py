"""What goes wrong at a source is said, and nothing is lost or doubled by it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg
import pytest

from connectors.postgres_cdc.changing import Driver, changing_postgres, config_of, ran
from connectors.postgres_cdc.test_changes import FILLED, ITEMS, load, slots
from penstock.connectors.postgres_cdc.source import PostgresChanges
from penstock.errors import UserError
from penstock.runtime.connector.capture import CaptureSequence
from penstock.runtime.connector.common import ConnectorError
from penstock.testing.postgres import PostgresServer

pytestmark = pytest.mark.postgres


def begun(url: str, *tables: str) -> Driver:
    """A capture that has read its tables."""
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items", *tables])
    driver.run()
    return driver


def slot_of(driver: Driver) -> str:
    return str(driver.state["slot"])  # type: ignore[index,call-overload]


def refusal(driver: Driver) -> ConnectorError:
    with pytest.raises(ConnectorError) as raised:
        driver.run()
    return raised.value


def recovered(driver: Driver) -> None:
    """A raised backfill mends it."""
    driver.backfill["items"] = driver.backfill.get("items", 0) + 1
    driver.documents.clear()
    driver.run()
    driver.check()


# -------------------------------------------------------------------------------------------- slots


def test_a_slot_that_is_gone_means_that_changes_are_lost(url: str) -> None:
    driver = begun(url)
    ran(url, f"SELECT pg_drop_replication_slot('{slot_of(driver)}')", "DELETE FROM items")
    error = refusal(driver)
    assert "changes were lost" in error.what
    assert "there is no such slot" in str(error)
    assert "backfill" in str(error)
    assert not error.transient
    old = slot_of(driver)
    recovered(driver)
    assert slot_of(driver) != old


def test_a_slot_whose_log_was_removed_means_that_changes_are_lost() -> None:
    with changing_postgres(
        "max_slot_wal_keep_size = 1MB", "min_wal_size = 32MB", "max_wal_size = 64MB"
    ) as server:
        url = server.create_database()
        driver = begun(url)
        ran(url, "CREATE TABLE noise (t text)")
        for _ in range(4):
            ran(
                url,
                "INSERT INTO noise SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
                "SELECT pg_switch_wal()",
                "CHECKPOINT",
            )
        error = refusal(driver)
        assert "changes were lost" in error.what
        assert "wal_status = lost" in str(error)
        recovered(driver)


def test_a_slot_that_somebody_moved_means_that_changes_are_lost(url: str) -> None:
    driver = begun(url)
    ran(
        url,
        "UPDATE items SET amount = 5",
        f"SELECT pg_replication_slot_advance('{slot_of(driver)}', pg_current_wal_lsn())",
    )
    error = refusal(driver)
    assert "moved beyond" in str(error)
    recovered(driver)


def test_a_slot_in_use_is_named_with_its_process(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connectors.postgres_cdc.opening.IN_USE_S", 0.3)
    driver = begun(url)
    other = driver.open(ends=False)
    try:
        other.poll(0.1)
        error = refusal(driver)
    finally:
        other.close()
    with psycopg.connect(url):
        assert f"slot {slot_of(driver)} is in use by pid " in error.what
    assert error.transient
    driver.run()


def test_another_server_is_refused(url: str) -> None:
    driver = begun(url)
    driver.state = {**driver.state, "system": "42"}  # type: ignore[dict-item]
    error = refusal(driver)
    assert "another server" in error.what
    assert "was 42" in str(error)


def test_a_server_that_went_back_in_time_is_refused(url: str) -> None:
    driver = begun(url)
    driver.state = {**driver.state, "cursor": "FFFF/0"}  # type: ignore[dict-item]
    assert "ends before" in refusal(driver).what


def test_a_crash_before_the_snapshot_is_committed_starts_over(url: str) -> None:
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items"])
    session = driver.open()
    driver.drive(session, sequences_max=1)  # the name of the slot
    polled = session.poll(0.5)
    while not isinstance(polled, CaptureSequence):
        polled = session.poll(0.5)
    session.close()  # the slot is made, and its snapshot is given, and not committed
    left = slots(url)
    assert left == [slot_of(driver)]
    assert "cursor" not in driver.state  # type: ignore[operator]
    ran(url, "UPDATE items SET amount = 5")
    driver.run()
    assert slots(url) == left
    assert len(driver.documents["items"]) == 10
    driver.check()


def test_what_was_given_and_not_committed_is_given_again(url: str) -> None:
    driver = begun(url)
    ran(url, "UPDATE items SET amount = 5 WHERE id = 1")
    session = driver.open(ends=False)
    polled = session.poll(0.5)
    while not isinstance(polled, CaptureSequence):
        polled = session.poll(0.5)
    session.close()
    driver.run()
    assert len(driver.documents["items"]) == 11
    driver.check()


def test_a_new_slot_says_which_transaction_it_waits_for(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran(url, ITEMS, FILLED)
    driver = Driver(url, ["items"])
    with psycopg.connect(url) as elder:
        elder.execute("INSERT INTO items VALUES (99, 'old', 1)")
        session = driver.open()
        try:
            driver.drive(session, sequences_max=1)
            until = time.monotonic() + 30
            while "a new slot waits for" not in caplog.text and time.monotonic() < until:
                session.poll(0.5)
            assert f"of pid {elder.info.backend_pid}" in caplog.text
            elder.rollback()
            driver.drive(session)
        finally:
            session.close()
    driver.check()


# ------------------------------------------------------------------------------------------ servers


def captured(driver: Driver, stop: threading.Event, failures: list[ConnectorError]) -> None:
    """Run sessions until it is time to stop."""
    while not stop.is_set():
        try:
            driver.run(until=lambda _: stop.is_set())
        except ConnectorError as error:
            failures.append(error)
            time.sleep(0.1)


def test_a_server_that_is_killed_loses_and_doubles_nothing() -> None:
    with changing_postgres() as server:
        url = server.create_database()
        ran(url, ITEMS, FILLED)
        driver = Driver(url, ["items"])
        driver.run()
        for _ in range(3):
            stop = threading.Event()
            failures: list[ConnectorError] = []
            thread = threading.Thread(target=captured, args=(driver, stop, failures))
            thread.start()
            try:
                with load(url, "items", outlives=psycopg.OperationalError):
                    time.sleep(1)
                    server.kill()
                server.start()
                with load(url, "items"):
                    time.sleep(1)
            finally:
                stop.set()
                thread.join()
            assert failures
            assert all(error.transient for error in failures), failures
        driver.run()
        driver.check()


def test_a_server_without_changes_in_its_log_is_refused(postgres: PostgresServer) -> None:
    source = PostgresChanges(config_of(postgres.url()), where="capture acme/changes")
    with pytest.raises(ConnectorError, match="does not have changes") as raised:
        source.check()
    assert "wal_level = logical" in str(raised.value)


def test_a_server_that_can_is_fine(url: str) -> None:
    PostgresChanges(config_of(url), where="capture acme/changes").check()


# -------------------------------------------------------------------------------- tables and grants


def test_a_user_who_may_not_replicate_is_told_so(changing: PostgresServer, url: str) -> None:
    ran(url, "CREATE ROLE plain LOGIN PASSWORD 'plain'")
    config = {**config_of(url), "user": "plain", "password": "plain"}
    try:
        with pytest.raises(ConnectorError, match="may not read the server's log") as raised:
            PostgresChanges(config, where="capture acme/changes").check()
        assert 'ALTER ROLE "plain" REPLICATION' in str(raised.value)
    finally:
        ran(url, "DROP ROLE plain")


def test_a_revoked_grant_is_named(url: str) -> None:
    ran(
        url,
        "CREATE ROLE reader LOGIN REPLICATION PASSWORD 'reader'",
        ITEMS,
        FILLED,
        "GRANT SELECT ON items TO reader",
        "CREATE PUBLICATION ours FOR TABLE items",
    )
    reader = Driver(
        url.replace("penstock:penstock", "reader:reader"),
        ["items"],
        options={"publication": "ours"},
    )
    try:
        reader.run()
        reader.check()
        ran(url, "REVOKE SELECT ON items FROM reader")
        error = refusal(reader)
        assert "reader may not read table public.items" in error.what
        ran(url, "GRANT SELECT ON items TO reader", "UPDATE items SET amount = 4")
        reader.run()
        reader.check()
        ran(url, "ALTER ROLE reader NOREPLICATION")
        assert "reader may not read the server's log" in refusal(reader).what
    finally:
        ran(url, f"SELECT pg_drop_replication_slot('{slot_of(reader)}')", "DROP OWNED BY reader")
        ran(url, "DROP ROLE reader")


def test_tables_that_are_not_the_users_need_a_publication(url: str) -> None:
    ran(
        url,
        "CREATE ROLE guest LOGIN REPLICATION PASSWORD 'guest'",
        ITEMS,
        "GRANT SELECT ON items TO guest",
    )
    guest = Driver(url.replace("penstock:penstock", "guest:guest"), ["items"])
    try:
        error = refusal(guest)
        assert "guest may not publish these tables" in error.what
        assert "CREATE PUBLICATION" in str(error)
    finally:
        ran(url, "DROP OWNED BY guest", "DROP ROLE guest")


def test_a_table_that_is_gone_or_another_one_is_refused(url: str) -> None:
    driver = begun(url)
    ran(url, "DROP TABLE items")
    assert "there is no table public.items" in refusal(driver).what
    ran(url, ITEMS, FILLED)
    error = refusal(driver)
    assert "not the one that was captured" in error.what
    recovered(driver)


def test_a_table_that_is_replaced_under_a_session_stops_it(url: str) -> None:
    ran(url, ITEMS, FILLED, "CREATE PUBLICATION ours FOR ALL TABLES")
    driver = Driver(url, ["items"], options={"publication": "ours"})
    driver.run()
    session = driver.open(ends=False)
    try:
        session.poll(0.1)
        ran(url, "DROP TABLE items", ITEMS, FILLED)
        with pytest.raises(ConnectorError, match="not the one that was captured"):
            driver.drive(session, until=lambda _: False)
    finally:
        session.close()


def test_changes_of_a_table_that_is_renamed_for_a_while_are_captured(url: str) -> None:
    driver = begun(url)
    ran(
        url,
        "ALTER TABLE items RENAME TO away",
        "UPDATE away SET amount = 5",
        "ALTER TABLE away RENAME TO items",
    )
    driver.run()
    driver.check()


def test_a_disk_that_cannot_hold_a_large_transaction_is_named(url: str, tmp_path: Path) -> None:
    ran(url, ITEMS)
    driver = Driver(url, ["items"], options={"spoolDirectory": str(tmp_path / "absent")})
    driver.run()
    ran(url, "INSERT INTO items SELECT i, repeat('x', 99), i FROM generate_series(1, 30000) i")
    error = refusal(driver)
    assert "cannot be put on disk" in error.what
    assert "spoolDirectory" in str(error)
    driver.options = {"spoolDirectory": str(tmp_path)}
    driver.run()
    driver.check()
    assert list(tmp_path.iterdir()) == [], "what is committed is removed"


def test_a_publication_that_is_gone_is_refused(url: str) -> None:
    driver = begun(url)
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT pubname FROM pg_publication").fetchone()
    assert row is not None
    ran(url, f"DROP PUBLICATION {row[0]}", "UPDATE items SET amount = 9")
    error = refusal(driver)
    assert f"no publication {row[0]}" in error.what
    assert "backfill" in str(error)
    recovered(driver)


def test_a_table_that_left_its_publication_is_refused(url: str) -> None:
    ran(url, ITEMS, ITEMS.replace("items", "others"), "CREATE PUBLICATION ours FOR ALL TABLES")
    driver = Driver(url, ["items"], options={"publication": "ours"})
    driver.run()
    ran(url, "DROP PUBLICATION ours", "CREATE PUBLICATION ours FOR TABLE others")
    error = refusal(driver)
    assert "publication ours does not have table public.items" in error.what
    assert "changes were missed" in str(error)


def test_a_publication_that_leaves_deletes_out_is_refused(url: str) -> None:
    ran(url, ITEMS, "CREATE PUBLICATION ours FOR TABLE items WITH (publish = 'insert')")
    driver = Driver(url, ["items"], options={"publication": "ours"})
    assert "leaves changes out" in refusal(driver).what


def test_a_table_without_an_identity_is_refused_before_it_is_published(url: str) -> None:
    ran(url, "CREATE TABLE items (id int, name text, amount int)", FILLED)
    driver = Driver(url, ["items"])
    (proposed,) = driver.source.discover()
    assert proposed.disable
    assert "no primary key" in (proposed.note or "")
    assert "which row of table public.items" in refusal(driver).what
    ran(url, "UPDATE items SET amount = 0")  # which a publication would have made an error
    ran(url, "ALTER TABLE items REPLICA IDENTITY FULL")
    driver.run()
    ran(url, "DELETE FROM items WHERE id = 1")
    driver.run()
    driver.check()


def test_a_column_called_meta_is_refused(url: str) -> None:
    ran(url, "CREATE TABLE items (id int PRIMARY KEY, _meta text)")
    with pytest.raises(UserError, match="has a column _meta"):
        Driver(url, ["items"]).run()


# ----------------------------------------------------------------------------------------- previews


def test_a_preview_leaves_nothing_behind(url: str) -> None:
    ran(url, ITEMS, FILLED)
    preview = Driver(url, ["items"])
    preview.run(preview=True)
    assert len(preview.documents["items"]) == 10
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1 FROM pg_publication").fetchall() == []
    assert slots(url) == []


def test_a_preview_beside_a_capture_shows_changes_and_moves_nothing(url: str) -> None:
    driver = begun(url)
    preview = Driver(url, ["items"])
    session = preview.open(ends=False, preview=True)
    try:
        preview.drive(session, sequences_max=1)
        assert len(preview.documents["items"]) == 10
        ran(url, "UPDATE items SET amount = 3 WHERE id = 3")
        preview.drive(session, until=lambda d: len(d.documents["items"]) == 11)
    finally:
        session.close()
    driver.run()
    driver.check()
    assert slots(url) == [slot_of(driver)]


def test_nothing_shows_the_password(url: str) -> None:
    source = PostgresChanges(
        {**config_of(url), "password": "not-the-one"}, where="capture acme/changes"
    )
    with pytest.raises(ConnectorError) as raised:
        source.check()
    assert "not-the-one" not in str(raised.value) + repr(source.server)
