"""PURE: a capture's state, and what a session has to do about it.

    {"system": identifier of the server, "slot": replication slot, "cursor": position in the log,
     "bindings": {state key: {"snapshot": "done", "table": its OID}}}

A name for the slot is committed before there is a slot of that name, so a slot that a crash leaves
behind is known, and nobody else's is ever touched. Without a cursor there was no snapshot: the slot
is made anew. A binding that is not listed has not been read: its table is, and changes before that
are left out. One that is listed and not in the catalog any more is forgotten before anything else,
since its changes pass unseen from then on.

The slot is never told of a position that is not committed here. So if it is further, somebody else
has moved it, or this state is an old one, and changes are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.connectors.postgres_cdc.wire import lsn_of, lsn_text
from penstock.model.json_order import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesProgress:
    """A state that was committed."""

    system: str | None = None
    slot: str | None = None
    cursor: int | None = None
    tables: Mapping[str, int] = field(default_factory=dict)
    """Tables that were read whole: OID by state key."""

    @classmethod
    def of(cls, state: Json) -> ChangesProgress:
        given: dict[str, Any] = state if isinstance(state, dict) else {}
        cursor = given.get("cursor")
        return cls(
            system=given.get("system"),
            slot=given.get("slot"),
            cursor=None if cursor is None else lsn_of(cursor),
            tables={
                key: binding["table"]
                for key, binding in given.get("bindings", {}).items()
                if binding.get("snapshot") == "done"
            },
        )

    def forgotten(self, state_keys: Iterable[str]) -> dict[str, Json] | None:
        """The patch that forgets bindings that are gone; None if there are none."""
        gone = sorted(self.tables.keys() - set(state_keys))
        return {"bindings": dict.fromkeys(gone)} if gone else None


def claimed(system: str, slot: str) -> dict[str, Json]:
    """The patch that names a slot which is to be made."""
    return {"system": system, "slot": slot, "cursor": None, "bindings": None}


def moved(cursor: int) -> dict[str, Json]:
    """The patch after changes up to a position."""
    return {"cursor": lsn_text(cursor)}


def read(cursor: int, tables: Mapping[str, int]) -> dict[str, Json]:
    """The patch after tables were read whole, as they were at a position: OIDs by state key."""
    bindings: dict[str, Json] = {
        key: {"snapshot": "done", "table": oid} for key, oid in tables.items()
    }
    return {"cursor": lsn_text(cursor), "bindings": bindings}
