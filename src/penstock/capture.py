"""What a capture in Python says to Penstock, beside its rows.

    from penstock.capture import State

    def read(config, state):
        after = state.get("after", 0)
        for page in pages(config["url"], after):
            yield "orders", page.rows
            yield State({"after": page.last})

`docs/connectors/python.md` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Resource", "Schema", "State"]


@dataclass(frozen=True, slots=True)
class State:
    """Where to read on: what `read` is given the next time.

    It commits together with the rows since the state before it, or not at all. It replaces the
    state before it; with `merge=True` it is merged into that one, and None removes a member.
    """

    value: Mapping[str, Any]
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON Schema of the rows of a stream, as the source knows it."""

    stream: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A stream that `discover` found."""

    stream: str
    schema: Mapping[str, Any]
    """Of its rows: a JSON Schema."""
    key: Sequence[str]
    """JSON pointers to what identifies a row."""
    note: str | None = None
