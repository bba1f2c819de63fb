"""The crash matrix on PostgreSQL: a sample that changes by the day; all of it in `make chaos`."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.connectors.postgres import sink as _postgres  # noqa: F401 - declares its crash points
from penstock.failpoints import FAILPOINTS
from penstock.runtime.materialize import leader as _leader  # noqa: F401 - likewise
from penstock.testing.postgres import PostgresServer
from runtime.crash_world import (
    CRASHED,
    Deployment,
    catalog_text,
    documents,
    oracle,
    shown,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = "PENSTOCK_CHAOS_SECONDS" in os.environ

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(600)]
if LONG:
    pytestmark.append(pytest.mark.chaos)

IMAGE = "penstock/materialize-postgres"
SAMPLE = 3
BOTH = ("acme/accounts", "acme/tags")

ELSEWHERE = {
    "leader.after-gather",
    "leader.after-store",
    "leader.after-trigger-hint-record",
    "leader.after-trigger",
    "leader.after-trigger-done-record",
    "leader.after-ack-record",
    "leader.after-apply-record",
    "leader.after-reconcile",
    "leader.after-supersede",
    "postgres.after-stage",
}
"""Not passed by the leader here: no webhooks, no direct stores, no patches, nothing to apply, no
backfill, tasks that stage."""

POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith(("leader.", "postgres.after-", "postgres.before-")) and name not in ELSEWHERE
)
CASES = [(point, shards) for point in POINTS for shards in (1, 3)]
TODAY = Random(datetime.datetime.now(datetime.UTC).date().toordinal())
CHOSEN = CASES if LONG else TODAY.sample(CASES, SAMPLE)


@dataclass
class Prepared:
    """A task with one transaction behind it, and what its database was then."""

    deployment: Deployment
    server: PostgresServer
    database: str


def config(url: str, secrets: Path) -> dict[str, Any]:
    """With the password in a file: Spark's workers have the environment of an earlier time."""
    parts = urlsplit(url)
    secret = secrets / "password"
    secret.write_text(parts.password or "none")
    return {
        "address": f"{parts.hostname}:{parts.port}",
        "database": parts.path.lstrip("/"),
        "user": parts.username or "postgres",
        "password": f"${{file:{secret}}}",
    }


@pytest.fixture(scope="module")
def prepared(
    spark: SparkSession, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Prepared:
    url = postgres.create_database()
    made = Deployment(tmp_path_factory.mktemp("prepared"), spark, BOTH)
    made.prepare(catalog_text(BOTH, image=IMAGE, config=config(url, made.directory)))
    made.append({name: documents(name, 0, 30) for name in BOTH})
    assert made.run() == 0
    made.append({name: documents(name, 30, 30) for name in BOTH})
    return Prepared(made, postgres, url)


def copied(prepared: Prepared, to: Path, shards: int) -> tuple[Deployment, str]:
    """The deployment, and its database, as they were prepared."""
    url = prepared.server.create_database()
    old, new = (urlsplit(each).path.lstrip("/") for each in (prepared.database, url))
    admin = urlsplit(url)._replace(path="/postgres").geturl()
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{new}"')  # type: ignore[arg-type]
        connection.execute(f'CREATE DATABASE "{new}" TEMPLATE "{old}"')  # type: ignore[arg-type]
    case = prepared.deployment.copy(to, shards=shards, through_tasks=True)
    case.prepare(catalog_text(BOTH, image=IMAGE, config=config(url, case.directory)))
    return case, url


def rows(url: str, collection: str) -> dict[int, Any]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        table = collection.removeprefix("acme/")
        found = connection.execute(
            f'SELECT * FROM "{table}"'  # type: ignore[arg-type]  # noqa: S608
        ).fetchall()
    return {row["account"]: shown(collection, _plain(row)) for row in found}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    document = row.get("flow_document")
    return {**row, "flow_document": document if isinstance(document, str) else json.dumps(document)}


@pytest.mark.parametrize(("point", "shards"), CHOSEN)
def test_a_crash_loses_nothing_and_doubles_nothing(
    prepared: Prepared, tmp_path: Path, point: str, shards: int
) -> None:
    case, url = copied(prepared, tmp_path / "case", shards)
    assert case.run(point) == CRASHED
    assert case.run() == 0
    for name in BOTH:
        assert rows(url, name) == oracle(name, documents(name, 0, 60))
