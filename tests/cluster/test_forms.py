"""What holds for a cluster in whatever form it runs: one process, or a process for each domain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.forms import FORMS, Remote, cluster_of, controller_of, first_words, with_derivations
from penstock.cluster import runner as cluster_runner
from penstock.cluster.sessions import CloseReason, Done, Response
from penstock.cluster.state import Compact
from penstock.cluster.wanted import AppliedCatalog
from penstock.consensus.statelog import load
from penstock.model.domain import Domain, domain_of
from penstock.runtime.recovery import RecoveryMachine, log_name, recovery_key
from support.deployments import SOON_S, Deployment, catalog_of, deployed, write_documents


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


async def epoch_of(here: Deployment, task: str) -> int:
    key = recovery_key(log_name("capture", task))
    return (await load(here.store, key, RecoveryMachine())).epoch


async def wanted_of(here: Deployment) -> AppliedCatalog:
    """The applied catalog, as a controller that starts now would see it."""
    catalog = AppliedCatalog(here.store)
    following = asyncio.create_task(catalog.follow())
    async with asyncio.timeout(SOON_S):
        await catalog.after(0)
    following.cancel()
    return catalog


@pytest.mark.parametrize("form", FORMS)
async def test_t01_t40_both_domains_are_shown_as_one_with_ids_of_one_log(
    here: Deployment, form: str
) -> None:
    for name in ("a", "b", "c"):
        (here.directory / "data" / name).mkdir(parents=True)
    await here.apply(with_derivations("a", "b", "c", of="a b c"))
    async with cluster_of(form, here) as cluster, controller_of(here, cluster.url):

        async def all_run() -> bool:
            rows = await cluster.rows("tasks")
            return [row["doing"] for row in rows] == ["running"] * 6

        await cluster.until(all_run)
        dataflows = await cluster.rows("dataflows")
        operators = await cluster.rows("operators")
        state = await here.state()
        assert {row["object"]: row["dataflow_id"] for row in dataflows} == {
            each.id: each.dataflow_id for each in state.objects.values()
        }
        assert sorted(row["dataflow_id"] for row in dataflows) == [1, 2, 3, 4, 5, 6]
        assert sorted(row["domain"] for row in dataflows) == ["compute"] * 3 + ["storage"] * 3
        ids = [row["operator_id"] for row in operators]
        assert len({*ids}) == len(ids)
        by_id = {row["dataflow_id"]: row["domain"] for row in dataflows}
        steps = {(by_id[row["dataflow_id"]], row["step"]) for row in operators}
        assert steps == {
            ("storage", "capture"), ("storage", "publish"),
            ("compute", "read"), ("compute", "transform"), ("compute", "publish"),
        }  # fmt: skip
        shown = {row["task"]: row["dataflow_id"] for row in await cluster.rows("tasks")}
        assert shown == {row["task"]: row["dataflow_id"] for row in dataflows}
        far = await cluster.rows("frontiers")
        assert {row["dataflow_id"]: row["lag_docs"] for row in far} == {
            each: None if by_id[each] == "storage" else 0 for each in by_id
        }
        sessions = await cluster.rows("sessions")
        assert {row["domain"]: row["stage"] for row in sessions} == {
            "storage": "serving",
            "compute": "serving",
        }
        said = await cluster.rows("commands")
        puts = [row for row in said if row["command"] == "put"]
        assert {row["outcome"] for row in puts} == {"applied"}
        assert {row["object"] for row in puts} == {*state.objects}
        assert sorted(row["command"] for row in said if row not in puts) == [
            "claim", "open", "open",
        ]  # fmt: skip
        if form == "split":
            runtimes = {row["runtime"]: row["domain"] for row in dataflows}
            assert runtimes == {"storage": "storage", "compute": "compute"}


@pytest.mark.parametrize("form", FORMS)
async def test_t11_t21_t22_a_domain_needs_no_other_and_a_batch_touches_what_differs(
    here: Deployment, form: str
) -> None:
    for name in ("a", "b"):
        write_documents(here.directory, name, range(3))
    await here.apply(with_derivations("a", "b", "c", of="c"))
    puts = {id_: put for id_, (put, _) in (await wanted_of(here)).wanted.items()}
    of_domain = {
        domain: [put for put in puts.values() if domain_of(put.kind) is domain] for domain in Domain
    }
    async with cluster_of(form, here) as cluster:
        said = first_words(Domain.STORAGE, "1", *of_domain[Domain.STORAGE])
        await Remote(cluster.url, *said).serves()
        for name in ("a", "b"):  # and no controller of the compute domain ever came
            await cluster.until_read(f"acme/{name}-files", 3)
        said = first_words(Domain.COMPUTE, "2", *of_domain[Domain.COMPUTE])
        await Remote(cluster.url, *said).serves()
        names = [put.name for put in puts.values()]
        await cluster.until_runs(*names)
        before = await here.state()
        epochs = [await epoch_of(here, f"acme/{name}-files") for name in ("a", "b")]

        again = first_words(Domain.STORAGE, "3", *of_domain[Domain.STORAGE])
        assert (await Remote(cluster.url, *again).serves()).seqno is None
        gone = "capture/acme/b-files"
        kept = [put for put in of_domain[Domain.STORAGE] if put.id != gone]
        fewer = Remote(cluster.url, *first_words(Domain.STORAGE, "4", *kept))
        await fewer.serves()
        await cluster.until_runs(*(name for name in names if name != "acme/b-files"))
        fewer.say(Compact(id=gone))
        assert [each.name for each in (await fewer.hears(Done)).outcomes] == ["DROPPED"]

        write_documents(here.directory, "a", range(3, 5))
        await cluster.until_read("acme/a-files", 5)  # counted by the session that began
        assert await epoch_of(here, "acme/a-files") == epochs[0]
        assert await epoch_of(here, "acme/b-files") == epochs[1]
        after = await here.state()
        assert after.objects == {id_: o for id_, o in before.objects.items() if id_ != gone}
        assert after.next_id == before.next_id


@pytest.mark.parametrize("form", FORMS)
async def test_t10_t13_t37_storms_of_both_controllers_change_nothing_that_runs(
    here: Deployment, form: str
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    [put] = [put for put, _ in (await wanted_of(here)).wanted.values()]
    async with cluster_of(form, here) as cluster:
        stale = Remote(cluster.url, *first_words(Domain.STORAGE, "first", put))
        await stale.serves()
        await cluster.until_read("acme/a-files", 3)
        before, epoch = await here.state(), await epoch_of(here, "acme/a-files")
        storm: list[Remote] = []
        for n in range(20):
            for domain in Domain:
                said = [put] if domain is Domain.STORAGE else []
                remote = Remote(cluster.url, *first_words(domain, f"{domain} {n}", *said))
                storm.append(remote)
                if n % 2:
                    await remote.hears(Response)
        for remote in storm:  # whichever came last has the domain
            await remote.heard()
        stale.say(Compact(id=put.id))  # one that was replaced long ago
        assert (await stale.closed()).reason is CloseReason.SUPERSEDED
        last = Remote(cluster.url, *first_words(Domain.STORAGE, "last", put))
        await last.serves()
        write_documents(here.directory, "a", range(3, 5))
        await cluster.until_read("acme/a-files", 5)
        after = await here.state()
        assert (after.objects, after.next_id) == (before.objects, before.next_id)
        assert await epoch_of(here, "acme/a-files") == epoch


async def test_t07_a_task_that_fails_twenty_times_keeps_its_id(
    here: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other form it is the same class that tries again; there, processes are killed."""
    monkeypatch.setattr(cluster_runner, "AGAIN_S", 0.01)
    monkeypatch.setattr(cluster_runner, "AGAIN_S_MAX", 0.01)
    bad = here.directory / "data" / "a"
    bad.mkdir(parents=True)
    (bad / "1.jsonl").write_text('{"id": "not a number"}\n')
    await here.apply(catalog_of("a"))
    async with cluster_of("unified", here) as cluster, controller_of(here, cluster.url):

        async def has_failed() -> bool:
            return bool(await cluster.rows("errors"))

        await cluster.until(has_failed)
        before, epoch = await here.state(), await epoch_of(here, "acme/a-files")

        async def has_failed_often() -> bool:
            return await epoch_of(here, "acme/a-files") >= epoch + 20

        await cluster.until(has_failed_often)
        assert await here.state() == before
        rows = await cluster.rows("errors")
        assert {row["dataflow_id"] for row in rows} == {1}
