"""What every connector with transactions must do, against real databases."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from connectors.places import (
    SECRET,
    VARIABLE,
    Place,
    PostgresPlace,
    SqlitePlace,
    merging,
    start,
)
from penstock.connectors import sql
from penstock.errors import UserError
from penstock.model.columns import LONG_MAX, LONG_MIN, Column, Kind
from penstock.runtime.connector import (
    ConnectorError,
    Constraint,
    FencedEndpoint,
    Staged,
    TargetField,
)
from penstock.runtime.materialize.fields import Mode
from penstock.testing.connector_suite import Bind, Document, built, by_key, expected


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


COUNTED = Bind(
    schema=merging(
        n={"type": "integer", "reduce": {"strategy": "sum"}},
        low={"type": "integer", "reduce": {"strategy": "minimize"}},
        top={"type": "string", "reduce": {"strategy": "maximize"}},
        first={"type": "string", "reduce": {"strategy": "firstWriteWins"}},
        last={"type": "number"},
    )
)
LOADED = Bind(
    schema={
        "type": "object",
        "required": ["k"],
        "properties": {
            "k": {"type": "string"},
            "list": {
                "type": "array",
                "items": {"type": "integer"},
                "reduce": {"strategy": "append"},
            },
        },
        "reduce": {"strategy": "merge"},
    }
)
DELETING = Bind(
    schema={
        "type": "object",
        "required": ["k", "op"],
        "properties": {
            "k": {"type": "integer"},
            "op": {"enum": ["c", "u", "d"], "type": "string"},
            "v": {"type": "integer"},
        },
        "if": {"properties": {"op": {"const": "d"}}},
        "then": {"reduce": {"strategy": "merge", "delete": True}},
        "else": {"reduce": {"strategy": "merge"}},
    }
)


def stored(place: Place, table: str = "t", *, key: str = "k") -> dict[str, Document]:
    """Rows by key, without what is NULL."""
    return {
        json.dumps([row[key]], separators=(",", ":"), ensure_ascii=False): {
            name: value
            for name, value in row.items()
            if value is not None and name != "flow_document"
        }
        for row in place.rows(table)
    }


# -------------------------------------------------------------------------------------- reductions


def _random_counts(rng: random.Random, count: int) -> list[Document]:
    """Documents that show every reduction, on few keys; any location may be absent."""
    words = ["", "a", "B", "b", "ä", "zz", "\U0001f600", "\uffff", "Z", "a b"]
    found: list[Document] = []
    for _ in range(count):
        document: Document = {"k": rng.randrange(8)}
        values: dict[str, Any] = {
            "n": rng.randrange(-(2**40), 2**40),
            "low": rng.choice([LONG_MIN, LONG_MAX, 0, rng.randrange(100)]),
            "top": rng.choice(words),
            "first": rng.choice(words),
            "last": rng.choice([0.5, -1.25, 1e300, 5e-324, 3]),
        }
        document |= {name: value for name, value in values.items() if rng.random() < 0.6}
        found.append(document)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_push_down_reductions_are_those_of_the_model(place: Place, seed: int) -> None:
    """However the documents are split over transactions, and these over sessions."""
    rng = random.Random(seed)
    documents = _random_counts(rng, 300)
    run, epoch, at = start(place, COUNTED), 1, 0
    assert [target.mode for target in run.built.targets] == [Mode.PUSHDOWN]
    while at < len(documents):
        size = rng.choice([1, 2, 7, 40])
        run.transaction(documents[at : at + size])
        at += size
        if rng.random() < 0.1:
            run.close()
            epoch += 1
            run = start(place, COUNTED, epoch=epoch, last=run)
    run.close()
    assert stored(place) == expected(COUNTED, documents)


def test_what_is_absent_keeps_a_value_and_null_replaces_it(place: Place) -> None:
    run = start(place, Bind(schema=merging(any={}), fields={"require": {"any": {}}}))
    assert run.built.targets[0].mode is Mode.PUSHDOWN
    seen = []
    for document in ({"k": 1, "any": {"a": [1]}}, {"k": 1}, {"k": 1, "any": None}):
        run.transaction([document])
        found = place.execute('SELECT CAST("any" AS text) FROM t')
        seen.append(json.loads(found[0][0]))
    assert seen == [{"a": [1]}, {"a": [1]}, None]


def test_a_sum_that_outgrows_64_bits_is_refused_and_changes_nothing(place: Place) -> None:
    run = start(place, COUNTED)
    run.transaction([{"k": 1, "n": LONG_MAX}, {"k": 2, "n": LONG_MIN}])
    before = stored(place)
    for document in ({"k": 1, "n": 1}, {"k": 2, "n": -1}):
        with pytest.raises(ConnectorError) as refused:
            run.transaction([{"k": 3, "n": 7}, document])
        assert refused.value.fix is not None
        assert "backfill" in refused.value.fix or "number" in refused.value.fix
        assert not refused.value.transient
    assert stored(place) == before
    run.transaction([{"k": 1, "n": -1}])


def test_documents_that_the_endpoint_cannot_reduce_are_loaded_and_reduced(place: Place) -> None:
    rng = random.Random(7)
    keys = ["", "a", "A", 'q"uote', "ünï", "x" * 300, "line\nbreak", "\\", "tab\t"]
    run = start(place, LOADED)
    assert run.built.targets[0].mode is Mode.LOAD
    documents: list[Document] = []
    for _ in range(12):
        some: list[Document] = [
            {"k": rng.choice(keys), "list": [rng.randrange(9)], "extra": {"u": [None, 1.5]}}
            for _ in range(6)
        ]
        documents += some
        run.transaction(some)
    found = run.load(0, [{"k": key} for key in [*keys, "never"]])
    want = {json.loads(key)[0]: state for key, state in expected(LOADED, documents).items()}
    assert {document["k"]: document for document in found} == want
    assert len(found) == len(want)


# ---------------------------------------------------------------------------------------- deletes


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_deletions(place: Place, hard: bool) -> None:
    run = start(place, DELETING, hardDelete=hard)
    run.transaction([{"k": k, "op": "c", "v": k} for k in range(4)])
    run.transaction(
        [
            {"k": 1, "op": "d"},
            {"k": 2, "op": "u", "v": 20},
            {"k": 9, "op": "d"},  # never seen: no row appears
            {"k": 8, "op": "c", "v": 8},
            {"k": 8, "op": "d"},  # came and went in one transaction
        ]
    )
    shown = {k: row.get("op") for k, row in ((r["k"], r) for r in place.rows())}
    want = {0: "c", 1: "d", 2: "u", 3: "c"}
    assert shown == ({k: op for k, op in want.items() if op != "d"} if hard else want)
    run.transaction([{"k": 1, "op": "c"}])  # starts over: nothing of the deleted one comes back
    row = next(row for row in place.rows() if row["k"] == 1)
    assert (row["op"], row["v"]) == ("c", None)
    document = (
        json.loads(row["flow_document"])
        if isinstance(row["flow_document"], str)
        else row["flow_document"]
    )
    assert document == {"k": 1, "op": "c"}


# ------------------------------------------------------------------------------------------- types

EVERYTHING = {
    "type": "object",
    "required": ["k", "sure"],
    "properties": {
        "k": {"type": "integer"},
        "sure": {"type": "integer"},
        "int": {"type": "integer"},
        "big": {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
        "double": {"type": "number"},
        "money": {"type": "number", "minimum": -(10**9), "maximum": 10**9, "multipleOf": 0.01},
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
        "nullable": {"type": ["string", "null"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "nested": {"type": "object", "properties": {"deep": {"type": "number"}}},
    },
}
ALL_FIELDS = Bind(schema=EVERYTHING, fields={"require": {"list": {}, "any": {}}})

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_doubles = st.floats(allow_nan=False, allow_infinity=False)
_values = st.fixed_dictionaries(
    {"sure": st.integers(LONG_MIN, LONG_MAX)},
    optional={
        "int": st.integers(LONG_MIN, LONG_MAX),
        "big": st.integers(-(10**30), 10**30),
        "double": _doubles,
        "money": st.integers(-(10**11), 10**11).map(lambda cents: cents / 100),
        "flag": st.booleans(),
        "text": _text,
        "nullable": st.none() | _text,
        "list": st.lists(_text, max_size=3),
        "any": _json,
        "nested": st.fixed_dictionaries({}, optional={"deep": _doubles}),
    },
)


def _seen(value: Any, like: Any) -> Any:  # noqa: ANN401
    """A value of a database as JSON, by what it should be."""
    if isinstance(like, bool) and isinstance(value, int):
        return bool(value)
    if isinstance(like, int | float) and isinstance(value, Decimal | str):
        return type(like)(Decimal(value)) if isinstance(like, int) else float(value)
    return value


def test_every_value_of_every_type_comes_back(place: Place) -> None:
    """Whole batches of examples, each replacing the one before."""
    run = start(place, ALL_FIELDS)

    @settings(max_examples=4, phases=[Phase.generate])  # each example is a batch of many
    @given(st.lists(_values, min_size=60, max_size=60))
    def check(values: list[Document]) -> None:
        documents: list[Document] = [{"k": at, **value} for at, value in enumerate(values)]
        run.transaction(documents)
        rows = {row["k"]: row for row in place.rows()}
        for document in documents:
            row = rows[document["k"]]
            for name in ("sure", "int", "big", "double", "money", "flag", "text", "nullable"):
                want = document.get(name)
                assert _seen(row[name], want) == want, name
            assert _seen(row["nested/deep"], 0.5) == document.get("nested", {}).get("deep")
            for name in ("list", "any"):
                text = row[name]
                value = json.loads(text) if isinstance(text, str) and not _parsed(place) else text
                assert _doubled(value) == _doubled(document.get(name)), name
        loaded = {
            each["k"]: each for each in run.load(0, [{"k": d["k"], "sure": 0} for d in documents])
        }
        assert loaded == {document["k"]: document for document in documents}

    check()


def _doubled(value: Any) -> Any:  # noqa: ANN401
    """JSON with its numbers as doubles: 1e17 and 100000000000000000 are one number."""
    match value:
        case bool():
            return value
        case int() | float():
            return float(value)
        case list():
            return [_doubled(item) for item in value]
        case dict():
            return {name: _doubled(item) for name, item in value.items()}
        case _:
            return value


def _parsed(place: Place) -> bool:
    """Whether the endpoint's driver gives JSON columns as values, not as text."""
    return isinstance(place, PostgresPlace)


