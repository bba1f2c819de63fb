"""The database of a shard over transactions, crashes, lost local files and attempts at once."""

import base64
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Bug, Unavailable, UserError
from penstock.model.json_order import Json
from penstock.runtime.derive.engine import LambdaFailed, ShardContext
from penstock.runtime.derive.sqlite_code import migration_hashes
from penstock.runtime.derive.sqlite_delta import Torn, apply, delta
from penstock.runtime.derive.sqlite_engine import SqliteEngine
from penstock.runtime.derive.sqlite_state import DELTAS_MAX, ShardFile
from runtime.derive.sqlite_derivations import Files, committed, engine_of, reads, transaction

SOURCE: dict[str, Any] = {
    "id": {"type": "integer"},
    "k": {"type": ["string", "null"]},
    "v": {"type": "string"},
}
MIGRATIONS = [
    """
    create table named (k text primary key, v text);
    create table counted (n integer primary key autoincrement, v text);
    create table bare (k, v);
    create index bare_k on bare (k);
    create table packed (k text primary key, v text) without rowid;
    """
]
LAMBDAS = [
    "insert or replace into named values ($k, $v); select rowid as r, * from named",
    "insert into counted (v) values ($v) returning n, v",
    "insert into bare values ($k, $v); select rowid as r, * from bare",
    "delete from counted where v = $v; delete from bare where k is $k; delete from named where 1",
    "insert into packed values (ifnull($k, ''), $v) on conflict do update set v = v || excluded.v",
    "update bare set v = v || $v where k is $k returning rowid as r, k, v; select * from packed",
]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "local")


def lose(files: Files) -> None:
    shutil.rmtree(files.local_dir, ignore_errors=True)


def tear(files: Files) -> None:
    for path in files.local_dir.iterdir():
        os.truncate(path, path.stat().st_size - 100)


def empty(files: Files) -> None:
    for path in files.local_dir.iterdir():
        path.write_bytes(b"")


KEYS = st.sampled_from(["a", "b", None])
STEPS = st.tuples(
    st.integers(0, len(LAMBDAS) - 1),
    KEYS,
    st.sampled_from(["x", "y" * 50, "z" * 5000]),
)
CRASHES = st.sampled_from(["none", "none", "lost", "torn", "empty", "again", "half"])


@given(st.lists(st.tuples(st.lists(STEPS, max_size=6), CRASHES), max_size=8))
def test_transactions_and_crashes_equal_one_undisturbed_database(
    transactions: list[tuple[list[tuple[int, str | None, str]], str]],
) -> None:
    engine = engine_of(LAMBDAS, SOURCE, migrations=MIGRATIONS)
    given_ = [
        [reads({"id": 0, "k": k, "v": v}, transform=t)[0] for t, k, v in steps]
        for steps, _ in transactions
    ]
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = Files(Path(directory) / "one")
        flat = [read for batch in given_ for read in batch]
        want = [doc for _, doc in transaction(engine, flat, undisturbed)[0]]
        got = []
        state: Json = {}
        files = Files(Path(directory) / "many")
        for batch, (_, crash) in zip(given_, transactions, strict=True):
            if crash == "half":  # an attempt that ended before it finished
                processor = engine.open(context(files, state))
                list(processor.process(batch))
                processor.close()
            elif crash == "again":  # an attempt that finished and was not committed
                transaction(engine, batch, files, state)
            elif crash != "none" and files.local_dir.exists():
                {"lost": lose, "torn": tear, "empty": empty}[crash](files)
            published, patches = transaction(engine, batch, files, state)
            state = committed(state, patches)
            got += [document for _, document in published]
        assert got == want


def context(files: Files, state: Json, shard: int = 0, shards: int = 1) -> ShardContext:
    return ShardContext(shard=shard, shards=shards, state=state, files=files)


def counting() -> SqliteEngine:
    """An engine whose documents count how often it has seen their key."""
    return engine_of(
        "insert into seen values ($id, 1) on conflict do update set n = n + 1 returning id, n",
        {"id": {"type": "integer"}},
        migrations=["create table seen (id integer primary key, n integer)"],
    )


