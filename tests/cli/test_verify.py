"""Damage, as people meet it: what `read`, `run` and `verify` say of a flipped bit."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import penstock as penstock_api
from penstock.cli.main import app

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CATALOG = """
collections:
  acme/orders: &orders
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}, text: {type: string}}
  acme/others: *orders
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings:
      - {source: acme/orders, resource: {table: orders}}
  acme/more:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: more.db}}}
    bindings:
      - {source: acme/others, resource: {table: others}}
"""


def penstock(*arguments: str, cwd: Path, stdin: str | None = None) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments), input=stdin)


def append(here: Path, collection: str, first: int, count: int, *, text: int = 64) -> None:
    lines = (
        json.dumps({"id": n, "text": secrets.token_hex(text)}) for n in range(first, first + count)
    )
    assert penstock("append", collection, cwd=here, stdin="\n".join(lines)).exit_code == 0


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """One inline append, one object, one that is larger than what is read in one piece."""
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    assert penstock("apply", "catalog.yaml", cwd=tmp_path).exit_code == 0
    append(tmp_path, "acme/orders", 0, 3, text=4)
    append(tmp_path, "acme/orders", 3, 100)
    append(tmp_path, "acme/orders", 103, 4000)
    append(tmp_path, "acme/others", 0, 3)
    return tmp_path


def objects(here: Path) -> list[Path]:
    """From the smallest on."""
    found = (here / ".penstock/blobs/acme/orders").rglob("*.parquet")
    return sorted(found, key=lambda file: file.stat().st_size)


def verified(here: Path) -> tuple[int, dict[str, Any]]:
    done = penstock("verify", "--json", cwd=here)
    return done.exit_code, json.loads(done.stdout)


@contextlib.contextmanager
def flipped(file: Path, position: int, bit: int) -> Iterator[None]:
    data = file.read_bytes()
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    file.write_bytes(bytes(changed))
    try:
        yield
    finally:
        file.write_bytes(data)


# ----------------------------------------------------------------------------------- read and run


def test_reading_shows_the_right_documents_or_says_what_is_damaged(here: Path) -> None:
    right, chance = penstock("read", "acme/orders", cwd=here).stdout, random.Random(1)
    assert right.count("\n") == 4103
    wrong = 0
    for file in objects(here):
        for _ in range(12):
            with flipped(file, chance.randrange(file.stat().st_size), chance.randrange(8)):
                done = penstock("read", "acme/orders", cwd=here)
            if done.exit_code == 0:
                assert done.stdout == right
                continue
            wrong += 1
            assert done.exit_code == 1
            assert right.startswith(done.stdout)
            assert f"an object is damaged: {file.relative_to(here / '.penstock/blobs')}" in (
                done.stderr
            )
            assert "journal acme/orders/pivot=00, offsets " in done.stderr
            assert "restore the object from a backup" in done.stderr
            assert "Traceback" not in done.stderr
    assert wrong > 20  # the first magic is the only part that nobody looks at


def rows(database: Path) -> int:
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name IN (?, ?)", (
            "orders", "others",
        )).fetchall()  # fmt: skip
        return sum(
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]  # noqa: S608
            for (name,) in tables
        )


@pytest.mark.spark
@pytest.mark.parametrize("size", [0, 1], ids=["a small object", "a large one"])
@pytest.mark.parametrize("part", [0.3, 0.9999], ids=["in a page", "in the footer"])
def test_a_run_stores_nothing_of_what_is_damaged_and_goes_on_with_other_tasks(
    here: Path, spark: SparkSession, size: int, part: float
) -> None:
    file = objects(here)[size]
    with flipped(file, int(file.stat().st_size * part), 2):
        done = penstock("run", cwd=here)
    assert done.exit_code == 1
    assert f"an object is damaged: {file.relative_to(here / '.penstock/blobs')}" in done.output
    assert "journal acme/orders/pivot=00, offsets " in done.output
    assert "Traceback" not in done.output
    assert "\tat org.apache" not in done.output
    assert (rows(here / "views.db"), rows(here / "more.db")) == (0, 3)
    again = penstock("run", cwd=here)  # it was restored
    assert again.exit_code == 0, again.stderr
    assert rows(here / "views.db") == 4103


# ----------------------------------------------------------------------------------------- verify


@pytest.mark.spark
def test_a_sound_deployment(here: Path, spark: SparkSession) -> None:
    assert penstock("run", cwd=here).exit_code == 0
    (here / ".penstock/blobs/acme/orders/stranger.txt").write_text("not ours")
    code, found = verified(here)
    assert code == 0
    assert found["faults"] == []
    logged = 2  # by the tasks
    assert (found["rows"], found["objects"]) == (4106 + logged, 2)
    assert found["inline"] == 2 + logged
    assert found["bytes"] >= sum(file.stat().st_size for file in objects(here))
    assert (found["unnamed"], found["unsummed"]) == (1, 0)
    assert found["schemas"] == 2  # one is that of what tasks log
    told = penstock("verify", cwd=here)
    assert told.exit_code == 0
    assert told.stdout == ""
    assert "no faults: all checksums match" in told.stderr
    assert "4,108 documents" in told.stderr


def remove(file: Path) -> None:
    file.unlink()


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_magic(file: Path) -> None:
    """Which no reader looks at."""
    data = file.read_bytes()
    file.write_bytes(b"Q" + data[1:])


@pytest.mark.parametrize("hurt", [remove, shorten, flip_magic])
def test_an_object_that_is_not_what_was_written(here: Path, hurt: Callable[[Path], None]) -> None:
    file = objects(here)[0]
    path = str(file.relative_to(here / ".penstock/blobs"))
    hurt(file)
    code, found = verified(here)
    assert code == 1
    (fault,) = found["faults"]
    assert (fault["path"], fault["journal"]) == (path, "acme/orders/pivot=00")
    assert (fault["begin"], fault["end"]) == (4, 104)
    assert found["rows"] == 4006
    told = penstock("verify", cwd=here)
    assert told.exit_code == 1
    assert path in told.stdout
    assert "journal acme/orders/pivot=00, offsets 4 to 104" in told.stdout
    assert "restore the object from a backup" in told.stdout
    assert "1 fault\n" in told.stderr


def test_a_damaged_page_is_one_fault(here: Path) -> None:
    with penstock_api.open(here / ".penstock") as opened:
        for n in range(130):  # each is two records, and more than a state holds
            opened.append("acme/others", [{"id": 3 + n}])
    (page,) = (here / ".penstock/blobs/acme/others").rglob("*.page")
    assert verified(here)[0] == 0
    with flipped(page, 40, 0):
        code, found = verified(here)
        assert penstock("read", "acme/others", cwd=here).exit_code == 1
    assert code == 1
    (fault,) = found["faults"]
    assert fault["path"] == str(page.relative_to(here / ".penstock/blobs"))
    assert (fault["journal"], fault["begin"]) == ("acme/others/pivot=00", 0)


@pytest.mark.spark
@pytest.mark.parametrize(
    "key", ["journal/acme/orders/pivot=00", "catalog/main", "schema/", "task/acme/views"]
)
def test_a_damaged_entry_of_the_consensus_store(here: Path, spark: SparkSession, key: str) -> None:
    """Inline rows, the catalog and the state of tasks are in there."""
    assert penstock("run", cwd=here).exit_code == 0
    with contextlib.closing(sqlite3.connect(here / ".penstock/consensus.db")) as database:
        found = database.execute(
            "SELECT shard, seqno, data FROM consensus_log WHERE shard GLOB ? ORDER BY shard, seqno",
            (f"{key}*",),
        ).fetchall()
        name, seqno, data = found[-1]
        changed = bytearray(data)
        changed[len(data) * 2 // 3] ^= 1
        database.execute(
            "UPDATE consensus_log SET data = ? WHERE shard = ? AND seqno = ?",
            (bytes(changed), name, seqno),
        )
        database.commit()
    code, report = verified(here)
    assert code == 1
    assert any(name in fault["what"] for fault in report["faults"])
    if key.startswith("journal/"):
        done = penstock("read", "acme/orders", cwd=here)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "Traceback" not in done.stderr
