"""SQLite beyond the suite: one file, its disk, and other processes that use it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.places import SqlitePlace
from penstock.connectors.sql.dialect import Fit
from penstock.connectors.sqlite.sink import Sqlite, SqliteSession
from penstock.errors import UserError
from penstock.model.columns import Column, Kind
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import TargetField
from penstock.testing.sink_harness import Bind, merging_schema, start

SUMS = Bind(schema=merging_schema(n={"type": "integer", "reduce": {"strategy": "sum"}}))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[SqlitePlace]:
    made = SqlitePlace(tmp_path)
    yield made
    for run in made.runs:
        run.close()


def test_a_full_disk_is_transient_and_undoes_the_transaction(place: SqlitePlace) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    assert isinstance(run.session, SqliteSession)
    pages = place.execute("PRAGMA page_count")[0][0]
    run.session._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ConnectorError, match="full") as full:
        run.transaction([{"k": k, "n": 1} for k in range(10_000)])
    assert full.value.transient
    assert "free some space" in str(full.value.fix)
    assert full.value.where == place.config["path"]
    assert place.rows() == [{"k": 1, "n": 1}]
    run.session._connection.execute("PRAGMA max_page_count = 100000")
    run.transaction([{"k": 1, "n": 1}])
    assert place.rows() == [{"k": 1, "n": 2}]


def test_a_staging_directory_that_is_not_writable_is_transient(place: SqlitePlace) -> None:
    run = start(place, SUMS)
    (place.directory / "views.db.staging").write_text("in the way")
    with pytest.raises(ConnectorError, match="cannot be staged") as refused:
        run.stage([{"k": 1, "n": 1}])
    assert refused.value.transient


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "removed"])
def test_a_file_that_is_replaced_under_a_session_is_not_written_to(
    place: SqlitePlace, replaced: bool
) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    path = Path(place.config["path"])
    copy = place.directory / "copy.db"
    place.execute(f"VACUUM INTO '{copy}'")
    path.unlink()
    if replaced:
        shutil.move(copy, path)
    with pytest.raises(ConnectorError, match="replaced or removed"):
        run.transaction([{"k": 1, "n": 1}])


def test_a_locked_database_is_waited_for_and_then_transient(
    place: SqlitePlace,
) -> None:
    run = start(place, SUMS, busyTimeout=0.05)
    other = sqlite3.connect(place.config["path"], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConnectorError, match="locked") as busy:
        run.transaction([{"k": 1, "n": 1}])
    assert busy.value.transient
    assert "busyTimeout" in str(busy.value.fix)
    other.execute("ROLLBACK")
    other.close()
    run.transaction([{"k": 1, "n": 1}])
    assert place.rows() == [{"k": 1, "n": 1}]


@pytest.mark.parametrize(
    ("path", "says", "fix"),
    [
        ("/nowhere/at/all/views.db", "unable to open", "make the directory"),
        ("{directory}/text.db", "not a database", "give another path"),
        ("{directory}", "unable to open", "make the directory"),
    ],
    ids=["no directory", "not a database", "a directory"],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: Path, path: str, says: str, fix: str
) -> None:
    (tmp_path / "text.db").write_text("something else" * 100)
    with pytest.raises(ConnectorError, match=says) as refused:
        Sqlite({"path": path.format(directory=tmp_path)}, where="here").check()
    assert fix in str(refused.value.fix)
    assert not refused.value.transient


def test_a_file_that_is_read_only_says_so(place: SqlitePlace) -> None:
    """By what SQLite itself says; this test may run as root, whom no file refuses."""
    run = start(place, SUMS)
    assert isinstance(run.session, SqliteSession)
    run.session._connection.execute("PRAGMA query_only = true")
    with pytest.raises(ConnectorError, match="readonly") as refused:
        run.transaction([{"k": 1, "n": 1}])
    assert "let this user write" in str(refused.value.fix)
    assert not refused.value.transient


def test_a_table_that_is_not_strict_is_refused(place: SqlitePlace) -> None:
    place.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER)")
    with pytest.raises(ConnectorError, match="not STRICT") as refused:
        start(place, SUMS)
    assert "outgrows 64 bits" in str(refused.value.why)
    run = start(place, Bind(schema=SUMS.schema, table="other"))
    run.transaction([{"k": 1, "n": 1}])


def test_a_view_is_not_a_table(place: SqlitePlace) -> None:
    place.execute("CREATE VIEW t AS SELECT 1 AS k")
    with pytest.raises(ConnectorError, match="is not a table but a view"):
        start(place, SUMS)


def test_texts_with_a_nul_come_back(place: SqlitePlace) -> None:
    run = start(
        place, Bind(schema=merging_schema(v={"type": "string", "reduce": {"strategy": "maximize"}}))
    )
    run.transaction([{"k": 1, "v": "a"}])
    run.transaction([{"k": 1, "v": "a\0b"}])
    assert place.rows() == [{"k": 1, "v": "a\0b"}]


@pytest.mark.parametrize(
    ("column", "live", "want"),
    [
        (Column(kind=Kind.LONG), "INT", Fit.HOLDS),
        (Column(kind=Kind.BOOLEAN), "INTEGER", Fit.HOLDS),
        (Column(kind=Kind.DECIMAL, precision=38), "INTEGER", Fit.WIDENS),
        (Column(kind=Kind.DECIMAL, precision=10, scale=2), "INTEGER", Fit.FAILS),
        (Column(kind=Kind.STRING), "INTEGER", Fit.FAILS),
        (Column(kind=Kind.LONG), "ANY", Fit.FAILS),
    ],
)
def test_which_columns_hold_which_fields(column: Column, live: str, want: Fit) -> None:
    field = TargetField(name="v", pointer="/v", column=column)
    assert Sqlite.dialect.fit(field, live) is want


@pytest.mark.parametrize("config", [{}, {"path": ""}, {"path": "x", "busyTimeout": -1},
                                    {"path": "x", "busyTimeout": True}, None])  # fmt: skip
def test_invalid_configurations_are_refused(config: dict[str, object] | None) -> None:
    with pytest.raises(UserError):
        Sqlite(config, where="here")  # type: ignore[arg-type]


@pytest.mark.parametrize("table", ["penstock_x", "sqlite_x", "nul\0", ""])
def test_reserved_table_names_are_refused(place: SqlitePlace, table: str) -> None:
    with pytest.raises(UserError):
        Sqlite(place.config, where="here").path({"table": table})
