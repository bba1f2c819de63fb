"""Upkeep beside running tasks, for a small share of the time.

Small fragments are compacted, documents that their collection keeps no longer are forgotten, and
garbage is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Final

from penstock import wall_clock
from penstock.catalog import desired
from penstock.errors import PenstockError
from penstock.journal.planning import Planner
from penstock.journal.sweeping import collect_garbage
from penstock.journal.upkeep import compact_all
from penstock.retention import retain_collections
from penstock.scope import Work, working_for

_log = logging.getLogger(__name__)

COMPACT_S: Final = 60.0
"""Seconds between two compactions, at least."""

RETAIN_S: Final = 600.0
"""Seconds between two looks for documents that are older than their collection keeps them."""

COLLECT_S: Final = 6 * 3600.0
"""Seconds between two garbage collections, at least: it lists the whole blob store."""

ROUND_S: Final = 30.0
"""Seconds that a compaction may take before it leaves the other journals to the next one; and
retention, the other collections."""

RECORDS_MAX: Final = 50_000
"""Records of a collection that retention looks at in a round."""

SHARE: Final = 0.05
"""Of the time: after a round, as much longer is rested."""


class Upkeep:
    """Keeps the journals of a deployment in order."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._held: dict[str, str] = {}
        """By collection, why old documents stay: it is logged when it changes."""

    async def run(self) -> None:
        """Work and rest until cancelled. What fails is logged, and tried again."""
        loop = asyncio.get_running_loop()
        due = {
            self._compact: (loop.time(), 0.0),
            self._retain: (loop.time() + RETAIN_S / 10, RETAIN_S),
            self._collect: (loop.time() + COLLECT_S / 10, COLLECT_S),
        }
        rest_s = COMPACT_S
        with working_for(Work()):
            while True:
                await asyncio.sleep(rest_s)
                began = loop.time()
                for work, (at, every_s) in due.items():
                    if loop.time() < at:
                        continue
                    try:
                        await work()
                    except PenstockError as error:
                        _log.warning("upkeep: %s", error.what)
                    due[work] = (loop.time() + every_s, every_s)
                rest_s = max(COMPACT_S, (loop.time() - began) * (1 / SHARE - 1))

    async def _compact(self) -> None:
        planner = self._planner
        with _budget() as enough:
            done = await compact_all(
                planner.journals,
                planner.blobs,
                planner.schemas,
                stop=enough,
                codecs=await desired.codecs(planner.journals.store),
            )
        if done.objects or done.pages:
            _log.info(
                "upkeep: %d fragments of %d journals are now %d objects",
                done.fragments,
                done.journals,
                done.objects,
            )

    async def _retain(self) -> None:
        planner = self._planner
        try:
            catalog = await desired.load(planner.journals.store)
        except desired.NothingApplied:
            return
        with _budget() as enough:
            done = await retain_collections(
                planner, catalog, now=wall_clock.now(), records_max=RECORDS_MAX, stop=enough
            )
        for each in done:
            if each.documents:
                _log.info("upkeep: forgot %d documents of %s", each.documents, each.collection)
            reason = each.reason or ""
            why = reason.partition(": ")[2]  # the number of documents grows all the time
            if why != self._held.get(each.collection, ""):
                self._held[each.collection] = why
                if reason:
                    _log.warning("upkeep: %s", reason)

    async def _collect(self) -> None:
        planner = self._planner
        found = await collect_garbage(planner.journals, planner.blobs, now_s=time.time())
        if found.deleted:
            _log.info("upkeep: removed %d objects, %d bytes", found.deleted, found.bytes)


@contextlib.contextmanager
def _budget() -> Iterator[asyncio.Event]:
    """Give an event that is set when a round has taken long enough."""
    enough = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(ROUND_S, enough.set)
    try:
        yield enough
    finally:
        timer.cancel()
