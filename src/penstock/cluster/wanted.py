"""What a catalog wants to run, and the catalog that was applied last, followed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import aclosing

from penstock.batch import tasks_to_run
from penstock.catalog.desired import CATALOG_KEY, DesiredMachine
from penstock.cluster.state import Put
from penstock.consensus.statelog import follow
from penstock.consensus.store import Consensus
from penstock.model.spec import Catalog, fingerprint
from penstock.runtime.kinds import TaskSpec, kind_of, reads_of, writes_of


def wanted(catalog: Catalog) -> dict[str, tuple[Put, TaskSpec]]:
    """Return the tasks that a catalog wants to run, by object id: not those that are disabled.

    The digest of a task is that of its spec, and of the collections that it reads and writes.
    """
    prints = {each.name: fingerprint(each) for each in catalog.collections}
    found = {}
    for spec in tasks_to_run(catalog):
        parts = [fingerprint(spec)]
        parts += [f"{name}={prints.get(name)}" for name in sorted(reads_of(spec) | writes_of(spec))]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        put = Put(kind=kind_of(spec), name=spec.name, digest=digest)
        found[put.id] = (put, spec)
    return found


class AppliedCatalog:
    """The catalog that was applied last. Used on one event loop."""

    def __init__(self, store: Consensus) -> None:
        self._store = store
        self._moved = asyncio.Event()
        self.version = 0
        """0: none was applied so far."""
        self.catalog = Catalog()
        self.wanted: Mapping[str, tuple[Put, TaskSpec]] = {}

    async def follow(self) -> None:
        """Keep up with what is applied, until cancelled."""
        moves = follow(self._store, CATALOG_KEY, DesiredMachine())
        async with aclosing(moves) as states:  # type: ignore[type-var]
            async for followed in states:
                desired = followed.replica.state
                if desired.version != self.version:
                    self.catalog = desired.catalog()
                    self.wanted = wanted(self.catalog)
                    self.version = desired.version
                    self._moved.set()
                    self._moved = asyncio.Event()

    async def after(self, version: int) -> int:
        """Wait until the catalog has another version than this one, and return that."""
        while self.version == version:
            await self._moved.wait()
        return self.version
