"""Recovery of the standalone daemon when its store is gone.

A schema that vanished took everything with it: it was dropped, or the database behind the address
is another one. A handle finds that out at its next transaction: the tables are missing
(UNDEFINED_TABLE), or they belong to another store (STORE_RESET). The committer then asks its
`Recover` for a handle to go on with.

The daemon opens the store again, which creates what is missing, in place (`Healer`). It has no
opinion about contents, it often fronts disposable stores, and a daemon that exits instead is dead
wherever no supervisor restarts it. This is safe because no client goes on by accident: every
operation on the old store ends with it (`served`), and clients that know the old incarnation get
STORE_RESET and stop. A process that *embeds* a committer runs pipelines and knows that its data
should exist; there, an empty schema would hide a catastrophe, so it has no recovery and stays
failed.

The operation that met the loss is not repeated here: its caller may have meant the old store, and
a first append would succeed in the new one. It is answered STORE_RESET.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.consensus.backend import Backend
from penstock.consensus.store import ConsensusError, ErrorKind, cause_chain
from penstock.errors import PenstockError
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

Recover = Callable[[Backend, ConsensusError], Awaitable[Backend]]
"""Returns a handle on the current store, given the handle that failed and its error; or raises."""

GONE = frozenset({ErrorKind.UNDEFINED_TABLE, ErrorKind.STORE_RESET})
"""Errors of a handle whose store no longer exists."""


class Healer:
    """Opens the store once more, which creates it where it is missing."""

    def __init__(self, reopen: Callable[[], Awaitable[Backend]]) -> None:
        self._reopen = reopen

    async def __call__(self, lost: Backend, error: ConsensusError) -> Backend:
        await _must_be_gone(lost, error)
        try:
            healed = await self._reopen()
        except (PenstockError, OSError) as failure:
            log.error(  # noqa: TRY400 - the chain of causes is in the fields
                "consensus schema is missing and cannot be created",
                extra=fields(error=cause_chain(failure)),
            )
            raise error from failure
        missing = error.kind is ErrorKind.UNDEFINED_TABLE
        log.error(
            "consensus schema was missing; recreated, previous contents are gone"
            if missing
            else "consensus store was created again by another process; previous contents are gone",
            extra=fields(
                url=healed.url,
                known=lost.incarnation,
                incarnation=healed.incarnation,
                error=error.message,
            ),
        )
        return healed


async def _must_be_gone(lost: Backend, error: ConsensusError) -> None:
    """Raise unless the whole store is provably gone."""
    try:
        await lost.revision()
    except ConsensusError as again:
        if again.kind not in GONE:  # nothing more is known now; the next caller asks again
            raise error from again
        return
    # Only a part is gone. Adding empty tables would misrepresent the rest.
    log.error("part of the consensus schema is missing", extra=fields(error=error.message))
    raise error
