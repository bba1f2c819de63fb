"""PURE: the body of a request, taken apart into the texts of its documents."""

from __future__ import annotations

from typing import Final

import msgspec

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
_LINES: Final = frozenset({LINES, "application/ndjson", "application/jsonl"})
_WHITE: Final = b" \t\r\n"

_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


class NotDocuments(Exception):
    """A body that is not what its type says; the text says why."""


def media_type(header: str | None) -> str | None:
    """Return `JSON` or `LINES`, as a Content-Type says; None for any other type.

    A page of another site can send other types to loopback without asking, and none of these two.
    """
    name = (header or "").partition(";")[0].strip().lower()
    if name in _LINES:
        return LINES
    return JSON if name == JSON or name.endswith("+json") else None


def split(body: bytes, media: str) -> list[bytes]:
    """Return the text of each document, in order. Lines may still be no JSON."""
    if media == LINES:
        lines = (line.strip(_WHITE) for line in body.split(b"\n"))
        return [line for line in lines if line]
    text = body.strip(_WHITE)
    if not text:
        raise NotDocuments("the body is empty; send a JSON object, or an array of them")
    if text[:1] != b"[":
        return [text]
    try:
        return [bytes(item).strip(_WHITE) for item in _decode_array(text)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotDocuments(f"the body is not a JSON array: {error}") from None
