"""PostgreSQL beyond the suite: types, staging, lost connections, and errors that help."""

from __future__ import annotations

import asyncio
import datetime
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from connectors.places import SECRET, VARIABLE, PostgresPlace
from consensus.pgproxy import PgProxy, Side
from penstock.connectors.postgres import rows as postgres_rows
from penstock.connectors.postgres.columns import fit, type_of
from penstock.connectors.postgres.rows import is_carried, stage_name, stage_prefix
from penstock.connectors.postgres.session import COMMITS_MAX, PostgresSession
from penstock.connectors.postgres.sink import Postgres
from penstock.connectors.sql.dialect import Fit
from penstock.errors import UserError
from penstock.model.clock import Clock
from penstock.model.columns import Column, Kind
from penstock.model.reduce import Strategy
from penstock.runtime.connector.common import ConnectorError, SparkAttempt
from penstock.runtime.connector.materialize import Constraint, TargetField
from penstock.runtime.materialize.fields import Mode
from penstock.testing.postgres import PostgresServer, free_port
from penstock.testing.sink_harness import (
    Bind,
    Document,
    SinkRun,
    build_sink,
    expected,
    merging_schema,
    start,
)

pytestmark = pytest.mark.postgres

SUMS = Bind(
    schema=merging_schema(
        n={"type": "integer", "reduce": {"strategy": "sum"}},
        text={"type": "string"},
    )
)


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)


