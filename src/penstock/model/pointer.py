"""JSON pointers (RFC 6901): the names of locations inside a document.

A pointer is text: "" is the document, "/a/b" a member of a member, "/arr/0" an item. `~` is written
`~0` and `/` is written `~1` inside a token. An index is digits without a leading zero.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.model.json_order import ABSENT, Absent, Json, escape_pointer


def parse(pointer: str) -> tuple[str, ...]:
    """Split a pointer into tokens; raises ValueError if it is not one."""
    if not pointer:
        return ()
    if not pointer.startswith("/"):
        raise ValueError(f'a JSON pointer is empty or begins with "/": "{pointer}"')
    return tuple(
        token.replace("~1", "/").replace("~0", "~")
        for token in pointer.removeprefix("/").split("/")
    )


def render(tokens: Iterable[str | int]) -> str:
    """Join tokens to a pointer; the inverse of `parse`."""
    return "".join("/" + escape_pointer(str(token)) for token in tokens)


def child(pointer: str, token: str | int) -> str:
    """Return the pointer to a member or item of the value at `pointer`."""
    return f"{pointer}/{escape_pointer(str(token))}"


def index(token: str) -> int | None:
    """Return the array index that `token` spells, if any."""
    if token.isascii() and token.isdigit() and (token == "0" or token[0] != "0"):  # noqa: S105
        return int(token)
    return None


def get(document: Json, pointer: str | tuple[str, ...]) -> Json | Absent:
    """Return the value at `pointer`, or ABSENT."""
    value = document
    for token in parse(pointer) if isinstance(pointer, str) else pointer:
        if isinstance(value, dict):
            if token not in value:
                return ABSENT
            value = value[token]
        elif isinstance(value, list):
            at = index(token)
            if at is None or at >= len(value):
                return ABSENT
            value = value[at]
        else:
            return ABSENT
    return value
