"""Which keys a principal may use.

    read      head, scan, subscribe, watch, snapshot
    list      list keys
    append    compare-and-set, truncate
    apply     the same, of keys that say what is to run (`DECISIVE`)

each under its prefix. Roles stand for several: a reader may read and list, a writer may do all of
it, and so may an admin, everywhere.

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

DECISIVE: Final = ("catalog/", "cluster/", "request/")
"""Prefixes of what decides which tasks run: the catalog, clusters, and requests to tasks."""


def check_access(who: Principal, needed: Access, key: str) -> None:
    """Raise unless `key`, which may be a prefix, is valid and `who` has this access to it."""
    check_prefix(key)
    if who.allows(needed, key):
        return
    if needed is Access.READ and who.prefix.startswith(JOURNALS) and _is_common(key):
        return
    what = f"{who.name} may not {needed.word} {key!r}"
    raise Determinate(ErrorKind.PERMISSION_DENIED, what)


def check_write(who: Principal, key: str) -> None:
    """Raise unless `key` is valid, and `who` may write it."""
    check_access(who, Access.APPLY if key.startswith(DECISIVE) else Access.APPEND, key)


def _is_common(key: str) -> bool:
    return any(
        key.startswith(common) if common.endswith("/") else key == common for common in COMMONS
    )
