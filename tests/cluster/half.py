"""`half.py DIRECTORY DOMAIN CLAIM`: a child of a split cluster, without Spark."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from penstock.cluster.unified import Unified
from penstock.model.domain import Domain
from penstock.servicekit import admin
from penstock.servicekit.metrics import Registry
from penstock.servicekit.readiness import Readiness
from penstock.servicekit.signals import at_stop_signals
from support.deployments import deployed


async def main(directory: Path, domain: Domain, claim: int) -> None:
    async with deployed(directory) as here:
        world = await here.world()
        unified = Unified(world, controlled=True, domains=(domain,), claim=claim)
        at_stop_signals(unified.stop)
        loop = asyncio.get_running_loop()

        def end_with_parent() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(unified.stop)

        threading.Thread(target=end_with_parent, daemon=True).start()
        page = admin.application(Registry("x"), lambda: Readiness(ready=True), unified.relations())
        async with admin.serving(page, 0) as port:
            print(f"admin http://127.0.0.1:{port}", flush=True)  # noqa: T201
            await unified.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Domain(sys.argv[2]), int(sys.argv[3])))
