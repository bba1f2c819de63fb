"""The registry of schemas: content decides, and content is checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.consensus.open import open_consensus
from penstock.consensus.store import Consensus, ConsensusError, VersionedData
from penstock.errors import Bug
from penstock.journal import schemas as module
from penstock.journal.schemas import Schemas, schema_key
from penstock.model.columns import columns
from penstock.model.spec import Frozen, fingerprint
from support.unreliable import UnreliableConsensus

A = Frozen({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]})
B = Frozen({"type": "object", "properties": {"id": {"type": "string"}}})


@pytest_asyncio.fixture
async def store() -> AsyncIterator[Consensus]:
    opened = await open_consensus("memory:")
    yield opened
    await opened.close()


async def test_a_schema_is_found_by_its_fingerprint(store: Consensus) -> None:
    name = await Schemas(store).put(A)
    assert name == fingerprint(A)
    found = await Schemas(store).get(name)
    assert found.text == A.text
    assert found.is_valid({"id": 1})
    assert await Schemas(store).layout(name) == columns(found.shape)


async def test_the_same_schema_is_kept_once_whoever_puts_it(store: Consensus) -> None:
    again = Frozen({"required": ["id"], **A.value})
    names = await asyncio.gather(*(Schemas(store).put(s) for s in (A, again, B, A)))
    assert len(set(names)) == 2
    assert [len(await store.scan(schema_key(name), 0)) for name in set(names)] == [1, 1]


async def test_what_is_known_needs_no_store(store: Consensus) -> None:
    schemas = Schemas(store)
    name = await schemas.put(A)
    await store.close()
    assert await schemas.put(A) == name
    assert (await schemas.get(name)).text == A.text


async def test_a_registry_remembers_a_bounded_number(
    store: Consensus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KNOWN_MAX", 2)
    schemas = Schemas(store)
    names = [await schemas.put(Frozen({"type": "object", "title": f"{n}"})) for n in range(4)]
    assert len(schemas._texts) == 2
    assert (await schemas.get(names[0])).schema["title"] == "0"


async def test_a_schema_that_nobody_put_is_an_error(store: Consensus) -> None:
    with pytest.raises(Bug, match="no schema") as caught:
        await Schemas(store).get(fingerprint(A))
    assert caught.value.where == schema_key(fingerprint(A))


@pytest.mark.parametrize("data", [B.text.encode(), b"not json", b"\xff"])
async def test_content_that_is_not_its_name_is_an_error(store: Consensus, data: bytes) -> None:
    await store.compare_and_set(schema_key(fingerprint(A)), VersionedData(0, data))
    with pytest.raises(Bug, match="not the one it is named after"):
        await Schemas(store).get(fingerprint(A))
    with pytest.raises(Bug, match="not the one it is named after"):
        await Schemas(store).put(A)


@pytest.mark.parametrize("seed", range(20))
async def test_after_a_put_that_returned_the_schema_is_there(store: Consensus, seed: int) -> None:
    unreliable = UnreliableConsensus(store, p_happen=0.7, p_timeout=0.5, seed=seed)
    while True:
        try:
            name = await Schemas(unreliable).put(A)
            break
        except ConsensusError:
            continue
    assert (await Schemas(store).get(name)).text == A.text


async def test_schemas_outlive_the_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    store = await open_consensus(url)
    name = await Schemas(store).put(A)
    await store.close()
    store = await open_consensus(url)
    assert (await Schemas(store).get(name)).text == A.text
    await store.close()
