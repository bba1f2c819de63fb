"""What is known of a collection's documents: the inferred schema, in the consensus store.

The key `inferred/COLLECTION` has the schema as JSON, its newest version. It only ever widens, and
widening by the same documents again changes nothing: so writers need no transaction for it, and
write it before the documents that it describes are committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.consensus.store import CasResult, Consensus, Indeterminate, VersionedData
from penstock.model.json_order import Json, canonical_json
from penstock.model.observed import Observed, widen, with_sourced

PREFIX: Final = "inferred/"


async def inferred(store: Consensus, collections: Iterable[str]) -> dict[str, Observed]:
    """Return the inferred schemas of those collections that have one."""
    found: dict[str, Observed] = {}
    for collection in collections:
        entry = await store.head(f"{PREFIX}{collection}", fresh=True)
        if entry is not None:
            found[collection] = msgspec.json.decode(entry.data)
    return found


async def all_inferred(store: Consensus) -> dict[str, Observed]:
    """Return all inferred schemas, by collection."""
    names = [key.removeprefix(PREFIX) async for key in store.list_keys(PREFIX)]
    return await inferred(store, names)


async def learn(
    store: Consensus, collection: str, *, seen: Observed | None, sourced: Json = None
) -> None:
    """Widen the inferred schema of a collection by documents, or by what a source says of them."""
    key = f"{PREFIX}{collection}"
    while True:
        entry = await store.head(key, fresh=True)
        known: Observed | None = None if entry is None else msgspec.json.decode(entry.data)
        wider = known
        if seen is not None:
            wider = seen if wider is None else widen(wider, seen)
        if sourced is not None:
            wider = with_sourced(wider, sourced)
        if wider is None or wider == known:
            return
        seqno = 0 if entry is None else entry.seqno + 1
        new = VersionedData(seqno, canonical_json(wider).encode())
        try:
            if await store.compare_and_set(key, new) is CasResult.COMMITTED:
                if seqno:
                    await store.truncate(key, seqno)
                return
        except Indeterminate:
            continue  # widening again changes nothing
