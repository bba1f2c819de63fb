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
