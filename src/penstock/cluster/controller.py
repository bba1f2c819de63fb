"""Tells a cluster what the applied catalog wants to run: one session for each domain.

A controller keeps nothing: whenever it connects, it says everything that the catalog wants now, and
from then on what changes. So it may be killed, and started elsewhere, at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Protocol

from penstock.cluster.claim import ClusterTaken
from penstock.cluster.sessions import (
    Closed,
    CloseReason,
    Done,
    Hello,
    InitializationComplete,
    Message,
    Response,
)
from penstock.cluster.state import Command, Compact, Put
from penstock.cluster.wanted import AppliedCatalog
from penstock.errors import UserError
from penstock.model.domain import Domain, domain_of
from penstock.servicekit.rpc.backoff import RECONNECT_CLAMP_S, Backoff
from penstock.shuffle.handover import first_error

_log = logging.getLogger(__name__)

_DECIDES: Final = Domain.STORAGE
"""Of two controllers that start at once each may win a domain: the one that has this one stays."""

_CONTEST_S: Final = 0.5
"""Seconds until the other domain is claimed again; if this one is lost as well, that is the end."""


_SHORT: Final = 4
"""Attempts to connect that fail before that is worth a line: within a tenth of a second."""

_LINE_EACH: Final = 30
"""Attempts between two lines, about a minute."""


class SessionTaken(UserError):
    """Another controller speaks to the same cluster."""


class Connection(Protocol):
    """A session as its controller sees it: `sessions.Session`, or `remote.RemoteSession`."""

    def receive(self, message: Message) -> None: ...

    def responses(self) -> AsyncIterator[Response]: ...

    def close(self, reason: CloseReason, detail: str = "") -> None: ...


class Controller:
    """Follows the catalog, and speaks for both domains."""

    def __init__(
        self, catalog: AppliedCatalog, connect: Callable[[], Connection], *, holder: str
    ) -> None:
        self._catalog = catalog
        self._connect = connect
        self._holder = holder
        self._serving = {domain: asyncio.Event() for domain in Domain}

    async def run(self) -> None:
        """Speak until cancelled; raises `SessionTaken` if another controller does.

        A `UserError` as well: what waiting does not mend.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for domain in Domain:
                    group.create_task(self._speak(domain), name=f"controller of {domain}")
        except BaseExceptionGroup as several:
            raise first_error(several) from None

    async def initialized(self) -> None:
        """Wait until the cluster knows what the catalog wants."""
        for serving in self._serving.values():
            await serving.wait()

    async def _speak(self, domain: Domain) -> None:
        backoff = Backoff(clamp_s=RECONNECT_CLAMP_S)
        await self._catalog.after(0)
        while True:
            self._serving[domain].clear()
            connection = self._connect()
            try:
                closed = await self._converse(connection, domain)
            finally:
                connection.close(CloseReason.LEFT)
            match closed.reason:
                case CloseReason.SUPERSEDED if domain is not _DECIDES:
                    await asyncio.sleep(_CONTEST_S)
                case CloseReason.SUPERSEDED:
                    raise SessionTaken(
                        "another controller speaks to this cluster now, and this one ends",
                        where=closed.detail,
                        why="the newest that is started takes over",
                        fix="end the one that is not wanted: one controller is enough",
                    )
                case CloseReason.MOVED:
                    raise ClusterTaken.by(closed.detail)
                case CloseReason.PROTOCOL | CloseReason.REFUSED:
                    raise UserError("the cluster refuses the controller", why=closed.detail)
                case _:
                    if self._serving[domain].is_set():
                        backoff.reset()
                    worth_a_line = backoff.attempts % _LINE_EACH == _SHORT
                    level = logging.WARNING if worth_a_line else logging.DEBUG
                    _log.log(level, "the %s session ended: %s", domain, closed.detail)
                    await backoff.wait()

    async def _converse(self, connection: Connection, domain: Domain) -> Closed:
        """Say what is wanted, and what changes, until the session is closed."""
        connection.receive(Hello(domain=domain, nonce=os.urandom(16), holder=self._holder))
        version, said = self._catalog.version, self._wanted(domain)
        for put in said.values():
            connection.receive(put)
        connection.receive(InitializationComplete())
        listening = asyncio.create_task(self._listen(connection, domain))
        try:
            while True:
                moved = asyncio.create_task(self._catalog.after(version))
                try:
                    both: list[asyncio.Future[object]] = [listening, moved]  # type: ignore[list-item]
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    moved.cancel()
                if listening.done():
                    return listening.result()
                version, now = self._catalog.version, self._wanted(domain)
                for command in differences(said, now):
                    connection.receive(command)
                said = now
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, connection: Connection, domain: Domain) -> Closed:
        async for response in connection.responses():
            match response:
                case Closed():
                    return response
                case Done(initialized=True):
                    self._serving[domain].set()
                case _:
                    pass
        return Closed(reason=CloseReason.LEFT, detail="the connection ended")

    def _wanted(self, domain: Domain) -> dict[str, Put]:
        return {
            id_: put
            for id_, (put, _) in self._catalog.wanted.items()
            if domain_of(put.kind) is domain
        }


def differences(before: Mapping[str, Put], after: Mapping[str, Put]) -> list[Command]:
    """Return what is to be said to get from one set of tasks to another: drops come first."""
    dropped = [Compact(id=id_) for id_ in before if id_ not in after]
    return [*dropped, *(put for id_, put in after.items() if before.get(id_) != put)]