@pytest.fixture
def place(tmp_path: Path, postgres: PostgresServer) -> Iterator[PostgresPlace]:
    made = PostgresPlace(tmp_path, postgres.url())
    yield made
    for run in made.runs:
        run.close()


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is carried: everything goes through tables."""
    monkeypatch.setattr(postgres_rows, "CARRIED_BYTES_MAX", -1)


def stage_tables(place: PostgresPlace, task: str = "acme/views") -> list[str]:
    rows = place.execute(
        "SELECT tablename::text FROM pg_tables WHERE schemaname = 'penstock_stage'"
    )
    owned = place.execute(
        "SELECT tablename::text FROM pg_tables WHERE tableowner = current_user "
        "AND schemaname = 'penstock_stage'"
    )
    mine = {name for (name,) in owned}
    return sorted(n for (n,) in rows if n in mine and n.startswith(stage_prefix(task)))


# ------------------------------------------------------------------------------------------ staging


def test_few_rows_are_carried_and_more_go_through_a_table(place: PostgresPlace) -> None:
    run = start(place, SUMS)
    few = run.stage([{"k": 1, "n": 1}])
    many = run.stage([{"k": k, "n": 1, "text": "x" * 200} for k in range(20_000)])
    assert (is_carried(few[0].at), is_carried(many[0].at)) == (True, False)
    assert stage_tables(place) == [many[0].at]
    run.commit([*few, *many])
    assert stage_tables(place) == []
    assert {row["k"]: row["n"] for row in place.rows()} == dict.fromkeys(range(20_000), 1) | {1: 2}


HARD_TEXTS = [
    "",
    '"',
    "\\",
    "\\.",
    "a\n\\.\nb",
    "\r\n",
    ",",
    "NULL",
    "{}",
    "\t",
    "'",
    "ß☃\U0001f600",
    "%s",
    "$1",
]


@pytest.mark.parametrize("tables", [False, True], ids=["carried", "by a table"])
def test_texts_arrive_unchanged(
    place: PostgresPlace, tables: bool, request: pytest.FixtureRequest
) -> None:
    if tables:
        request.getfixturevalue("staging")
    run = start(place, SUMS)
    staged = run.stage(
        [{"k": at, "text": text} for at, text in enumerate(HARD_TEXTS)] + [{"k": -1}]
    )
    assert is_carried(staged[0].at) is not tables
    run.commit(staged)
    found = {row["k"]: row["text"] for row in place.rows()}
    assert found == dict(enumerate(HARD_TEXTS)) | {-1: None}


def test_tables_of_older_attempts_are_swept_and_newer_ones_stay(
    place: PostgresPlace, staging: None
) -> None:
    old = start(place, SUMS, epoch=1)
    old.stage([{"k": 1, "n": 1}])
    newer = start(place, SUMS, epoch=5)
    (left,) = newer.stage([{"k": 1, "n": 1}])
    assert stage_tables(place) == [left.at]
    assert isinstance(newer.session, PostgresSession)
    newer.session._epoch = 4
    newer.session.sweep()
    assert stage_tables(place) == [left.at]
    newer.session._epoch = 5
    newer.session.sweep()
    assert stage_tables(place) == []


def test_a_table_that_is_still_written_to_is_not_waited_for(
    place: PostgresPlace, staging: None
) -> None:
    run = start(place, SUMS)
    (left,) = run.stage([{"k": 1, "n": 1}])
    with psycopg.connect(place.url) as holder:
        holder.execute(f'LOCK TABLE penstock_stage."{left.at}"'.encode())
        assert isinstance(run.session, PostgresSession)
        run.session.sweep()
        assert stage_tables(place) == [left.at]
    run.transaction([{"k": 1, "n": 1}])  # the session is as good as before
    assert place.rows()[0]["n"] == 1


def test_an_attempt_that_gives_up_leaves_no_table(place: PostgresPlace, staging: None) -> None:
    run = start(place, SUMS)
    batch = _batch(run)
    stager = run.session.workers.stager(run.attempt())
    stager.store(0, batch)
    stager.discard()
    assert stage_tables(place) == []


def _batch(run: SinkRun) -> Any:  # noqa: ANN401 - an Arrow batch
    from penstock.testing.sink_harness import _projected

    return _projected(run.built.targets[0], [({"k": 1, "n": 1}, False)])


@given(
    st.text(max_size=80),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 9999),
)
@settings(max_examples=50)
def test_names_of_staged_tables_fit_and_differ(
    task: str, epoch: int, clock: int, number: int, shard: int
) -> None:
    def name(number: int) -> str:
        attempt = SparkAttempt(
            task=task,
            epoch=epoch,
            transaction=Clock(clock),
            job="3b17",
            shard=shard,
            attempt=number,
        )
        return stage_name(attempt, 17)

    assert len(name(number).encode()) <= 63
    assert name(number) != name(number + 1)
    assert name(number).startswith(f"{stage_prefix(task)}{epoch}_")


def test_a_crash_of_the_server_empties_staged_tables_and_the_commit_sees_it(
    tmp_path: Path, own_postgres: PostgresServer, staging: None
) -> None:
    place = PostgresPlace(tmp_path, own_postgres.url())
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    staged = run.stage([{"k": 1, "n": 1}])
    run.close()
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute("CHECKPOINT")  # or the table itself may be forgotten
    own_postgres.kill()
    own_postgres.start()
    assert isinstance(run.built.connector, Postgres)
    assert stage_tables(place) == [staged[0].at]
    run.session = PostgresSession(run.built.connector, run.built.sink_task, 1)
    for _ in ("emptied", "gone"):
        with pytest.raises(ConnectorError, match="1 rows were staged, and 0 are there") as lost:
            run.commit(staged)
        assert lost.value.transient
        place.execute(f'DROP TABLE IF EXISTS penstock_stage."{staged[0].at}"')
    assert place.rows() == [{"k": 1, "n": 1, "text": None}]
    run.transaction([{"k": 1, "n": 1}])
    assert place.rows()[0]["n"] == 2
    run.close()


# ---------------------------------------------------------------------------- unknown outcomes


async def test_a_connection_may_break_at_every_message_of_a_commit(
    tmp_path: Path, place: PostgresPlace, postgres: PostgresServer
) -> None:
    """Whatever gets lost: the commit says it happened, and it did, or says that it did not."""
    proxy = PgProxy("127.0.0.1", postgres.port)
    total, epoch, outcomes = 0, 1, set()
    start(place, SUMS, epoch=1).transaction([{"k": 1, "n": 0}])
    async with proxy.running():
        through = {"address": f"127.0.0.1:{proxy.listen_port}", "sslmode": "disable"}
        for side in Side:
            cut_at = 0
            while True:
                cut_at, epoch = cut_at + 1, epoch + 1
                run = await asyncio.to_thread(start, place, SUMS, epoch=epoch, **through)
                staged = run.stage([{"k": 1, "n": 1}])
                proxy.arm(side, cut_at)
                try:
                    await asyncio.to_thread(run.commit, staged)
                    total += 1
                    outcomes.add("settled" if proxy.counted[side] >= cut_at else "untouched")
                except ConnectorError as error:
                    outcomes.add("did not happen" if error.transient else str(error))
                reached = proxy.counted[side] >= cut_at
                proxy.arm(side, None)
                await asyncio.to_thread(run.close)
                assert place.rows()[0]["n"] == total
                if not reached:
                    break
    assert outcomes == {"did not happen", "settled", "untouched"}


def _refusing(place: PostgresPlace, times: int) -> None:
    """Let the first N transactions that write to `t` fail as if others were in the way."""
    place.execute("CREATE SEQUENCE tried")  # which no rollback takes back
    place.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('{place.role}.tried') <= {times} THEN "
        "RAISE EXCEPTION 'in the way' USING ERRCODE = 'serialization_failure'; END IF; "
        "RETURN NULL; END $$"
    )
    place.execute(
        "CREATE TRIGGER refuse AFTER INSERT OR UPDATE ON t FOR EACH STATEMENT "
        "EXECUTE FUNCTION refuse()"
    )


@pytest.mark.parametrize(
    ("times", "succeeds"), [(COMMITS_MAX - 1, True), (COMMITS_MAX, False)], ids=["two", "three"]
)
def test_a_commit_that_failed_to_serialize_is_run_again(
    place: PostgresPlace, times: int, succeeds: bool
) -> None:
    run = start(place, SUMS)
    _refusing(place, times)
    if succeeds:
        run.transaction([{"k": 1, "n": 1}])
    else:
        with pytest.raises(ConnectorError) as refused:
            run.transaction([{"k": 1, "n": 1}])
        assert refused.value.transient
        run.transaction([{"k": 1, "n": 1}])
    assert place.rows()[0]["n"] == 1


# ------------------------------------------------------------------------------------------- types

TIMES = Bind(
    schema=merging_schema(
        at={"type": "string", "format": "date-time"},
        day={"type": "string", "format": "date"},
        id={"type": "string", "format": "uuid"},
        tod={"type": "string", "format": "time"},
    )
)


def test_formats_have_columns_of_their_own(place: PostgresPlace) -> None:
    start(place, TIMES)
    assert place.columns() == {
        "k": "bigint",
        "at": "timestamp with time zone",
        "day": "date",
        "id": "uuid",
        "tod": "text",
    }


FIRST, LAST = datetime.datetime(2, 1, 1), datetime.datetime(9998, 12, 31)  # noqa: DTZ001


def test_every_date_time_is_stored_as_the_instant_it_is(place: PostgresPlace) -> None:
    run = start(place, TIMES)
    zones = st.integers(-(23 * 60 + 59), 23 * 60 + 59)

    @settings(max_examples=3, phases=[Phase.generate])
    @given(
        st.lists(
            st.tuples(
                st.datetimes(FIRST, LAST),
                zones,
            ),
            min_size=50,
            max_size=50,
        )
    )
    def check(instants: list[tuple[datetime.datetime, int]]) -> None:
        documents = [
            {"k": at, "at": f"{when.isoformat()}{_offset(zone)}", "day": when.date().isoformat()}
            for at, (when, zone) in enumerate(instants)
        ]
        run.transaction(documents)
        rows = {row["k"]: row for row in place.rows()}
        for at, (when, zone) in enumerate(instants):
            utc = when.replace(tzinfo=datetime.UTC) - datetime.timedelta(minutes=zone)
            assert rows[at]["at"] == utc
            assert rows[at]["day"] == when.date()

    check()


def _offset(minutes: int) -> str:
    sign, minutes = ("-" if minutes < 0 else "+"), abs(minutes)
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}"


@pytest.mark.parametrize(
    ("given_", "shown"),
    [
        ("2016-12-31T23:59:60Z", "2017-01-01 00:00:00+00"),
        ("2016-12-31T23:59:60.5+23:59", "2016-12-31 00:01:00.5+00"),
        ("0000-01-01T00:00:00Z", "0001-01-01 00:00:00+00 BC"),
        ("0000-02-29T12:00:00+00:00", "0001-02-29 12:00:00+00 BC"),
        ("9999-12-31T23:59:59-23:59", "10000-01-01 23:58:59+00"),
        ("0000-01-01T00:00:00+23:59", "0002-12-31 00:01:00+00 BC"),
        ("2020-06-01t12:00:00.1234567z", "2020-06-01 12:00:00.123457+00"),
        (f"2020-06-01T12:00:00.{'3' * 200}Z", "2020-06-01 12:00:00.333333+00"),
    ],
)
def test_odd_date_times(place: PostgresPlace, given_: str, shown: str) -> None:
    run = start(place, TIMES)
    run.transaction([{"k": 1, "at": given_, "day": "0000-12-31"}])
    place.execute(f"ALTER ROLE {place.role} SET timezone = 'UTC'")
    assert place.execute("SELECT at::text, day::text FROM t") == [(shown, "0001-12-31 BC")]


def test_an_existing_text_column_keeps_formats_unchanged(place: PostgresPlace) -> None:
    place.execute("CREATE TABLE t (k integer PRIMARY KEY, at text, day varchar(4), id varchar)")
    run = start(
        place,
        Bind(schema=merging_schema(at=TIMES.schema["properties"]["at"], day={"type": "string"})),
    )
    run.transaction([{"k": 2**40, "at": "2020-01-01t00:00:00+00:00", "day": "longer than four"}])
    assert place.columns() == {
        "k": "bigint", "at": "text", "day": "text", "id": "character varying",
    }  # fmt: skip
    (row,) = place.rows()
    assert (row["at"], row["day"]) == ("2020-01-01t00:00:00+00:00", "longer than four")


def test_extremes_of_decimals_and_texts_are_pushed_down(place: PostgresPlace) -> None:
    bind = Bind(
        schema=merging_schema(
            word={"type": "string", "reduce": {"strategy": "minimize"}},
            top={
                "type": "number", "minimum": -1000, "maximum": 1000, "multipleOf": 0.01,
                "reduce": {"strategy": "maximize"},
            },
            zero={"type": "number", "reduce": {"strategy": "sum"}},
        )
    )  # fmt: skip
    run = start(place, bind)
    assert run.built.targets[0].mode is Mode.PUSHDOWN
    rng = random.Random(3)
    documents: list[Document] = [
        {
            "k": rng.randrange(3),
            "word": rng.choice(["a", "B", "ä", "_", "Z", "z"]),
            "top": rng.randrange(-100_000, 100_000) / 100,
            "zero": rng.randrange(-8, 8) / 4,
        }
        for _ in range(40)
    ]
    for at in range(0, 40, 7):
        run.transaction(documents[at : at + 7])
    found = {f"[{row['k']}]": row | {"top": float(row["top"])} for row in place.rows()}
    assert found == expected(bind, documents)


def _field(kind: Kind, reduction: Strategy, logical: str | None = None) -> TargetField:
    column = Column(kind=kind, logical=logical)
    return TargetField(name="v", pointer="/v", column=column, reduction=reduction)


@pytest.mark.parametrize(
    ("field", "can"),
    [
        pytest.param(_field(Kind.LONG, Strategy.SUM), True, id="sum of integers"),
        pytest.param(
            _field(Kind.DECIMAL, Strategy.SUM), False, id="sum of decimals: digits limited"
        ),
        pytest.param(_field(Kind.DECIMAL, Strategy.MAXIMIZE), True, id="greatest decimal"),
        pytest.param(_field(Kind.STRING, Strategy.MINIMIZE), True, id="least text, by bytes"),
        pytest.param(_field(Kind.STRING, Strategy.MINIMIZE, "date"), False, id="dates: no texts"),
        pytest.param(
            _field(Kind.STRING, Strategy.MINIMIZE, "date-time"), False, id="instants: not as texts"
        ),
        pytest.param(
            _field(Kind.STRING, Strategy.MAXIMIZE, "uuid"), False, id="uuid: not as texts"
        ),
        pytest.param(_field(Kind.JSON, Strategy.MAXIMIZE), False, id="greatest of anything"),
        pytest.param(_field(Kind.ARRAY, Strategy.APPEND), False, id="append"),
        pytest.param(_field(Kind.JSON, Strategy.LAST_WRITE_WINS), True, id="last of anything"),
    ],
)
def test_which_reductions_are_pushed_down(field: TargetField, can: bool) -> None:
    config = {"address": "x", "database": "x", "user": "x"}
    assert Postgres(config, where="here").can_reduce(field) is can


LONG, MONEY = Column(kind=Kind.LONG), Column(kind=Kind.DECIMAL, precision=10, scale=2)


@pytest.mark.parametrize(
    ("column", "live", "want"),
    [
        (LONG, "bigint", Fit.HOLDS),
        (LONG, "numeric", Fit.HOLDS),
        (LONG, "integer", Fit.WIDENS),
        (LONG, "text", Fit.FAILS),
        (LONG, "double precision", Fit.FAILS),
        (MONEY, "numeric", Fit.HOLDS),
        (MONEY, "numeric(12,2)", Fit.HOLDS),
        (MONEY, "numeric(12,5)", Fit.WIDENS),
        (MONEY, "numeric(10,1)", Fit.WIDENS),
        (MONEY, "bigint", Fit.WIDENS),
        (Column(kind=Kind.DOUBLE), "real", Fit.WIDENS),
        (Column(kind=Kind.DOUBLE), "bigint", Fit.CONVERTS),
        (Column(kind=Kind.STRING), "character varying(9)", Fit.WIDENS),
        (Column(kind=Kind.STRING), "character(9)", Fit.FAILS),
        (Column(kind=Kind.STRING), "uuid", Fit.FAILS),
        (Column(kind=Kind.STRING, logical="uuid"), "text", Fit.HOLDS),
        (Column(kind=Kind.ARRAY), "json", Fit.HOLDS),
        (Column(kind=Kind.ARRAY), "text", Fit.FAILS),
    ],
)
def test_which_columns_hold_which_fields(column: Column, live: str, want: Fit) -> None:
    assert fit(TargetField(name="v", pointer="/v", column=column), live) is want


def test_texts_of_a_key_are_text_whatever_their_format() -> None:
    column = Column(kind=Kind.STRING, logical="date-time")
    assert type_of(TargetField(name="k", pointer="/k", column=column, is_key=True)) == "text"
    assert type_of(TargetField(name="k", pointer="/k", column=column)) != "text"


# ---------------------------------------------------------------------------------------- refusals

NESTED = Bind(
    schema=merging_schema(text={"type": "string"}, any={}), fields={"require": {"any": {}}}
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "column"),
    [({"text": "a\0b"}, "text"), ({"any": {"deep": ["\0"]}}, "any")],
    ids=["text", "inside JSON"],
)
@pytest.mark.parametrize("tables", [False, True], ids=["carried", "by a table"])
def test_a_text_with_a_nul_is_refused_by_name(
    place: PostgresPlace,
    value: Document,
    column: str,
    tables: bool,
    request: pytest.FixtureRequest,
) -> None:
    if tables:
        request.getfixturevalue("staging")
    run = start(place, NESTED)
    with pytest.raises(ConnectorError) as refused:
        run.transaction([{"k": 1, "text": "fine"}, {"k": 7, **value}])
    said = str(refused.value)
    assert f"{place.role}.t, column {column}" in said
    assert "{'k': 7}" in said
    assert not refused.value.transient
    assert place.rows() == []
    run.transaction([{"k": 8, "text": "\\u0000", "any": "\\\\u0000"}])  # written, not meant


def test_a_document_with_a_nul_is_kept_where_no_column_shows_it(place: PostgresPlace) -> None:
    bind = Bind(
        schema={**NESTED.schema, "additionalProperties": True}, fields={"exclude": ["text"]}
    )
    run = start(place, bind)
    run.transaction([{"k": 1, "text": "a\0b", "more": "\0"}])
    assert run.load(0, [{"k": 1}]) == [{"k": 1, "text": "a\0b", "more": "\0"}]


def test_a_key_that_is_too_long_for_an_index_is_refused(place: PostgresPlace) -> None:
    bind = Bind(
        schema={"type": "object", "required": ["k"], "properties": {"k": {"type": "string"}}}
    )
    run = start(place, bind)
    rng = random.Random(1)
    letters = "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(4000))
    with pytest.raises(ConnectorError, match="index row") as refused:
        run.transaction([{"k": letters}])
    assert "2,700 bytes" in str(refused.value.fix)


Broken = Callable[[PostgresPlace, pytest.MonkeyPatch], dict[str, Any]]


def _wrong_password(_: PostgresPlace, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setenv(VARIABLE, "something else")
    return {}


def _revoked(place: PostgresPlace, _: pytest.MonkeyPatch) -> dict[str, Any]:
    with psycopg.connect(place.admin_url, autocommit=True) as connection:
        connection.execute(f"ALTER SCHEMA {place.role} OWNER TO penstock".encode())
        connection.execute(f"GRANT USAGE ON SCHEMA {place.role} TO {place.role}".encode())
    return {}


@pytest.mark.parametrize(
    ("breaks", "says", "fix", "transient"),
    [
        pytest.param(_wrong_password, "does not let .* in", "check user and password", False,
                     id="wrong password"),
        pytest.param(lambda *_: {"user": "nobody"}, "does not let nobody in", "check user", False,
                     id="no such user"),
        pytest.param(lambda *_: {"database": "nowhere"}, "no such database", "create it", False,
                     id="no such database"),
        pytest.param(lambda *_: {"address": f"127.0.0.1:{free_port()}"}, "does not listen",
                     "start it", True, id="refused connection"),
        pytest.param(lambda *_: {"address": "/nowhere"}, "does not listen", "start it", True,
                     id="no such socket"),
        pytest.param(lambda *_: {"address": "nowhere.invalid"}, "host", "spelling", True,
                     id="no such host"),
        pytest.param(lambda *_: {"sslmode": "require"}, "sslmode", "change sslmode", False,
                     id="no SSL"),
        pytest.param(lambda *_: {"schema": "elsewhere"}, "no schema elsewhere, and .* may not",
                     'CREATE SCHEMA "elsewhere"', False, id="no such schema"),
        pytest.param(_revoked, "may not make tables in schema", "GRANT CREATE, USAGE", False,
                     id="revoked privilege"),
    ],
)  # fmt: skip
def test_an_endpoint_that_cannot_be_used_says_why(
    place: PostgresPlace,
    monkeypatch: pytest.MonkeyPatch,
    breaks: Broken,
    says: str,
    fix: str,
    transient: bool,
) -> None:
    config = place.config | breaks(place, monkeypatch)
    with pytest.raises(ConnectorError, match=says) as refused:
        Postgres(config, where="materialization acme/views").check()
    assert fix in str(refused.value.fix)
    assert refused.value.transient is transient
    assert SECRET not in str(refused.value)
    assert "something else" not in str(refused.value)


def test_a_privilege_that_is_revoked_under_a_session_stops_it_and_loses_nothing(
    place: PostgresPlace,
) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    place.execute(f"REVOKE INSERT ON t FROM {place.role}")
    with pytest.raises(ConnectorError, match="permission denied for table t") as refused:
        run.transaction([{"k": 1, "n": 1}])
    assert "GRANT" in str(refused.value.fix)
    assert not refused.value.transient
    place.execute(f"GRANT INSERT ON t TO {place.role}")
    run.transaction([{"k": 1, "n": 1}])
    assert place.rows()[0]["n"] == 2


def test_a_server_that_goes_away_is_a_transient_error(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    place = PostgresPlace(tmp_path, own_postgres.url())
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    staged = run.stage([{"k": 1, "n": 1}])
    own_postgres.stop()
    with pytest.raises(ConnectorError) as gone:
        run.commit(staged)
    assert gone.value.transient
    with pytest.raises(ConnectorError, match="does not listen"):
        start(place, SUMS, epoch=2)
    own_postgres.start()
    again = start(place, SUMS, epoch=2)
    assert again.session.checkpoint == b"1/1"
    again.transaction([{"k": 1, "n": 1}])
    assert place.rows()[0]["n"] == 2
    run.close()
    again.close()


def test_rows_that_break_a_constraint_of_the_table_name_it(place: PostgresPlace) -> None:
    run = start(place, SUMS)
    place.execute("ALTER TABLE t ADD CONSTRAINT positive CHECK (n > 0)")
    with pytest.raises(ConnectorError, match="positive") as refused:
        run.transaction([{"k": 1, "n": -1, "text": "private"}])
    assert "break positive" in str(refused.value.fix)
    assert "private" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["postgresql://me:hunter2@db/x", "me:hunter2@db", "db:port", ""]
)
def test_an_invalid_address_is_not_repeated(address: str) -> None:
    with pytest.raises(UserError) as refused:
        Postgres({"address": address, "database": "d", "user": "u"}, where="here").check()
    assert "hunter2" not in str(refused.value)
    assert "address" in refused.value.what


def test_a_refused_password_is_not_in_the_error(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(place, SUMS)
    monkeypatch.setenv(VARIABLE, "wrong-hunter2")
    with pytest.raises(ConnectorError) as refused:
        start(place, SUMS, epoch=2)
    assert "hunter2" not in f"{refused.value}{refused.value!r}{refused.value.__cause__!r}"


def test_a_missing_secret_is_named(place: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UserError, match=VARIABLE):
        start(place, SUMS)


@pytest.mark.parametrize(
    "resource",
    [{"table": "penstock_x"}, {"table": "t", "schema": "pg_catalog"}, {"table": "x" * 64}, {}],
    ids=["ours", "the server's", "too long", "none"],
)
def test_reserved_table_names_are_refused(place: PostgresPlace, resource: Document) -> None:
    with pytest.raises(UserError):
        Postgres(place.config, where="here").path(resource)


def test_impossible_column_names_are_left_out(place: PostgresPlace) -> None:
    names = ["xmin", "ctid", "x" * 64]
    run = start(place, Bind(schema=merging_schema(**{name: {"type": "integer"} for name in names})))
    assert set(place.columns()) == {"k", "flow_document"}
    target = run.built.targets[0].target
    field = TargetField(name="ctid", pointer="/ctid", column=LONG)
    verdicts = run.built.connector.validate(
        target.path, [field], delta_updates=False, state_key=target.state_key
    )
    assert verdicts["ctid"].constraint is Constraint.FORBIDDEN


# -------------------------------------------------------------------------------------- migrations


def test_grants_and_indexes_of_others_survive_a_backfill(place: PostgresPlace) -> None:
    run = start(place, SUMS)
    place.execute("CREATE INDEX mine ON t (n)")
    place.execute("GRANT SELECT ON t TO PUBLIC")
    start(place, Bind(schema=SUMS.schema, backfill=1), epoch=2, last=run)
    assert place.execute("SELECT 'mine'::regclass::text") == [("mine",)]
    assert place.execute("SELECT has_table_privilege('public', 't', 'SELECT')") == [(True,)]


def test_a_view_is_not_a_table(place: PostgresPlace) -> None:
    place.execute("CREATE VIEW t AS SELECT 1 AS k")
    with pytest.raises(ConnectorError, match="is not a table"):
        start(place, SUMS)


def test_tables_of_another_schema(place: PostgresPlace) -> None:
    with psycopg.connect(place.admin_url, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{place.role} too" AUTHORIZATION {place.role}'.encode())
    run = start(place, Bind(schema=SUMS.schema, resource={"schema": f"{place.role} too"}))
    run.transaction([{"k": 1, "n": 1}])
    place.execute(f'ALTER ROLE {place.role} SET search_path = "{place.role} too"')
    assert place.rows()[0]["n"] == 1


def test_tasks_that_start_at_once_do_not_conflict(
    tmp_path: Path, postgres_url: str, postgres: PostgresServer
) -> None:
    """In a database where nothing is there yet."""
    config = {
        "address": f"127.0.0.1:{postgres.port}", "database": postgres_url.rpartition("/")[2],
        "user": "penstock", "password": "penstock", "schema": "fresh",
    }  # fmt: skip
    failures: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            what = build_sink(
                tmp_path,
                [Bind(schema=SUMS.schema, table=f"t{number}")],
                lambda endpoint, where: Postgres(endpoint.config.value, where=where),
                config=config,
                name=f"acme/task{number}",
            )
            run = SinkRun.start(what, epoch=1)
            run.transaction([{"k": 1, "n": number}])
            run.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
