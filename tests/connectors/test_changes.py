"""What a changed target means for its table, decided without a database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.connectors.sql.changes import changes
from penstock.connectors.sql.dialect import Dialect, Fit, LiveColumn, LiveTable
from penstock.connectors.sql.plan import plan, remake, types
from penstock.connectors.sqlite.dialect import SqliteDialect
from penstock.model.columns import Column, Kind
from penstock.model.spec import Frozen
from penstock.runtime.connector.materialize import Target, TargetField

DIALECTS = [SqliteDialect(), PostgresDialect()]

KEY = TargetField(name="k", pointer="/k", column=Column(kind=Kind.LONG), is_key=True, required=True)

_columns = st.sampled_from(
    [
        Column(kind=Kind.LONG),
        Column(kind=Kind.DOUBLE),
        Column(kind=Kind.BOOLEAN),
        Column(kind=Kind.STRING),
        Column(kind=Kind.STRING, logical="date"),
        Column(kind=Kind.DECIMAL, precision=30, scale=0),
        Column(kind=Kind.JSON),
    ]
)
_fields = st.builds(
    lambda name, pointer, column, required: TargetField(
        name=name, pointer=pointer, column=column, required=required
    ),
    st.sampled_from("abc"),
    st.sampled_from(["/x", "/y", "/z"]),
    _columns,
    st.booleans(),
)
_targets = st.lists(_fields, max_size=3, unique_by=(lambda f: f.name, lambda f: f.pointer)).map(
    lambda fields: target(*fields)
)


def target(*fields: TargetField) -> Target:
    return Target(
        binding=0,
        state_key="t.v0",
        collection="acme/c",
        path=("t",),
        resource=Frozen({}),
        fields=(KEY, *fields),
    )


def made(dialect: Dialect, of: Target) -> LiveTable:
    """The table that is made for a target."""
    return LiveTable(
        columns={
            dialect.fold(field.name): LiveColumn(
                type=dialect.type_of(field),
                not_null=field.is_key or (field.required and dialect.can_alter),
            )
            for field in of.fields
        },
        unique=frozenset({frozenset({"k"})}),
    )


@pytest.mark.parametrize("dialect", DIALECTS, ids=["sqlite", "postgres"])
@given(was=_targets, now=_targets)
def test_a_change_without_a_rebuild_is_one_that_a_table_can_follow(
    dialect: Dialect, was: Target, now: Target
) -> None:
    """What is foreseen and what is done are one: no plan fails that was foreseen as in place."""
    found = list(changes(dialect, was, now))
    live = made(dialect, was)
    if not any(each.rebuild for each in found):
        steps = list(plan(dialect, now, live, before=was))
        if not found:
            assert steps == []
        for field in now.fields:
            fits = [
                dialect.fit(field, dialect.type_of(old)) is not Fit.FAILS
                for old in was.fields
                if old.pointer == field.pointer and old.name == field.name
            ]
            assert all(fits)
    if was == now:
        assert not found


@pytest.mark.parametrize("dialect", DIALECTS, ids=["sqlite", "postgres"])
@given(was=_targets, now=_targets)
def test_a_rebuilt_table_has_the_columns_of_a_new_one(
    dialect: Dialect, was: Target, now: Target
) -> None:
    live = made(dialect, was)
    wanted = types(dialect, now, live, before=was)
    assert wanted == {field.name: dialect.type_of(field) for field in now.fields}
    steps = [text for step in remake(dialect, now, live, wanted) for text in step.statements]
    assert steps[0] == 'DELETE FROM "t"', "a key of the same type: the table itself stays"


def test_columns_that_others_made_keep_their_type() -> None:
    dialect = PostgresDialect()
    dated = target(
        TargetField(name="a", pointer="/x", column=Column(kind=Kind.STRING, logical="date"))
    )
    theirs = made(dialect, dated)
    theirs = replace(theirs, columns={**theirs.columns, "a": LiveColumn(type="text")})
    assert types(dialect, dated, theirs, before=dated)["a"] == "text"
    plain = target(TargetField(name="a", pointer="/x", column=Column(kind=Kind.STRING)))
    assert types(dialect, dated, theirs, before=plain)["a"] == "date", "it was made for a text"
