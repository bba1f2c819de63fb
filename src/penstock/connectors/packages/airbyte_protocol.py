"""PURE: the Airbyte protocol: its messages, the catalog of streams, and its states.

The connector's state has, for each binding, what the package last said of its stream; beside that
`_shared` of packages with one state for all streams, and `_config` of those that change their own
configuration. What the package says is kept as text: a patch would lose its nulls, and merge it
with what was said before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from penstock.connectors.packages.messages import MessageReader
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import SourceBinding

SHARED: Final = "_shared"
CONFIG: Final = "_config"

SyncMode: TypeAlias = Literal["full_refresh", "incremental"]


class AirbyteRecord(msgspec.Struct):
    """A document."""

    stream: str
    data: msgspec.Raw
    emitted_at: int | float | None = None
    namespace: str | None = None


class AirbyteMessage(msgspec.Struct):
    """A line. What is rare is read when it is needed."""

    type: str
    record: AirbyteRecord | None = None
    state: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    control: dict[str, Any] | None = None
    log: dict[str, Any] | None = None
    catalog: dict[str, Any] | None = None
    connectionStatus: dict[str, Any] | None = None  # noqa: N815 - as the protocol has it


READER: Final = MessageReader(AirbyteMessage, ("RECORD", "STATE", "CONTROL"))


# ---------------------------------------------------------------------------------------- streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream that a binding reads, as the package is asked for it."""

    binding: SourceBinding
    name: str
    namespace: str | None
    mode: SyncMode
    cursor: tuple[str, ...]
    found: Mapping[str, Any]
    """As the package described it."""

    @property
    def key(self) -> str:
        """Where its state is."""
        return self.binding.state_key

    @property
    def descriptor(self) -> dict[str, Json]:
        named: dict[str, Json] = {"name": self.name}
        return {**named, "namespace": self.namespace} if self.namespace else named

    def configured(self) -> dict[str, Any]:
        """Its part of the catalog for the package."""
        return {
            "stream": dict(self.found),
            "sync_mode": self.mode,
            "destination_sync_mode": "append",
            "cursor_field": list(self.cursor),
            "primary_key": self.found.get("source_defined_primary_key") or [],
        }


def choose(
    bindings: Iterable[SourceBinding], found: Sequence[Mapping[str, Any]], *, where: str
) -> tuple[Stream, ...]:
    """Find the streams of bindings among those of the package, and decide how to read them."""
    chosen: dict[tuple[str, str | None], Stream] = {}
    for binding in bindings:
        stream = _choose(binding, found, where)
        if (stream.name, stream.namespace) in chosen:
            raise UserError(
                f"two bindings read the stream {stream.name}",
                where=where,
                fix="a run gives a stream once: keep one binding, and derive from its collection",
            )
        chosen[stream.name, stream.namespace] = stream
    return tuple(chosen.values())


def _choose(binding: SourceBinding, found: Sequence[Mapping[str, Any]], where: str) -> Stream:
    resource: Any = binding.resource.value
    name, namespace = resource["stream"], resource.get("namespace")
    named = [each for each in found if each.get("name") == name]
    fitting = [each for each in named if namespace in (None, each.get("namespace"))]
    if len(fitting) != 1:
        known = sorted({str(each.get("name")) for each in found})
        spaces = ", ".join(sorted(str(each.get("namespace")) for each in named))
        raise UserError(
            f"there is no stream {name}" if not fitting else f"there are several streams {name}",
            where=where,
            why=f"its namespaces: {spaces}" if named else f"the package has {', '.join(known)}",
            fix="name one of them" if not named else "name one of them: namespace",
        )
    stream = fitting[0]
    mode, cursor = _mode(resource, stream, where)
    return Stream(
        binding=binding,
        name=name,
        namespace=stream.get("namespace"),
        mode=mode,
        cursor=cursor,
        found=stream,
    )


def _mode(
    resource: Mapping[str, Any], stream: Mapping[str, Any], where: str
) -> tuple[SyncMode, tuple[str, ...]]:
    """Read what is new where that is possible, and everything otherwise."""
    supported = stream.get("supported_sync_modes") or ["full_refresh"]
    cursor = tuple(resource.get("cursorField") or stream.get("default_cursor_field") or ())
    has_cursor = bool(cursor) or bool(stream.get("source_defined_cursor"))
    wanted: SyncMode | None = resource.get("syncMode")
    if wanted is not None and wanted not in supported:
        raise UserError(
            f"the stream {stream['name']} cannot be read as {wanted}",
            where=where,
            fix=f"syncMode: {' or '.join(supported)}; or leave it out",
        )
    if wanted == "incremental" and not has_cursor:
        raise UserError(
            f"the stream {stream['name']} has no cursor of its own",
            where=where,
            fix="name a member that grows: cursorField: [updated_at]",
        )
    if wanted is not None:
        return wanted, cursor
    return ("incremental" if "incremental" in supported and has_cursor else "full_refresh"), cursor


# ----------------------------------------------------------------------------------------- states


def kept(state: Json) -> str:
    """Return a state as it is kept."""
    return json.dumps(state, separators=(",", ":"), ensure_ascii=False)


def state_to_send(state: Mapping[str, Any], streams: Sequence[Stream]) -> Json:
    """Return what the package is given as its state; None if there is nothing to give.

    A binding without a state of its own begins anew: it was added, or its `backfill` raised.
    """
    known = [
        (stream, json.loads(state[stream.key]["state"]))
        for stream in streams
        if stream.key in state
    ]
    if not known:
        return None
    shared = state.get(SHARED)
    if shared is None:
        return [_stream_state(stream, value) for stream, value in known]
    if shared["type"] == "LEGACY":
        data = json.loads(shared["state"])
        new = {each.name for each in streams} - {stream.name for stream, _ in known}
        return {name: each for name, each in data.items() if name not in new}
    return [
        {
            "type": "GLOBAL",
            "global": {
                "shared_state": json.loads(shared["state"]),
                "stream_states": [
                    {"stream_descriptor": stream.descriptor, "stream_state": value}
                    for stream, value in known
                    if value is not None
                ],
            },
        }
    ]


def _stream_state(stream: Stream, value: Json) -> Json:
    descriptor: Json = dict(stream.descriptor)
    return {
        "type": "STREAM",
        "stream": {"stream_descriptor": descriptor, "stream_state": value},
    }


def stream_patch(stream: Stream, state: Json) -> dict[str, Json]:
    """How the connector's state changes by the state of one stream; None is that it has none."""
    return {stream.key: None if state is None else {"state": kept(state)}}


def shared_patch(message: Mapping[str, Any], streams: Sequence[Stream]) -> dict[str, Json]:
    """How the connector's state changes by one state for all streams."""
    if message.get("type") != "GLOBAL":
        patch: dict[str, Json] = {stream.key: {"state": "null"} for stream in streams}
        return {**patch, SHARED: {"type": "LEGACY", "state": kept(message.get("data") or {})}}
    value = message.get("global") or {}
    states = {
        descriptor_of(each): each.get("stream_state") for each in value.get("stream_states") or ()
    }
    patch = {
        stream.key: {"state": kept(states.get((stream.name, stream.namespace)))}
        for stream in streams
    }
    return {**patch, SHARED: {"type": "GLOBAL", "state": kept(value.get("shared_state"))}}


def descriptor_of(value: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the name and namespace of the stream that a message is about."""
    described = value.get("stream_descriptor") or {}
    return described.get("name") or "", described.get("namespace")
