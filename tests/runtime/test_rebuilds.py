"""Tables that are rebuilt, renamed and taken over: right to the last row, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import applying
from penstock.batch import run_until
from penstock.catalog import desired
from penstock.catalog.build import build_valid
from penstock.catalog.desired import ApplyResult, ChangeRefused
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.store import Consensus
from penstock.journal.follower import current_revision
from penstock.refilling import plan_refills, plan_takeover, request
from penstock.runtime.control import Control
from penstock.runtime.supervise import supervise
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

TAGGED: Document = copy.deepcopy(ACCOUNTS)
TAGGED["schema"]["properties"]["tags"] = {"type": "array", "reduce": {"strategy": "append"}}
"""Rows are loaded to be reduced, and no longer summed up by the endpoint: a rebuild."""

VIEWS = "acme/views"


class Trial:
    """A deployment whose catalog changes between runs, by the way of `penstock apply`."""

    def __init__(self, directory: Path, spark: SparkSession) -> None:
        self.place = Place(directory, spark)
        self.count = 0

    def apply(
        self, collection: Document = ACCOUNTS, *, name: str = VIEWS, **binding: object
    ) -> ApplyResult:
        """A task whose first binding has these members; `renamedFromTask` is the task's own."""
        resource = {"table": binding.pop("table", "accounts")}
        more = {key: binding.pop(key) for key in ("renamedFromTask",) if key in binding}
        bound = {"source": "acme/accounts", "resource": resource, **binding}
        others = {"source": "acme/others", "resource": {"table": "others"}}
        made = task(
            "sqlite",
            {"path": self.place.database()},
            [bound, others],
            **({"renamedFrom": more["renamedFromTask"]} if more else {}),
        )
        catalog = {
            "collections": {"acme/accounts": collection, "acme/others": ACCOUNTS},
            "materializations": {name: made},
        }
        file = self.place.directory / "catalog.json"
        file.write_text(json.dumps(catalog))
        built = build_valid([file], environ=None, connectors=BUILTIN, inferred={})
        return self.on_store(lambda store: applying.apply(store, built))

    def on_store(self, act: Callable[[Consensus], Any]) -> Any:  # noqa: ANN401
        async def do() -> object:
            async with self.place.store() as store:
                return await act(store)

        return asyncio.run(do())

    def append(self, count: int = 10) -> None:
        self.place.append({"acme/accounts": accounts(self.count, count)})
        self.count += count

    def run(self, name: str = VIEWS) -> str:
        """What a run said that was refused."""

        async def run(store: Consensus) -> str:
            catalog = await desired.load(store)
            (spec,) = catalog.materializations
            revision = await current_revision(store)
            ran = await run_until(catalog, spec, self.place.world(store), revision)
            return "" if ran.error is None else str(ran.error)

        return str(self.on_store(run))

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.place.database())) as connection:
            rows = connection.execute(statement).fetchall()
            connection.commit()
        return rows

    def generation(self, table: str = "accounts") -> str:
        ((key,),) = self.query(f"SELECT state_key FROM penstock_tables WHERE name = '{table}'")  # noqa: S608
        return str(key).rpartition(".")[2]

    def tables(self) -> set[str]:
        rows = self.query("SELECT name FROM sqlite_schema WHERE type = 'table'")
        return {name for (name,) in rows if not name.startswith("sqlite_")}

    def is_right(self, table: str = "accounts") -> bool:
        return self.place.table(table) == reduced(accounts(0, self.count))

    def ask(self, what: str = "backfill", name: str = VIEWS) -> None:
        async def ask(store: Consensus) -> None:
            catalog = await desired.load(store)
            if what == "takeover":
                await request(store, name, plan_takeover(catalog, name), takeover=True)
            else:
                await request(store, name, plan_refills(catalog, name, [0]))

        self.on_store(ask)


@pytest.fixture
def trial(tmp_path: Path, spark: SparkSession) -> Trial:
    made = Trial(tmp_path, spark)
    made.apply()
    made.append()
    assert made.run() == ""
    return made


def test_a_change_and_the_change_back_and_a_second_run(trial: Trial) -> None:
    for number, collection in enumerate((TAGGED, ACCOUNTS, TAGGED), start=1):
        trial.apply(collection)
        trial.append()
        assert trial.run() == ""
        assert trial.is_right()
        assert trial.run() == "", "once is enough"
        assert trial.generation() == f"v{(number + 1) // 2}", "only one way needs a rebuild"
    assert trial.tables() >= {"accounts", "others"}
    assert not any("rebuild" in name for name in trial.tables())


def test_a_change_with_nothing_new_is_made_as_well(trial: Trial) -> None:
    trial.apply(TAGGED)
    assert trial.run() == ""
    assert trial.is_right()
    assert trial.generation() == "v1"