def test_the_next_transaction_takes_the_file_of_the_last(files: Files) -> None:
    _, patches = transaction(counting(), reads({"id": 1}), files)
    state = committed({}, patches)
    (left,) = files.local_dir.iterdir()
    inode = left.stat().st_ino
    _, patches = transaction(counting(), reads({"id": 1}), files, state)
    (left,) = files.local_dir.iterdir()
    assert left.stat().st_ino == inode


def test_a_local_file_equals_what_the_pieces_build(files: Files) -> None:
    state: Json = {}
    for i in range(5):
        _, patches = transaction(
            counting(), reads(*({"id": n} for n in range(i * 300))), files, state
        )
        state = committed(state, patches)
    (left,) = files.local_dir.iterdir()
    kept = left.read_bytes()
    lose(files)
    counting().open(context(files, state)).close()
    (built,) = files.local_dir.iterdir()
    assert (built.name, built.read_bytes()) == (left.name, kept)


def test_a_transaction_that_changes_nothing_has_no_patch(files: Files) -> None:
    _, patches = transaction(counting(), [], files)
    state = committed({}, patches)
    assert patches
    _, patches = transaction(counting(), [], files, state)
    assert patches == ()


def test_attempts_at_once_do_not_meet(files: Files) -> None:
    state = committed({}, transaction(counting(), reads({"id": 1}), files)[1])
    first = counting().open(context(files, state))
    second = counting().open(context(files, state))
    assert list(first.process(reads({"id": 1}))) == [(0, {"id": 1, "n": 2})]
    assert list(second.process(reads({"id": 1}, {"id": 1}))) == [
        (0, {"id": 1, "n": 2}),
        (1, {"id": 1, "n": 3}),
    ]
    one, two = first.finish().patches, second.finish().patches
    first.close()
    second.close()
    assert transaction(counting(), reads({"id": 1}), files, committed(state, one))[0] == [
        (0, {"id": 1, "n": 3})
    ]
    assert transaction(counting(), reads({"id": 1}), files, committed(state, two))[0] == [
        (0, {"id": 1, "n": 4})
    ]


def test_a_failed_document_changes_nothing(files: Files) -> None:
    state = committed({}, transaction(counting(), reads({"id": 1}), files)[1])
    with pytest.raises(LambdaFailed):
        transaction(counting(), reads({"id": 1}, {"id": 2**63}), files, state)
    published, _ = transaction(counting(), reads({"id": 1}), files, state)
    assert published == [(0, {"id": 1, "n": 2})]


def test_shards_keep_their_own_rows_and_their_number(files: Files) -> None:
    state: Json = {}
    for shard in range(3):
        patches = transaction(counting(), reads({"id": shard}), files, shard=shard, shards=3)[1]
        state = committed(state, patches)
    published, _ = transaction(
        counting(), reads({"id": 1}, {"id": 2}), files, state, shard=1, shards=3
    )
    assert published == [(0, {"id": 1, "n": 2}), (1, {"id": 2, "n": 1})]
    with pytest.raises(UserError, match="split over 3 shards, not 2") as refused:
        counting().open(context(files, state, shards=2))
    assert "count: 3" in (refused.value.fix or "")


