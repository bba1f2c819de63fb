"""Leaders that are killed, frozen and thawed, and database servers that are killed under them.

Sums reveal anything lost or doubled: a table is right if it equals an independently computed one.
The default run is short. With `PENSTOCK_CHAOS_SECONDS` it has 200,000 documents and 20 kills, for
PostgreSQL too, and kills beside compaction, retention, garbage collection and edits for that long.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from chaos.process_tree import Tree, choose_seed, under_fire
from penstock.testing.postgres import PostgresServer
from runtime.forks import start
from runtime.sessions import ACCOUNTS, Document, Place, accounts, reduced, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
LONG = SECONDS > 0
DOCUMENTS, KILLS, KEYS = (200_000, 20, 1000) if LONG else (4_000, 2, 50)
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 3600 * LONG)]

SOURCE = {"source": "acme/accounts", "resource": {"table": "accounts"}}
long_only = pytest.mark.skipif(not LONG, reason="only in long runs: make chaos")


@dataclass
class Endpoint:
    """Where rows go, and how to read them back."""

    image: str
    config: Document
    table: Callable[[str, str], dict[Any, Document]]
    """Returns the rows of a table, keyed by a column."""
    before_commit: str
    """A failpoint at which the endpoint's transaction is open."""

    def rows(self) -> dict[Any, Document]:
        return self.table("accounts", "account")


@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres])],
)
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    if request.param == "postgres":
        return postgres_endpoint(request.getfixturevalue("postgres_url"))
    return sqlite_endpoint(tmp_path)


def sqlite_endpoint(directory: Path) -> Endpoint:
    there = Place(directory, None)  # type: ignore[arg-type]
    config = {"path": there.database()}

    def table(name: str, by: str) -> dict[Any, Document]:
        return there.table(name, *_shown(by), key=by)

    return Endpoint("sqlite", config, table, "sqlite.before-commit")


def _shown(by: str) -> list[str]:
    """Return the columns that `reduced` has when grouped by this one."""
    return ["count", "total", "top", *(["region"] if by == "account" else [])]


def postgres_endpoint(url: str) -> Endpoint:
    parts = conninfo_to_dict(url)
    config = {
        "address": f"{parts['host']}:{parts['port']}",
        "database": parts["dbname"],
        "user": parts["user"],
        "password": parts["password"],
    }

    def table(name: str, by: str) -> dict[Any, Document]:
        with psycopg.connect(url, row_factory=dict_row) as connection:
            found = connection.execute(
                f'SELECT *, total::bigint AS total FROM "{name}"'  # type: ignore[arg-type]  # noqa: S608
            ).fetchall()
        return {row[by]: {column: row[column] for column in _shown(by)} for row in found}

    return Endpoint("postgres", config, table, "postgres.before-commit")


def apply(place: Place, endpoint: Endpoint) -> None:
    views = task(endpoint.image, endpoint.config, [SOURCE])
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views})


# ----------------------------------------------------------------------- kill -9 of a process tree


