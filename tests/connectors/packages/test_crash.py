"""A crash after every step of a capture by a package: nothing is lost, and keys make it right.

The source is a file of rows in which ids come again with another text; what a collection reduces to
must be the last text of each id. One transaction is behind the capture. In the next run it dies at
the point, for the first or for the second time that it gets there, and is run again.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from connectors.packages import fakes
from penstock import failpoints
from penstock.batch import make_world, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.connectors.packages import pending
from penstock.consensus.open import open_consensus
from penstock.failpoints import FAILPOINTS
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from runtime.crash_world import CRASHED, Deployment

pytestmark = pytest.mark.timeout(600)

POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith("capture.")
    or name
    in {
        "leader.after-epoch",
        "leader.after-stats",
        "leader.after-commit-record",
        "leader.after-intents",
        "publisher.rows",
        "publisher.acks",
        "publisher.flushed",
        "statelog.after-send",
    }
)
EACH = {"statePolicy": "each"}
SOURCES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "airbyte": ("airbyte:source-fake", {}, {}),
    "airbyte, lagging": ("airbyte:source-fake", {"lag": 7}, EACH),
    "singer": ("singer:tap-fake", {}, {}),
}
AGAIN = ("capture.after-acknowledge", "capture.after-publish", "leader.after-commit-record")
"""Points at which it dies for the second time as well; in a long run, all of them."""

LONG = "PENSTOCK_CHAOS_SECONDS" in os.environ


@dataclass
class Captured(Deployment):
    """A deployment of one capture by a fake package."""

    documents_max: int = 7
    """Documents of a sequence: fewer than the package gives between two states."""

    def run(self, failpoint: str | None = None) -> int:
        async def run() -> None:
            os.chdir(self.directory)
            pending.DOCUMENTS_MAX = self.documents_max  # type: ignore[misc]
            store = await open_consensus(self.settings.consensus)
            catalog = await desired.load(store)
            failpoints.arm(failpoint)
            world = make_world(self.settings, store)
            runs = await run_graph(catalog, tasks_to_run(catalog), world)
            failpoints.arm(None)
            await store.close()
            for each in runs:
                if each.error is not None:
                    raise each.error

        return self._forked(run)

    def write(self, count: int) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows(count))
        (self.directory / "rows.jsonl").write_text(text)

    def captured(self) -> list[dict[str, Any]]:
        """The documents that are committed, in order."""
        found: list[dict[str, Any]] = []

        async def read() -> None:
            store = await open_consensus(self.settings.consensus)
            reader = CollectionReader(
                Journals(store), open_blobs(self.settings.blob), Schemas(store), "acme/items"
            )
            async for some in reader.read():
                lines = [json.loads(line) for line in to_lines(some.batch, some.root)]
                found.extend({"id": each["id"], "text": each["text"]} for each in lines)
            await store.close()

        asyncio.run(read())
        return found


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": n % 23, "text": f"t{n}"} for n in range(count)]


def reduced(documents: list[dict[str, Any]]) -> dict[int, str]:
    return {each["id"]: each["text"] for each in documents}


def made(directory: Path, source: str, **others: Any) -> Captured:  # noqa: ANN401
    """A capture with one run behind it and one before it."""
    image, config, options = SOURCES[source]
    task = {
        "endpoint": {
            "connector": {
                "image": image,
                "config": {"config": {"source": "rows.jsonl", **config}, **options, **others},
            }
        },
        "bindings": [{"resource": {"stream": "items"}, "target": "acme/items"}],
    }
    collection = {"key": ["/id"], "schema": fakes.ITEMS}
    deployment = Captured(directory, None, ())  # type: ignore[arg-type]
    catalog = {"collections": {"acme/items": collection}, "captures": {"acme/capture": task}}
    deployment.prepare(json.dumps(catalog))
    deployment.write(30)
    assert deployment.run() == 0
    assert deployment.captured() == rows(30)
    deployment.write(75)
    return deployment


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("share")
    fakes.put(home, "airbyte:source-fake", fakes.AIRBYTE)
    fakes.put(home, "singer:tap-fake", fakes.SINGER)
    return home


@pytest.fixture(scope="module", params=sorted(SOURCES))
def prepared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, home: Path
) -> Captured:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(home))
        return made(tmp_path_factory.mktemp("prepared"), request.param)


@pytest.fixture
def packages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_loses_nothing_and_the_reduced_collection_equals_the_source(
    prepared: Captured, tmp_path: Path, point: str
) -> None:
    for time in (1, 2) if LONG or point in AGAIN else (1,):
        case = prepared.copy(tmp_path / f"case-{time}")
        ended = case.run(f"{point}:{time}")
        assert ended in ((CRASHED,) if time == 1 else (CRASHED, 0)), "it got there"
        if ended == CRASHED:
            assert case.run() == 0
        assert reduced(case.captured()) == reduced(rows(75))


@pytest.fixture(scope="module", params=["airbyte", "singer"])
def exact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, home: Path
) -> Captured:
    """Each state covers what came before it, counts as it comes, and a sequence has room for it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(home))
        others = EACH if request.param == "airbyte" else {}
        prepared = made(tmp_path_factory.mktemp("exact"), request.param, **others)
        return replace(prepared, documents_max=4_000)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("point", POINTS)
def test_a_package_whose_states_are_exact_is_read_exactly_once(
    exact: Captured, tmp_path: Path, point: str
) -> None:
    case = exact.copy(tmp_path / "case")
    assert case.run(f"{point}:1") == CRASHED
    assert case.run() == 0
    assert case.captured() == rows(75)
