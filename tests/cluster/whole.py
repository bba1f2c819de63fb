"""`whole.py DIRECTORY ADDRESS`: a cluster with its port, without Spark."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.cluster.service import ClusterService, serving
from penstock.cluster.unified import Unified
from support.deployments import deployed


async def main(directory: Path, address: str) -> None:
    async with deployed(directory) as here:
        unified = Unified(await here.world(), controlled=True)
        service = ClusterService(unified.sessions)
        async with serving(service, listen=address, before=unified.claim):
            await unified.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
