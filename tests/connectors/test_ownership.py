"""Whose a table is, and what was lost of it, for every connector with transactions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.places import (
    SECRET,
    VARIABLE,
    Place,
    PostgresPlace,
    SqlitePlace,
    merging,
    start,
)
from penstock.connectors.ownership import Claim, Found, Record, claim, claimed
from penstock.connectors.sql import TABLES
from penstock.errors import UserError
from penstock.model.spec import Frozen
from penstock.runtime.connector import ConnectorError, FencedEndpoint, Target, Task
from penstock.testing.connector_suite import Bind, Run

SUM = {"type": "integer", "reduce": {"strategy": "sum"}}
SUMS = Bind(schema=merging(n=SUM))
ANEW = Bind(schema=SUMS.schema, backfill=1)
TAKEN = Bind(schema=SUMS.schema, takeover=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.setenv(VARIABLE, SECRET)
    made: Place = (
        SqlitePlace(tmp_path)
        if request.param == "sqlite"
        else PostgresPlace(tmp_path, request.getfixturevalue("postgres").url())
    )
    yield made
    for run in made.runs:
        run.close()


def filled(place: Place, *binds: Bind, **more: object) -> Run:
    run = start(place, *(binds or (SUMS,)), **more)  # type: ignore[arg-type]
    run.transaction(*([{"k": 1, "n": 1}, {"k": 2, "n": 2}] for _ in binds or (SUMS,)))
    run.close()
    return run


def sums(place: Place, table: str = "t") -> dict[int, int]:
    return {row["k"]: row["n"] for row in place.rows(table)}


STRICT = {SqlitePlace: " STRICT", PostgresPlace: ""}


# ------------------------------------------------------------------------------ what has been lost


def test_a_dropped_table_is_refused_until_a_backfill_fills_it_anew(place: Place) -> None:
    run = filled(place)
    place.execute("DROP TABLE t")
    for _ in range(2):
        with pytest.raises(ConnectorError, match="is gone, and acme/views had filled it") as gone:
            start(place, SUMS, epoch=2, last=run)
        assert "backfill" in str(gone.value)
        assert not gone.value.transient
    again = start(place, ANEW, epoch=3, last=run)
    again.transaction([{"k": 1, "n": 5}])
    assert sums(place) == {1: 5}


def test_a_table_that_never_had_rows_is_made_again(place: Place) -> None:
    run = start(place, SUMS)
    run.commit([], b"nothing was stored")
    run.close()
    place.execute("DROP TABLE t")
    start(place, SUMS, epoch=2, last=run).transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 1}


@pytest.mark.parametrize("how", ["emptied", "made by hand"])
def test_a_table_that_has_lost_its_rows_is_refused(place: Place, how: str) -> None:
    run = filled(place)
    if how == "emptied":
        place.execute("DELETE FROM t")
    else:
        place.execute("DROP TABLE t")
        place.execute(
            f"CREATE TABLE t (k BIGINT PRIMARY KEY, n BIGINT){''}"
            if isinstance(place, PostgresPlace)
            else "CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER) STRICT"
        )
    with pytest.raises(ConnectorError, match="backfill") as lost:
        start(place, SUMS, epoch=2, last=run)
    said = str(lost.value)
    assert "is empty, and had rows" in said or "another in its place" in said
    # Who knows better removes the record, by the statement that the error gives.
    assert "DELETE FROM" in said
    place.execute("DELETE FROM penstock_tables WHERE name = 't'")
    start(place, SUMS, epoch=3, last=run)


def test_an_old_endpoint_that_has_lost_a_table_is_refused_too(place: Place) -> None:
    run = filled(place)
    for column in ("task", "filled") if isinstance(place, SqlitePlace) else ("kept",):
        place.execute(f"ALTER TABLE {TABLES} DROP COLUMN {column}")
    if isinstance(place, PostgresPlace):
        for column in ("task", "filled", "made"):
            place.execute(f"ALTER TABLE {TABLES} DROP COLUMN {column}")
    goes_on = start(place, SUMS, epoch=2, last=run)
    goes_on.transaction([{"k": 1, "n": 1}])
    goes_on.close()
    assert sums(place) == {1: 2, 2: 2}
    with pytest.raises(ConnectorError, match="belongs to acme/views"):
        start(place, SUMS, name="acme/other")
    place.execute("DROP TABLE t")
    with pytest.raises(ConnectorError, match="is gone"):
        start(place, SUMS, epoch=3, last=run)
    place.execute(f"DROP TABLE {TABLES}")
    with pytest.raises(ConnectorError, match="is gone"):
        start(place, SUMS, epoch=4, last=run)


def test_rows_that_are_consumed_may_be_gone(place: Place) -> None:
    queue = Bind(schema=SUMS.schema, resource={"delta_updates": True})
    run = filled(place, queue)
    place.execute("DELETE FROM t")
    start(place, queue, epoch=2, last=run).close()
    other = Bind(schema=SUMS.schema, table="u")
    run = filled(place, other, name="acme/hard", hardDelete=True)
    place.execute("DELETE FROM u")
    start(place, other, epoch=2, last=run, name="acme/hard", hardDelete=True).close()


@pytest.mark.parametrize("how", ["dropped", "made by hand"])
def test_a_table_that_goes_under_a_session_stops_it(place: Place, how: str) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    place.execute("DROP TABLE t")
    if how != "dropped":
        kind = "BIGINT" if isinstance(place, PostgresPlace) else "INTEGER"
        place.execute(
            f"CREATE TABLE t (k {kind} PRIMARY KEY, n {kind}){STRICT[type(place)]}"  # type: ignore[index]
        )
    with pytest.raises(ConnectorError) as stopped:
        run.transaction([{"k": 2, "n": 2}])
    assert stopped.value.transient, "the next session says what is wrong"
    if how != "dropped":
        assert place.rows() == []
    run.close()
    with pytest.raises(ConnectorError, match="backfill") as refused:
        start(place, SUMS, epoch=2, last=run)
    assert not refused.value.transient


def test_tables_of_others_may_come_and_go_under_a_session(place: Place) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    place.execute("CREATE TABLE others (x INTEGER)")
    run.transaction([{"k": 1, "n": 1}])
    place.execute("ALTER TABLE t ADD COLUMN note TEXT")
    run.transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 3}


def test_a_backfill_counter_that_was_used_before_is_refused(place: Place) -> None:
    first = filled(place)
    second = start(place, ANEW, epoch=2, last=first)
    second.transaction([{"k": 1, "n": 1}])
    second.close()
    with pytest.raises(ConnectorError, match="raise `backfill`") as refused:
        start(place, SUMS, epoch=3, last=first)  # its log still has what was read under 0
    assert "never had" in str(refused.value)
    assert sums(place) == {1: 1}


# ------------------------------------------------------------------------------------ whose it is


def test_a_table_of_another_task_is_refused_and_the_ways_out_are_named(place: Place) -> None:
    filled(place)
    with pytest.raises(ConnectorError, match=r"table .*t belongs to acme/views") as refused:
        start(place, SUMS, name="acme/other")
    for way in ("renamedFrom: acme/views", "takeover: true", "another table"):
        assert way in str(refused.value)
    assert sums(place) == {1: 1, 2: 2}
    elsewhere = Bind(schema=SUMS.schema, table="u")
    start(place, elsewhere, name="acme/other").transaction([{"k": 1, "n": 7}])
    assert sums(place, "u") == {1: 7}


def test_a_backfill_does_not_empty_a_table_of_another_task(place: Place) -> None:
    filled(place)
    with pytest.raises(ConnectorError, match="belongs to acme/views"):
        start(place, Bind(schema=SUMS.schema, backfill=3), name="acme/other")
    assert sums(place) == {1: 1, 2: 2}


def test_a_takeover_empties_the_table_and_keeps_its_last_owner_out(place: Place) -> None:
    old = start(place, SUMS)
    old.transaction([{"k": 1, "n": 1}])
    staged = old.stage([{"k": 1, "n": 100}])
    new = start(place, TAKEN, name="acme/other")
    assert place.rows() == []
    new.transaction([{"k": 1, "n": 5}])
    with pytest.raises(FencedEndpoint):
        old.commit(staged)
    old.close()
    with pytest.raises(ConnectorError, match="belongs to acme/other"):
        start(place, SUMS, epoch=2, last=old)
    with pytest.raises(ConnectorError, match="never had"):
        start(place, TAKEN, epoch=3, last=old)  # its log is behind documents that are gone
    new.close()
    again = start(place, TAKEN, name="acme/other", epoch=2, last=new)  # once is enough
    again.transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 6}


def test_who_drops_a_table_gives_it_away(place: Place) -> None:
    filled(place)
    place.execute("DROP TABLE t")
    start(place, SUMS, name="acme/other").transaction([{"k": 1, "n": 5}])
    assert sums(place) == {1: 5}


def test_a_task_goes_on_under_another_name(place: Place) -> None:
    sleepy = start(place, SUMS, epoch=5, resumed=False)
    sleepy.transaction([{"k": 1, "n": 1}])
    staged = sleepy.stage([{"k": 1, "n": 100}])
    new = start(place, SUMS, name="acme/new", renamed_from="acme/views", last=sleepy)
    assert new.session.checkpoint == b"5/1"
    with pytest.raises(FencedEndpoint):
        sleepy.commit(staged)
    with pytest.raises(ConnectorError, match="belongs to acme/new"):
        start(place, SUMS, epoch=6, last=sleepy)
    new.transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 2}
    new.close()
    back = start(place, SUMS, epoch=7, last=new, renamed_from="acme/new")
    assert back.session.checkpoint == b"1/1"
    back.transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 3}
    assert place.execute("SELECT task FROM penstock_checkpoints") == [("acme/views",)]


def test_two_tasks_that_stored_are_not_joined_by_a_rename(place: Place) -> None:
    filled(place)
    other = filled(place, Bind(schema=SUMS.schema, table="u"), name="acme/new")
    with pytest.raises(ConnectorError, match="have both stored"):
        start(
            place,
            Bind(schema=SUMS.schema, table="u"),
            name="acme/new",
            renamed_from="acme/views",
            epoch=2,
            last=other,
        )
    assert len(place.execute("SELECT task FROM penstock_checkpoints")) == 2


def test_what_an_old_release_filled_is_not_given_to_a_newcomer(place: Place) -> None:
    filled(place)
    place.execute("UPDATE penstock_tables SET task = NULL, filled = NULL")
    with pytest.raises(ConnectorError, match="belongs to another task"):
        start(place, SUMS, name="acme/other")
    assert sums(place) == {1: 1, 2: 2}


def test_rows_that_the_log_does_not_know_are_not_added_to(place: Place) -> None:
    filled(place)
    with pytest.raises(ConnectorError, match="rows of acme/views that its recovery log does not"):
        start(place, SUMS)
    assert sums(place) == {1: 1, 2: 2}
    start(place, ANEW).transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 1}


def test_sqlite_has_one_table_by_all_spellings(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    filled(place)
    with pytest.raises(ConnectorError, match="belongs to acme/views"):
        start(place, Bind(schema=SUMS.schema, table="T"), name="acme/other")
    with pytest.raises(UserError, match="store to the same place"):
        start(place, SUMS, Bind(schema=SUMS.schema, table="T"))


@pytest.mark.postgres
def test_a_table_is_known_from_checkpoints_in_another_schema(
    tmp_path: Path, postgres: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    place = PostgresPlace(tmp_path, postgres.url())  # type: ignore[attr-defined]
    filled(place)
    place.execute("CREATE TABLE mine (x int)")
    with pytest.raises(ConnectorError, match="belongs to acme/views"):
        start(
            place,
            Bind(schema=SUMS.schema, resource={"schema": place.role}),
            name="acme/other",
            schema="penstock_stage",
        )
    # The task itself may keep its checkpoint elsewhere; its table is filled anew by a backfill.
    before = filled(place, Bind(schema=SUMS.schema, table="own"), name="acme/own")
    moved = Bind(schema=SUMS.schema, table="own", resource={"schema": place.role}, backfill=1)
    run = start(place, moved, name="acme/own", schema="penstock_stage", last=before)
    run.transaction([{"k": 1, "n": 5}])
    assert sums(place, "own") == {1: 5}
    run.close()
    for table in (TABLES, "penstock_checkpoints"):
        place.execute(f"DROP TABLE penstock_stage.{table}")


@pytest.mark.postgres
def test_a_database_that_was_dumped_and_restored_goes_on(
    tmp_path: Path, postgres: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table has another OID then, that of the records too."""
    monkeypatch.setenv(VARIABLE, SECRET)
    place = PostgresPlace(tmp_path, postgres.url())  # type: ignore[attr-defined]
    run = filled(place)
    for table in ("t", TABLES):
        place.execute(f"ALTER TABLE {table} RENAME TO old")
        place.execute(f"CREATE TABLE {table} (LIKE old INCLUDING ALL)")
        place.execute(f"INSERT INTO {table} SELECT * FROM old")  # noqa: S608
        place.execute("DROP TABLE old")
    again = start(place, SUMS, epoch=2, last=run)
    again.transaction([{"k": 1, "n": 1}])
    assert sums(place) == {1: 2, 2: 2}
    again.close()
    place.execute("ALTER TABLE t RENAME TO old")
    place.execute("CREATE TABLE t (LIKE old INCLUDING ALL)")
    place.execute("INSERT INTO t SELECT * FROM old LIMIT 1")
    with pytest.raises(ConnectorError, match="another in its place"):
        start(place, SUMS, epoch=3, last=run)


