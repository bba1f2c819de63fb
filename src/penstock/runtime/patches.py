"""PURE: updates of a connector's state, as streams of JSON merge patches (RFC 7396).

A patch that is an object merges member by member, where null removes a member; any other patch
replaces the state. Nothing and null are the empty object.

Patches stay separate and are applied in order, never composed: "reset, then set" is two patches,
and no single one means it.

As bytes, a stream is nothing at all, or an array with one compact patch per line:

    [{"cursor":7}
    ,{"cursor":8}
    ]
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NoReturn, TypeAlias

from penstock.errors import PenstockError
from penstock.model.json_order import Json, NotJson, canonical_json

Patches: TypeAlias = tuple[Json, ...]
"""In the order in which they apply."""


class MalformedPatches(PenstockError):
    """Bytes that are not a stream of patches."""


def updated(value: Json, *, merge: bool) -> Patches:
    """The patches of a connector's update, which merges into its state or replaces it."""
    return (value,) if merge else (None, value)


def apply_patches(state: Json, patches: Iterable[Json]) -> Json:
    """The state after all patches; `state` itself stays as it is."""
    for patch in patches:
        state = _merged(state, patch)
    return {} if state is None else state


def _merged(base: Json, patch: Json) -> Json:
    if not isinstance(patch, dict):
        return patch
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


def encode(patches: Iterable[Json]) -> bytes:
    """Encode a stream; an empty one is no bytes at all."""
    lines = "\n,".join(map(canonical_json, patches))
    return f"[{lines}\n]".encode() if lines else b""


def decode(data: bytes) -> Patches:
    """Decode a stream. The framing is checked to the byte: programs write it."""
    if not data or data.removesuffix(b"\n") == b"[]":
        return ()
    if not data.startswith(b"["):
        _refuse("they are not framed as an array")
    patches: list[Json] = []
    at = 1
    while True:
        end = data.find(b"\n", at)
        if end < 0:
            is_comma = patches and data[at:] == b"]"
            _refuse("a comma trails" if is_comma else "a patch does not end its line")
        patches.append(_patch(data[at:end]))
        at = end + 2
        match data[end + 1 : at]:
            case b"]":
                break
            case b",":
                continue
            case b"":
                _refuse("the array does not end")
            case _:
                _refuse("a comma is missing between patches")
    if data[at:] not in {b"", b"\n"}:
        _refuse("bytes trail the array")
    return tuple(patches)


def _patch(line: bytes) -> Json:
    try:
        patch: Json = json.loads(line)
        canonical_json(patch)  # Python reads a little more than JSON can say
    except (ValueError, RecursionError, NotJson) as error:
        _refuse(f"a patch is not JSON: {error}")
    return patch


def _refuse(why: str) -> NoReturn:
    raise MalformedPatches(
        "a connector's state patches cannot be read",
        why=why,
        fix="report this to the connector's maintainers",
    )
