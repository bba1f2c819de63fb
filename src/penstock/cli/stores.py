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


def is_there(settings: Settings) -> bool:
    """Whether there may be something in the consensus store; a database has to be asked."""
    from penstock.consensus.open import Scheme, scheme_of, sqlite_path

    url = settings.consensus
    return scheme_of(url) is not Scheme.SQLITE or sqlite_path(url).exists()


@asynccontextmanager
async def opened(settings: Settings, *, create: bool = False) -> AsyncIterator[Consensus]:
    """The consensus store. Commands that only look do not `create` one where there is none."""
    from penstock.consensus.open import open_consensus, sqlite_path
    from penstock.runtime.waiting import Waits

    url = settings.consensus
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