@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, long_only])]
)
def test_killing_the_process_tree_at_any_time_loses_and_doubles_nothing(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place = Place(tmp_path, None)  # type: ignore[arg-type]
    endpoint = (
        sqlite_endpoint(tmp_path)
        if kind == "sqlite"
        else postgres_endpoint(request.getfixturevalue("postgres_url"))
    )
    apply(place, endpoint)

    def append(start: int, count: int) -> None:
        place.append({"acme/accounts": accounts(start, count, keys=KEYS)})

    fire = under_fire(place, append, documents=DOCUMENTS, kills=KILLS)
    assert endpoint.rows() == reduced(accounts(0, fire.appended, keys=KEYS)), fire
    assert place.counted("acme/accounts") == fire.appended, fire


# ------------------------------------------------------- kills beside upkeep and edited catalogs


@dataclass(frozen=True, slots=True)
class Bound:
    """A binding as it is in the current catalog."""

    source: str
    table: str
    by: str = "account"
    backfill: int = 0
    disabled: bool = False

    @property
    def spec(self) -> Document:
        return {
            "source": self.source,
            "resource": {"table": self.table},
            "fields": {"recommended": True, "groupBy": [self.by]},
            "backfill": self.backfill,
            "disable": self.disabled,
        }


BINDINGS = (
    Bound("acme/accounts", "accounts"),
    Bound("acme/accounts", "regions", by="region"),
    Bound("acme/others", "others"),
    Bound("acme/recent", "recent"),
)
RECENT = {**ACCOUNTS, "journals": {"fragments": {"retention": "1s"}}}
"""Forgotten as soon as it is read: tables that are filled from it cannot be filled anew."""
COLLECTIONS = {"acme/accounts": ACCOUNTS, "acme/others": ACCOUNTS, "acme/recent": RECENT}
UPKEEP_KILLS = 2
"""Kills in a short run."""


def edit_bindings(rng: random.Random, bindings: tuple[Bound, ...]) -> tuple[Bound, ...]:
    """Reorder the bindings and change some of them; at least one stays enabled."""
    changed = [
        replace(each, disabled=not each.disabled) if rng.random() < 0.4
        else replace(each, backfill=each.backfill + 1)
        if rng.random() < 0.1 and each.source != "acme/recent"
        else each
        for each in rng.sample(bindings, len(bindings))
    ]  # fmt: skip
    if all(each.disabled for each in changed):
        changed[0] = replace(changed[0], disabled=False)
    return tuple(changed)


def age_objects(place: Place) -> None:
    """Make objects of the blob store that are half a minute old look hours old."""
    now_s = time.time()
    for path in (place.settings.data / "blobs").rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime < now_s - 30:
                os.utime(path, (now_s - 3 * 3600, now_s - 3 * 3600))


class Upkeep:
    """Runs `penstock compact`, `retain` and `gc` beside everything else."""

    def __init__(self, place: Place, rng: random.Random) -> None:
        self._place, self._rng = place, rng
        self._running: subprocess.Popen[bytes] | None = None
        self.ended: dict[str, int] = {}

    def start_next(self) -> None:
        """Start the next command if the last one has ended."""
        if self._running is not None and self._running.poll() is None:
            return
        self.wait()
        age_objects(self._place)
        what = self._rng.choice(("compact", "retain", "gc"))
        command: list[str | Path] = [
            Path(sys.executable).parent / "penstock", what, "--data", self._place.settings.data
        ]  # fmt: skip
        command += ["--grace", "2h"] if what == "gc" else []
        self._what = what
        with (self._place.directory / "upkeep.log").open("ab") as log:
            self._running = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        if self._running is not None:
            log = self._place.directory / "upkeep.log"
            assert self._running.wait(timeout=300) == 0, log.read_text()
            self.ended[self._what] = self.ended.get(self._what, 0) + 1
            self._running = None


@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, long_only])]
)
def test_kills_beside_upkeep_and_edited_catalogs_lose_and_double_nothing(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    seed = choose_seed()
    rng = random.Random(seed)
    place = Place(tmp_path, None)  # type: ignore[arg-type]
    endpoint = (
        sqlite_endpoint(tmp_path)
        if kind == "sqlite"
        else postgres_endpoint(request.getfixturevalue("postgres_url"))
    )
    log, upkeep = tmp_path / "run.log", Upkeep(place, rng)
    bindings = BINDINGS
    story: list[object] = []
    appended = kills = runs = edits = 0

    def apply_bindings(after: tuple[Bound, ...]) -> None:
        views = task(endpoint.image, endpoint.config, [bound.spec for bound in after])
        place.apply(COLLECTIONS, {"acme/views": views})

    def append(count: int) -> None:
        nonlocal appended
        documents = accounts(appended, count, keys=KEYS)
        place.append(dict.fromkeys(COLLECTIONS, documents))
        appended += count

    apply_bindings(bindings)
    append(500)
    until, usual_s = time.monotonic() + SECONDS, 8.0
    while time.monotonic() < until or (not LONG and kills < UPKEEP_KILLS):
        tree = Tree(place, "--shards", str(rng.randint(1, 3)))
        began, runs = time.monotonic(), runs + 1
        dies_at = began + rng.uniform(0.3, 1.6) * usual_s
        while tree.alive and time.monotonic() < dies_at:
            append(rng.randint(1, 40))
            upkeep.start_next()
            time.sleep(0.05)
        if tree.alive:
            tree.kill()
            kills += 1
        else:
            usual_s = (usual_s + time.monotonic() - began) / 2
            assert tree.wait() == 0, log.read_text()
        story.append((appended, bindings))
        bindings = edit_bindings(rng, bindings)
        apply_bindings(bindings)
        edits += 1
    upkeep.wait()
    bindings = tuple(replace(bound, disabled=False) for bound in bindings)
    apply_bindings(bindings)
    assert Tree(place).wait() == 0, log.read_text()
    summary = (
        f"seed {seed}: {kills} kills in {runs} runs, {edits} edits of the catalog, "
        f"{upkeep.ended}, {appended} documents in {len(COLLECTIONS)} collections"
    )
    print(summary)  # noqa: T201
    everything = accounts(0, appended, keys=KEYS)
    for name in COLLECTIONS:
        there = sorted(document["total"] for document in place.read(name))
        expected_there = [document["total"] for document in everything]
        if name == "acme/recent":  # of which the newest are left
            expected_there = expected_there[len(everything) - len(there) :]
        assert there == expected_there, f"{summary}: {name}"
    wrong: list[object] = []
    for bound in bindings:
        expected = {
            key: {column: row[column] for column in _shown(bound.by)}
            for key, row in reduced(everything, bound.by).items()
        }
        found = endpoint.table(bound.table, bound.by)
        keys = [
            key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
        ]
        if keys:
            first = min(keys)
            wrong.append((bound, len(keys), first, found.get(first), expected.get(first)))
    assert not wrong, f"{summary}: {wrong}; {story}"


# ------------------------------------------------------------------------- kill -9 of the endpoint


@long_only
@pytest.mark.spark
@pytest.mark.postgres
def test_killing_the_database_server_at_any_time_loses_and_doubles_nothing(
    tmp_path: Path, spark: SparkSession, own_postgres: PostgresServer
) -> None:
    seed = choose_seed()
    rng = random.Random(seed)
    place = Place(tmp_path, spark)
    endpoint = postgres_endpoint(own_postgres.create_database())
    apply(place, endpoint)
    share = DOCUMENTS // KILLS
    appended = kills = 0
    outcomes: dict[str, int] = {}
    usual_s = 5.0
    while kills < KILLS:
        if appended <= share * kills:
            place.append({"acme/accounts": accounts(appended, share, keys=KEYS)})
            appended += share
        began = time.monotonic()
        leader = start(place, failures_max=5)
        time.sleep(rng.uniform(0, usual_s))
        own_postgres.kill()
        kills += 1
        time.sleep(rng.uniform(0, 1))
        own_postgres.start()
        outcome = leader.outcome().partition("\n")[0]
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if not outcome:
            usual_s = (usual_s + time.monotonic() - began) / 2
    assert start(place).outcome() == ""
    summary = f"seed {seed}: {kills} kills, {appended} documents, {outcomes}"
    print(summary)  # noqa: T201
    assert endpoint.rows() == reduced(accounts(0, appended, keys=KEYS)), summary
    assert place.counted("acme/accounts") == appended, summary
    assert not any(outcome.startswith("Bug") for outcome in outcomes), summary


# ---------------------------------------------------------------------------------------- zombies

FENCED = ("Fenced: ", "FencedEndpoint: ")


FREEZES = ["leader.after-stats", "leader.after-start-commit"]
if LONG:
    FREEZES += ["leader.after-open", "leader.after-flush", "leader.after-hint-record"]


@pytest.mark.spark
@pytest.mark.parametrize("frozen_at", FREEZES)
def test_a_leader_that_slept_while_another_took_over_commits_nothing(
    tmp_path: Path, spark: SparkSession, endpoint: Endpoint, frozen_at: str
) -> None:
    place = Place(tmp_path, spark)
    apply(place, endpoint)
    place.append({"acme/accounts": accounts(0, 40)})
    zombie = start(place, freeze_at=frozen_at)
    zombie.frozen()
    place.append({"acme/accounts": accounts(40, 40)})
    assert start(place).outcome() == ""
    assert endpoint.rows() == reduced(accounts(0, 80))

    zombie.thaw()
    outcome = zombie.outcome()
    assert outcome.startswith(FENCED), outcome
    assert "was taken over" in outcome or "is over" in outcome
    assert endpoint.rows() == reduced(accounts(0, 80)), "the zombie must not store anything"
    assert place.counted("acme/accounts") == 80, "the zombie must not commit statistics"
    place.append({"acme/accounts": accounts(80, 10)})
    assert start(place).outcome() == ""
    assert endpoint.rows() == reduced(accounts(0, 90)), "the third leader continues from the second"


@pytest.mark.spark
def test_a_leader_that_slept_inside_an_endpoint_transaction_is_settled(
    tmp_path: Path, spark: SparkSession, endpoint: Endpoint
) -> None:
    """It holds locks: its successor waits for them, and then learns that it did commit."""
    place = Place(tmp_path, spark)
    apply(place, endpoint)
    place.append({"acme/accounts": accounts(0, 40)})
    zombie = start(place, freeze_at=endpoint.before_commit)
    zombie.frozen(within="views.db")
    place.append({"acme/accounts": accounts(40, 40)})
    successor = start(place, mark_at="leader.after-epoch")
    successor.marked()
    assert not successor.ended
    zombie.thaw()
    outcome = zombie.outcome()
    assert outcome.startswith(FENCED), outcome
    assert successor.outcome() == ""
    assert endpoint.rows() == reduced(accounts(0, 80))
    assert place.counted("acme/accounts") == 80