# ------------------------------------------------------------------------------------ delta updates


def test_delta_updates_append_what_a_transaction_adds_up_to(place: Place) -> None:
    bind = Bind(schema=COUNTED.schema, resource={"delta_updates": True})
    run = start(place, bind)
    run.transaction([{"k": 1, "n": n} for n in (-1, 3, 2)])
    run.transaction([{"k": 1, "n": n} for n in (6, -7, -1)])
    assert [row["n"] for row in place.rows()] == [4, -2]


def test_a_default_stands_for_a_key_that_is_absent(place: Place) -> None:
    bind = Bind(
        schema=merging(
            g={"type": "integer", "default": 0},
            n={"type": "integer", "reduce": {"strategy": "sum"}},
        ),
        fields={"groupBy": ["g"]},
    )
    run = start(place, bind)
    for _ in range(2):
        run.transaction([{"k": 1, "g": 1, "n": 1}, {"k": 1, "n": 5}])
    assert {row["g"]: row["n"] for row in place.rows()} == {0: 10, 1: 2}


def test_a_key_that_may_be_null_is_refused_but_for_delta_updates() -> None:
    maybe = TargetField(name="k", pointer="/k", column=Column(kind=Kind.LONG), is_key=True)
    (verdict,) = sql.verdicts([maybe], delta_updates=False).values()
    assert verdict.constraint is Constraint.INCOMPATIBLE
    assert sql.verdicts([maybe], delta_updates=True) == {}


