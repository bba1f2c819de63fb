"""Ownership of tables, beyond the suite: older releases, and what one database alone can tell."""

from __future__ import annotations

import pytest

from connectors.places import PostgresPlace, SqlitePlace
from penstock.connectors.ownership import Claim, Found, TableRecord, claim, claimed
from penstock.connectors.sql.records import TABLES
from penstock.errors import UserError
from penstock.model.spec import Frozen
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import SinkTask, Target
from penstock.testing.connector_suite import SUMS, filled, sums
from penstock.testing.sink_harness import Bind, SqlPlace, start


def test_an_old_endpoint_that_has_lost_a_table_is_refused_too(place: SqlPlace) -> None:
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


# ------------------------------------------------------------------------------------ whose it is


def test_sqlite_has_one_table_by_all_spellings(sqlite_place: SqlitePlace) -> None:
    place = sqlite_place
    filled(place)
    with pytest.raises(ConnectorError, match="belongs to acme/views"):
        start(place, Bind(schema=SUMS.schema, table="T"), name="acme/other")
    with pytest.raises(UserError, match="store to the same place"):
        start(place, SUMS, Bind(schema=SUMS.schema, table="T"))


def test_a_renamed_task_has_one_checkpoint_under_its_new_name(place: SqlPlace) -> None:
    old = filled(place)
    new = start(place, SUMS, name="acme/new", renamed_from="acme/views", epoch=2, last=old)
    new.transaction([{"k": 1, "n": 1}])
    assert place.execute("SELECT task FROM penstock_checkpoints") == [("acme/new",)]


def test_a_refused_rename_leaves_both_checkpoints(place: SqlPlace) -> None:
    filled(place)
    elsewhere = Bind(schema=SUMS.schema, table="u")
    other = filled(place, elsewhere, name="acme/new")
    with pytest.raises(ConnectorError, match="have both stored"):
        start(place, elsewhere, name="acme/new", renamed_from="acme/views", epoch=2, last=other)
    assert len(place.execute("SELECT task FROM penstock_checkpoints")) == 2


@pytest.mark.postgres
def test_a_table_is_known_from_checkpoints_in_another_schema(
    postgres_place: PostgresPlace,
) -> None:
    place = postgres_place
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
    postgres_place: PostgresPlace,
) -> None:
    """Every table has another OID then, that of the records too."""
    place = postgres_place
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
        else TableRecord(state_key=key, task=owner if owner != "me" else "a/me", filled=stored)
    )
    task = SinkTask(
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
