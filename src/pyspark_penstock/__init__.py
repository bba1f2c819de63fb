"""Where Spark finds `format("penstock")`: it looks into every package called `pyspark_…`.

The source itself is `penstock.journal.source`; here it learns where a deployment is, by the same
rules as the command line, and what its catalog says.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.catalog import desired
from penstock.catalog.collection_lookup import find_collection
from penstock.consensus.open import Scheme, scheme_of, sqlite_path
from penstock.errors import UserError
from penstock.journal.source import CollectionSource, StoreUrls
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.model.spec import CollectionSpec

__all__ = ["DefaultSource"]


class DefaultSource(CollectionSource):
    """Committed documents of a collection (`penstock.journal.source`)."""

    def place(self) -> StoreUrls:
        flags = {name: self.options.get(name) for name in ("data", "consensus", "blob")}
        settings = Settings.resolve(flags, os.environ)
        url = settings.consensus
        if scheme_of(url) is Scheme.SQLITE and not sqlite_path(url).exists():
            raise UserError(
                "there is nothing here yet",
                where=str(sqlite_path(url).absolute()),
                fix='name the data directory: .option("data", "/path/to/.penstock")',
            )
        return StoreUrls(consensus=url, blob=settings.blob)

    async def find(self, store: Consensus, collection: str) -> CollectionSpec:
        return find_collection(await desired.load(store), collection)
