"""The stores that commands work on, opened from settings and closed with the command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from penstock.errors import UserError
from penstock.servicekit.secrets import mask_url
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus


@asynccontextmanager
async def opened(settings: Settings, *, create: bool = False) -> AsyncIterator[Consensus]:
    """The consensus store. Commands that only look do not `create` one where there is none."""
    from penstock.consensus.open import open_consensus, sqlite_path
    from penstock.deployment import check_not_lost, is_there
    from penstock.runtime.waiting import Waits

    url = settings.consensus
    check_not_lost(settings)
    if not create and not is_there(settings):
        raise UserError(
            "there is nothing here yet",
            where=str(sqlite_path(url)),
            fix="name the data directory with --data, or fill one: penstock apply catalog.yaml",
        )
    with Waits().on("this command", f"the consensus store {mask_url(url)}"):
        store = await open_consensus(url)
    try:
        yield store
    finally:
        await store.close()
