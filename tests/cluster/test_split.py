"""A process for each domain: the same log, the same ids, one introspection; without Spark."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.forms import cluster_of, controller_of, with_derivations
from penstock.cluster import split as split_module
from penstock.cluster import unified as unified_module
from penstock.cluster.claim import ClusterTaken, claim_cluster
from penstock.cluster.split import Split
from penstock.cluster.unified import MAIN
from penstock.model.domain import Domain
from support.deployments import SOON_S, Deployment, catalog_of, deployed, write_documents

HALF = Path(__file__).with_name("half.py")


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


async def test_t07_a_process_that_is_killed_comes_back_and_stops_no_other(
    here: Deployment,
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(with_derivations("a", "b", of="b"))
    async with cluster_of("split", here) as cluster:
        async with controller_of(here, cluster.url):
            await cluster.until_read("acme/a-files", 3)
            await cluster.until_runs("acme/a-files", "acme/b-files", "acme/b-derived")
        assert isinstance(cluster.host, Split)
        children = cluster.host.children
        other = children[Domain.STORAGE].pid
        before = await here.state()
        for n in range(1, 4):
            killed = children[Domain.COMPUTE].pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            write_documents(here.directory, "a", [10 * n, 10 * n + 1])
            await cluster.until_read("acme/a-files", 3 + 2 * n)
            await cluster.until_runs("acme/a-files", "acme/b-files", "acme/b-derived")
            assert children[Domain.STORAGE].pid == other
            assert children[Domain.COMPUTE].pid not in (killed, None)
        assert await here.state() == before  # coming back gives no id


async def test_a_second_cluster_ends_both_processes(here: Deployment) -> None:
    await here.apply(catalog_of("a"))
    async with cluster_of("split", here) as cluster:
        host = cluster.host
        assert isinstance(host, Split)

        async def both_run() -> bool:
            return len(host.children) == 2 and all(each.said for each in host.children.values())

        await cluster.until(both_run)
        await claim_cluster(here.store, MAIN)
        with pytest.raises(ClusterTaken):
            await asyncio.wait_for(cluster.task, SOON_S)


def test_t47_both_forms_run_the_same_class() -> None:
    """No logic of a domain is in the parent, and what runs a domain stays small."""
    assert "Runner(" not in inspect.getsource(split_module)
    assert len(inspect.getsource(unified_module).splitlines()) < 300
