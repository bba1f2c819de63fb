"""PURE: the state of a function, as it is kept.

    {"state": [<the function's state>], "streams": {"orders": "<state key>"}}

In an array, since the members of an object would be merged one by one, and null would remove them:
so a state is kept exactly as the function gave it.

A raised backfill changes the state key of a stream. Then the member of the function's state that is
named as the stream is dropped, since it is the stream's own by convention; if there is none, all of
it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.model.json_order import Json
from penstock.runtime.patches import apply_patches


@dataclass(slots=True)
class Progress:
    """The function's state now, and how the kept one has to change."""

    value: dict[str, Json]
    keys: Mapping[str, str]
    """State keys, by stream."""
    begun: bool
    """True if the kept state has these keys."""

    @classmethod
    def of(cls, kept: Json, keys: Mapping[str, str]) -> Progress:
        """Go on from what is kept, for streams with these state keys."""
        kept = kept if isinstance(kept, dict) else {}
        states, known = kept.get("state"), kept.get("streams")
        first = states[0] if isinstance(states, list) and states else None
        value = dict(first) if isinstance(first, dict) else {}
        known = known if isinstance(known, dict) else {}
        for stream, key in keys.items():
            if known.get(stream, key) == key:
                continue
            if stream in value:
                del value[stream]
            else:
                value = {}
        return cls(value, keys, all(known.get(stream) == key for stream, key in keys.items()))

    def advance(self, value: Json, *, merge: bool) -> tuple[Json, ...]:
        """The function gave a state: return the patches of the kept one."""
        found = apply_patches(self.value, [value]) if merge else value
        self.value = found if isinstance(found, dict) else {}
        return self._patches({"state": [self.value]})

    def stay(self) -> tuple[Json, ...]:
        """The function gave none: return the patches that are needed all the same."""
        return () if self.begun else self._patches({"state": [self.value]})

    def _patches(self, patch: dict[str, Json]) -> tuple[Json, ...]:
        if not self.begun:
            patch["streams"] = dict(self.keys)
            self.begun = True
        return (patch,)
