"""Captures by packages as they run for long: intervals, failures, logs and stops."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from connectors.packages import fakes
from connectors.packages.fakes import Message, eventually, is_alive, notes, record
from penstock.batch import make_world, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import capture, materialization
from penstock.consensus.open import open_consensus
from penstock.errors import PenstockError
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas
from penstock.runtime.control import Control, TransactionSummary
from penstock.runtime.kinds import Connect, build_task
from penstock.runtime.ops import LOGS
from penstock.runtime.supervise import supervise
from penstock.settings import Settings

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.timeout(120)]


@dataclass(slots=True, kw_only=True)
class Pauses(Control):
    """Notes the pauses of a task, and stops it in the last one."""

    last: int = 1
    pauses: list[float] = field(default_factory=list)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self.last:
            self.stop()


@dataclass
class Place:
    """A deployment of one capture, which runs in this process."""

    directory: Path
    policy: str = "stream_complete"

    @property
    def settings(self) -> Settings:
        return Settings.resolve({"data": self.directory / "data"}, {})

    def run(self, config: Message, control: Control, **binding: Any) -> None:  # noqa: ANN401
        """Run the capture as `penstock run` does that never ends, until `control` stops it."""
        asyncio.run(self.ran(config, control, **binding))

    async def ran(self, config: Message, control: Control, **binding: Any) -> None:  # noqa: ANN401
        given = {"config": config, "statePolicy": self.policy}
        endpoint = {"connector": {"image": "airbyte:source-fake", "config": given}}
        bound = {"resource": {"stream": "items"}, "target": "acme/items", **binding}
        task = {"endpoint": endpoint, "bindings": [bound], "interval": "1h"}
        file = self.directory / "catalog.json"
        collection = {"key": ["/id"], "schema": fakes.ITEMS}
        file.write_text(
            json.dumps({"collections": {"acme/items": collection}, "captures": {"acme/x": task}})
        )
        store = await open_consensus(self.settings.consensus)
        try:
            await desired.apply(store, load_catalog([file], environ=None))
            catalog = await desired.load(store)
            (spec,) = tasks_to_run(catalog)
            built = build_task(catalog, spec, Connect(capture, materialization))
            await supervise(built, make_world(self.settings, store), control)
        finally:
            await store.close()

    def read(self, collection: str) -> list[dict[str, Any]]:
        async def read() -> list[dict[str, Any]]:
            store = await open_consensus(self.settings.consensus)
            blobs = open_blobs(self.settings.blob)
            reader = CollectionReader(Journals(store), blobs, Schemas(store), collection)
            found = [
                json.loads(line)
                async for rows in reader.read()
                for line in to_lines(rows.batch, rows.root)
            ]
            await store.close()
            return found

        return asyncio.run(read())

    def ids(self) -> list[int]:
        return [document["id"] for document in self.read("acme/items")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def write(place: Place, count: int) -> str:
    path = place.directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n}) + "\n" for n in range(count)))
    return str(path)


def test_a_run_that_ends_is_followed_by_another_one_after_the_interval(place: Place) -> None:
    config = {"source": write(place, 12), "notes": str(place.directory / "notes")}

    def grown(_: TransactionSummary) -> None:
        write(place, 20)

    control = Pauses(last=2, on_progress=grown)
    place.run(config, control)
    assert place.ids() == list(range(20))
    assert [each["argv"][0] for each in notes(place.directory / "notes")] == [
        "discover", "read", "read",
    ]  # fmt: skip
    assert all(3000 < pause <= 3600 for pause in control.pauses), "an hour after it began"


def test_a_run_that_fails_is_tried_again_after_the_interval(place: Place) -> None:
    control = Pauses(last=2)
    place.run({"read": [record(1), {"error": "kaputt"}, {"exit": 1}]}, control)
    assert control.pauses == [3600, 3600]


def test_a_mistake_in_the_configuration_stops_the_capture(place: Place) -> None:
    read = [fakes.trouble("wrong password", "config_error"), {"exit": 1}]
    with pytest.raises(PenstockError, match="failed: wrong password"):
        place.run({"read": read}, Pauses())


def test_documents_that_do_not_fit_are_named_by_their_number(place: Place) -> None:
    bad = {"type": "RECORD", "record": {"stream": "items", "data": {"id": "x"}, "emitted_at": 1}}
    nan = {"raw": '{"type": "RECORD", "record": {"stream": "items", "data": {"id": NaN}}}\n'}
    read = [record(1), record(2), bad, nan, record(5)]
    place.policy = "each"  # so that documents wait for the end, however the pipe cuts them
    with pytest.raises(PenstockError, match="2 documents do not fit") as refused:
        place.run({"read": read}, Pauses())
    assert "items, record 3: /id" in str(refused.value.why)
    assert "items, record 4" in str(refused.value.why)
    place.run({"read": read}, Pauses(), onInvalid="skip")
    assert place.ids() == [1, 2, 5]


def test_what_a_package_says_is_in_the_log_of_its_task(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    log = {"type": "LOG", "log": {"level": "WARN", "message": "slow today"}}
    with caplog.at_level(logging.INFO, "penstock"):
        place.run({"read": [{"error": "from stderr"}, log, record(1)]}, Pauses())
    said = {(each["level"], each["message"]) for each in place.read(LOGS.name)}
    assert ("info", "source-fake: from stderr") in said
    assert ("warning", "source-fake: slow today") in said


def test_a_stop_ends_a_package_that_hangs(place: Place) -> None:
    config = {
        "notes": str(place.directory / "notes"),
        "read": [{"deaf": True}, record(1), {"sleep": 600}],
    }

    async def stopped() -> None:
        control = Control()
        running = asyncio.create_task(place.ran(config, control))
        await asyncio.to_thread(
            eventually, lambda: control.transactions == 1, "nothing was committed"
        )
        control.abort()
        await running

    asyncio.run(stopped())
    assert place.ids() == [1]
    pid = notes(place.directory / "notes")[-1]["pid"]
    eventually(lambda: not is_alive(pid), "it lives")