# -------------------------------------------------------------------------------------- identifiers

NAMES = [
    "select",
    "Mixed Case",
    'quo"te',
    "per%cent %s $1",
    "ünïcödé ☃",
    "semi;colon--",
    "back\\slash",
    "t",
    "s",
    "excluded",
    "o'clock",
]


def test_names_are_quoted_whatever_is_in_them(place: Place) -> None:
    properties = {name: {"type": "integer", "reduce": {"strategy": "sum"}} for name in NAMES}
    bind = Bind(
        schema={**merging(), "properties": {'the "key" %s': {"type": "integer"}, **properties},
                "required": ['the "key" %s']},
        key=['/the "key" %s'],
        table='We"ird %s täble; drop',
    )  # fmt: skip
    run = start(place, bind)
    assert run.built.targets[0].mode is Mode.PUSHDOWN
    document = {'the "key" %s': 1, **{name: at for at, name in enumerate(NAMES)}}
    for _ in range(2):
        run.transaction([document])
    table = bind.table.replace('"', '""')
    (row,) = place.rows(table)
    assert row == {'the "key" %s': 1, **{name: 2 * at for at, name in enumerate(NAMES)}}
    run.close()
    run = start(place, bind, epoch=2, last=run)


@pytest.mark.parametrize("name", ["_delete", "nul\0"])
def test_names_that_no_column_can_have_are_forbidden(place: Place, name: str) -> None:
    bind = Bind(schema=merging(**{name: {"type": "integer"}}))
    run = start(place, bind)
    assert [field.name for field in run.built.targets[0].target.fields if field.name == name] == []
    run.transaction([{"k": 1, name: 1}])
    assert [row["k"] for row in place.rows()] == [1]