def test_a_binding_that_is_disabled_while_its_collection_changes(trial: Trial) -> None:
    trial.apply(ACCOUNTS, disable=True)
    trial.append()
    assert trial.run() == ""
    trial.apply(TAGGED, disable=True)
    assert trial.run() == ""
    assert trial.generation() == "v0"
    trial.apply(TAGGED)
    assert trial.run() == ""
    assert trial.is_right()
    assert trial.generation() == "v1"


@pytest.mark.parametrize("collection", [ACCOUNTS, TAGGED], ids=["alone", "with a change"])
def test_a_table_is_renamed_with_its_rows(trial: Trial, collection: Document) -> None:
    renamed = {"table": "renamed", "renamedFrom": {"table": "accounts"}}
    trial.query("ALTER TABLE accounts ADD COLUMN mine TEXT")
    trial.apply(collection, **renamed)
    trial.append()
    for _ in range(2):
        assert trial.run() == ""
        assert trial.is_right("renamed")
    assert "accounts" not in trial.tables()
    assert trial.query("SELECT DISTINCT mine FROM renamed") == [(None,)], "columns of others stay"
    trial.apply(collection, table="renamed")
    trial.append()
    assert trial.run() == "", "the key may be removed"
    assert trial.is_right("renamed")


def test_a_table_and_its_task_are_renamed_at_once(trial: Trial) -> None:
    trial.append()
    trial.apply(
        name="acme/new",
        renamedFromTask=VIEWS,
        table="renamed",
        renamedFrom={"table": "accounts"},
    )
    assert trial.run() == ""
    assert trial.is_right("renamed")


def test_a_table_is_not_renamed_over_another(trial: Trial) -> None:
    trial.query("CREATE TABLE taken (x)")
    trial.apply(table="taken", renamedFrom={"table": "accounts"})
    assert "cannot be renamed: taken is there" in trial.run()
    assert trial.is_right()
    trial.query("DROP TABLE taken")
    assert trial.run() == ""
    assert trial.is_right("taken")


def test_a_request_is_met_once(trial: Trial) -> None:
    trial.ask()
    trial.ask()
    trial.query("UPDATE accounts SET region = 'by hand'")
    trial.append()
    assert trial.run() == ""
    assert trial.is_right()
    assert trial.generation() == "v1"
    assert trial.run() == ""
    assert trial.generation() == "v1"
    assert trial.generation("others") == "v0"
    trial.query("DROP TABLE accounts")
    trial.ask()
    assert trial.run() == "", "a table that is gone is filled again"
    assert trial.is_right()


def test_a_running_task_meets_a_request(trial: Trial) -> None:
    async def watch(store: Consensus) -> None:
        catalog = await desired.load(store)
        built = await trial.place.built(store, VIEWS, with_history=True)
        control = Control()
        running = asyncio.create_task(supervise(built, trial.place.world(store), control))
        await asyncio.sleep(1)
        await request(store, VIEWS, plan_refills(catalog, VIEWS, [0]))
        until = time.monotonic() + 60
        while trial.generation() != "v1" and time.monotonic() < until:  # noqa: ASYNC110 - a table
            await asyncio.sleep(0.1)
        control.stop()
        await running

    trial.on_store(watch)
    assert trial.generation() == "v1"
    assert trial.is_right()


def test_a_table_is_taken_over_by_request_and_back(trial: Trial) -> None:
    trial.apply(name="acme/other")
    said = trial.run()
    assert "belongs to acme/views" in said
    assert "penstock task takeover acme/other --table accounts" in said
    trial.ask("takeover", "acme/other")
    trial.append()
    assert trial.run() == ""
    assert trial.is_right()
    trial.apply()
    assert "belongs to acme/other" in trial.run()
    trial.ask("takeover")
    assert trial.run() == ""
    assert trial.is_right()


# --------------------------------------------------------------------- onIncompatibleSchemaChange


def test_abort_refuses_before_anything_is_recorded(trial: Trial) -> None:
    with pytest.raises(ChangeRefused) as refused:
        trial.apply(TAGGED, onIncompatibleSchemaChange="abort")
    said = str(refused.value)
    assert "table accounts" in said
    assert "set backfill: 1 on binding 0; this rebuilds accounts" in said
    trial.append()
    assert trial.run() == ""
    assert trial.generation() == "v0"
    effects = trial.apply(TAGGED, onIncompatibleSchemaChange="abort", backfill=1).tables
    assert [each.how for each in effects if each.column is None][:1] == ["rebuild"]
    assert trial.run() == ""
    assert trial.is_right()


