"""Money moves between two tables while Penstock and the source are killed, again and again.

Every transfer is one transaction of the source over both tables, so their sum never changes there.
A capture brings both to a materialization; whoever looks at the two tables at the destination sees
the same sum at any time, and at rest the same rows. The default run is short. With
`PENSTOCK_CHAOS_SECONDS` there are 20 kills, for each destination.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from chaos.process_tree import Tree, choose_seed
from connectors.postgres_cdc.changing import changing_postgres, config_of, ran
from connectors.postgres_cdc.pipeline import catalog_of
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.testing.postgres import PostgresServer
from runtime.sessions import Place

LONG = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0")) > 0
KILLS, ACCOUNTS = (20, 200) if LONG else (3, 20)
EACH = 1000
TOTAL = 2 * ACCOUNTS * EACH
TABLES = ("checking", "savings")
AWAY = 1_000_000

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(600 + 3600 * LONG)]

SUMS = (
    "SELECT (SELECT count(*) FROM checking) + (SELECT count(*) FROM savings), "
    "(SELECT sum(amount) FROM checking) + (SELECT sum(amount) FROM savings)"
)
Look = Callable[[str], list[tuple[int, ...]]]


@dataclass
class Worker:
    """Does something all the time, in a thread, and remembers how often."""

    times: int = 0
    found: list[str] = field(default_factory=list)
    """What should not have been."""
    stop: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def working(work: Callable[[Worker], None]) -> Iterator[Worker]:
    worker = Worker()

    def run() -> None:
        while not worker.stop.is_set():
            with contextlib.suppress(psycopg.OperationalError, sqlite3.OperationalError):
                work(worker)
            worker.stop.wait(0.05)  # the server, or the tables, are not there

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop.set()
        thread.join()


def transfers(url: str, seed: int) -> Callable[[Worker], None]:
    """Move money between tables, and sometimes a whole row, which gets another key there."""

    def work(worker: Worker) -> None:
        rng = random.Random(seed + worker.times)
        with psycopg.connect(url, autocommit=True) as connection:
            while not worker.stop.is_set():
                giver, taker = rng.sample(TABLES, 2)
                if rng.random() < 0.1:
                    _move_row(connection, giver, taker, rng.randrange(ACCOUNTS), rng.random() < 0.5)
                else:
                    _move_money(connection, giver, taker, rng)
                worker.times += 1
                time.sleep(0.002)

    return work


def _move_money(connection: psycopg.Connection, giver: str, taker: str, rng: random.Random) -> None:
    amount = rng.randrange(1, 100)
    with connection.transaction() as transaction:
        for table, change in ((giver, -amount), (taker, amount)):
            changed = connection.execute(
                f"UPDATE {table} SET amount = amount + %s WHERE id = %s".encode(),  # noqa: S608
                (change, rng.randrange(ACCOUNTS)),
            )
            if not changed.rowcount:
                raise psycopg.Rollback(transaction)


def _move_row(
    connection: psycopg.Connection, giver: str, taker: str, account: int, back_at_once: bool
) -> None:
    """A row is in the other table, under another key, and then back: at once, or soon."""
    move = (
        "WITH gone AS (DELETE FROM {} WHERE id = %s RETURNING *) "
        "INSERT INTO {} SELECT id + %s, amount FROM gone"
    )
    there = move.format(giver, taker).encode(), (account, AWAY)
    back = move.format(taker, giver).encode(), (account + AWAY, -AWAY)
    with connection.transaction():
        connection.execute(*there)
        if back_at_once:
            connection.execute(*back)
    connection.execute(*back)


def watching(look: Look) -> Callable[[Worker], None]:
    """Look at both tables at once, all the time."""

    def work(worker: Worker) -> None:
        while not worker.stop.is_set():
            ((rows, total),) = look(SUMS)
            worker.times += bool(rows)
            if rows and (int(total) != TOTAL or rows != 2 * ACCOUNTS):
                worker.found.append(f"{rows} rows with {total}")
            time.sleep(0.005)

    return work


def destination(kind: str, place: Place, request: pytest.FixtureRequest) -> tuple[dict, Look]:  # type: ignore[type-arg]
    """A connector for a materialization, and how to look at its tables."""
    if kind == "sqlite":
        path = place.database()

        def look(query: str) -> list[tuple[int, ...]]:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
                return database.execute(query).fetchall()

        config = {"path": path, "hardDelete": True}
        return {"image": "penstock/materialize-sqlite", "config": config}, look
    url: str = request.getfixturevalue("postgres_url")

    lasting = psycopg.connect(url, autocommit=True)
    request.addfinalizer(lasting.close)

    def ask(query: str) -> list[tuple[int, ...]]:
        try:
            return lasting.execute(query.encode()).fetchall()
        except psycopg.errors.UndefinedTable as error:
            raise psycopg.OperationalError from error

    config = config_of(url, hardDelete=True)
    return {"image": "penstock/materialize-postgres", "config": config}, ask


def rows_of(look: Look, table: str) -> dict[int, int]:
    return {key: int(amount) for key, amount in look(f"SELECT id, amount FROM {table}")}  # noqa: S608


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_money_is_never_seen_missing_or_doubled(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    with changing_postgres() as source:
        url = source.create_database()
        ran(
            url,
            *(f"CREATE TABLE {name} (id int PRIMARY KEY, amount int NOT NULL)" for name in TABLES),
            *(
                f"INSERT INTO {name} SELECT i, {EACH} FROM generate_series(0, {ACCOUNTS - 1}) i"  # noqa: S608
                for name in TABLES
            ),
        )
        place = Place(tmp_path, None)  # type: ignore[arg-type]
        connector, look = destination(kind, place, request)
        catalog = tmp_path / "catalog.json"
        catalog.write_text(json.dumps(catalog_of(url, TABLES, materialization=connector)))

        async def apply() -> None:
            async with place.store() as store:
                await desired.apply(store, load_catalog([catalog], environ=None))

        asyncio.run(apply())
        seed = choose_seed()
        with working(transfers(url, seed)) as bank, working(watching(look)) as watcher:
            story = under_fire(place, source, seed)
        log = (tmp_path / "run.log").read_text()
        assert Tree(place).wait() == 0, log
        story += f", {bank.times} transfers, {watcher.times} looks"
        print(story)  # noqa: T201
        assert not watcher.found, f"{story}: {watcher.found[:5]}"
        assert watcher.times
        for table in TABLES:
            with psycopg.connect(url) as connection:
                query = f"SELECT id, amount FROM {table}"  # noqa: S608
                wanted = dict(connection.execute(query.encode()).fetchall())
            assert rows_of(look, table) == wanted, story


def under_fire(place: Place, source: PostgresServer, seed: int) -> str:
    """Run Penstock in a loop, and kill it, or the source, at any time.

    Every other kill waits until the destination has changed, so that it does again and again.
    """
    rng = random.Random(seed)
    log = place.directory / "run.log"
    began = time.monotonic()
    assert Tree(place).wait() == 0, log.read_text()
    usual_s = time.monotonic() - began
    kills = source_kills = runs = 0
    while kills < KILLS:
        runs += 1
        seen = _stored(log)
        tree = Tree(place)
        until = time.monotonic() + rng.uniform(0.2, 1.0) * usual_s
        while tree.alive and (_stored(log) == seen if runs % 2 else time.monotonic() < until):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.2))
        if rng.random() < 0.3 or (kills == KILLS - 1 and not source_kills):
            source.kill()
            time.sleep(rng.uniform(0, 0.5))
            source.start()
            source_kills += 1
            time.sleep(rng.uniform(0, 1))
        kills += tree.alive
        tree.kill()
    return (
        f"seed {seed}: {kills} kills, {source_kills} of the source, {runs} runs, "
        f"{_stored(log)} transactions of the destination, usually in {usual_s:.1f} s"
    )


def _stored(log: Path) -> int:
    return log.read_bytes().count(b"acme/views: transaction ")
