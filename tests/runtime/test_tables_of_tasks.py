"""Tables that are dropped, shared or renamed under a task: refused, or right to the last row."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.crash_world import (
    CRASHED,
    Deployment,
    catalog_text,
    documents,
    oracle,
    sqlite_rows,
)
from runtime.sessions import ACCOUNTS, Document, Place, accounts, reduced, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


class Trial:
    """A deployment whose catalog changes between runs."""

    def __init__(self, directory: Path, spark: SparkSession) -> None:
        self.place = Place(directory, spark)
        self.count = 0

    def catalog(self, **tasks: Document) -> None:
        """Tasks by the last part of their names; members of a binding, and `renamedFrom`."""
        made = {}
        for name, given in tasks.items():
            more = {key: given[key] for key in ("renamedFrom", "shards") if key in given}
            binding = {key: given[key] for key in ("backfill", "takeover") if key in given}
            table = given.get("table", "accounts")
            bound = {"source": "acme/accounts", "resource": {"table": table}, **binding}
            config = {"path": self.place.database()}
            made[f"acme/{name}"] = task("sqlite", config, [bound], **more)
        self.place.apply({"acme/accounts": ACCOUNTS}, made)

    def append(self, count: int = 10) -> None:
        self.place.append({"acme/accounts": accounts(self.count, count)})
        self.count += count

    def run(self, name: str) -> str:
        """What a run said that was refused."""
        error = self.place.run(f"acme/{name}")[f"acme/{name}"].error
        return "" if error is None else str(error)

    def execute(self, *statements: str) -> None:
        with contextlib.closing(sqlite3.connect(self.place.database())) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    def is_right(self, table: str = "accounts") -> bool:
        return self.place.table(table) == reduced(accounts(0, self.count))


@pytest.fixture
def trial(tmp_path: Path, spark: SparkSession) -> Trial:
    made = Trial(tmp_path, spark)
    made.catalog(views={})
    made.append()
    assert made.run("views") == ""
    return made


def test_a_dropped_table_is_refused_also_with_nothing_new_until_it_is_filled_anew(
    trial: Trial,
) -> None:
    trial.execute("DROP TABLE accounts")
    assert "table accounts is gone" in trial.run("views")
    trial.append()
    assert "`backfill`" in trial.run("views")
    trial.catalog(views={"backfill": 1})
    assert trial.run("views") == ""
    assert trial.is_right()
    trial.catalog(views={})
    trial.append()
    assert trial.run("views") == "", "the counter may go again: nothing is filled anew"
    assert trial.is_right()
    trial.catalog(views={"backfill": 1})
    trial.execute("UPDATE accounts SET region = 'by hand'")
    assert trial.run("views") == "", "and raising it fills the table anew, once"
    assert trial.is_right()
    trial.execute("UPDATE accounts SET region = 'by hand'")
    assert trial.run("views") == ""
    assert not trial.is_right()


def test_a_database_that_is_gone_is_filled_anew_by_a_backfill(trial: Trial) -> None:
    """What the refusal asks for does help: with its checkpoint, or with everything."""
    trial.execute("DROP TABLE penstock_checkpoints")
    assert "lost its checkpoint" in trial.run("views")
    trial.catalog(views={"backfill": 1})
    trial.append()
    assert trial.run("views") == ""
    assert trial.is_right()
    for path in trial.place.directory.glob("views.db*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert "table accounts is gone" in trial.run("views")
    trial.catalog(views={"backfill": 2})
    assert trial.run("views") == ""
    assert trial.is_right()


def test_a_renamed_task_is_refused_and_goes_on_with_renamed_from(trial: Trial) -> None:
    trial.catalog(other={})
    assert "table accounts belongs to acme/views" in trial.run("other")
    trial.append()
    assert "renamedFrom: acme/views" in trial.run("other")
    trial.catalog(other={"renamedFrom": "acme/views"})
    assert trial.run("other") == ""
    assert trial.is_right()
    trial.append()
    trial.catalog(views={})
    assert "acme/views goes on as acme/other" in trial.run("views")
    trial.catalog(views={"renamedFrom": "acme/other"})
    for _ in range(2):
        assert trial.run("views") == ""
        assert trial.is_right()


def test_another_task_takes_the_table_over_or_has_one_of_its_own(trial: Trial) -> None:
    trial.catalog(views={"shards": {"disable": True}}, other={})
    assert "belongs to acme/views" in trial.run("other")
    trial.catalog(other={"table": "others"})
    assert trial.run("other") == ""
    assert trial.is_right("others")
    trial.catalog(third={"takeover": True})
    trial.append()
    assert trial.run("third") == ""
    assert trial.is_right()
    trial.catalog(views={})
    assert "belongs to acme/third" in trial.run("views")
    trial.catalog(views={"takeover": True})
    assert "never had" in trial.run("views")
    trial.catalog(views={"takeover": True, "backfill": 1})
    assert trial.run("views") == ""
    assert trial.is_right()


def test_a_table_that_is_dropped_while_its_task_is_renamed(trial: Trial) -> None:
    trial.execute("DROP TABLE accounts")
    trial.append()
    trial.catalog(other={"renamedFrom": "acme/views"})
    assert "table accounts is gone" in trial.run("other")
    trial.catalog(other={"renamedFrom": "acme/views", "backfill": 1})
    assert trial.run("other") == ""
    assert trial.is_right()


def test_two_data_directories_do_not_share_a_table(trial: Trial, tmp_path: Path) -> None:
    """By the same name, too: the second never gets to store anything."""
    second = Trial(tmp_path / "second", trial.place.spark)
    second.place.directory.mkdir()
    second.catalog(views={})
    second.append()
    Path(second.place.database()).symlink_to(trial.place.database())
    for _ in range(3):
        assert second.run("views") != ""
        assert trial.is_right()
    trial.execute("DROP TABLE penstock_tables")
    assert "another data directory" in second.run("views")
    assert trial.is_right()


# ------------------------------------------------------------------------------------- with crashes

BOTH = ("acme/accounts", "acme/tags")


@pytest.fixture(scope="module")
def crashed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A task with a transaction that the endpoint has committed, and nobody knows."""
    made = Deployment(tmp_path_factory.mktemp("crashed"), spark, BOTH)
    made.prepare(_catalog())
    made.append({name: documents(name, 0, 30) for name in BOTH})
    assert made.run() == 0
    made.append({name: documents(name, 30, 30) for name in BOTH})
    assert made.run("sqlite.after-commit") == CRASHED
    made.append({name: documents(name, 60, 30) for name in BOTH})
    return made


def _catalog() -> str:
    return catalog_text(BOTH, image="penstock/materialize-sqlite", config={"path": "views.db"})


@pytest.mark.parametrize(
    "point",
    [
        "rename.after-moved",
        "rename.after-taken",
        "leader.after-apply",
        "leader.after-apply-record",
        "leader.after-open",
        "leader.after-reconcile",
        "sqlite.after-commit",
    ],
)
def test_a_task_is_renamed_exactly_once(crashed: Deployment, tmp_path: Path, point: str) -> None:
    case = crashed.copy(tmp_path / "case")
    renamed = _catalog().replace("acme/views:", "acme/new:\n    renamedFrom: acme/views")
    case.prepare(renamed)
    assert case.run(point) == CRASHED
    assert case.run() == 0
    case.prepare(renamed.replace("renamedFrom: acme/views", ""))
    assert case.run() == 0
    for name in BOTH:
        assert sqlite_rows(case.directory / "views.db", name) == oracle(
            name, documents(name, 0, 90)
        )
