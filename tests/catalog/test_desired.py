"""The desired state: what a catalog records, and what applying another one changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.catalog.desired import (
    CATALOG_KEY,
    ApplyResult,
    Change,
    ChangeRefused,
    DefinitionKind,
    Desired,
    DesiredMachine,
    NothingApplied,
)
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.model.spec import Catalog

TEMPLATE = Path(str(files("penstock.catalog") / "templates" / "demo"))

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}, total: {type: number}}
materializations:
  acme/out:
    endpoint:
      connector: {image: penstock/materialize-postgres, config: {password: "${env:PASSWORD}"}}
    bindings:
      - {resource: {table: orders}, source: acme/orders}
tests:
  acme/test:
    - ingest: {collection: acme/orders, documents: [{id: 1, total: 0.1}]}
"""


@pytest.fixture
async def store() -> AsyncIterator[Consensus]:
    opened = await open_consensus("memory:")
    yield opened
    await opened.close()


def built(directory: Path, text: str = CATALOG) -> Catalog:
    path = directory / "catalog.yaml"
    path.write_text(text, encoding="utf-8")
    return load_catalog([path], environ={"PASSWORD": "hunter2"})


def change_rows(applied: ApplyResult) -> list[tuple[str, str, str]]:
    return [(c.action, c.kind.value, c.name) for c in applied.changes]


async def test_what_was_applied_is_loaded(store: Consensus, tmp_path: Path) -> None:
    catalog = built(tmp_path)
    applied = await desired.apply(store, catalog)
    assert applied.version == 1
    assert change_rows(applied) == [
        ("added", "collection", "acme/orders"),
        ("added", "materialization", "acme/out"),
        ("added", "test", "acme/test"),
    ]
    assert await desired.load(store) == catalog
    template = load_catalog([TEMPLATE], environ={})
    await desired.apply(store, template)
    assert await desired.load(store) == template


async def test_nothing_is_loaded_before_anything_was_applied(store: Consensus) -> None:
    with pytest.raises(NothingApplied, match="no catalog has been applied"):
        await desired.load(store)
    assert await desired.apply(store, Catalog()) == ApplyResult(version=1, changes=())
    assert await desired.load(store) == Catalog()


async def test_only_what_differs_changes(store: Consensus, tmp_path: Path) -> None:
    await desired.apply(store, built(tmp_path))
    moved = CATALOG.replace(
        "\ntests:", "\n# a comment, and all below is a line further down\ntests:"
    )
    again = await desired.apply(store, built(tmp_path, moved))
    assert (again.version, again.changes) == (1, ())
    edited = CATALOG.replace("acme/test:", "acme/other:").replace(
        "{type: number}", "{type: string}"
    )
    edited = edited.replace("total: 0.1", 'total: "1"')
    applied = await desired.apply(store, built(tmp_path, edited))
    assert change_rows(applied) == [
        ("changed", "collection", "acme/orders"),
        ("added", "test", "acme/other"),
        ("removed", "test", "acme/test"),
    ]
    [changed, _, _] = applied.changes
    assert changed.before == built(tmp_path).collections[0]
    assert changed.after == built(tmp_path, edited).collections[0]
    assert applied.version == 2
    assert change_rows(await desired.apply(store, Catalog()))[0] == (
        "removed",
        "collection",
        "acme/orders",
    )
    assert await desired.load(store) == Catalog()


async def test_a_dry_run_changes_nothing(store: Consensus, tmp_path: Path) -> None:
    catalog = built(tmp_path)
    planned = await desired.apply(store, catalog, dry_run=True)
    assert await store.head(CATALOG_KEY, fresh=True) is None
    assert await desired.apply(store, catalog) == planned


async def test_secrets_are_recorded_as_references(store: Consensus, tmp_path: Path) -> None:
    await desired.apply(store, built(tmp_path))
    recorded = b"".join(entry.data for entry in await store.scan(CATALOG_KEY, 0))
    assert b"hunter2" not in recorded
    materialization = (await desired.load(store)).materializations[0]
    assert materialization.endpoint.config.value["password"] == "${env:PASSWORD}"  # noqa: S105


async def test_every_objection_is_told_and_nothing_is_changed(
    store: Consensus, tmp_path: Path
) -> None:
    asked: list[Change] = []

    async def check(change: Change) -> str | None:
        asked.append(change)
        return None if change.kind is DefinitionKind.TEST else f"has {len(change.name)} documents"

    with pytest.raises(ChangeRefused) as caught:
        await desired.apply(store, built(tmp_path), check=check)
    assert str(caught.value).splitlines() == [
        "the catalog cannot be applied",
        "  collection acme/orders: has 11 documents",
        "  materialization acme/out: has 8 documents",
    ]
    assert len(asked) == 3
    assert await store.head(CATALOG_KEY, fresh=True) is None


async def test_an_apply_that_was_overtaken_is_checked_again(
    store: Consensus, tmp_path: Path
) -> None:
    catalog = built(tmp_path)
    seen: list[str] = []

    async def check(change: Change) -> str | None:
        seen.append(f"{change.action} {change.name}")
        if seen == ["added acme/orders"]:
            await desired.apply(store, Catalog(collections=catalog.collections))
        return None

    collections = Catalog(collections=catalog.collections, tests=catalog.tests)
    applied = await desired.apply(store, collections, check=check)
    assert seen == ["added acme/orders", "added acme/test", "added acme/test"]
    assert (applied.version, change_rows(applied)) == (2, [("added", "test", "acme/test")])


async def test_applies_at_once_leave_one_of_their_catalogs(
    store: Consensus, tmp_path: Path
) -> None:
    catalogs = [
        built(tmp_path, CATALOG.replace("acme/orders", f"acme/orders{n}")) for n in range(6)
    ]
    versions = [
        a.version for a in await asyncio.gather(*(desired.apply(store, c) for c in catalogs))
    ]
    assert sorted(versions) == [1, 2, 3, 4, 5, 6]
    assert await desired.load(store) == catalogs[versions.index(6)]


async def test_a_log_that_has_rolled_up_is_loaded(store: Consensus, tmp_path: Path) -> None:
    catalogs = [built(tmp_path), Catalog()]
    for catalog in catalogs * 80:
        await desired.apply(store, catalog)
    await desired.apply(store, catalogs[0])
    replica = await load_log(store, CATALOG_KEY, DesiredMachine())
    assert replica.base > 0
    assert replica.state.version == 161
    assert replica.state.catalog() == catalogs[0]


@pytest.mark.parametrize(
    "state",
    [
        Desired(),
        Desired(
            version=3, specs={(DefinitionKind.TEST, "a"): "{}", (DefinitionKind.CAPTURE, ""): ""}
        ),
    ],
)
def test_a_state_survives_its_encoding(state: Desired) -> None:
    machine = DesiredMachine()
    assert machine.decode_state(machine.encode_state(state), machine.format, 0) == state


def test_storage_mappings_that_an_older_release_recorded_are_left_out() -> None:
    machine, encode = DesiredMachine(), msgspec.msgpack.encode
    recorded = [("test", "a", "{}"), ("storage mapping", "acme/", "{}")]
    state = machine.decode_state(encode((3, recorded)), machine.format, 0)
    assert state == Desired(version=3, specs={(DefinitionKind.TEST, "a"): "{}"})
    edit = machine.decode_diff(encode((3, recorded, [("storage mapping", "x/")])), machine.format)
    assert (list(edit.put), edit.remove) == ([(DefinitionKind.TEST, "a")], ())
