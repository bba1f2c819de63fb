from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

from consensus.conformance import COMMITTED, V
from fix_postgres import PostgresServer
from penstock.consensus.open import (
    ConsensusOptions,
    Scheme,
    open_backend,
    open_consensus,
    probe,
    scheme_of,
    sqlite_path,
)
from penstock.consensus.store import Entry
from penstock.errors import PenstockError, Unavailable, UsageError


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("memory:", Scheme.MEMORY),
        ("sqlite:///p.db", Scheme.SQLITE),
        ("SQLite:///p.db", Scheme.SQLITE),
        ("postgresql://h/d", Scheme.POSTGRESQL),
        ("postgres://h/d", Scheme.POSTGRESQL),
        ("grpc://h:6882", Scheme.GRPC),
    ],
)
def test_the_scheme_says_what_kind_of_store(url: str, scheme: Scheme) -> None:
    assert scheme_of(url) is scheme


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("sqllite:///p.db", "did you mean sqlite:///"),
        ("postgesql://u:hunter2@h/d", "did you mean postgresql://"),
        ("postgresql+psycopg://u:hunter2@h/d", "did you mean postgresql://"),
        ("memroy:", "did you mean memory:"),
        ("grpcs://h:1", "did you mean grpc://"),
        ("mongodb://u:hunter2@h", "known are memory:, sqlite:///"),
        ("state.db", "sqlite:///state.db"),
        ("/var/lib/state.db", "sqlite:////var/lib/state.db"),
        ("", "sqlite:///penstock.db"),
    ],
)
async def test_an_unknown_scheme_gets_help(url: str, fix: str) -> None:
    for opening in (open_consensus, open_backend):
        with pytest.raises(UsageError) as caught:
            await opening(url)
        assert fix in str(caught.value.fix)
        assert "hunter2" not in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:",
        "sqlite:p.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/p.db",
        "sqlite:///:memory:",
        "sqlite:///p.db?mode=ro",
    ],
)
def test_a_sqlite_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        sqlite_path(url)


def test_three_slashes_are_relative_and_four_absolute() -> None:
    assert sqlite_path("sqlite:///data/p.db") == Path("data/p.db")
    assert sqlite_path("sqlite:////data/p.db") == Path("/data/p.db")
    assert sqlite_path("sqlite:///with%20percent and space.db") == Path(
        "with%20percent and space.db"
    )


async def test_a_committer_is_not_a_database() -> None:
    with pytest.raises(UsageError, match="not another committer"):
        await open_backend("grpc://127.0.0.1:6882")


@pytest.mark.parametrize("scheme", ["memory", "sqlite", "postgresql"])
@pytest.mark.postgres
async def test_what_is_opened_is_a_whole_store(
    scheme: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = {
        "memory": lambda: "memory:",
        "sqlite": lambda: f"sqlite:///{tmp_path}/p.db",
        "postgresql": lambda: request.getfixturevalue("postgres_url"),
    }[scheme]()
    store = await open_consensus(url)
    assert await store.compare_and_set("k", V(0, b"a")) is COMMITTED
    assert await store.head("k") == V(0, b"a")
    async with asyncio.timeout(30), aclosing(cast("Any", store.subscribe("k", 0))) as stream:
        assert await anext(stream) == Entry(V(0, b"a"))
    incarnation = await store.incarnation()
    await store.close()
    if scheme != "memory":
        again = await open_consensus(url)
        assert await again.incarnation() == incarnation
        assert await again.head("k") == V(0, b"a")
        await again.close()


async def test_memory_is_a_new_store_each_time() -> None:
    one, two = await open_consensus("memory:"), await open_consensus("memory:")
    assert await one.incarnation() != await two.incarnation()
    await one.close()
    await two.close()


@pytest.mark.postgres
async def test_a_database_that_starts_later_is_waited_for(own_postgres: PostgresServer) -> None:
    own_postgres.stop()
    told: list[Unavailable] = []
    with pytest.raises(Unavailable):
        await open_consensus(own_postgres.url())
    starting: list[asyncio.Task[None]] = []

    def waiting(error: Unavailable) -> None:
        told.append(error)
        if not starting:
            starting.append(asyncio.create_task(asyncio.to_thread(own_postgres.start)))

    options = ConsensusOptions(wait_s=60, waiting=waiting)
    store = await open_consensus(own_postgres.url(), options)
    await starting[0]
    assert told
    assert await store.head("k") is None
    await store.close()


def test_a_probe_tells_about_the_store_and_leaves_it_alone(tmp_path: Path) -> None:
    assert "in memory" in probe("memory:")
    assert "will be created" in probe(f"sqlite:///{tmp_path}/p.db")
    assert list(tmp_path.iterdir()) == []
    for url in ("nope://x", "postgresql://u:hunter2@127.0.0.1:1/d", "grpc://127.0.0.1:1"):
        with pytest.raises(PenstockError) as caught:
            probe(url)
        assert "hunter2" not in str(caught.value)


def test_importing_the_way_in_imports_no_driver() -> None:
    script = "import sys, penstock.consensus.open; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    for module in ("psycopg", "grpc", "sqlite3", "pyspark"):
        assert not re.search(rf"'{module}'", loaded)
