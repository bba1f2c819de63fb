"""A client process of its own: `python clients.py URL PREFIX CLIENTS ROUNDS` appends and reports.

Each client is a connection of its own, with a key of its own, and one append under way.
"""

from __future__ import annotations

import asyncio
import sys

from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.store import CasResult, VersionedData


async def append(url: str, key: str, rounds: int) -> None:
    store = RpcConsensus(url)
    for seqno in range(rounds):
        result = await store.compare_and_set(key, VersionedData(seqno, f"{key}#{seqno}".encode()))
        assert result is CasResult.COMMITTED, f"{key} {seqno}: {result}"
    await store.close()


async def main(url: str, prefix: str, clients: int, rounds: int) -> None:
    await asyncio.gather(*[append(url, f"{prefix}/{n}", rounds) for n in range(clients)])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
