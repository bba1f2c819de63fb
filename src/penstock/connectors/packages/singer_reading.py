"""No IO: a run of a Singer tap, message by message, made sequences.

A STATE closes every document before it, of all streams. Taps repeat the state that they were given
before their first document: that is no progress, and is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.connectors.packages.messages import UnknownStream
from penstock.connectors.packages.pending import Pending
from penstock.connectors.packages.singer_protocol import (
    READER,
    SingerMessage,
    Stream,
    state_patch,
)
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import CaptureSequence


class BatchRefused(Exception):
    """The tap names files instead of sending documents."""


class SingerReading:
    """What a run has given so far."""

    def __init__(
        self, streams: Sequence[Stream], given: Json, others: frozenset[str] = frozenset()
    ) -> None:
        """`given` is the state that the tap was given; `others` are streams that nobody reads."""
        self._streams = tuple(streams)
        self._pending = Pending(
            {each.binding.index: (each.binding, each.name) for each in streams}, "time_extracted"
        )
        self._by_alias = {alias: each.binding.index for each in streams for alias in each.aliases}
        self._others = others
        self._last = given
        self._unknown: set[str] = set()
        self.logs: list[tuple[int, str]] = []
        """For the log, until they are taken."""

    def take(self, line: bytes) -> None:
        """Take one line in; raises `BrokenMessage`, `UnknownStream` or `BatchRefused`."""
        message = READER.read(line)
        if message is None:
            self.logs.append((logging.INFO, line.decode(errors="replace")))
            return
        match message.type:
            case "RECORD" if bytes(message.record):
                at = self._binding(message)
                if at is not None:
                    self._pending.add(at, bytes(message.record), message.time_extracted)
            case "SCHEMA":
                at = self._binding(message)
                if at is not None:
                    self._pending.describe(at, message.schema)
            case "STATE":
                self._on_state(message.value)
            case "ACTIVATE_VERSION":
                self.logs.append(
                    (
                        logging.INFO,
                        f"{message.stream} is complete in version {message.version}; documents of "
                        "older versions stay",
                    )
                )
            case "BATCH":
                raise BatchRefused
            case _:
                pass

    def _on_state(self, value: Json) -> None:
        if value == self._last and not self._pending.has_documents:
            return
        self._last = value
        self._pending.close_all()
        self._pending.patch(state_patch(value, self._streams))

    def _binding(self, message: SingerMessage) -> int | None:
        name = message.stream or ""
        at = self._by_alias.get(name)
        if at is not None:
            return at
        if name not in self._others:
            raise UnknownStream(name)
        if name not in self._unknown:
            self._unknown.add(name)
            self.logs.append((logging.INFO, f"no binding reads the stream {name}"))
        return None

    def finish(self) -> None:
        """The tap has ended without an error: everything counts."""
        self._pending.close_all()

    @property
    def is_full(self) -> bool:
        return self._pending.is_full

    def next(self) -> CaptureSequence | None:
        """Return what can be given now."""
        sequence = self._pending.take()
        if sequence is None and self._pending.is_full:
            return self._pending.take(everything=True)
        return sequence