# ------------------------------------------------------------------------------------------ commits

PAIR = (
    Bind(schema=COUNTED.schema, table="one"),
    Bind(schema=COUNTED.schema, table="two"),
)


def test_several_targets_commit_together_or_not_at_all(place: Place) -> None:
    run = start(place, *PAIR)
    run.transaction([{"k": 1, "n": 1}], [{"k": 1, "n": LONG_MAX}])
    with pytest.raises(ConnectorError):
        run.transaction([{"k": 1, "n": 1}], [{"k": 1, "n": 1}])
    assert (stored(place, "one")["[1]"]["n"], stored(place, "two")["[1]"]["n"]) == (1, LONG_MAX)
    run.transaction([{"k": 1, "n": 1}], [])
    assert stored(place, "one")["[1]"]["n"] == 2


def test_shards_commit_together(place: Place) -> None:
    run = start(place, COUNTED)
    staged = [*run.stage([{"k": 1, "n": 1}]), *run.stage([{"k": 2, "n": 2}])]
    run.commit(staged)
    assert {row["k"]: row["n"] for row in place.rows()} == {1: 1, 2: 2}


def test_the_checkpoint_is_that_of_the_last_commit(place: Place) -> None:
    run = start(place, COUNTED)
    assert run.session.checkpoint is None
    run.commit(run.stage([{"k": 1, "n": 1}]), b"\x00first\xff")
    with pytest.raises(ConnectorError):
        run.commit(run.stage([{"k": 1, "n": LONG_MAX}]), b"refused")
    run.close()
    run = start(place, COUNTED, epoch=2)
    assert run.session.checkpoint == b"\x00first\xff"
    run.commit([], b"empty")  # a transaction without rows has a checkpoint too
    run.close()
    run = start(place, COUNTED, epoch=3)
    assert run.session.checkpoint == b"empty"


