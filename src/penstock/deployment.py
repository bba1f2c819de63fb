"""Check the stores of a deployment before they are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.consensus.open import Scheme, scheme_of, sqlite_path
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.settings import Settings


def is_there(settings: Settings) -> bool:
    """True if the consensus store may exist; only SQLite can be ruled out without connecting."""
    url = settings.consensus
    return scheme_of(url) is not Scheme.SQLITE or sqlite_path(url).exists()


def check_not_lost(settings: Settings) -> None:
    """Refuse to start over where the blob store shows that a consensus store existed."""
    from penstock.journal.blobs import open_blobs
    from penstock.journal.ownership import is_used

    if is_there(settings):
        return
    blobs = open_blobs(settings.blob)
    if is_used(blobs):
        raise UserError(
            "the consensus store is missing, but the blob store has objects",
            where=str(sqlite_path(settings.consensus)),
            why=f"they are in {blobs}; without the consensus store they cannot be read",
            fix="restore it from a backup, or check --data, --consensus and --blob. A new "
            "deployment needs its own blob store, or prefix in one; to start over here, remove "
            "the objects",
        )
