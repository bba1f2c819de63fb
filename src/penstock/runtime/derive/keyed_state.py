"""State by key, which any number of shards share: each changes the keys of its own documents.

Documents of equal shuffle key meet at one shard, so a key that follows from the shuffle key is
changed by one shard only, and the changes of all shards can be merged. Values are kept as JSON
text: a value is replaced as a whole, and may hold null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from penstock.model.json_order import Json, canonical_json
from penstock.runtime.patches import Patches

_GONE: Final = object()


class KeyedState:
    """A dictionary of JSON values by JSON key, without iteration: other shards have keys as well.

    A value that was read may be changed in place.
    """

    def __init__(self, stored: Mapping[str, str]) -> None:
        self._stored = stored
        self._used: dict[str, Any] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - any JSON value
        value = self._find(_text(key))
        if value is _GONE:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        self._used[_text(key)] = value

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401
        self[key]
        self._used[_text(key)] = _GONE

    def __contains__(self, key: Any) -> bool:  # noqa: ANN401
        return self._find(_text(key)) is not _GONE

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401
        value = self._find(_text(key))
        return default if value is _GONE else value

    def setdefault(self, key: Any, default: Any) -> Any:  # noqa: ANN401
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401
        value = self.get(key, default)
        if key in self:
            del self[key]
        return value

    def changes(self) -> dict[str, str | None]:
        """The text of each value that changed, None if it was removed."""
        texts = {
            key: None if value is _GONE else canonical_json(value)
            for key, value in self._used.items()
        }
        return {key: text for key, text in texts.items() if text != self._stored.get(key)}

    def _find(self, key: str) -> Any:  # noqa: ANN401
        if key not in self._used:
            stored = self._stored.get(key)
            if stored is None:
                return _GONE
            self._used[key] = json.loads(stored)
        return self._used[key]


def _text(key: Json) -> str:
    return canonical_json(list(key) if isinstance(key, tuple) else key)


def keyed_patches(state: KeyedState, member: str) -> Patches:
    """The changes as patches of a connector state."""
    changes: dict[str, Json] = {**state.changes()}
    return ({member: {"keyed": changes}},) if changes else ()
