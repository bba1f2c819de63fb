"""`source-http-ingest`: clients send documents by POST, and are answered after the commit.

The endpoint is open while the capture runs: a run that ends with what is there opens none.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import ClassVar, Final

from penstock.connectors.http_ingest.app import IngestApp, Route, meta_of
from penstock.connectors.http_ingest.desk import Desk
from penstock.connectors.http_ingest.intake import Group, Intake, Ticket
from penstock.connectors.http_ingest.judging import Judge, meta_batch
from penstock.connectors.http_ingest.keys import KeyLog, is_over
from penstock.connectors.http_ingest.options import CONFIG, RESOURCE, Options, read_options
from penstock.connectors.http_ingest.pages import IngestPath
from penstock.connectors.http_ingest.server import ServerThread, check_free, describe, listen
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import (
    CaptureSequence,
    CaptureSession,
    Discovered,
    Documents,
    Given,
    Idle,
    Opening,
    Polled,
    SourceBinding,
)
from penstock.runtime.connector.common import ConnectorError

_log = logging.getLogger("penstock.connectors")

_THREADS: Final = 2
"""That judge large requests."""


class HttpIngest:
    """A source that others send to."""

    config_schema: ClassVar[ConfigSchema] = CONFIG
    resource_schema: ClassVar[ConfigSchema] = RESOURCE

    def __init__(self, config: Json, *, where: str) -> None:
        self._where = where
        self._options: Options = read_options(config, where=f"{where}: endpoint")
        self._session: IngestSession | None = None

    def check(self) -> None:
        """Raise if it could not listen: the port is taken, or the certificate is not usable."""
        where = f"{self._where}: endpoint"
        self._options.check_certificate(where)
        self._options.open_tokens(where)
        check_free(self._options, where=where)

    def discover(self) -> Sequence[Discovered]:
        raise UserError(
            "there is nothing to discover: clients send what they have",
            where=self._where,
            fix="write a binding for each path: {resource: {path: orders}, target: acme/orders}",
        )

    def open(self, opening: Opening) -> CaptureSession:
        if opening.ends or opening.preview:
            what = "a preview" if opening.preview else "a run that ends"
            _log.info("%s: %s opens no port; penstock up serves it", opening.task, what)
            return _NotServed(Idle.NOTHING if opening.ends else Idle.END)
        where = f"{self._where}: endpoint"
        self._options.check_certificate(where)
        self._session = IngestSession(self._options, opening, where)
        return self._session

    def interrupt(self) -> None:
        if self._session is not None:
            self._session.wake()

    def waits_for(self) -> str | None:
        return None


class _NotServed:
    """A session of a run that does not wait for requests."""

    def __init__(self, idle: Idle) -> None:
        self._idle = idle

    def poll(self, wait_s: float) -> Polled:
        return self._idle

    def acknowledge(self, sequences: int) -> None:
        """There is nothing to acknowledge."""

    def close(self) -> None:
        """There is nothing to close."""


class IngestSession:
    """An endpoint that is open."""

    def __init__(self, options: Options, opening: Opening, where: str) -> None:
        self._where = where
        self._bindings = {binding.index: binding for binding in opening.bindings}
        self._paths = {index: _path(binding) for index, binding in self._bindings.items()}
        state = opening.state if isinstance(opening.state, dict) else {}
        self._stale = _stale(state, opening.bindings)
        keys = {binding.index: KeyLog(state.get(binding.state_key)) for binding in opening.bindings}
        self._desk = Desk(Intake(keys))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="http-ingest-judge")
        listener = listen(options, where=where)
        try:
            app = IngestApp(
                opening.task,
                self._routes(),
                options,
                self._desk,
                self._threads,
                options.open_tokens(where),
            )
            self._server = ServerThread(app, listener, options, self._desk)
            self.port: int = _port(listener)
            self._server.start()
        except BaseException:
            listener.close()
            self._threads.shutdown(wait=False)
            raise
        _log.info("%s: listens on %s", opening.task, describe(options, self.port))

    def _routes(self) -> dict[str, Route]:
        routes = {}
        for index, binding in self._bindings.items():
            text = binding.collection.write_schema.text
            routes[self._paths[index]] = Route(
                binding=index,
                place=IngestPath(
                    path=self._paths[index],
                    collection=binding.collection.name,
                    schema_text=text,
                ),
                judge=Judge(text),
                wants_meta=binding.wants_meta,
            )
        return routes

    def wake(self) -> None:
        """Let `poll` return soon."""
        self._desk.wake()

    def poll(self, wait_s: float) -> Polled:
        if not self._server.serves and not self._desk.stopping:
            raise ConnectorError(
                "the HTTP endpoint ended by itself",
                where=self._where,
                why=str(self._server.error or ""),
                transient=True,
            )
        group = self._desk.take(wait_s)
        return Idle.PENDING if group is None else self._sequence(group)

    def acknowledge(self, sequences: int) -> None:
        self._desk.commit(sequences)

    def close(self) -> None:
        self._desk.stop()
        self._server.stop()
        self._threads.shutdown(wait=False)

    def _sequence(self, group: Group) -> CaptureSequence:
        patches: list[Json] = []
        if self._stale:
            patches.append(dict.fromkeys(self._stale))
            self._stale = ()
        for index, change in group.changes.items():
            patches.append({self._bindings[index].state_key: change})
        given = []
        by_binding = sorted(group.tickets, key=lambda ticket: ticket.binding)
        for index, tickets in itertools.groupby(by_binding, key=lambda ticket: ticket.binding):
            given.append(self._given(self._bindings[index], list(tickets)))
        return CaptureSequence(given=tuple(given), patches=tuple(patches))

    def _given(self, binding: SourceBinding, tickets: Sequence[Ticket]) -> Given:
        path = self._paths[binding.index]
        starts = list(itertools.accumulate((len(t.texts) for t in tickets), initial=0))

        def origin(at: int) -> str:
            which = bisect.bisect_right(starts, at) - 1
            moment = datetime.fromtimestamp(tickets[which].received_s, UTC)
            return f"POST /{path} of {moment:%Y-%m-%dT%H:%M:%SZ}, document {at - starts[which]}"

        meta = None
        if binding.wants_meta:
            metas = [meta_of(ticket, path) for ticket in tickets for _ in ticket.texts]
            meta = meta_batch(metas)
        return Given(
            binding=binding.index,
            documents=Documents(
                texts=[text for ticket in tickets for text in ticket.texts],
                meta=meta,
                origin=origin,
            ),
            bytes=sum(ticket.bytes for ticket in tickets),
        )


def _path(binding: SourceBinding) -> str:
    resource = RESOURCE.read(binding.resource.value, where=f"binding {binding.index}: resource")
    return str(resource["path"])


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _stale(state: Mapping[str, Json], bindings: Sequence[SourceBinding]) -> tuple[str, ...]:
    """Parts of the state of bindings that are gone, with keys that need not be kept any more."""
    present = {binding.state_key for binding in bindings}
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    return tuple(
        name for name, part in state.items() if name not in present and is_over(part, now_ms)
    )
