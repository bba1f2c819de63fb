"""PURE: the Singer protocol: its messages, the catalog of streams, and its state.

A tap has one state, which every STATE message replaces. It is kept as text under `_state`; each
binding that it covers has a mark of its own beside it. A binding without one begins anew: then its
bookmark is left out of what the tap is given.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.connectors.packages.messages import MessageReader
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import SourceBinding

STATE: Final = "_state"


class SingerMessage(msgspec.Struct):
    """A line."""

    type: str
    stream: str | None = None
    record: msgspec.Raw = msgspec.Raw()
    """Empty if it has none."""
    time_extracted: str | None = None
    value: Any = None
    """Of a STATE."""
    schema: Any = None
    version: Any = None


READER: Final = MessageReader(SingerMessage, ("RECORD", "STATE", "BATCH"))


# ---------------------------------------------------------------------------------------- streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream that a binding reads."""

    binding: SourceBinding
    name: str
    """As the tap's catalog and its bookmarks have it: `tap_stream_id`."""
    aliases: frozenset[str]
    """As its messages have it: taps use one or the other of its two names."""

    @property
    def key(self) -> str:
        """Where its mark is."""
        return self.binding.state_key


def stream_id(stream: Mapping[str, Any]) -> str:
    """Return the name of a stream in a tap's catalog."""
    return str(stream.get("tap_stream_id") or stream.get("stream"))


def choose(
    bindings: Iterable[SourceBinding], catalog: Mapping[str, Any], *, where: str
) -> tuple[dict[str, Any], tuple[Stream, ...]]:
    """Return the tap's catalog with the streams of bindings selected, and these streams."""
    chosen = copy.deepcopy(dict(catalog))
    found = {stream_id(stream): stream for stream in chosen.get("streams") or ()}
    for stream in found.values():
        _select(stream, None)
    streams: dict[str, Stream] = {}
    for binding in bindings:
        resource: Any = binding.resource.value
        name = resource["stream"]
        if name not in found:
            raise UserError(
                f"there is no stream {name}",
                where=where,
                why=f"the tap has {', '.join(sorted(found)) or 'none'}",
                fix="name one of them",
            )
        if name in streams:
            raise UserError(
                f"two bindings read the stream {name}",
                where=where,
                fix="a run gives a stream once: keep one binding, and derive from its collection",
            )
        _select(found[name], resource)
        streams[name] = Stream(binding=binding, name=name, aliases=_aliases(name, found))
    return chosen, tuple(streams.values())


def _aliases(name: str, found: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """The names of a stream that no other one has."""
    short = str(found[name].get("stream") or name)
    shared = [each for each in found.values() if each.get("stream") == short]
    return frozenset({name} if len(shared) > 1 or short in found else {name, short})


def unread(catalog: Mapping[str, Any], streams: Sequence[Stream]) -> frozenset[str]:
    """Return the names of the streams that nobody reads, and nobody could take for one that is."""
    read = {each.name for each in streams}
    found = catalog.get("streams") or ()
    wanted = {each.get("stream") for each in found if stream_id(each) in read} | read
    every = {name for each in found for name in (stream_id(each), each.get("stream")) if name}
    return frozenset(every - wanted)


def _select(stream: dict[str, Any], resource: Mapping[str, Any] | None) -> None:
    """Select a stream with all of its members, or leave it out."""
    wanted = resource is not None
    stream["selected"] = wanted
    if isinstance(stream.get("schema"), dict):
        stream["schema"]["selected"] = wanted
    entries = [each for each in stream.get("metadata") or () if isinstance(each, dict)]
    whole = next((each for each in entries if not each.get("breadcrumb")), None)
    if whole is None:
        whole = {"breadcrumb": [], "metadata": {}}
        entries.append(whole)
    stream["metadata"] = entries
    for entry in entries:
        about = entry.setdefault("metadata", {})
        if entry is whole:
            about["selected"] = wanted
        elif about.get("inclusion") != "unsupported":
            about.setdefault("selected", True)
    if resource is not None:
        _replicate(stream, whole["metadata"], resource)


def _replicate(stream: dict[str, Any], about: dict[str, Any], resource: Mapping[str, Any]) -> None:
    """Say how the stream is read: as the binding wants, else only what is new, where possible."""
    keys = about.get("valid-replication-keys") or []
    key = resource.get("replicationKey") or about.get("replication-key") or next(iter(keys), None)
    method = (
        resource.get("replicationMethod")
        or about.get("forced-replication-method")
        or about.get("replication-method")
        or ("INCREMENTAL" if key else "FULL_TABLE")
    )
    about["replication-method"] = stream["replication_method"] = method
    if key and method == "INCREMENTAL":
        about["replication-key"] = stream["replication_key"] = key


def key_properties(stream: Mapping[str, Any]) -> list[str]:
    """Return the members that are a stream's key, wherever the tap's catalog says it."""
    for about in _abouts(stream):
        found = about.get("table-key-properties") or about.get("view-key-properties")
        if found:
            return [str(name) for name in found]
    return [str(name) for name in stream.get("key_properties") or ()]


def _abouts(stream: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for entry in stream.get("metadata") or ():
        if isinstance(entry, dict) and not entry.get("breadcrumb"):
            yield entry.get("metadata") or {}


# ------------------------------------------------------------------------------------------ state


def state_patch(value: Json, streams: Sequence[Stream]) -> dict[str, Json]:
    """How the connector's state changes by a STATE message."""
    marks: dict[str, Json] = {stream.key: {"covered": True} for stream in streams}
    return {**marks, STATE: {"text": json.dumps(value, separators=(",", ":"), ensure_ascii=False)}}


def state_to_send(state: Mapping[str, Any], streams: Sequence[Stream]) -> Json:
    """Return what the tap is given as its state; None if there is nothing to give.

    Of a state without bookmarks by stream, no part can be left out: then all of it is.
    """
    if STATE not in state:
        return None
    value = json.loads(state[STATE]["text"])
    new = [stream for stream in streams if stream.key not in state]
    if not new:
        return value if isinstance(value, dict) else None
    bookmarks = value.get("bookmarks") if isinstance(value, dict) else None
    if not isinstance(bookmarks, dict) or len(new) == len(streams):
        return None
    anew = frozenset().union(*(each.aliases for each in new))
    left = {name: each for name, each in bookmarks.items() if name not in anew}
    rest = {name: each for name, each in value.items() if name != "currently_syncing"}
    return {**rest, "bookmarks": left}
