"""The conformance suite of sinks: a subclass of `SinkSuite` or `SqlSinkSuite`, and a fixture.

    class TestMySink(SinkSuite):
        @pytest.fixture
        def place(self, tmp_path: Path) -> MyPlace: ...

`SinkSuite` holds what any sink of pattern ENDPOINT promises (`penstock.runtime.connector`), and
`SqlSinkSuite` what a SQL database promises as well. Every case runs against a real endpoint, the
`place`. `docs/guides/add-a-sink.md` shows both. Put
`pytest.register_assert_rewrite("penstock.testing.connector_suite")` into `conftest.py`.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.model.columns import LONG_MAX, LONG_MIN
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import (
    Constraint,
    FencedEndpoint,
    Materialization,
    Rebuilds,
    Staged,
)
from penstock.runtime.materialize.fields import Mode
from penstock.testing.sink_harness import (
    Bind,
    Document,
    SinkPlace,
    SinkRun,
    SqlPlace,
    build_sink,
    expected,
    merging_schema,
    start,
)

COUNTED = Bind(
    schema=merging_schema(
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


PAIR = (
    Bind(schema=COUNTED.schema, table="one"),
    Bind(schema=COUNTED.schema, table="two"),
)
SUMS = Bind(schema=merging_schema(n={"type": "integer", "reduce": {"strategy": "sum"}}))
ANEW = Bind(schema=SUMS.schema, backfill=1)
TAKEN = Bind(schema=SUMS.schema, takeover=True)


def stored(place: SinkPlace, table: str = "t", *, key: str = "k") -> dict[str, Document]:
    """Rows by key, without what is NULL."""
    return {
        json.dumps([row[key]], separators=(",", ":"), ensure_ascii=False): {
            name: value
            for name, value in row.items()
            if value is not None and name != "flow_document"
        }
        for row in place.rows(table)
    }


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


def filled(place: SinkPlace, *binds: Bind, **more: Any) -> SinkRun:  # noqa: ANN401 - as `start`
    """Store two documents for each binding in a session of its own."""
    run = start(place, *(binds or (SUMS,)), **more)
    run.transaction(*([{"k": 1, "n": 1}, {"k": 2, "n": 2}] for _ in binds or (SUMS,)))
    run.close()
    return run


def sums(place: SinkPlace, table: str = "t") -> dict[int, int]:
    return {row["k"]: row["n"] for row in place.rows(table)}


def paths(place: SinkPlace, *binds: Bind) -> list[tuple[str, ...]]:
    return [place.connector().path({"table": bind.table, **bind.resource}) for bind in binds]


def open_preview(
    place: SinkPlace, preview: Materialization, *binds: Bind, epoch: int = 1
) -> SinkRun:
    """Apply and open a session of a preview."""
    what = build_sink(
        place.directory, binds, lambda *_: preview, config=place.config, name="acme/views/preview"
    )
    return SinkRun.start(what, epoch=epoch)


def _kept(run: SinkRun) -> int:
    """Return how many rows a table of one row has after a rebuild of it has begun."""
    return int(isinstance(run.session, Rebuilds))


class SinkSuite:
    """The promises of a sink of pattern ENDPOINT; subclasses have a fixture `place`."""

    @pytest.fixture(autouse=True)
    def _closed(self, place: SinkPlace) -> Iterator[None]:
        yield
        place.close()

    # Reductions and rows

    @pytest.mark.parametrize("seed", range(3))
    def test_reductions_are_those_of_the_model(self, place: SinkPlace, seed: int) -> None:
        """However the documents are split over transactions, and these over sessions."""
        rng = random.Random(seed)
        documents = _random_counts(rng, 300)
        run, epoch, at = start(place, COUNTED), 1, 0
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

    def test_documents_are_loaded_and_reduced(self, place: SinkPlace) -> None:
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

    def test_delta_updates_append_what_a_transaction_adds_up_to(self, place: SinkPlace) -> None:
        bind = Bind(schema=COUNTED.schema, resource={"delta_updates": True})
        run = start(place, bind)
        run.transaction([{"k": 1, "n": n} for n in (-1, 3, 2)])
        run.transaction([{"k": 1, "n": n} for n in (6, -7, -1)])
        assert [row["n"] for row in place.rows()] == [4, -2]

    def test_a_default_stands_for_a_key_that_is_absent(self, place: SinkPlace) -> None:
        bind = Bind(
            schema=merging_schema(
                g={"type": "integer", "default": 0},
                n={"type": "integer", "reduce": {"strategy": "sum"}},
            ),
            fields={"groupBy": ["g"]},
        )
        run = start(place, bind)
        for _ in range(2):
            run.transaction([{"k": 1, "g": 1, "n": 1}, {"k": 1, "n": 5}])
        assert {row["g"]: row["n"] for row in place.rows()} == {0: 10, 1: 2}

    # Commits and fences

    def test_shards_commit_together(self, place: SinkPlace) -> None:
        run = start(place, COUNTED)
        staged = [*run.stage([{"k": 1, "n": 1}]), *run.stage([{"k": 2, "n": 2}])]
        run.commit(staged)
        assert {row["k"]: row["n"] for row in place.rows()} == {1: 1, 2: 2}

    def test_the_checkpoint_is_that_of_the_last_commit(self, place: SinkPlace) -> None:
        run = start(place, COUNTED)
        assert run.session.checkpoint is None
        run.commit(run.stage([{"k": 1, "n": 1}]), b"\x00first\xff")
        run.close()
        run = start(place, COUNTED, epoch=2)
        assert run.session.checkpoint == b"\x00first\xff"
        run.commit([], b"empty")  # a transaction without rows has a checkpoint too
        run.close()
        run = start(place, COUNTED, epoch=3)
        assert run.session.checkpoint == b"empty"

    def test_tasks_have_separate_checkpoints(self, place: SinkPlace) -> None:
        one = start(place, PAIR[0], name="acme/one")
        two = start(place, PAIR[1], name="acme/two", epoch=9, resumed=False)
        one.commit([], b"one")
        two.commit([], b"two")
        again = start(place, PAIR[0], name="acme/one", epoch=2)
        assert again.session.checkpoint == b"one"

    def test_an_older_session_changes_nothing(self, place: SinkPlace) -> None:
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

    # Staging

    def test_staged_rows_are_invisible_until_they_are_committed(self, place: SinkPlace) -> None:
        run = start(place, COUNTED)
        staged = run.stage([{"k": 1, "n": 1}])
        assert place.rows() == []
        assert [each.rows for each in staged] == [1]
        run.close()
        run = start(place, COUNTED, epoch=2)  # opening sweeps
        run.transaction([{"k": 2, "n": 2}])
        assert [row["k"] for row in place.rows()] == [2]

    def test_two_attempts_of_one_shard_are_separate_and_one_counts(self, place: SinkPlace) -> None:
        run = start(place, COUNTED)
        one, twin = run.stage([{"k": 1, "n": 1}]), run.stage([{"k": 1, "n": 1}])
        run.commit(one)
        assert stored(place)["[1]"]["n"] == 1
        assert [each.rows for each in twin] == [1]

    def test_fewer_rows_than_were_staged_are_not_committed(self, place: SinkPlace) -> None:
        run = start(place, COUNTED)
        staged = run.stage([{"k": at, "n": 1, "first": "x" * 1000} for at in range(2000)])
        (one,) = staged
        wrong = Staged(binding=0, shard=0, at=one.at, rows=one.rows + 1, bytes=one.bytes)
        with pytest.raises(ConnectorError, match="2001 rows were staged, and 2000 are there"):
            run.commit([wrong])
        assert place.rows() == []
        run.commit(staged)
        assert len(place.rows()) == 2000

    def test_workers_have_no_secret_in_them(self, place: SinkPlace) -> None:
        run = start(place, COUNTED)
        shown = pickle.dumps(run.session.workers) + repr((run.session.workers, run.built)).encode()
        assert not [secret for secret in place.secrets if secret.encode() in shown]

    # Applying

    def test_applying_again_changes_nothing(self, place: SinkPlace) -> None:
        run = start(place, *PAIR)
        run.transaction([{"k": 1, "n": 1}], [{"k": 2, "n": 2}])
        before = place.snapshot()
        for last in (None, run.built.sink_task):
            task = run.built.resumed(frozenset({0, 1})).sink_task
            applied = run.built.connector.apply(task, last, None, epoch=1)
            assert applied.description == ""
        assert place.snapshot() == before

    def test_a_backfill_empties_its_table_once_and_no_other(self, place: SinkPlace) -> None:
        run = start(place, *PAIR)
        run.transaction([{"k": 1, "n": 1}], [{"k": 2, "n": 2}])
        run.close()
        again = (Bind(schema=COUNTED.schema, table="one", backfill=1), PAIR[1])
        first = start(place, *again, epoch=2, last=run)
        assert (len(place.rows("one")), len(place.rows("two"))) == (_kept(first), 1)
        first.transaction([{"k": 3, "n": 3}], [])
        first.close()
        # Its record was lost: it is applied again with the spec before, and the rows are current.
        start(place, *again, epoch=3, last=run, resumed=True)
        assert [row["k"] for row in place.rows("one")] == [3]

    def test_a_backfill_with_another_key_remakes_the_table(self, place: SinkPlace) -> None:
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

    def test_unknown_members_are_refused_without_their_values(self, place: SinkPlace) -> None:
        with pytest.raises(UserError, match='unknown key "passphrase"') as refused:
            start(place, COUNTED, passphrase="hunter2")  # noqa: S106
        assert "hunter2" not in str(refused.value)
        with pytest.raises(UserError, match='unknown key "tables"'):
            start(place, Bind(schema=COUNTED.schema, resource={"tables": "x"}))

    def test_check_passes_for_a_working_endpoint(self, place: SinkPlace) -> None:
        endpoint = build_sink(
            place.directory, [COUNTED], place.connect, config=place.config
        ).connector
        endpoint.check()

    # Ownership

    def test_a_backfill_counter_that_was_used_before_is_refused(self, place: SinkPlace) -> None:
        first = filled(place)
        second = start(place, ANEW, epoch=2, last=first)
        second.transaction([{"k": 1, "n": 1}])
        second.close()
        with pytest.raises(ConnectorError, match="raise `backfill`") as refused:
            start(place, SUMS, epoch=3, last=first)  # its log still has what was read under 0
        assert "never had" in str(refused.value)
        assert sums(place) == {1: 1}

    def test_a_table_of_another_task_is_refused_and_the_ways_out_are_named(
        self, place: SinkPlace
    ) -> None:
        filled(place)
        with pytest.raises(ConnectorError, match=r"table .*t belongs to acme/views") as refused:
            start(place, SUMS, name="acme/other")
        for way in ("renamedFrom: acme/views", "penstock task takeover", "another table"):
            assert way in str(refused.value)
        assert sums(place) == {1: 1, 2: 2}
        elsewhere = Bind(schema=SUMS.schema, table="u")
        start(place, elsewhere, name="acme/other").transaction([{"k": 1, "n": 7}])
        assert sums(place, "u") == {1: 7}

    def test_a_backfill_does_not_empty_a_table_of_another_task(self, place: SinkPlace) -> None:
        filled(place)
        with pytest.raises(ConnectorError, match="belongs to acme/views"):
            start(place, Bind(schema=SUMS.schema, backfill=3), name="acme/other")
        assert sums(place) == {1: 1, 2: 2}

    def test_a_takeover_empties_the_table_and_keeps_its_last_owner_out(
        self, place: SinkPlace
    ) -> None:
        old = start(place, SUMS)
        old.transaction([{"k": 1, "n": 1}])
        staged = old.stage([{"k": 1, "n": 100}])
        new = start(place, TAKEN, name="acme/other")
        assert len(place.rows()) == _kept(new)
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

    def test_a_renamed_task_continues(self, place: SinkPlace) -> None:
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

    def test_two_tasks_that_stored_are_not_joined_by_a_rename(self, place: SinkPlace) -> None:
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

    def test_rows_unknown_to_the_recovery_log_are_not_added_to(self, place: SinkPlace) -> None:
        filled(place)
        with pytest.raises(
            ConnectorError, match="rows of acme/views that its recovery log does not"
        ):
            start(place, SUMS)
        assert sums(place) == {1: 1, 2: 2}
        start(place, ANEW).transaction([{"k": 1, "n": 1}])
        assert sums(place) == {1: 1}

    # Previews

    def test_a_preview_leaves_nothing_behind(self, place: SinkPlace) -> None:
        before = place.snapshot()
        with place.connector().preview(paths(place, SUMS)) as preview:
            run = open_preview(place, preview, SUMS)
            assert run.session.checkpoint is None
            run.transaction([{"k": 1, "n": 1}])
            run.transaction([{"k": 1, "n": 2}])
            run.close()
            again = open_preview(place, preview, SUMS, epoch=2)
            assert again.session.checkpoint == b"1/2", "sessions of a preview share its state"
            again.close()
            assert place.previews()
            assert place.snapshot() == before
        assert place.previews() == []
        real = start(place, SUMS)
        assert real.session.checkpoint is None
        real.transaction([{"k": 1, "n": 5}])
        assert [(row["k"], row["n"]) for row in place.rows()] == [(1, 5)]

    def test_a_preview_after_a_run_changes_none_of_its_rows(self, place: SinkPlace) -> None:
        run = start(place, SUMS)
        run.transaction([{"k": 1, "n": 1}])
        before = place.snapshot()
        for _ in range(2):
            with place.connector().preview(paths(place, SUMS)) as preview:
                tried = open_preview(place, preview, SUMS)
                # It starts over, in a table that is empty: nothing is loaded, nothing is added to.
                tried.transaction([{"k": 1, "n": 100}, {"k": 2, "n": 1}])
                assert place.snapshot() == before
                tried.close()
        assert (place.snapshot(), place.previews()) == (before, [])
        run.transaction([{"k": 1, "n": 1}])
        assert [(row["k"], row["n"]) for row in place.rows()] == [(1, 2)]

    def test_documents_are_loaded_from_the_tables_of_the_preview(self, place: SinkPlace) -> None:
        lists = Bind(
            schema=merging_schema(
                v={"type": "array", "items": {"type": "integer"}, "reduce": {"strategy": "append"}}
            )
        )
        run = start(place, lists)
        run.transaction([{"k": 1, "v": [100]}])
        with place.connector().preview(paths(place, lists)) as preview:
            tried = open_preview(place, preview, lists)
            tried.transaction([{"k": 1, "v": [1]}])
            tried.transaction([{"k": 1, "v": [2]}])
            assert tried.load(0, [{"k": 1}]) == [{"k": 1, "v": [1, 2]}]
            tried.close()

    def test_many_rows_are_staged_and_their_tables_removed(self, place: SinkPlace) -> None:
        big = Bind(schema=merging_schema(v={"type": "string"}))
        with place.connector().preview(paths(place, big)) as preview:
            run = open_preview(place, preview, big)
            run.stage([{"k": at, "v": "x" * 2000} for at in range(1000)])  # and never committed
            run.close()
        assert place.previews() == []

    def test_concurrent_previews_are_separate(self, place: SinkPlace) -> None:
        first = place.connector().preview(paths(place, SUMS))
        second = place.connector().preview(paths(place, SUMS))
        with first as one:
            run = open_preview(place, one, SUMS)
            run.transaction([{"k": 1, "n": 1}])
            with second as two:
                other = open_preview(place, two, SUMS)
                assert other.session.checkpoint is None
                other.transaction([{"k": 1, "n": 10}])
                other.close()
            run.transaction([{"k": 1, "n": 1}])
            run.close()
            assert place.previews(), "the end of one removes nothing of the other"
        assert place.previews() == []

    def test_an_error_removes_the_tables_too(self, place: SinkPlace) -> None:
        def fail() -> None:
            with place.connector().preview(paths(place, SUMS)) as preview:
                run = open_preview(place, preview, SUMS)
                run.transaction([{"k": 1, "n": 1}])
                run.close()
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            fail()
        assert place.previews() == []


class SqlSinkSuite(SinkSuite):
    """The promises of a sink for a SQL database; `place` is a `SqlPlace`."""

    # Reductions and rows

    def test_reductions_are_pushed_down(self, place: SqlPlace) -> None:
        assert start(place, COUNTED).built.targets[0].mode is Mode.PUSHDOWN

    def test_a_member_that_is_no_flag_is_refused(self, place: SqlPlace) -> None:
        with pytest.raises(UserError, match="/hardDelete: expected true or false"):
            start(place, COUNTED, hardDelete="yes")

    def test_an_absent_field_keeps_its_value_and_null_replaces_it(self, place: SqlPlace) -> None:
        run = start(place, Bind(schema=merging_schema(any={}), fields={"require": {"any": {}}}))
        assert run.built.targets[0].mode is Mode.PUSHDOWN
        seen = []
        for document in ({"k": 1, "any": {"a": [1]}}, {"k": 1}, {"k": 1, "any": None}):
            run.transaction([document])
            found = place.execute('SELECT CAST("any" AS text) FROM t')
            seen.append(json.loads(found[0][0]))
        assert seen == [{"a": [1]}, {"a": [1]}, None]

    def test_a_sum_that_outgrows_64_bits_is_refused_and_changes_nothing(
        self, place: SqlPlace
    ) -> None:
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

    @pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
    def test_deletions(self, place: SqlPlace, hard: bool) -> None:
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

    def test_names_are_quoted_whatever_is_in_them(self, place: SqlPlace) -> None:
        properties = {name: {"type": "integer", "reduce": {"strategy": "sum"}} for name in NAMES}
        bind = Bind(
            schema={
                **merging_schema(),
                "properties": {'the "key" %s': {"type": "integer"}, **properties},
                "required": ['the "key" %s'],
            },
            key=['/the "key" %s'],
            table='We"ird %s täble; drop',
        )
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
    def test_names_that_no_column_can_have_are_forbidden(self, place: SqlPlace, name: str) -> None:
        properties: dict[str, Document] = {name: {"type": "integer"}}
        bind = Bind(schema=merging_schema(**properties))
        run = start(place, bind)
        assert [
            field.name for field in run.built.targets[0].target.fields if field.name == name
        ] == []
        run.transaction([{"k": 1, name: 1}])
        assert [row["k"] for row in place.rows()] == [1]

    # Commits and fences

    def test_several_targets_commit_together_or_not_at_all(self, place: SqlPlace) -> None:
        run = start(place, *PAIR)
        run.transaction([{"k": 1, "n": 1}], [{"k": 1, "n": LONG_MAX}])
        with pytest.raises(ConnectorError):
            run.transaction([{"k": 1, "n": 1}], [{"k": 1, "n": 1}])
        assert (stored(place, "one")["[1]"]["n"], stored(place, "two")["[1]"]["n"]) == (1, LONG_MAX)
        run.transaction([{"k": 1, "n": 1}], [])
        assert stored(place, "one")["[1]"]["n"] == 2

    def test_a_refused_transaction_leaves_the_checkpoint(self, place: SqlPlace) -> None:
        run = start(place, COUNTED)
        run.commit(run.stage([{"k": 1, "n": 1}]), b"first")
        with pytest.raises(ConnectorError):
            run.commit(run.stage([{"k": 1, "n": LONG_MAX}]), b"refused")
        run.close()
        assert start(place, COUNTED, epoch=2).session.checkpoint == b"first"

    def test_an_older_session_applies_nothing(self, place: SqlPlace) -> None:
        start(place, COUNTED, epoch=2, resumed=False).close()
        more = Bind(schema=merging_schema(other={"type": "integer"}))
        with pytest.raises(FencedEndpoint):
            start(place, more, epoch=1)
        assert "other" not in place.columns()

    # Migrations

    def test_missing_columns_are_added_and_those_of_others_stay(self, place: SqlPlace) -> None:
        run = start(place, COUNTED)
        run.transaction([{"k": 1, "n": 1}])
        place.execute("ALTER TABLE t ADD COLUMN note TEXT")
        place.execute("UPDATE t SET note = 'mine'")
        more = Bind(
            schema=merging_schema(**COUNTED.schema["properties"], added={"type": "boolean"})
        )
        run.close()
        run = start(place, more, epoch=2, last=run)
        run.transaction([{"k": 1, "n": 1, "added": True}, {"k": 2, "added": False}])
        rows = {row["k"]: row for row in place.rows()}
        assert (rows[1]["note"], rows[1]["n"], bool(rows[1]["added"])) == ("mine", 2, True)
        assert (rows[2]["note"], bool(rows[2]["added"])) == (None, False)

    def test_a_field_that_is_no_longer_stored_or_required_may_be_absent(
        self, place: SqlPlace
    ) -> None:
        both = {"a": {"type": "integer"}, "b": {"type": "integer"}}
        run = start(place, Bind(schema=merging_schema(["k", "a", "b"], **both)))
        run.transaction([{"k": 1, "a": 1, "b": 1}])
        run.close()
        run = start(place, Bind(schema=merging_schema(a=both["a"])), epoch=2, last=run)
        run.transaction([{"k": 2}])
        assert {row["k"]: (row["a"], row["b"]) for row in place.rows()} == {
            1: (1, 1),
            2: (None, None),
        }

    def test_integers_that_outgrow_64_bits_widen_their_column(self, place: SqlPlace) -> None:
        run = start(place, Bind(schema=merging_schema(v={"type": "integer"})))
        run.transaction([{"k": 1, "v": LONG_MAX}, {"k": 2}])
        run.close()
        huge = {"type": "integer", "maximum": 10**30}
        run = start(place, Bind(schema=merging_schema(v=huge)), epoch=2, last=run)
        run.transaction([{"k": 3, "v": 10**30}])
        found = {row["k"]: row["v"] and int(row["v"]) for row in place.rows()}
        assert found == {1: LONG_MAX, 2: None, 3: 10**30}

    def test_a_column_of_another_type_is_refused_until_a_backfill_replaces_it(
        self, place: SqlPlace
    ) -> None:
        run = start(place, Bind(schema=merging_schema(v={"type": "integer"})))
        run.transaction([{"k": 1, "v": 1}])
        run.close()
        texts = merging_schema(v={"type": "string"})
        with pytest.raises(UserError) as refused:
            start(place, Bind(schema=texts), epoch=2, last=run)
        assert "raise `backfill`" in str(refused.value)
        assert "is needed" in str(refused.value)
        run = start(place, Bind(schema=texts, backfill=1), epoch=2, last=run)
        assert [(row["k"], row["v"]) for row in place.rows()] == [(1, 1)], "until all are there"
        run.transaction([{"k": 1, "v": "one"}])
        assert [(row["k"], row["v"]) for row in place.rows()] == [(1, "one")]

    def test_a_backfill_keeps_columns_of_others(self, place: SqlPlace) -> None:
        run = start(place, *PAIR)
        run.transaction([{"k": 1, "n": 1}], [{"k": 2, "n": 2}])
        place.execute("ALTER TABLE one ADD COLUMN note TEXT")
        run.close()
        start(place, Bind(schema=COUNTED.schema, table="one", backfill=1), epoch=2, last=run)
        assert "note" in place.columns("one")

    def test_a_foreign_table_without_the_key_is_refused(self, place: SqlPlace) -> None:
        place.execute(f"CREATE TABLE t (k INTEGER, n INTEGER){place.table_options}")
        with pytest.raises(ConnectorError, match="key") as refused:
            start(place, COUNTED)
        assert refused.value.fix is not None

    def test_a_foreign_table_that_fits_is_used(self, place: SqlPlace) -> None:
        place.execute(
            f"CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER, mine TEXT){place.table_options}"
        )
        place.execute("INSERT INTO t VALUES (1, 10, 'x')")
        run = start(place, COUNTED)
        run.transaction([{"k": 1, "n": 2**40}])
        (row,) = place.rows()
        assert (row["n"], row["mine"]) == (2**40 + 10, "x")

    def test_a_required_column_that_rows_lack_is_refused(self, place: SqlPlace) -> None:
        place.execute(
            f"CREATE TABLE t (k INTEGER PRIMARY KEY, mine TEXT NOT NULL){place.table_options}"
        )
        with pytest.raises(ConnectorError, match="mine may not be null and has no default"):
            start(place, COUNTED)

    def test_verdicts_on_fields_depend_on_the_live_table(self, place: SqlPlace) -> None:
        run = start(place, Bind(schema=merging_schema(v={"type": "integer"})))
        run.close()
        texts = Bind(schema=merging_schema(v={"type": "string"}), table="u")
        built = build_sink(place.directory, [texts], place.connect, config=place.config)
        fields = built.targets[0].target.fields
        target = run.built.targets[0].target

        def verdict(state_key: str) -> Constraint | None:
            found = run.built.connector.validate(
                target.path, fields, delta_updates=False, state_key=state_key
            ).get("v")
            return None if found is None else found.constraint

        assert verdict(target.state_key) is Constraint.INCOMPATIBLE
        assert verdict("another") is None

    # Ownership

    def test_a_dropped_table_is_refused_until_a_backfill_fills_it_anew(
        self, place: SqlPlace
    ) -> None:
        run = filled(place)
        place.execute("DROP TABLE t")
        for _ in range(2):
            with pytest.raises(
                ConnectorError, match="is gone, and acme/views had filled it"
            ) as gone:
                start(place, SUMS, epoch=2, last=run)
            assert "backfill" in str(gone.value)
            assert not gone.value.transient
        again = start(place, ANEW, epoch=3, last=run)
        again.transaction([{"k": 1, "n": 5}])
        assert sums(place) == {1: 5}

    def test_a_table_that_never_had_rows_is_made_again(self, place: SqlPlace) -> None:
        run = start(place, SUMS)
        run.commit([], b"nothing was stored")
        run.close()
        place.execute("DROP TABLE t")
        start(place, SUMS, epoch=2, last=run).transaction([{"k": 1, "n": 1}])
        assert sums(place) == {1: 1}

    @pytest.mark.parametrize("how", ["emptied", "made by hand"])
    def test_a_table_that_has_lost_its_rows_is_refused(self, place: SqlPlace, how: str) -> None:
        run = filled(place)
        if how == "emptied":
            place.execute("DELETE FROM t")
        else:
            place.execute("DROP TABLE t")
            place.execute(f"CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER){place.table_options}")
        with pytest.raises(ConnectorError, match="backfill") as lost:
            start(place, SUMS, epoch=2, last=run)
        said = str(lost.value)
        assert "is empty, and had rows" in said or "another in its place" in said
        # People who know better remove the record, by the statement that the error gives.
        assert "DELETE FROM" in said
        place.execute("DELETE FROM penstock_tables WHERE name = 't'")
        start(place, SUMS, epoch=3, last=run)

    def test_rows_that_are_consumed_may_be_gone(self, place: SqlPlace) -> None:
        queue = Bind(schema=SUMS.schema, resource={"delta_updates": True})
        run = filled(place, queue)
        place.execute("DELETE FROM t")
        start(place, queue, epoch=2, last=run).close()
        other = Bind(schema=SUMS.schema, table="u")
        run = filled(place, other, name="acme/hard", hardDelete=True)
        place.execute("DELETE FROM u")
        start(place, other, epoch=2, last=run, name="acme/hard", hardDelete=True).close()

    @pytest.mark.parametrize("how", ["dropped", "made by hand"])
    def test_a_table_that_is_dropped_under_a_session_stops_it(
        self, place: SqlPlace, how: str
    ) -> None:
        run = start(place, SUMS)
        run.transaction([{"k": 1, "n": 1}])
        place.execute("DROP TABLE t")
        if how != "dropped":
            place.execute(f"CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER){place.table_options}")
        with pytest.raises(ConnectorError) as stopped:
            run.transaction([{"k": 2, "n": 2}])
        assert stopped.value.transient, "the next session says what is wrong"
        if how != "dropped":
            assert place.rows() == []
        run.close()
        with pytest.raises(ConnectorError, match="backfill") as refused:
            start(place, SUMS, epoch=2, last=run)
        assert not refused.value.transient

    def test_tables_of_others_may_come_and_go_under_a_session(self, place: SqlPlace) -> None:
        run = start(place, SUMS)
        run.transaction([{"k": 1, "n": 1}])
        place.execute("CREATE TABLE others (x INTEGER)")
        run.transaction([{"k": 1, "n": 1}])
        place.execute("ALTER TABLE t ADD COLUMN note TEXT")
        run.transaction([{"k": 1, "n": 1}])
        assert sums(place) == {1: 3}

    def test_a_dropped_table_is_free_for_another_task(self, place: SqlPlace) -> None:
        filled(place)
        place.execute("DROP TABLE t")
        start(place, SUMS, name="acme/other").transaction([{"k": 1, "n": 5}])
        assert sums(place) == {1: 5}

    def test_a_table_of_an_older_release_is_not_given_to_another_task(
        self, place: SqlPlace
    ) -> None:
        filled(place)
        place.execute("UPDATE penstock_tables SET task = NULL, filled = NULL")
        with pytest.raises(ConnectorError, match="belongs to another task"):
            start(place, SUMS, name="acme/other")
        assert sums(place) == {1: 1, 2: 2}

    # Previews

    def test_a_preview_shows_what_a_run_would_do_to_a_table_that_is_there(
        self, place: SqlPlace
    ) -> None:
        start(place, SUMS).close()
        more = Bind(
            schema=merging_schema(n=SUMS.schema["properties"]["n"], added={"type": "boolean"}),
            table="t",
        )
        with place.connector().preview(paths(place, more)) as preview:
            what = build_sink(
                place.directory, [more], lambda *_: preview, config=place.config, name="x/y"
            )
            said = what.connector.apply(what.sink_task, None, None, epoch=1).description
        assert "added" in said
        assert said.replace('"', "").endswith("t.added")
        assert "preview" not in said
        assert "added" not in place.columns()
        texts = Bind(schema=merging_schema(n={"type": "string"}))
        with place.connector().preview(paths(place, texts)) as preview:
            with pytest.raises(UserError, match="raise `backfill`"):
                open_preview(place, preview, texts)
            again = Bind(schema=texts.schema, backfill=1)
            run = open_preview(place, preview, again)
            run.transaction([{"k": 1, "n": "one"}])
            run.close()
        assert place.previews() == []

    def test_a_preview_refuses_a_view_as_a_run_does(self, place: SqlPlace) -> None:
        place.execute("CREATE VIEW t AS SELECT 1 AS k, 2 AS n")
        refused = pytest.raises(ConnectorError, match="is not a table")
        with refused, place.connector().preview(paths(place, SUMS)) as preview:
            open_preview(place, preview, SUMS)
        assert place.previews() == []