def test_checkpoints_of_tasks_are_apart(place: Place) -> None:
    one = start(place, PAIR[0], name="acme/one")
    two = start(place, PAIR[1], name="acme/two", epoch=9, resumed=False)
    one.commit([], b"one")
    two.commit([], b"two")
    again = start(place, PAIR[0], name="acme/one", epoch=2)
    assert again.session.checkpoint == b"one"


# ------------------------------------------------------------------------------------------- fences


def test_an_older_session_changes_nothing(place: Place) -> None:
    old = start(place, COUNTED)
    old.transaction([{"k": 1, "n": 1}])
    staged = old.stage([{"k": 1, "n": 100}])
    new = start(place, COUNTED, epoch=2)
    with pytest.raises(FencedEndpoint) as fenced:
        old.commit(staged, b"zombie")
    assert not fenced.value.transient
    new.transaction([{"k": 1, "n": 1}])
    with pytest.raises(FencedEndpoint):
        old.commit([], b"zombie")
    assert stored(place)["[1]"]["n"] == 2
    with pytest.raises(FencedEndpoint):
        start(place, COUNTED, epoch=1)
    last = start(place, COUNTED, epoch=3)
    assert last.session.checkpoint == b"2/1"


def test_an_older_session_applies_nothing(place: Place) -> None:
    start(place, COUNTED, epoch=2, resumed=False).close()
    more = Bind(schema=merging(other={"type": "integer"}))
    with pytest.raises(FencedEndpoint):
        start(place, more, epoch=1)
    assert "other" not in place.columns()


# ------------------------------------------------------------------------------------------ staging


def test_what_is_staged_is_seen_by_nobody_until_it_is_committed(place: Place) -> None:
    run = start(place, COUNTED)
    staged = run.stage([{"k": 1, "n": 1}])
    assert place.rows() == []
    assert [each.rows for each in staged] == [1]
    run.close()
    run = start(place, COUNTED, epoch=2)  # opening sweeps
    run.transaction([{"k": 2, "n": 2}])
    assert [row["k"] for row in place.rows()] == [2]


def test_two_attempts_of_one_shard_are_apart_and_one_counts(place: Place) -> None:
    run = start(place, COUNTED)
    one, twin = run.stage([{"k": 1, "n": 1}]), run.stage([{"k": 1, "n": 1}])
    run.commit(one)
    assert stored(place)["[1]"]["n"] == 1
    assert [each.rows for each in twin] == [1]


def test_fewer_rows_than_were_staged_are_not_committed(place: Place) -> None:
    run = start(place, COUNTED)
    staged = run.stage([{"k": at, "n": 1, "first": "x" * 1000} for at in range(2000)])
    (one,) = staged
    wrong = Staged(binding=0, shard=0, at=one.at, rows=one.rows + 1, bytes=one.bytes)
    with pytest.raises(ConnectorError, match="2001 rows were staged, and 2000 are there"):
        run.commit([wrong])
    assert place.rows() == []
    run.commit(staged)
    assert len(place.rows()) == 2000


# ------------------------------------------------------------------------------------------ secrets


def test_workers_and_errors_have_no_secret_in_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(place, COUNTED)
    shown = pickle.dumps(run.session.workers) + repr((run.session.workers, run.built)).encode()
    assert SECRET.encode() not in shown
    monkeypatch.setenv(VARIABLE, "wrong-hunter2")
    if isinstance(place, PostgresPlace):
        with pytest.raises(ConnectorError) as refused:
            start(place, COUNTED, epoch=2)
        assert "hunter2" not in f"{refused.value}{refused.value!r}{refused.value.__cause__!r}"


# --------------------------------------------------------------------------------------- migrations


