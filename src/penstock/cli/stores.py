"""Open the consensus store of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from penstock.errors import UserError
from penstock.servicekit.secrets import mask_url
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.model.spec import Catalog


@asynccontextmanager
async def opened(settings: Settings, *, create: bool = False) -> AsyncIterator[Consensus]:
    """Open the consensus store. Commands that only read do not `create` a missing one."""
    from penstock.consensus.open import open_consensus, sqlite_path
    from penstock.deployment import check_not_lost, is_there
    from penstock.runtime.awaited import store_at
    from penstock.runtime.waiting import Waits

    url = settings.consensus
    check_not_lost(settings)
    if not create and not is_there(settings):
        raise UserError(
            "there is no deployment here yet",
            where=str(sqlite_path(url)),
            fix="give its directory with --data, or create one here: penstock apply catalog.yaml",
        )
    with Waits().on("this command", store_at(mask_url(url))):
        store = await open_consensus(url)
    try:
        yield store
    finally:
        await store.close()


async def current_catalog(store: Consensus, settings: Settings, *, yes: bool = False) -> Catalog:
    """The catalog that was applied last; one that is given is applied first.

    Unless it is agreed to by `yes`, that removes no task and no collection.
    """
    from penstock import applying
    from penstock.catalog import desired
    from penstock.catalog.build import build_valid
    from penstock.connectors.builtin import BUILTIN
    from penstock.journal.inferred import all_inferred
    from penstock.runtime.awaited import store_at
    from penstock.runtime.waiting import Waits

    given = None
    with Waits().on("this command", store_at(mask_url(settings.consensus))):
        if settings.catalog:
            given = build_valid(
                settings.catalog,
                environ=None,
                connectors=BUILTIN,
                inferred=await all_inferred(store),
            )
        if given is not None:
            await applying.apply(
                store,
                given,
                files=[str(main.resolve()) for main in settings.catalog],
                may_remove=None if yes else (),
            )
        return await desired.load(store)
