"""A catalog that is edited between a crash and the next run, with real endpoints and Spark.

`simulation/test_catalog_edits.py` does so at every crash point; here is a handful of cases end to
end. What a table must hold is worked out by hand from all documents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.connectors.postgres import sink as _postgres  # noqa: F401 - declares its crash points
from penstock.connectors.sqlite import sink as _sqlite  # noqa: F401 - likewise
from penstock.failpoints import FAILPOINTS
from penstock.model.spec import Endpoint
from penstock.runtime.connector.materialize import Materialization
from runtime.crash_world import (
    CRASHED,
    Deployment,
    Document,
    catalog_text,
    documents,
    oracle,
    shown,
    sqlite_rows,
)
from support.endpoints import Files, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = "PENSTOCK_CHAOS_SECONDS" in os.environ

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
if LONG:
    pytestmark.append(pytest.mark.chaos)

COLLECTIONS = ("acme/accounts", "acme/tags")


@dataclass(frozen=True, slots=True)
class Bound:
    """A binding as it is written in the catalog."""

    collection: str
    table: str
    backfill: int = 0
    disabled: bool = False

    @property
    def spec(self) -> Document:
        return {
            "source": self.collection,
            "resource": {"table": self.table},
            "backfill": self.backfill,
            "disable": self.disabled,
        }


Catalog = tuple[Bound, ...]
BOTH: Catalog = tuple(Bound(name, name.removeprefix("acme/")) for name in COLLECTIONS)
ACCOUNTS, TAGS = BOTH


@dataclass
class Edited:
    """A deployment whose catalog changes."""

    here: Deployment
    image: str
    config: Document
    rows: Callable[[Bound], dict[int, Document]]
    committed: str
    """The crash point at which both tables are committed, and not all of the world knows."""
    documents: int = 0

    def apply(self, catalog: Catalog, *, shards: int = 1) -> None:
        self.here.shards = shards
        specs = [bound.spec for bound in catalog]
        self.here.prepare(
            catalog_text(COLLECTIONS, image=self.image, config=self.config, bindings=specs)
        )

    def append(self, count: int = 20) -> None:
        start, self.documents = self.documents, self.documents + count
        self.here.append({name: documents(name, start, count) for name in COLLECTIONS})

    def check(self, catalog: Catalog) -> None:
        """Each table of it holds everything."""
        for bound in catalog:
            expected = oracle(bound.collection, documents(bound.collection, 0, self.documents))
            assert self.rows(bound) == expected, bound


def on_sqlite(here: Deployment, request: pytest.FixtureRequest) -> Edited:
    def rows(bound: Bound) -> dict[int, Document]:
        return sqlite_rows(here.directory / "views.db", bound.collection, bound.table)

    image = "penstock/materialize-sqlite"
    return Edited(here, image, {"path": "views.db"}, rows, "sqlite.after-commit")


def on_postgres(here: Deployment, request: pytest.FixtureRequest) -> Edited:
    url = request.getfixturevalue("postgres_url")
    parts = urlsplit(url)
    secret = here.directory / "password"
    secret.write_text(parts.password or "none")
    config = {
        "address": f"{parts.hostname}:{parts.port}",
        "database": parts.path.lstrip("/"),
        "user": parts.username or "postgres",
        "password": f"${{file:{secret}}}",
    }

    def rows(bound: Bound) -> dict[int, Document]:
        with psycopg.connect(url, row_factory=dict_row) as connection:
            found = connection.execute(
                f'SELECT * FROM "{bound.table}"'  # type: ignore[arg-type]  # noqa: S608
            ).fetchall()
        return {row["account"]: shown(bound.collection, _plain(row)) for row in found}

    return Edited(here, "penstock/materialize-postgres", config, rows, "postgres.after-commit")


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    document = row.get("flow_document")
    return {**row, "flow_document": document if isinstance(document, str) else json.dumps(document)}


def on_files(here: Deployment, request: pytest.FixtureRequest) -> Edited:
    """Without transactions over its tables: the log commits, and then they are applied."""

    def connect(endpoint: Endpoint, where: str) -> Materialization:
        return Files(endpoint.config.value, where=where)

    def rows(bound: Bound) -> dict[int, Document]:
        found = Table(here.directory / "views" / f"{bound.table}.db").rows()
        return {row["account"]: shown(bound.collection, row) for row in found}

    here.connect = connect
    config = {"path": str(here.directory / "views")}
    return Edited(here, "penstock/test", config, rows, "leader.after-commit-record")


@pytest.fixture(
    params=[on_sqlite, pytest.param(on_postgres, marks=pytest.mark.postgres), on_files],
    ids=["sqlite", "postgres", "files"],
)
def edited(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Edited:
    made: Edited = request.param(Deployment(tmp_path, spark, COLLECTIONS), request)
    made.apply(BOTH)
    made.append()
    assert made.here.run() == 0
    made.append()
    return made


GONE = {
    "disabled": (ACCOUNTS, replace(TAGS, disabled=True)),
    "removed, the other moved": (ACCOUNTS,),
    "renamed": (replace(TAGS, table="others"), ACCOUNTS),
}


@pytest.mark.parametrize(
    "catalog", [pytest.param(catalog, id=name) for name, catalog in GONE.items()]
)
def test_a_binding_that_is_gone_when_a_commit_is_settled_counts_once_when_it_is_back(
    edited: Edited, catalog: Catalog
) -> None:
    if "sqlite" not in edited.image and catalog is not GONE["disabled"] and not LONG:
        pytest.skip("a long run only: make chaos")
    assert edited.here.run(edited.committed) == CRASHED
    edited.apply(catalog, shards=2)
    edited.append()
    assert edited.here.run() == 0
    edited.check(tuple(bound for bound in catalog if not bound.disabled))
    edited.apply(tuple(reversed(BOTH)))
    assert edited.here.run() == 0
    edited.check(BOTH)


def test_a_binding_that_is_gone_when_a_transaction_is_replayed_is_read_when_it_is_back(
    edited: Edited,
) -> None:
    assert edited.here.run("leader.after-hint-record") == CRASHED
    edited.apply((replace(TAGS, disabled=True), ACCOUNTS))
    assert edited.here.run("leader.after-start-commit") == CRASHED, "in the replay"
    edited.apply(BOTH, shards=3)
    edited.append()
    assert edited.here.run() == 0
    edited.check(BOTH)


def test_a_backfill_counter_that_goes_down_changes_nothing(edited: Edited) -> None:
    edited.apply((replace(ACCOUNTS, backfill=2), TAGS))
    assert edited.here.run("leader.after-supersede") == CRASHED
    edited.apply((replace(ACCOUNTS, backfill=1), TAGS))
    assert edited.here.run() == 0
    edited.check(BOTH)
    edited.apply((ACCOUNTS, replace(TAGS, backfill=1)))
    assert edited.here.run() == 0
    edited.check(BOTH)


@pytest.mark.postgres
def test_a_rebuild_crashes_in_postgres_and_is_done_exactly_once(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path
) -> None:
    edited = on_postgres(Deployment(tmp_path, spark, COLLECTIONS), request)
    points = ("sql.before-shadow", "postgres.after-commit", "sql.before-swap", "sql.after-swap")
    for backfill, point in enumerate(("", *points)):
        edited.apply((replace(ACCOUNTS, backfill=backfill), TAGS))
        edited.append(10)
        if point:
            assert edited.here.run(point) == CRASHED
            assert edited.rows(ACCOUNTS), "nobody sees it empty"
        assert edited.here.run() == 0
        edited.check(BOTH)


# -------------------------------------------------------------------------------------- at random


def _edit(rng: Random, catalog: Catalog) -> Catalog:
    at = rng.randrange(len(catalog))
    bound = catalog[at]
    changed = {
        "disable": replace(bound, disabled=not bound.disabled),
        "backfill": replace(bound, backfill=bound.backfill + 1),
        "rename": replace(bound, table=f"{bound.table}s", backfill=0),
        "nothing": bound,
    }[rng.choice(("disable", "disable", "backfill", "rename", "nothing"))]
    every = (*catalog[:at], changed, *catalog[at + 1 :])
    return tuple(rng.sample(every, len(every)))


def _points(edited: Edited) -> list[str]:
    own = edited.committed.partition(".")[0]
    return sorted(
        name
        for name in FAILPOINTS
        if name.startswith(("leader.", f"{own}.after-", "files.", "sql.", "rebuild."))
    )


@pytest.mark.parametrize("seed", range(20 if LONG else 1))
def test_a_catalog_is_edited_at_random_and_runs_crash_wherever_they_like(
    edited: Edited, seed: int
) -> None:
    rng = Random(f"{seed}/{edited.image}")
    points, catalog = _points(edited), BOTH
    story: list[object] = []
    for _ in range(3):
        point = f"{rng.choice(points)}:{rng.randint(1, 2)}"
        story.append(point)
        assert edited.here.run(point) in (0, CRASHED), story
        catalog = _edit(rng, catalog)
        if all(bound.disabled for bound in catalog):
            catalog = (replace(catalog[0], disabled=False), *catalog[1:])
        story.append(catalog)
        edited.apply(catalog, shards=rng.randint(1, 3))
        edited.append(10)
    catalog = tuple(replace(bound, disabled=False) for bound in catalog)
    edited.apply(catalog)
    assert edited.here.run() == 0, story
    edited.check(catalog)
