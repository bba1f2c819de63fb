"""Where Spark finds `format("penstock")`: it looks into every package called `pyspark_…`.

The source itself is `penstock.journal.source`; here it learns where a deployment is, by the same
rules as the command line, and what its catalog says.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.catalog import desired
from penstock.catalog.collection_lookup import find_collection, salt_of
from penstock.consensus.open import Scheme, scheme_of, sqlite_path
from penstock.errors import UserError
from penstock.journal.source import CollectionSource, StoreUrls
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.model.spec import Catalog, CollectionSpec

__all__ = ["DefaultSource"]


class DefaultSource(CollectionSource):
    """The documents of a collection (`penstock.journal.source`)."""

    def place(self) -> StoreUrls:
        flags = {name: self.options.get(name) for name in ("data", "consensus", "blob")}
        settings = Settings.resolve(flags, os.environ)
        url = settings.consensus
        if scheme_of(url) is Scheme.SQLITE and not sqlite_path(url).exists():
            raise UserError(
                "there is no deployment here",
                where=str(sqlite_path(url).absolute()),
                fix='name its data directory: .option("data", "/path/to/.penstock")',
            )
        return StoreUrls(consensus=url, blob=settings.blob)

    async def find(self, store: Consensus, collection: str) -> CollectionSpec:
        return find_collection(await _catalog(store), collection)

    async def salt(self, store: Consensus, collection: str) -> bytes:
        catalog = await _catalog(store)
        given = os.environ.get("PENSTOCK_REDACT_SALT")
        return salt_of(find_collection(catalog, collection), catalog, given)


async def _catalog(store: Consensus) -> Catalog:
    try:
        return await desired.load(store)
    except desired.NothingApplied as error:
        fix = 'penstock.open("/path/to/.penstock").apply("catalog.yaml")'
        raise UserError(error.what, fix=fix) from None
