"""What a task logs is kept, also what it logs last."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.batch import make_world
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Publisher
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas
from penstock.runtime import task_log
from penstock.runtime.ops import LOGS
from penstock.settings import Settings

_log = logging.getLogger("penstock.runtime")


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_log_that_ends_while_it_is_flushed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """Nor if the task is cancelled while it waits for that."""
    flushing = asyncio.Event()

    class Slow(Publisher):
        async def publish(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            flushing.set()
            await asyncio.sleep(0.05)
            return await super().publish(*arguments, **named)

    monkeypatch.setattr(task_log, "FLUSH_S", 0.01)
    monkeypatch.setattr(task_log, "Publisher", Slow)
    settings = Settings.resolve({"data": tmp_path / "data"}, {})
    store = await open_consensus(settings.consensus)
    world = make_world(settings, store)

    async def task() -> None:
        async with task_log.task_log(
            world.planner,
            kind="capture",
            task="acme/x",
            level=logging.WARNING,
            now=world.now,
            entropy=world.entropy,
        ):
            _log.warning("first")
            await flushing.wait()
            _log.warning("last")

    running = asyncio.create_task(task())
    if stopped:
        await flushing.wait()
        await asyncio.sleep(0.01)  # it waits for its log by now
        running.cancel()
    await asyncio.wait([running])
    reader = CollectionReader(Journals(store), open_blobs(settings.blob), Schemas(store), LOGS.name)
    said = [
        json.loads(line)["message"]
        async for rows in reader.read()
        for line in to_lines(rows.batch, rows.root)
    ]
    await store.close()
    assert said == ["first", "last"]
