"""No IO: a run of an Airbyte source, message by message, made sequences.

**When a state counts.** Packages send states that lag, and a few cannot resume from the middle of a
stream. So by default (`stream_complete`) documents are given as they come, and the state of a
stream only when the stream is complete: after a crash its documents come again from where the run
began. With `each`, every state counts as it comes, and documents wait for theirs.

A stream that is read in full keeps no state from one run to the next: with one, the package would
give nothing. With `each` it has one within a run, which is removed when the stream is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from penstock.connectors.packages.airbyte_protocol import (
    READER,
    AirbyteRecord,
    Stream,
    descriptor_of,
    shared_patch,
    stream_patch,
)
from penstock.connectors.packages.messages import UnknownStream
from penstock.connectors.packages.pending import Pending
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import CaptureSequence

StatePolicy: TypeAlias = Literal["stream_complete", "each"]

_LEVELS: Final = {
    "FATAL": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG,
}


class AirbyteReading:
    """What a run has given so far, and what is known of its streams."""

    def __init__(self, streams: Sequence[Stream], policy: StatePolicy) -> None:
        self._streams = tuple(streams)
        self._each = policy == "each"
        self._pending = Pending(
            {each.binding.index: (each.binding, each.name) for each in streams}, "emitted_at"
        )
        self._by_name = _by_name(streams)
        self._states: dict[int, Json] = {}
        """By binding, the last state of its stream that does not count yet."""
        self._shared: Mapping[str, Any] | None = None
        self._complete: set[int] = set()
        self._incomplete: set[int] = set()
        self._unknown: set[str] = set()
        self._urgent = False
        self.error: Mapping[str, Any] | None = None
        """What the package last said went wrong."""
        self.config: Json = None
        """The configuration that the package wants from now on, until it is taken."""
        self.logs: list[tuple[int, str]] = []
        """For the log, until they are taken."""
        for each in streams:
            self._pending.describe(each.binding.index, each.found.get("json_schema"))

    # ----------------------------------------------------------------------------------- messages

    def take(self, line: bytes) -> None:
        """Take one line in; raises `BrokenMessage` or `UnknownStream`."""
        message = READER.read(line)
        if message is None:
            self._say(logging.INFO, line.decode(errors="replace"))
        elif message.record is not None:
            self._on_record(message.record)
        elif message.state is not None:
            self._on_state(message.state)
        elif message.trace is not None:
            self._on_trace(message.trace)
        elif message.control is not None:
            self._on_control(message.control)
        elif message.log is not None:
            level = _LEVELS.get(str(message.log.get("level")), logging.INFO)
            self._say(level, str(message.log.get("message")))

    def _on_record(self, record: AirbyteRecord) -> None:
        stream = self._stream(record.stream, record.namespace)
        if stream is not None:
            emitted = None if record.emitted_at is None else int(record.emitted_at)
            self._pending.add(stream.binding.index, bytes(record.data), emitted)

    def _on_state(self, state: Mapping[str, Any]) -> None:
        if state.get("type") != "STREAM":
            self._shared = state
            if self._each:
                self._commit_shared()
            return
        value = state.get("stream") or {}
        stream = self._stream(*descriptor_of(value))
        if stream is None:
            return
        at = stream.binding.index
        self._states[at] = value.get("stream_state")
        if at in self._complete:
            self._commit(stream, ended=True)
        elif self._each:
            self._commit(stream, ended=False)

    def _on_trace(self, trace: Mapping[str, Any]) -> None:
        if trace.get("type") == "ERROR":
            self.error = trace.get("error") or {}
        elif trace.get("type") == "STREAM_STATUS":
            about = trace.get("stream_status") or {}
            stream = self._stream(*descriptor_of(about))
            if stream is None:
                return
            at = stream.binding.index
            if about.get("status") == "COMPLETE":
                self._complete.add(at)
                self._commit(stream, ended=True)
            elif about.get("status") == "INCOMPLETE":
                self._incomplete.add(at)

    def _on_control(self, control: Mapping[str, Any]) -> None:
        if control.get("type") == "CONNECTOR_CONFIG":
            about = control.get("connectorConfig") or control.get("connector_config") or {}
            self.config = about.get("config")

    # ------------------------------------------------------------------------------------- states

    def _commit(self, stream: Stream, *, ended: bool) -> None:
        """Everything so far of a stream counts with its last state."""
        at = stream.binding.index
        self._pending.close([at])
        if ended and stream.mode == "full_refresh":
            self._states.pop(at, None)
            if self._each:
                self._pending.patch(stream_patch(stream, None))
        elif at in self._states:
            self._pending.patch(stream_patch(stream, self._states.pop(at)))

    def _commit_shared(self) -> None:
        if self._shared is not None:
            self._pending.close_all()
            self._pending.patch(shared_patch(self._shared, self._streams))
            self._shared = None

    def finish(self) -> None:
        """The package has ended without an error: everything counts."""
        for stream in self._streams:
            if stream.binding.index not in self._complete | self._incomplete:
                self._commit(stream, ended=True)
        if not self._incomplete:
            self._commit_shared()
        self._pending.close_all()

    @property
    def incomplete(self) -> list[str]:
        """The streams that the package says it could not read to their end."""
        return [each.name for each in self._streams if each.binding.index in self._incomplete]

    def change(self, patch: Mapping[str, Json]) -> None:
        """The connector's state changes by this as well, and soon."""
        self._pending.patch(patch)
        self._urgent = True

    # ---------------------------------------------------------------------------------- sequences

    @property
    def is_full(self) -> bool:
        return self._urgent or self._pending.is_full

    def next(self) -> CaptureSequence | None:
        """Return what can be given now."""
        self._urgent = False
        if not self._each:
            return self._pending.take(everything=True)
        sequence = self._pending.take()
        if sequence is None and self._pending.is_full:
            return self._pending.take(everything=True)
        return sequence

    # ------------------------------------------------------------------------------------ helpers

    def _stream(self, name: str, namespace: str | None) -> Stream | None:
        found = self._by_name.get((name, namespace))
        if found is None and (alone := self._by_name.get((name, None))) is not None:
            found = alone if alone.namespace is None else None
        if found is not None:
            return found
        if any(each.name == name for each in self._streams):
            raise UnknownStream(f"{name} in namespace {namespace}")
        if name not in self._unknown:
            self._unknown.add(name)
            self._say(logging.INFO, f"no binding reads the stream {name}")
        return None

    def _say(self, level: int, text: str) -> None:
        self.logs.append((level, text))


def _by_name(streams: Sequence[Stream]) -> dict[tuple[str, str | None], Stream]:
    """Streams by name and namespace, and by name alone where that is enough."""
    found = {(each.name, each.namespace): each for each in streams}
    for each in streams:
        if sum(other.name == each.name for other in streams) == 1:
            found.setdefault((each.name, None), each)
    return found
