"""A deployment whose capture reads a topic."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from connectors.kafka.broker import Broker
from penstock import failpoints
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors.kafka.records import META_MEMBERS
from penstock.runtime.control import Control
from penstock.runtime.ops import QUARANTINE, STATS
from penstock.runtime.supervise import supervise
from runtime.forks import begin_anew
from runtime.sessions import Document, Place

TASK, COLLECTION = "acme/in", "acme/events"

SCHEMA: Document = {
    "type": "object",
    "required": ["id", "_meta"],
    "properties": {
        "id": {"type": "integer"},
        "_meta": {
            "type": "object",
            "required": ["partition", "offset"],
            "properties": {name: META_MEMBERS[name] for name in ("partition", "offset", "key")},
        },
    },
}


@dataclass
class KafkaPlace(Place):
    """Everything that survives, beside the broker."""

    def capture(
        self, broker: Broker, topic: str, catalog: Document | None = None, **binding: object
    ) -> None:
        """Capture a topic into `COLLECTION`."""
        config = {"bootstrapServers": broker.address}
        events = {"key": ["/_meta/partition", "/_meta/offset"], "schema": SCHEMA}
        catalog = {
            **(catalog or {"collections": {COLLECTION: events}}),
            "captures": {
                TASK: {
                    "endpoint": {"connector": {"image": "penstock/source-kafka", "config": config}},
                    "bindings": [{"resource": {"topic": topic}, "target": COLLECTION, **binding}],
                }
            },
        }
        file = self.directory / "catalog.json"
        file.write_text(json.dumps(catalog))

        async def apply() -> None:
            async with self.store() as store:
                await desired.apply(store, load_catalog([file], environ=None))

        asyncio.run(apply())

    def copy(self, to: Path) -> KafkaPlace:
        shutil.copytree(self.directory, to)
        return replace(self, directory=to)

    def events(self) -> list[Document]:
        """Everything that is committed, in its order; each record once."""
        found = self.read(COLLECTION)
        places = [(d["_meta"]["partition"], d["_meta"]["offset"]) for d in found]
        assert len(set(places)) == len(places), "a record was captured twice"
        return found

    def ids(self) -> list[int]:
        return [document["id"] for document in self.events()]

    def quarantined(self) -> list[Document]:
        return self.read(QUARANTINE.name)

    def jobs_count(self) -> int:
        """Documents that statistics add up to."""
        every: Any = (each.get("capture", {}).get(COLLECTION) for each in self.read(STATS.name))
        return sum(each["out"]["docsTotal"] for each in every if each)

    def run_once(self) -> None:
        """Run the capture in this process until it has caught up."""
        run = self.run(TASK)[TASK]
        if run.error is not None:
            raise run.error

    def run_forked(self, failpoint: str | None = None) -> int:
        """The same in a process of its own; its exit code."""
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        begin_anew()
        code = 1

        def go() -> None:
            nonlocal code
            try:
                failpoints.arm(failpoint)
                self.run_once()
                code = 0
            except BaseException:
                traceback.print_exc()

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        os._exit(code)

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """The capture runs in a thread, for as long as this lasts; raises if it has failed."""
        control = Control()
        failed: list[BaseException] = []

        async def run() -> None:
            async with self.store() as store:
                task = await self.built(store, TASK)
                await supervise(task, self.world(store), control)

        def go() -> None:
            try:
                loop.run_until_complete(run())
            except BaseException as error:
                failed.append(error)
            finally:
                loop.close()

        def check() -> None:
            if failed:
                raise failed[0]

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=go)
        thread.start()
        try:
            yield check
        finally:
            loop.call_soon_threadsafe(control.stop)
            thread.join()
        check()
