"""The stores of a deployment, as settings name them, before they are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.consensus.open import Scheme, scheme_of, sqlite_path
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.settings import Settings


def is_there(settings: Settings) -> bool:
    """Whether there may be something in the consensus store; a database has to be asked."""
    url = settings.consensus
    return scheme_of(url) is not Scheme.SQLITE or sqlite_path(url).exists()


def check_not_lost(settings: Settings) -> None:
    """Refuse to begin anew where objects say that there was a consensus store before."""
    from penstock.journal.blobs import open_blobs
    from penstock.journal.ownership import is_used

    if is_there(settings):
        return
    blobs = open_blobs(settings.blob)
    if is_used(blobs):
        raise UserError(
            "the consensus store is missing, but the blob store has objects",
            where=str(sqlite_path(settings.consensus)),
            why=f"they are in {blobs}; without the consensus store nobody can tell what they are",
            fix="restore it from a backup; or check --data, --consensus and --blob. A new "
            "deployment needs a blob store, or a prefix, of its own; to start over here, remove "
            "the objects",
        )