def test_applying_again_changes_nothing(place: Place) -> None:
    run = start(place, *PAIR)
    run.transaction([{"k": 1, "n": 1}], [{"k": 2, "n": 2}])
    before = (place.columns("one"), place.rows("one"), place.rows("two"))
    for last in (None, run.built.task):
        task = run.built.resumed(frozenset({0, 1})).task
        applied = run.built.connector.apply(task, last, None, epoch=1)
        assert applied.description == ""
    assert (place.columns("one"), place.rows("one"), place.rows("two")) == before


def test_missing_columns_are_added_and_those_of_others_stay(place: Place) -> None:
    run = start(place, COUNTED)
    run.transaction([{"k": 1, "n": 1}])
    place.execute("ALTER TABLE t ADD COLUMN note TEXT")
    place.execute("UPDATE t SET note = 'mine'")
    more = Bind(schema=merging(**COUNTED.schema["properties"], added={"type": "boolean"}))
    run.close()
    run = start(place, more, epoch=2, last=run)
    run.transaction([{"k": 1, "n": 1, "added": True}, {"k": 2, "added": False}])
    rows = {row["k"]: row for row in place.rows()}
    assert (rows[1]["note"], rows[1]["n"], bool(rows[1]["added"])) == ("mine", 2, True)
    assert (rows[2]["note"], bool(rows[2]["added"])) == (None, False)


def test_a_field_that_is_no_longer_stored_or_required_may_be_absent(place: Place) -> None:
    both = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    run = start(place, Bind(schema=merging(["k", "a", "b"], **both)))
    run.transaction([{"k": 1, "a": 1, "b": 1}])
    run.close()
    run = start(place, Bind(schema=merging(a=both["a"])), epoch=2, last=run)
    run.transaction([{"k": 2}])
    assert {row["k"]: (row["a"], row["b"]) for row in place.rows()} == {1: (1, 1), 2: (None, None)}


def test_integers_that_outgrow_64_bits_widen_their_column(place: Place) -> None:
    run = start(place, Bind(schema=merging(v={"type": "integer"})))
    run.transaction([{"k": 1, "v": LONG_MAX}, {"k": 2}])
    run.close()
    huge = {"type": "integer", "maximum": 10**30}
    run = start(place, Bind(schema=merging(v=huge)), epoch=2, last=run)
    run.transaction([{"k": 3, "v": 10**30}])
    found = {row["k"]: row["v"] and int(row["v"]) for row in place.rows()}
    assert found == {1: LONG_MAX, 2: None, 3: 10**30}


def test_a_column_of_another_type_is_refused_until_a_backfill_replaces_it(place: Place) -> None:
    run = start(place, Bind(schema=merging(v={"type": "integer"})))
    run.transaction([{"k": 1, "v": 1}])
    run.close()
    texts = merging(v={"type": "string"})
    with pytest.raises(UserError) as refused:
        start(place, Bind(schema=texts), epoch=2, last=run)
    assert "raise `backfill`" in str(refused.value)
    assert "is needed" in str(refused.value)
    run = start(place, Bind(schema=texts, backfill=1), epoch=2, last=run)
    assert place.rows() == []
    run.transaction([{"k": 1, "v": "one"}])
    assert [(row["k"], row["v"]) for row in place.rows()] == [(1, "one")]


def test_a_backfill_empties_its_table_once_and_no_other(place: Place) -> None:
    run = start(place, *PAIR)
    run.transaction([{"k": 1, "n": 1}], [{"k": 2, "n": 2}])
    place.execute("ALTER TABLE one ADD COLUMN note TEXT")
    run.close()
    again = (Bind(schema=COUNTED.schema, table="one", backfill=1), PAIR[1])
    first = start(place, *again, epoch=2, last=run)
    assert (place.rows("one"), len(place.rows("two"))) == ([], 1)
    assert "note" in place.columns("one")
    first.transaction([{"k": 3, "n": 3}], [])
    first.close()
    # Its record was lost: it is applied again with the spec before, and the rows are those of now.
    start(place, *again, epoch=3, last=run, resumed=True)
    assert [row["k"] for row in place.rows("one")] == [3]