def test_a_binding_is_left_out_and_goes_on_when_it_fits_again(trial: Trial) -> None:
    trial.apply(TAGGED, onIncompatibleSchemaChange="disableBinding")
    trial.append()
    trial.place.append({"acme/others": accounts(0, 3)})
    assert trial.run() == ""
    assert not trial.is_right()
    assert trial.place.table("others") == reduced(accounts(0, 3)), "others go on"
    trial.apply(ACCOUNTS, onIncompatibleSchemaChange="disableBinding")
    assert trial.run() == ""
    assert trial.is_right()
    assert trial.generation() == "v0"


def test_a_task_is_left_out_and_rebuilds_when_it_may(trial: Trial) -> None:
    trial.apply(TAGGED, onIncompatibleSchemaChange="disableTask")
    trial.append()
    trial.place.append({"acme/others": accounts(0, 3)})
    assert trial.run() == ""
    assert trial.place.table("others") == {}
    trial.apply(TAGGED, onIncompatibleSchemaChange="backfill")
    assert trial.run() == ""
    assert trial.is_right()
    assert len(trial.place.table("others")) == 3


def test_a_table_of_others_that_does_not_fit_is_not_rebuilt(trial: Trial) -> None:
    trial.query("CREATE TABLE theirs (account INTEGER PRIMARY KEY, count TEXT) STRICT")
    trial.apply(table="theirs")
    assert "the column of table theirs is TEXT, and INTEGER is needed" in trial.run()
    assert trial.query("SELECT * FROM theirs") == []


# ------------------------------------------------------------------------------------ with crashes

BOTH = ("acme/accounts", "acme/tags")


def _catalog(**accounts: object) -> str:
    bound = [
        {"source": "acme/accounts", "resource": {"table": "accounts"}, **accounts},
        {"source": "acme/tags", "resource": {"table": "tags"}},
    ]
    config = {"path": "views.db"}
    return catalog_text(BOTH, image="penstock/materialize-sqlite", config=config, bindings=bound)


def _changed() -> str:
    """`accounts` is loaded to be reduced from now on."""
    region = "        region: {type: string}\n"
    more = "        extra: {type: array, reduce: {strategy: append}}\n"
    return _catalog().replace(region, region + more)


@pytest.fixture(scope="module")
def filled(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    made = Deployment(tmp_path_factory.mktemp("filled"), spark, BOTH)
    made.prepare(_catalog())
    made.append({name: documents(name, 0, 30) for name in BOTH})
    assert made.run() == 0
    return made


def _check(case: Deployment, count: int, table: str = "accounts") -> None:
    for name, at in zip(BOTH, (table, "tags"), strict=True):
        assert sqlite_rows(case.directory / "views.db", name, at) == oracle(
            name, documents(name, 0, count)
        )


@pytest.mark.parametrize(
    "point",
    [
        "leader.after-supersede",
        "sql.before-shadow",
        "leader.after-apply",
        "leader.after-apply-record",
        "leader.after-hint-record",
        "sqlite.after-commit",
        "rebuild.complete",
        "sql.before-swap",
        "sql.after-swap",
    ],
)
def test_a_rebuild_crashes_and_is_done_exactly_once(
    filled: Deployment, tmp_path: Path, point: str
) -> None:
    case = filled.copy(tmp_path / "case")
    case.prepare(_changed())
    case.append({name: documents(name, 30, 30) for name in BOTH})
    assert case.run(point) == CRASHED
    seen = sqlite_rows(case.directory / "views.db", BOTH[0])
    expected = [oracle(BOTH[0], documents(BOTH[0], 0, count)) for count in (30, 60)]
    assert seen in expected, "old rows, or all of the new"
    case.append({name: documents(name, 60, 10) for name in BOTH})
    assert case.run() == 0
    _check(case, 70)
    assert case.run("sql.before-swap") == 0, "nothing is left to do"


@pytest.mark.parametrize("point", ["sql.before-shadow", "sqlite.after-commit", "sql.before-swap"])
def test_a_rebuild_crashes_and_the_catalog_changes_again(
    filled: Deployment, tmp_path: Path, point: str
) -> None:
    case = filled.copy(tmp_path / "case")
    case.prepare(_changed())
    assert case.run(point) == CRASHED
    case.append({name: documents(name, 30, 30) for name in BOTH})
    case.prepare(_catalog())
    assert case.run() == 0
    _check(case, 60)


@pytest.mark.parametrize(
    "point", ["rename.after-binding", "leader.after-apply", "sqlite.after-commit"]
)
def test_a_table_is_renamed_exactly_once(filled: Deployment, tmp_path: Path, point: str) -> None:
    case = filled.copy(tmp_path / "case")
    case.prepare(_catalog(resource={"table": "renamed"}, renamedFrom={"table": "accounts"}))
    case.append({name: documents(name, 30, 30) for name in BOTH})
    assert case.run(point) == CRASHED
    assert case.run() == 0
    _check(case, 60, "renamed")
