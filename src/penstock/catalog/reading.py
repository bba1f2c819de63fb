"""Read the values of keys whose form the grammar has checked.

Each reader returns the default where a key is absent or malformed: the grammar has reported the
latter, and continuing with a default finds more mistakes in the same run.
"""

from __future__ import annotations

import datetime
import re
from typing import TypeVar

from penstock.catalog.nodes import Node

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_T = TypeVar("_T")


def flag(node: Node, name: str, default: bool = False) -> bool:
    member = node.get(name)
    return member.value if member and isinstance(member.value, bool) else default


def whole(node: Node, name: str, default: _T) -> int | _T:
    member = node.get(name)
    if member is None or isinstance(member.value, bool) or not isinstance(member.value, int):
        return default
    return member.value


def word(node: Node, name: str, allowed: tuple[_T, ...], default: _T) -> _T:
    """Return one of a few words, as the literal type that the spec wants."""
    text = node.text_of(name)
    return next((choice for choice in allowed if choice == text), default)


def texts(node: Node | None) -> tuple[str, ...]:
    return tuple(item.text for item in (node.items if node else ()) if item.text is not None)


def text_pairs(node: Node | None) -> tuple[tuple[str, str], ...]:
    """Return a mapping of strings, sorted by name."""
    members = node.members.items() if node else ()
    return tuple(sorted((name, m.text) for name, m in members if m.text is not None))


def seconds(node: Node, name: str, default: _T) -> int | _T:
    """Return the seconds of a duration such as `1h 30m`."""
    text = node.text_of(name)
    parts = re.findall(r"(\d+)([smhd])", text or "")
    return sum(int(count) * _SECONDS[unit] for count, unit in parts) if parts else default


def moment(node: Node) -> str | None:
    """Return an RFC 3339 time in UTC; None if there is no such time."""
    text = (node.text or "").upper().replace(" ", "T")
    whole_part, point, rest = text.partition(".")
    digits = re.match(r"\d*", rest)
    # Python reads at most microseconds; documents are stamped no finer.
    fraction = point + (digits[0][:6] if digits else "")
    zone = rest[len(digits[0]) :] if digits and point else ""
    try:
        read = datetime.datetime.fromisoformat(whole_part + fraction + zone)
    except ValueError:
        return None
    if read.tzinfo is None:
        return None
    return read.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")
