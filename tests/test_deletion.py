"""Deleting a task takes away what only it needs, and fences whoever runs it unseen."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.catalog import desired
from penstock.consensus.statelog import Fenced, StateLog
from penstock.consensus.statelog import load as load_log
from penstock.deletion import Deletion, delete, plan_deletion
from penstock.runtime import requests
from penstock.runtime.recovery import RecoveryMachine, log_name, recovery_key
from penstock.status import statuses
from runtime.sessions import ACCOUNTS, Place, accounts, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEY = recovery_key(log_name("materialization", "acme/views"))


def applied(place: Place) -> None:
    bindings = [{"source": "acme/accounts", "resource": {"table": "accounts"}}]
    views = task("sqlite", {"path": place.database()}, bindings)
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views})


async def deleted(place: Place) -> Deletion:
    async with place.store() as store:
        catalog = await desired.load(store)
        planned = await plan_deletion(store, catalog, "acme/views")
        await delete(store, catalog, planned)
        return planned


async def lag(place: Place) -> tuple[int | None, bool]:
    async with place.store() as store:
        (found,) = await statuses(store, await desired.load(store))
        return found.lag_docs, found.last_commit is not None


@pytest.mark.spark
def test_how_far_it_has_read_is_forgotten_and_what_it_stored_is_not(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    applied(place)
    place.append({"acme/accounts": accounts(0, 6)})
    assert asyncio.run(lag(place)) == (6, False)
    place.run()
    assert asyncio.run(lag(place)) == (0, True)
    asyncio.run(deleted(place))
    assert len(place.table("accounts")) == 6
    assert len(place.read("acme/accounts")) == 6

    async def log() -> object:
        async with place.store() as store:
            assert (await desired.load(store)).materializations == ()
            return (await load_log(store, KEY, RecoveryMachine())).state

    assert asyncio.run(log()) == {}
    applied(place)
    assert asyncio.run(lag(place)) == (6, False), "from the beginning"


def test_a_leader_that_nobody_knew_of_is_fenced(tmp_path: Path) -> None:
    place = Place(tmp_path, lambda _: None)  # type: ignore[arg-type]
    applied(place)

    async def run() -> None:
        async with place.store() as store:
            leader = await StateLog.lead(store, KEY, RecoveryMachine())
            await leader.append(lambda _: (("put", b"connector-state", b"{}"),))
            await deleted(place)
            with pytest.raises(Fenced):
                await leader.append(lambda _: (("put", b"connector-state", b"{}"),))

    asyncio.run(run())


def test_it_can_be_repeated_from_half_way(tmp_path: Path) -> None:
    """Its process was killed after the task was kept from running: it still is in the catalog."""
    place = Place(tmp_path, lambda _: None)  # type: ignore[arg-type]
    applied(place)

    async def half() -> None:
        async with place.store() as store:
            await requests.stop(store, "acme/views", at=int(time.time()))

    async def stopped() -> dict[str, int]:
        async with place.store() as store:
            return await requests.all_stopped(store)

    asyncio.run(half())
    assert asyncio.run(deleted(place)).kinds == ("materialization",)
    assert asyncio.run(stopped()) == {}
