"""Which keys a principal may use.

    role      may
    reader    head, scan, subscribe, watch        under its prefix
    writer    and compare-and-set, truncate       under its prefix
    admin     and list keys                       everywhere

A prefix of journals also opens, for reading only, what no reader or writer of journals can do
without: the catalog, which defines collections, and the schemas of documents (`COMMONS`).
"""

from __future__ import annotations

from typing import Final

from penstock.consensus.store import LIVENESS_KEY, Determinate, ErrorKind, check_prefix
from penstock.servicekit.rpc.tokens import Access, Principal

JOURNALS: Final = "journal/"
COMMONS: Final = ("catalog/main", "schema/", "blobs/turns", LIVENESS_KEY)
"""Keys and prefixes that every principal with a prefix of journals may read."""


def check_access(who: Principal, needed: Access, key: str) -> None:
    """Raise unless `key`, which may be a prefix, is valid and `who` has this access to it."""
    check_prefix(key)
    if who.allows(needed, key):
        return
    if needed is Access.READ and who.prefix.startswith(JOURNALS) and _is_common(key):
        return
    what = f"{who.name} may not {needed.name.lower()} {key!r}"
    raise Determinate(ErrorKind.PERMISSION_DENIED, what)


def _is_common(key: str) -> bool:
    return any(
        key.startswith(common) if common.endswith("/") else key == common for common in COMMONS
    )
