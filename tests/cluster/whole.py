"""`whole.py FORM DIRECTORY ADDRESS`: a cluster with its port, without Spark."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cluster.forms import cluster_of
from support.deployments import deployed


async def main(form: str, directory: Path, address: str) -> None:
    async with deployed(directory) as here, cluster_of(form, here, address) as cluster:
        await cluster.task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