# ------------------------------------------------------------------------------------- the decision


def _target(*, takeover: bool = False) -> Target:
    return Target(
        binding=0,
        state_key="t.v0",
        collection="acme/c",
        path=("t",),
        resource=Frozen({}),
        fields=(),
        takeover=takeover,
    )


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("there", ["no", "empty", "rows"])
@pytest.mark.parametrize("owner", ["nobody", None, "me", "other"])
@pytest.mark.parametrize("key", ["t.v0", "t.v1"])
@pytest.mark.parametrize("stored", [None, False, True])
def test_no_claim_counts_twice_or_loses(
    takeover: bool, resumed: bool, there: str, owner: str | None, key: str, stored: bool | None
) -> None:
    """Whatever the record and the log say: rows that are kept are those that the log is behind."""
    record = (
        None
        if owner == "nobody"
        else Record(state_key=key, task=owner if owner != "me" else "a/me", filled=stored)
    )
    task = Task(
        name="a/me",
        config=Frozen({}),
        targets=(),
        resumed=frozenset({0}) if resumed else frozenset(),
    )
    target = _target(takeover=takeover)
    found = Found(there=there != "no", is_empty=lambda: there != "rows")
    try:
        got = claim(task, target, record, found, was=None, hard_delete=False, forget="")
    except ConnectorError:
        return
    kept = there == "rows" and not got.emptied
    if resumed:
        assert not got.emptied, "what it has read is not read again"
        assert there != "no" or stored is False, "rows are gone only where there were none"
        assert record is None or record.task in (None, "a/me")
    if kept and record is not None:
        assert resumed or not stored, "rows that the log does not know would count twice"
        assert record.state_key == "t.v0"
        assert resumed or record.task == "a/me", "rows are not another's"
    if owner == "other":
        assert got == Claim(emptied=True, taken_from="other")
    assert claimed(task, target, record, got).task == "a/me"