def test_a_backfill_with_another_key_makes_the_table_anew(place: Place) -> None:
    run = start(place, COUNTED)
    run.transaction([{"k": 1, "n": 1}])
    run.close()
    schema = {**COUNTED.schema, "required": ["k", "first"]}
    run = start(place, Bind(schema=schema, key=["/k", "/first"], backfill=1), epoch=2, last=run)
    run.transaction([{"k": 1, "first": first, "n": 1} for first in ("a", "b", "a")])
    assert sorted((row["k"], row["first"], row["n"]) for row in place.rows()) == [
        (1, "a", 2),
        (1, "b", 1),
    ]


def test_a_table_of_somebody_else_without_the_key_is_refused(place: Place) -> None:
    strict = "" if isinstance(place, PostgresPlace) else " STRICT"
    place.execute(f"CREATE TABLE t (k INTEGER, n INTEGER){strict}")
    with pytest.raises(ConnectorError, match="key") as refused:
        start(place, COUNTED)
    assert refused.value.fix is not None


def test_a_table_of_somebody_else_that_fits_is_used(place: Place) -> None:
    strict = "" if isinstance(place, PostgresPlace) else " STRICT"
    place.execute(f"CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER, mine TEXT){strict}")
    place.execute("INSERT INTO t VALUES (1, 10, 'x')")
    run = start(place, COUNTED)
    run.transaction([{"k": 1, "n": 2**40}])
    (row,) = place.rows()
    assert (row["n"], row["mine"]) == (2**40 + 10, "x")


def test_a_column_that_nobody_fills_is_refused_before_rows_are(place: Place) -> None:
    strict = "" if isinstance(place, PostgresPlace) else " STRICT"
    place.execute(f"CREATE TABLE t (k INTEGER PRIMARY KEY, mine TEXT NOT NULL){strict}")
    with pytest.raises(ConnectorError, match="mine may not be null and has no default"):
        start(place, COUNTED)


# ---------------------------------------------------------------------------------- configuration


def test_members_that_are_not_known_are_refused_without_their_values(place: Place) -> None:
    with pytest.raises(UserError, match="pasword is not understood") as refused:
        start(place, COUNTED, pasword="hunter2")  # noqa: S106
    assert "hunter2" not in str(refused.value)
    with pytest.raises(UserError, match="tabel is not understood"):
        start(place, Bind(schema=COUNTED.schema, resource={"tabel": "x"}))
    with pytest.raises(UserError, match="hardDelete is neither true nor false"):
        start(place, COUNTED, hardDelete="yes")


def test_what_an_endpoint_thinks_of_fields_depends_on_what_is_there(place: Place) -> None:
    run = start(place, Bind(schema=merging(v={"type": "integer"})))
    run.close()
    texts = built(place.directory, [Bind(schema=merging(v={"type": "string"}), table="u")],
                  place.connect, config=place.config)  # fmt: skip
    fields = texts.targets[0].target.fields
    target = run.built.targets[0].target

    def verdict(state_key: str) -> Constraint | None:
        found = run.built.connector.validate(
            target.path, fields, delta_updates=False, state_key=state_key
        ).get("v")
        return None if found is None else found.constraint

    assert verdict(target.state_key) is Constraint.INCOMPATIBLE
    assert verdict("another") is None


def test_checking_an_endpoint_that_is_in_order(place: Place) -> None:
    endpoint = built(place.directory, [COUNTED], place.connect, config=place.config).connector
    endpoint.check()


def test_the_suite_groups_documents_by_key() -> None:
    assert by_key(["/k"], [{"k": 1}, {"k": 2}, {"k": 1}]) == {
        "[1]": [{"k": 1}, {"k": 1}],
        "[2]": [{"k": 2}],
    }
