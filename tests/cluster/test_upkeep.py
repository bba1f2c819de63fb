"""Upkeep beside running tasks: what it does, and that it never ends."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

import pytest

import penstock
from penstock.cluster import upkeep
from penstock.cluster.upkeep import Upkeep
from penstock.consensus.open import open_consensus
from penstock.errors import Unavailable
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.planning import Planner
from penstock.journal.schemas import Schemas
from penstock.journal.state import Blob, Fragment
from penstock.journal.upkeep import Compacted, compact_all
from penstock.settings import Settings
from support.deployments import SOON_S

CATALOG = {
    "collections": {
        "acme/orders": {
            "key": ["/id"],
            "schema": {
                "type": "object",
                "required": ["id"],
                "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
            },
        }
    }
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A deployment with twelve appends, each an object of its own."""
    (tmp_path / "catalog.yaml").write_text(json.dumps(CATALOG))
    data = tmp_path / "store"
    with penstock.open(data=data) as opened:
        opened.apply(tmp_path / "catalog.yaml")
        for number in range(12):
            opened.append("acme/orders", [{"id": number, "text": secrets.token_hex(4096)}])
    return Settings.resolve({"data": data}, {})


async def test_small_fragments_are_compacted_and_errors_end_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "COMPACT_S", 0.01)
    monkeypatch.setattr(upkeep, "SHARE", 0.9)
    failures = 0

    async def fails_first(*arguments: object, **options: object) -> Compacted:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise Unavailable("the blob store is away")
        return await compact_all(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(upkeep, "compact_all", fails_first)
    store = await open_consensus(settings.consensus)
    journals = Journals(store)
    planner = Planner(journals=journals, blobs=open_blobs(settings.blob), schemas=Schemas(store))

    async def objects() -> set[object]:
        [journal] = await journals.list("acme/orders")
        fragments = [each for each in journal.state.records if isinstance(each, Fragment)]
        return {each.at.path for each in fragments if isinstance(each.at, Blob)}

    assert len(await objects()) == 12
    working = asyncio.create_task(Upkeep(planner).run())
    try:
        async with asyncio.timeout(SOON_S):
            while len(await objects()) > 1:  # noqa: ASYNC110 - it is the store that changes
                await asyncio.sleep(0.02)
        assert failures == 2
        assert not working.done()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await store.close()


async def test_old_documents_are_forgotten_and_it_is_said_who_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "COMPACT_S", 0.01)
    monkeypatch.setattr(upkeep, "RETAIN_S", 0.01)
    monkeypatch.setattr(upkeep, "SHARE", 0.9)
    orders = {**CATALOG["collections"]["acme/orders"]}
    orders["journals"] = {"fragments": {"retention": "1s"}}
    endpoint = {"connector": {"image": "penstock/materialize-sqlite", "config": {"path": "v.db"}}}
    views = {
        "endpoint": endpoint,
        "bindings": [{"source": "acme/held", "resource": {"table": "t"}}],
    }
    catalog = {
        "collections": {"acme/orders": orders, "acme/held": orders},
        "materializations": {"acme/views": views},
    }
    (tmp_path / "catalog.yaml").write_text(json.dumps(catalog))
    data = tmp_path / "store"
    with penstock.open(data=data) as opened:
        opened.apply(tmp_path / "catalog.yaml")
        for name in ("acme/orders", "acme/held"):
            opened.append(name, [{"id": 1}, {"id": 2}])
    settings = Settings.resolve({"data": data}, {})
    store = await open_consensus(settings.consensus)
    journals = Journals(store)
    planner = Planner(journals=journals, blobs=open_blobs(settings.blob), schemas=Schemas(store))
    caplog.set_level("INFO", "penstock.cluster.upkeep")
    working = asyncio.create_task(Upkeep(planner).run())
    try:
        async with asyncio.timeout(SOON_S):
            while sum("upkeep: " in line for line in caplog.messages) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert sorted(caplog.messages) == [
        "upkeep: 2 documents of acme/held are older than its retention, and stay: "
        "acme/views has not read them",
        "upkeep: forgot 2 documents of acme/orders",
    ], "once, however often it is looked at"
    states = {each.name.rpartition("/")[0]: each.state for each in await journals.list("acme")}
    await store.close()
    assert {name: state.begin == state.end for name, state in states.items()} == {
        "acme/held": False,
        "acme/orders": True,
    }
