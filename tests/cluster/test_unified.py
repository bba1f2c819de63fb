"""Everything of a catalog in one process: captures from files over real stores, without Spark."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cluster import runner as cluster_runner
from penstock.cluster.claim import ClusterTaken
from penstock.cluster.unified import Unified
from penstock.consensus.statelog import StateLog, load
from penstock.deployment import taking_over
from penstock.model.domain import Domain
from penstock.runtime.recovery import RecoveryMachine, log_name, recovery_key
from support.deployments import (
    SOON_S,
    Deployment,
    Running,
    catalog_of,
    deployed,
    write_documents,
)


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


def key_of(task: str) -> str:
    return recovery_key(log_name("capture", task))


async def epoch_of(here: Deployment, task: str) -> int:
    return (await load(here.store, key_of(task), RecoveryMachine())).epoch


async def test_everything_of_the_catalog_runs(here: Deployment) -> None:
    for name in ("a", "b"):
        write_documents(here.directory, name, range(10))
    await here.apply(catalog_of("a", "b"))
    async with here.up() as up:
        await up.until_read("acme/a-files", 10)
        await up.until_read("acme/b-files", 10)
        write_documents(here.directory, "a", range(10, 15))
        await up.until_read("acme/a-files", 15)
        state = await here.state()
    assert [each.dataflow_id for each in state.objects.values()] == [1, 2]
    assert all(each.domain is Domain.STORAGE for each in state.objects.values())


async def test_only_what_changed_restarts(here: Deployment) -> None:
    for name in ("a", "b"):
        write_documents(here.directory, name, range(3))
    await here.apply(catalog_of("a", "b"))
    async with here.up() as up:
        for name in ("a", "b"):
            await up.until_read(f"acme/{name}-files", 3)
        epochs = [await epoch_of(here, f"acme/{name}-files") for name in ("a", "b")]
        ids = [each.dataflow_id for each in (await here.state()).objects.values()]

        await here.apply(catalog_of("a", "b", "c", b={"interval": "2s"}))
        write_documents(here.directory, "c", range(3))
        await up.until_read("acme/c-files", 3)
        write_documents(here.directory, "b", range(3, 5))
        await up.until_read("acme/b-files", 5)  # counted over both
        objects = (await here.state()).objects
        assert [each.dataflow_id for each in objects.values()] == [ids[0], 3, 4]
        assert await epoch_of(here, "acme/a-files") == epochs[0]  # its session goes on
        assert await epoch_of(here, "acme/b-files") > epochs[1]

        await here.apply(catalog_of("a", b={}))
        await up.until(lambda: up.tasks == ["acme/a-files"])
        assert await epoch_of(here, "acme/a-files") == epochs[0]


async def test_a_task_that_is_disabled_stops_and_one_that_is_enabled_goes_on(
    here: Deployment,
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    async with here.up() as up:
        await up.until_read("acme/a-files", 3)
        await here.apply(catalog_of("a", a={"shards": {"disable": True}}))
        await up.until(lambda: not up.tasks)
        write_documents(here.directory, "a", range(3, 5))
        await here.apply(catalog_of("a"))
        await up.until(
            lambda: (seen := up.of("acme/a-files")) is not None and seen.dataflow_id == 2
        )
        await up.until_read("acme/a-files", 2)  # and not those from before once more
        status = up.of("acme/a-files")
        assert status is not None
        assert status.documents == 2
        assert (await here.state()).objects["capture/acme/a-files"].dataflow_id == 2


async def test_a_bad_task_stops_no_other_and_is_tried_again(
    here: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_runner, "AGAIN_S_MAX", 0.2)
    write_documents(here.directory, "good", range(3))
    bad = here.directory / "data" / "bad"
    bad.mkdir(parents=True)
    (bad / "1.jsonl").write_text('{"id": "not a number"}\n')
    await here.apply(catalog_of("bad", "good"))
    async with here.up() as up:
        await up.until(lambda: up.doing("acme/bad-files") == "failed")
        await up.until_read("acme/good-files", 3)
        status = up.of("acme/bad-files")
        assert status is not None
        assert status.failure is not None
        assert "not a number" in str(status.failure)
        objects = (await here.state()).objects

        (bad / "1.jsonl").unlink()  # corrected elsewhere, without a word to anybody
        write_documents(here.directory, "bad", [1])
        await up.until_read("acme/bad-files", 1)
        assert up.of("acme/bad-files").failure is None  # type: ignore[union-attr]
        assert (await here.state()).objects == objects  # trying again gives no id


async def test_a_restarted_process_goes_on_with_the_same_ids(here: Deployment) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a", "b"))
    async with here.up() as up:
        await up.until_read("acme/a-files", 3)
        before = await here.state()
    write_documents(here.directory, "a", range(3, 4))
    async with here.up() as up:
        await up.until_read("acme/a-files", 1)
        after = await here.state()
        status = up.of("acme/a-files")
        assert status is not None
        assert status.documents == 1
    assert after.objects == before.objects
    assert after.next_id == before.next_id
    assert after.epoch_of(Domain.STORAGE) == before.epoch_of(Domain.STORAGE) + 1


async def test_what_was_deleted_while_nothing_ran_is_not_started(here: Deployment) -> None:
    await here.apply(catalog_of("a", "b"))
    async with here.up() as up:
        await up.until(lambda: len(up.tasks) == 2)
    await here.apply(catalog_of("b"))
    epoch = await epoch_of(here, "acme/a-files")
    async with here.up() as up:
        await up.until(lambda: bool(up.tasks))
        assert up.tasks == ["acme/b-files"]
    assert await epoch_of(here, "acme/a-files") == epoch


async def test_the_newest_process_takes_over_and_the_older_one_ends(here: Deployment) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    older = Unified(await here.world())
    runs = asyncio.create_task(older.run())
    await Running(older, runs).until_read("acme/a-files", 3)
    async with here.up() as newer:
        with pytest.raises(ClusterTaken, match="another process runs this deployment"):
            await asyncio.wait_for(runs, SOON_S)
        write_documents(here.directory, "a", range(3, 5))
        await newer.until_read("acme/a-files", 2)
        assert newer.doing("acme/a-files") == "running"


@pytest.mark.parametrize("_again", range(3))
async def test_of_several_that_start_at_once_one_stays(here: Deployment, _again: int) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    all_of_them = [Unified(await here.world()) for _ in range(4)]
    runs = {asyncio.create_task(each.run()): each for each in all_of_them}
    try:
        left = {*runs}
        async with asyncio.timeout(SOON_S):
            while len(left) > 1:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(1)
        [run] = left
        stays = runs[run]
        write_documents(here.directory, "a", range(3, 5))
        await Running(stays, run).until(lambda: sum(r.documents for r in stays.reports) >= 2)
    finally:
        for each in all_of_them:
            each.stop()
            each.stop()
        ends = await asyncio.gather(*runs, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == [*["ClusterTaken"] * 3, "NoneType"]


async def test_a_task_that_another_process_leads_is_taken_back_when_that_is_quiet(
    here: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_runner, "QUIET_S", 1.0)
    for name in ("a", "b"):
        write_documents(here.directory, name, range(3))
    await here.apply(catalog_of("a", "b"))
    async with here.up() as up:
        for name in ("a", "b"):
            await up.until_read(f"acme/{name}-files", 3)
        other = await StateLog.lead(here.store, key_of("acme/a-files"), RecoveryMachine())
        write_documents(here.directory, "a", range(3, 5))
        await up.until(lambda: up.doing("acme/a-files") == "retrying")
        for _ in range(4):  # as long as it writes, it has the task
            await other.append(lambda _: ())
            await asyncio.sleep(0.5)
            assert up.doing("acme/a-files") == "retrying"
        await up.until_read("acme/a-files", 5)
        assert up.doing("acme/b-files") == "running"


async def test_a_task_that_a_command_took_over_is_taken_back_when_that_has_ended(
    here: Deployment,
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    async with here.up() as up:
        await up.until_read("acme/a-files", 3)
        with taking_over(here.settings):
            await StateLog.lead(here.store, key_of("acme/a-files"), RecoveryMachine())
            write_documents(here.directory, "a", range(3, 5))
            await up.until(lambda: up.doing("acme/a-files") == "retrying")
            await asyncio.sleep(1.5)
            assert up.doing("acme/a-files") == "retrying"
        began = time.monotonic()
        await up.until_read("acme/a-files", 5)
        assert time.monotonic() - began < cluster_runner.QUIET_S  # it knew


async def test_applying_the_same_catalog_again_changes_nothing(here: Deployment) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    async with here.up() as up:
        await up.until_read("acme/a-files", 3)
        state = await here.state()
        moved = catalog_of("a")
        moved["collections"]["acme/unrelated"] = moved["collections"]["acme/a"]
        await here.apply(json.loads(json.dumps(moved)))  # another version, the same tasks
        await asyncio.sleep(0.5)
        assert await here.state() == state