def test_a_new_base_follows_many_deltas(files: Files) -> None:
    state: Any = {}
    most = 0
    for i in range(2 * DELTAS_MAX + 10):
        _, patches = transaction(counting(), reads({"id": i % 7}), files, state)
        state = committed(state, patches)
        most = max(most, len(state["sqlite"]["0"]["deltas"]))
    assert most == DELTAS_MAX
    assert len(state["sqlite"]["0"]["deltas"]) < DELTAS_MAX
    assert files.kept == {}, "small pieces travel in the patch"
    lose(files)
    published, _ = transaction(counting(), reads({"id": 0}), files, state)
    assert published == [(0, {"id": 0, "n": (2 * DELTAS_MAX + 10 + 6) // 7 + 1})]


def test_a_new_base_follows_large_deltas(files: Files) -> None:
    state: Any = {}
    noise = [os.urandom(3000).hex() for _ in range(40)]
    engine = engine_of("insert into t values ($v)", SOURCE, migrations=["create table t (v)"])
    bases = set()
    for text in noise:
        _, patches = transaction(engine, reads({"id": 1, "v": text}), files, state)
        state = committed(state, patches)
        bases.add(str(state["sqlite"]["0"]["base"]))
    assert 3 <= len(bases) < 20


def test_migrations_run_once_in_order_and_stay_as_they_were(files: Files) -> None:
    code = "select count(*) as n from t"
    made = "create table t (id)"
    filled = "insert into t values (1); insert into t values (2)"

    def count(state: Json, *migrations: str) -> tuple[object, Json]:
        engine = engine_of(code, SOURCE, migrations=migrations)
        published, patches = transaction(engine, reads({"id": 1}), files, state)
        return published[0][1]["n"], committed(state, patches)

    n, state = count({}, made)
    assert n == 0
    n, state = count(state, made, filled)
    assert n == 2
    n, state = count(state, f"\n{made}\n", filled)
    assert n == 2, "space around a migration is no change"
    for changed in ([made, filled + ";select 1"], [made], [filled, made]):
        with pytest.raises(UserError, match="since it was applied \\[E-MIGRATION\\]"):
            count(state, *changed)


def test_a_migration_that_fails_names_its_line(files: Files) -> None:
    engine = engine_of(
        "select 1", SOURCE, migrations=["create table t (id)", "\ninsert into u values (1)"]
    )
    with pytest.raises(LambdaFailed, match="migration 2") as failed:
        engine.open(context(files, {}))
    assert failed.value.where == "acme/derived, migration 2, line 2"
    assert list(files.local_dir.iterdir()) == []


def test_hashes_tell_migrations_apart() -> None:
    spec = engine_of("select 1", SOURCE, migrations=["a", "b", " a "]).target.derivation
    assert spec
    a, b, again = migration_hashes(spec)
    assert a == again != b


def test_lambdas_leave_the_runtimes_table_alone(files: Files) -> None:
    engine = engine_of(
        "delete from penstock_migrations", SOURCE, migrations=["create table t (id)"]
    )
    with pytest.raises(LambdaFailed, match="cannot run"):
        engine.open(context(files, {}))


def test_state_that_is_damaged_is_no_state(files: Files) -> None:
    state: Any = committed({}, transaction(counting(), reads({"id": 1}), files)[1])
    lose(files)
    state["sqlite"]["0"]["base"]["inline"] = "AAAA"
    with pytest.raises(Bug, match="cannot be read"):
        counting().open(context(files, state))


# --- deltas ---


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[tuple[Path, apsw.Connection]]:
    path = tmp_path / "db"
    db = apsw.Connection(str(path))
    db.execute("pragma journal_mode = wal; pragma wal_autocheckpoint = 0")
    yield path, db
    db.close()


def logged_delta(path: Path) -> bytes:
    with Path(f"{path}-wal").open("rb") as log, path.open("rb") as former:
        return delta(log, former)


def test_scattered_updates_are_a_small_delta(logged: tuple[Path, apsw.Connection]) -> None:
    path, db = logged
    db.execute("create table t (id text primary key, n integer, s text)")
    with db:
        rows = [(f"key {i * 7919 % 50_000}", i, f"name {i}") for i in range(50_000)]
        db.executemany("insert into t values (?, ?, ?)", rows)
    db.execute("pragma wal_checkpoint(truncate)")
    former = path.read_bytes()
    session = apsw.Session(db, "main")
    session.attach()
    with db:
        for i in range(0, 50_000, 50):
            db.execute("update t set n = n + 1 where id = ?", (f"key {i}",))
    changeset = session.changeset()
    session.close()
    changed = logged_delta(path)
    log_size = Path(f"{path}-wal").stat().st_size
    assert len(changed) < 2 * len(changeset)
    assert len(changed) * 20 < log_size
    db.execute("pragma wal_checkpoint(truncate)")
    copy = path.with_name("copy")
    copy.write_bytes(former)
    with copy.open("r+b") as file:
        apply(changed, file)
    assert copy.read_bytes() == path.read_bytes()


def test_what_is_not_committed_is_not_in_a_delta(logged: tuple[Path, apsw.Connection]) -> None:
    path, db = logged
    db.execute("create table t (v)")
    db.execute("pragma wal_checkpoint(truncate)")
    db.execute("pragma cache_size = 5; begin")
    db.executemany("insert into t values (?)", [(os.urandom(2000),) for _ in range(200)])
    assert Path(f"{path}-wal").stat().st_size > 0, "pages went to the log before the commit"
    assert logged_delta(path) == b""
    db.execute("commit")
    assert logged_delta(path)


def test_a_delta_covers_all_transactions_of_a_log(logged: tuple[Path, apsw.Connection]) -> None:
    path, db = logged
    db.execute("create table a (v); create table b (v)")
    db.execute("pragma wal_checkpoint(truncate)")
    former = path.read_bytes()
    db.execute("insert into a values (1)")
    db.execute("insert into b values (2)")
    changed = logged_delta(path)
    db.execute("pragma wal_checkpoint(truncate)")
    copy = path.with_name("copy")
    copy.write_bytes(former)
    with copy.open("r+b") as file:
        apply(changed, file)
    assert copy.read_bytes() == path.read_bytes()


def test_a_database_that_shrinks_is_cut(logged: tuple[Path, apsw.Connection]) -> None:
    path, db = logged
    db.execute("create table t (v)")
    db.executemany("insert into t values (?)", [(os.urandom(2000),) for _ in range(50)])
    db.execute("pragma wal_checkpoint(truncate)")
    former = path.read_bytes()
    db.execute("delete from t")
    db.execute("vacuum")
    changed = logged_delta(path)
    db.execute("pragma wal_checkpoint(truncate)")
    copy = path.with_name("copy")
    copy.write_bytes(former)
    with copy.open("r+b") as file:
        apply(changed, file)
    assert copy.read_bytes() == path.read_bytes()
    assert len(former) > path.stat().st_size


def test_a_delta_of_another_file_is_torn(logged: tuple[Path, apsw.Connection]) -> None:
    path, db = logged
    db.execute("create table t (v); insert into t values (1)")
    changed = logged_delta(path)
    for broken in (b"", changed[:-1], changed[:9], changed[:12] + b"\xff" * 40):
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        with copy.open("r+b") as file, pytest.raises(Torn):
            apply(broken, file)


def test_the_pieces_are_a_database_of_sqlite(files: Files, tmp_path: Path) -> None:
    state: Any = committed({}, transaction(counting(), reads({"id": 7}), files)[1])
    found = tmp_path / "found.db"
    base = state["sqlite"]["0"]["base"]
    found.write_bytes(zlib.decompress(base64.b64decode(base["inline"])))
    assert sqlite3.connect(found).execute("select * from seen").fetchall() == [(7, 1)]


@pytest.mark.parametrize("count", [1, 2000], ids=["inline", "in files"])
@pytest.mark.parametrize("first", [True, False])
def test_an_attempt_whose_changes_could_not_be_staged_leaves_none_of_them(
    files: Files, monkeypatch: pytest.MonkeyPatch, count: int, first: bool
) -> None:
    """The blob store failed after SQLite had committed: the next attempt starts from before it."""
    state: Json = {}
    some = reads(*({"id": n} for n in range(count)))
    if not first:
        state = committed({}, transaction(counting(), some, files)[1])

    def fail(self: ShardFile, data: bytes) -> None:
        raise Unavailable("the blob store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(ShardFile, "_piece", fail)
        with pytest.raises(Unavailable):
            transaction(counting(), some, files, state)
    published, _ = transaction(counting(), some, files, state)
    assert {document["n"] for _, document in published} == {1 if first else 2}
