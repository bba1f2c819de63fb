"""Tables that leave rows out: a transaction is stored with all of its rows, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.places import SECRET, VARIABLE, PostgresPlace, SqlitePlace
from penstock.runtime.connector.common import ConnectorError
from penstock.testing.sink_harness import Bind, SqlPlace, merging_schema, start

SUMS = Bind(schema=merging_schema(n={"type": "integer", "reduce": {"strategy": "sum"}}))
QUEUE = Bind(schema=SUMS.schema, resource={"delta_updates": True})
KEYS = Bind(schema=merging_schema())
DELETING = Bind(
    schema={
        "type": "object",
        "required": ["k", "op"],
        "properties": {"k": {"type": "integer"}, "op": {"type": "string"}},
        "if": {"properties": {"op": {"const": "d"}}},
        "then": {"reduce": {"strategy": "merge", "delete": True}},
        "else": {"reduce": {"strategy": "merge"}},
    }
)


def swallow(place: SqlPlace, event: str, *, table: str = "t") -> None:
    """A trigger that leaves the row of key 2 out."""
    row = "OLD" if event == "DELETE" else "NEW"
    if isinstance(place, SqlitePlace):
        place.execute(
            f"CREATE TRIGGER swallow_{event} BEFORE {event} ON {table} WHEN {row}.k = 2 "
            "BEGIN SELECT RAISE(IGNORE); END"
        )
        return
    place.execute(
        f"CREATE FUNCTION swallow_{event}() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF {row}.k = 2 THEN RETURN NULL; END IF; RETURN {row}; END $$"
    )
    place.execute(
        f"CREATE TRIGGER swallow BEFORE {event} ON {table} FOR EACH ROW "
        f"EXECUTE FUNCTION swallow_{event}()"
    )


@pytest.mark.parametrize("bind", [SUMS, QUEUE, KEYS], ids=["upsert", "append", "keys"])
def test_rows_that_a_trigger_leaves_out_are_noticed(place: SqlPlace, bind: Bind) -> None:
    run = start(place, bind)
    swallow(place, "INSERT")
    with pytest.raises(ConnectorError) as refused:
        run.transaction([{"k": 1}, {"k": 2}, {"k": 3}])
    assert "3 rows were sent to table" in refused.value.what
    assert "it stored 2" in refused.value.what
    assert "trigger" in str(refused.value)
    assert not refused.value.transient
    assert place.rows() == []
    run.close()
    again = start(place, bind, epoch=2)
    assert again.session.checkpoint is None, "nothing was committed"
    again.transaction([{"k": 1}, {"k": 3}])
    again.transaction([{"k": 1}, {"k": 3}])  # rows that are there already count as stored
    assert {row["k"] for row in place.rows()} == {1, 3}


def test_updates_that_a_trigger_leaves_out_are_noticed(place: SqlPlace) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}, {"k": 2, "n": 2}])
    swallow(place, "UPDATE")
    with pytest.raises(ConnectorError, match=r"2 rows were sent .* stored 1"):
        run.transaction([{"k": 1, "n": 1}, {"k": 2, "n": 2}])
    assert {row["k"]: row["n"] for row in place.rows()} == {1: 1, 2: 2}


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_deletions_that_a_trigger_leaves_out_are_noticed(place: SqlPlace, hard: bool) -> None:
    run = start(place, DELETING, hardDelete=hard)
    run.transaction([{"k": k, "op": "c"} for k in range(4)])
    # A key that was never there, or is gone already, is deleted without a row for it.
    run.transaction([{"k": 1, "op": "d"}, {"k": 9, "op": "d"}])
    run.transaction([{"k": 1, "op": "d"}])
    before = place.rows()
    swallow(place, "DELETE" if hard else "UPDATE")
    with pytest.raises(
        ConnectorError, match=r"rows of table .* were to be deleted, and"
    ) as refused:
        run.transaction([{"k": 2, "op": "d"}, {"k": 3, "op": "d"}, {"k": 9, "op": "d"}])
    assert "2 rows of table" in str(refused.value)
    assert "and 1 were" in str(refused.value)
    assert sorted(row["k"] for row in place.rows()) == sorted(row["k"] for row in before)
    run.transaction([{"k": 3, "op": "d"}])


@pytest.mark.postgres
def test_rows_that_a_rule_leaves_out_are_noticed_also_through_a_staged_table(
    tmp_path: Path, postgres: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setattr("penstock.connectors.postgres.rows.CARRIED_BYTES_MAX", 1)
    place = PostgresPlace(tmp_path, postgres.url())  # type: ignore[attr-defined]
    run = start(place, QUEUE)
    place.execute("CREATE RULE nothing AS ON INSERT TO t WHERE NEW.k = 2 DO INSTEAD NOTHING")
    with pytest.raises(ConnectorError, match=r"3 rows were sent .* stored 2"):
        run.transaction([{"k": 1}, {"k": 2}, {"k": 3}])
    assert place.rows() == []
    place.execute("DROP RULE nothing ON t")
    run.transaction([{"k": 1}, {"k": 2}, {"k": 3}])
    assert len(place.rows()) == 3
    run.close()


def test_a_constraint_that_ignores_rows_is_noticed(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    place.execute(
        "CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER UNIQUE ON CONFLICT IGNORE) STRICT"
    )
    run = start(place, SUMS)
    with pytest.raises(ConnectorError, match=r"2 rows were sent .* stored 1"):
        run.transaction([{"k": 1, "n": 5}, {"k": 2, "n": 5}])
    assert place.rows() == []
    run.close()
