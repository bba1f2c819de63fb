"""Upkeep beside running tasks: compaction and garbage collection, for a small share of the time."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from penstock.catalog.desired import codecs
from penstock.errors import PenstockError
from penstock.journal.planning import Planner
from penstock.journal.sweeping import collect_garbage
from penstock.journal.upkeep import compact_all
from penstock.scope import Work, working_for

_log = logging.getLogger(__name__)

COMPACT_S: Final = 60.0
"""Seconds between two compactions, at least."""

COLLECT_S: Final = 6 * 3600.0
"""Seconds between two garbage collections, at least: it lists the whole blob store."""

ROUND_S: Final = 30.0
"""Seconds that a compaction may take before it leaves the other journals to the next one."""

SHARE: Final = 0.05
"""Of the time: after a round, as much longer is rested."""


class Upkeep:
    """Keeps the journals of a deployment in order."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    async def run(self) -> None:
        """Work and rest until cancelled. What fails is logged, and tried again."""
        loop = asyncio.get_running_loop()
        collect_at = loop.time() + COLLECT_S / 10
        rest_s = COMPACT_S
        with working_for(Work()):
            while True:
                await asyncio.sleep(rest_s)
                began = loop.time()
                try:
                    await self._compact()
                    if loop.time() >= collect_at:
                        await self._collect()
                        collect_at = loop.time() + COLLECT_S
                except PenstockError as error:
                    _log.warning("upkeep: %s", error.what)
                rest_s = max(COMPACT_S, (loop.time() - began) * (1 / SHARE - 1))

    async def _compact(self) -> None:
        planner, enough = self._planner, asyncio.Event()
        timer = asyncio.get_running_loop().call_later(ROUND_S, enough.set)
        try:
            done = await compact_all(
                planner.journals,
                planner.blobs,
                planner.schemas,
                stop=enough,
                codecs=await codecs(planner.journals.store),
            )
        finally:
            timer.cancel()
        if done.objects or done.pages:
            _log.info(
                "upkeep: %d fragments of %d journals are now %d objects",
                done.fragments,
                done.journals,
                done.objects,
            )

    async def _collect(self) -> None:
        planner = self._planner
        found = await collect_garbage(planner.journals, planner.blobs, now_s=time.time())
        if found.deleted:
            _log.info("upkeep: removed %d objects, %d bytes", found.deleted, found.bytes)
