"""What goes wrong at the ends of a task: documents and endpoints that are not as they should be.

Whatever it is: the error says what to do, the task tries again or stops as fits, nothing is lost or
doubled when it goes on, and a task beside it does not notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from penstock import failpoints
from penstock.errors import UserError
from penstock.runtime import reading
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.recovery import EndpointMismatch
from penstock.runtime.refusals import RefusedDocument
from penstock.testing.postgres import PostgresServer
from runtime.sessions import ACCOUNTS, Document, Place, accounts, reduced, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SOURCE = {"source": "acme/accounts", "resource": {"table": "accounts"}}


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


def beside(place: Place) -> Document:
    """A task with nothing wrong about it."""
    return task("sqlite", {"path": place.database("good")}, [SOURCE])


def good(place: Place) -> dict[Any, Document]:
    return place.table("accounts", database="good")


# -------------------------------------------------------------------------------------- documents

REFUSALS: dict[str, tuple[Document, Document, str, str]] = {
    "an expression finds it": (
        {"type": "integer"},
        {"type": "integer", "minimum": 0},
        "-5",
        "/v: -5 is less than 0",
    ),
    "the validator finds it": (
        {"type": "string"},
        {"type": "string", "format": "date-time"},
        '"noon"',
        '/v: "noon" does not have the format date-time',
    ),
    "the layout does not hold it": (
        {"type": ["integer", "string"]},
        {"type": "integer"},
        '"x"',
        '/v: "x" is not an integer',
    ),
}


def collection(written: Document, read: Document) -> Document:
    def schema(value: Document) -> Document:
        return {
            "type": "object",
            "required": ["id"],
            "properties": {"id": {"type": "integer"}, "v": value},
        }

    return {"key": ["/id"], "writeSchema": schema(written), "readSchema": schema(read)}


def test_a_document_that_the_read_schema_refuses_stops_its_task_and_no_other(
    place: Place,
) -> None:
    names = [f"acme/c{number}" for number in range(len(REFUSALS))]
    cases = dict(zip(names, REFUSALS.values(), strict=True))
    valid = {"integer": 1, "string": "2026-01-01T00:00:00Z"}

    def value_of(name: str) -> object:
        kind = cases[name][1]["type"]
        return valid[kind]

    fields = {"recommended": True, "exclude": ["v"]}  # a column would be of one type for ever
    tasks: Document = {
        f"{name}/view": task(
            "sqlite",
            {"path": place.database(name.replace("/", "-"))},
            [{"source": name, "resource": {"table": "t"}, "fields": fields}],
        )
        for name in names
    } | {"acme/good": beside(place)}

    def apply(*, relaxed: bool) -> None:
        collections = {
            name: collection(written, written if relaxed else read)
            for name, (written, read, _, _) in cases.items()
        }
        place.apply({**collections, "acme/accounts": ACCOUNTS}, tasks)

    def stored(name: str) -> dict[int, object]:
        rows = place.table("t", "flow_document", key="id", database=name.replace("/", "-"))
        return {id_: json.loads(row["flow_document"])["v"] for id_, row in rows.items()}

    apply(relaxed=False)
    place.append({name: [{"id": 1, "v": value_of(name)}] for name in names})
    assert {run.error for run in place.run(*list(tasks)[:-1]).values()} == {None}

    bad = {name: json.loads(text) for name, (_, _, text, _) in cases.items()}
    place.append({name: [{"id": 2, "v": value_of(name)}] for name in names})
    place.append({name: [{"id": 3, "v": bad[name]}] for name in names})
    place.append({name: [{"id": 4, "v": value_of(name)}] for name in names})
    place.append({"acme/accounts": accounts(0, 30)})
    runs = place.run()
    assert runs["acme/good"].error is None
    assert good(place) == reduced(accounts(0, 30))
    for name, (_, _, _, message) in cases.items():
        error = runs[f"{name}/view"].error
        assert isinstance(error, RefusedDocument), error
        assert name in error.what
        assert message in error.what
        assert f"journal {name}/" in (error.where or "")
        assert "readSchema" in (error.fix or "")
        assert stored(name).keys() == {1}, "nothing of that transaction"

    apply(relaxed=True)
    assert {run.error for run in place.run().values()} == {None}
    for name in names:
        value = value_of(name)
        assert stored(name) == {1: value, 2: value, 3: bad[name], 4: value}
        assert place.counted(name) == 4


# -------------------------------------------------------------------------------------- endpoints


def test_a_table_with_a_column_of_another_type_is_refused_before_anything_happens(
    place: Place,
) -> None:
    bad = task("sqlite", {"path": place.database()}, [SOURCE])
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/bad": bad, "acme/good": beside(place)})
    place.append({"acme/accounts": accounts(0, 30)})
    with contextlib.closing(sqlite3.connect(place.database())) as connection:
        connection.execute("CREATE TABLE accounts (account INTEGER PRIMARY KEY, total BLOB)")
    runs = place.run()
    error = runs["acme/bad"].error
    assert isinstance(error, UserError | ConnectorError), error
    assert "total" in str(error)
    assert error.fix
    assert runs["acme/good"].error is None
    assert good(place) == reduced(accounts(0, 30))

    with contextlib.closing(sqlite3.connect(place.database())) as connection:
        assert connection.execute("SELECT * FROM accounts").fetchall() == []
        connection.execute("DROP TABLE accounts")
    assert place.run()["acme/bad"].error is None
    assert place.table("accounts") == reduced(accounts(0, 30))


def test_a_database_that_was_restored_from_a_backup_is_not_written_to(place: Place) -> None:
    place.apply(
        {"acme/accounts": ACCOUNTS},
        {"acme/views": task("sqlite", {"path": place.database()}, [SOURCE])},
    )
    for start in (0, 30):
        if start:
            shutil.copy(place.database(), place.database("backup"))
        place.append({"acme/accounts": accounts(start, 30)})
        assert place.run()["acme/views"].error is None
    shutil.move(place.database("backup"), place.database())
    place.append({"acme/accounts": accounts(60, 30)})
    error = place.run()["acme/views"].error
    assert isinstance(error, EndpointMismatch), error
    assert "backup" in (error.fix or "")
    assert place.table("accounts") == reduced(accounts(0, 30)), "as the backup has it"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this system does not let root mount a small file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_stops_a_task_until_there_is_space(place: Place, small_disk: Path) -> None:
    bad = task("sqlite", {"path": str(small_disk / "views.db")}, [SOURCE])
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/bad": bad, "acme/good": beside(place)})
    place.append({"acme/accounts": accounts(0, 30)})
    assert place.run("acme/bad")["acme/bad"].error is None

    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    place.append({"acme/accounts": accounts(30, 30)})
    runs = place.run(failures_max=2)
    error = runs["acme/bad"].error
    assert isinstance(error, ConnectorError), error
    assert error.transient, "it is tried again, and only a batch run gives up"
    assert any(word in (error.fix or "") for word in ("space", "full"))
    assert runs["acme/good"].error is None
    assert good(place) == reduced(accounts(0, 60))

    (small_disk / "filler").unlink()
    assert place.run()["acme/bad"].error is None
    shutil.copy(small_disk / "views.db", place.database())
    assert place.table("accounts") == reduced(accounts(0, 60))


# ------------------------------------------------------------------------------------- PostgreSQL


def config_of(url: str, **others: object) -> Document:
    parts = conninfo_to_dict(url)
    return {
        "address": f"{parts['host']}:{parts['port']}",
        "database": parts["dbname"],
        "user": parts["user"],
        "password": parts["password"],
        **others,
    }


def rows_of(url: str) -> dict[Any, Document]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        rows = connection.execute(
            "SELECT account, count, total::bigint, top, region FROM accounts"
        ).fetchall()
    return {row.pop("account"): row for row in rows}


@pytest.mark.postgres
def test_a_wrong_password_and_a_revoked_privilege_need_a_person(
    place: Place, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        user = f"teller_{os.getpid()}_{connection.info.dbname[:8]}"
        connection.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'right'")  # type: ignore[arg-type]
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {user}")  # type: ignore[arg-type]
        connection.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {user}")  # type: ignore[arg-type]

        def apply(password: str) -> None:
            config = config_of(postgres_url, user=user, password=password)
            bad = task("postgres", config, [SOURCE])
            place.apply({"acme/accounts": ACCOUNTS}, {"acme/bad": bad, "acme/good": beside(place)})

        apply("wr0ng!")
        place.append({"acme/accounts": accounts(0, 30)})
        runs = place.run()
        error = runs["acme/bad"].error
        assert isinstance(error, ConnectorError), error
        assert not error.transient
        assert "password" in (error.fix or "")
        assert "wr0ng!" not in str(error)
        assert runs["acme/good"].error is None

        apply("right")
        assert place.run()["acme/bad"].error is None
        assert rows_of(postgres_url) == reduced(accounts(0, 30))

        # Of its owner too: a table that was handed over to somebody stricter.
        connection.execute(f"ALTER TABLE accounts OWNER TO {connection.info.user}")  # type: ignore[arg-type]
        connection.execute(f"GRANT SELECT ON accounts TO {user}")  # type: ignore[arg-type]
        place.append({"acme/accounts": accounts(30, 30)})
        runs = place.run()
        error = runs["acme/bad"].error
        assert isinstance(error, ConnectorError), error
        assert not error.transient
        assert "GRANT" in (error.fix or "")
        assert user in str(error)
        assert runs["acme/good"].error is None
        assert good(place) == reduced(accounts(0, 60))
        assert rows_of(postgres_url) == reduced(accounts(0, 30)), "nothing of the transaction"

        connection.execute(f"GRANT ALL ON accounts TO {user}")  # type: ignore[arg-type]
        assert place.run()["acme/bad"].error is None
        assert rows_of(postgres_url) == reduced(accounts(0, 60))
        assert place.counted("acme/accounts") == 60 * 2, "once by each task"


@pytest.mark.postgres
def test_a_server_that_dies_in_the_middle_of_a_transaction_comes_back_to_all_of_it(
    place: Place, own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.create_database()
    bad = task("postgres", config_of(url), [SOURCE])
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/bad": bad, "acme/good": beside(place)})
    place.append({"acme/accounts": accounts(0, 30)})
    assert place.run()["acme/bad"].error is None

    # Staged in tables of the server, which a crash empties, rather than carried along.
    monkeypatch.setattr(reading, "SMALL_BYTES", 0)
    monkeypatch.setattr("penstock.connectors.postgres.rows.CARRIED_BYTES_MAX", 0)
    deaths: list[str] = []

    def die(name: str) -> None:
        if name in ("leader.after-hint-record", "postgres.before-commit") and name not in deaths:
            deaths.append(name)
            own_postgres.kill()
            own_postgres.start()

    monkeypatch.setattr(failpoints, "hit", die)
    place.append({"acme/accounts": accounts(30, 30)})
    runs = place.run()
    assert deaths == ["leader.after-hint-record", "postgres.before-commit"]
    assert {run.error for run in runs.values()} == {None}
    assert rows_of(url) == reduced(accounts(0, 60))
    assert good(place) == reduced(accounts(0, 60))
    assert place.counted("acme/accounts") == 60 * 2
    lost = [log for log in place.logs() if log["level"] == "warning"]
    assert any("trying again" in log["message"] for log in lost), "what a task went through is kept"
