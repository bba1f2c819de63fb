"""Sessions of controllers: what they say goes to the cluster's log, and to nothing else.

    CONNECTED --Hello--> OPENING --opened--> INITIALIZING --InitializationComplete--> SERVING
                                      any of them --> CLOSED, with a reason

A session belongs to one connection, and this module knows nothing of how it is made: `receive`
takes a message and never waits, `responses` gives the answers. Hello is not a command: it opens a
session, and only that is logged. Until a session has said everything that its domain is to run, its
commands are kept; then they are one entry of the log.

**The newest wins.** Another Hello for the domain closes the session before it at once, whatever it
is doing, here and in every other process that follows the log. What it had still to say is
forgotten; what was on its way to the log is void there, because its epoch is over. Nobody waits for
the one before to end, for the other domain, or for tasks to start or stop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.cluster.state import (
    Change,
    ClusterMachine,
    ClusterState,
    Command,
    CommandOutcome,
    Diff,
    Open,
    Reconcile,
    log_key,
    step,
)
from penstock.consensus.statelog import StateLog
from penstock.consensus.store import Consensus
from penstock.errors import PenstockError
from penstock.model.domain import Domain

_log = logging.getLogger(__name__)

WAITING_MAX: Final = 100_000
"""Commands that a session keeps; a controller that says more is closed."""

AT_ONCE: Final = 256
"""Commands per entry, after the first."""

PROTOCOL: Final = 1


# -------------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a connection, and never another."""

    domain: Domain
    nonce: bytes
    """Random, and made for this connection."""
    holder: str
    """Who it is that connects, for people."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class InitializationComplete:
    """Everything that the domain is to run has been said."""


Message: TypeAlias = Hello | Command | InitializationComplete


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Answers Hello: the session is the domain's, and this is what the domain runs."""

    epoch: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Answers commands, in their order: durable, and what became of each."""

    seqno: int | None
    """The entry of the log that has them; None if none was needed."""
    outcomes: tuple[CommandOutcome, ...]
    initialized: bool = False
    """They were the first batch."""


class CloseReason(enum.Enum):
    """Why a session is over."""

    SUPERSEDED = "a newer session has the domain"
    MOVED = "another process runs the cluster"
    REFUSED = "the controller may not speak here"
    PROTOCOL = "a message that must not come now"
    LEFT = "the controller has left"
    FAILED = "the log cannot be written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The last answer of a session."""

    reason: CloseReason
    detail: str


Response: TypeAlias = Opened | Done | Closed


class Stage(enum.Enum):
    """How far a session is; CLOSED is its end."""

    CONNECTED = "Hello is expected"
    OPENING = "its epoch is being logged"
    INITIALIZING = "commands are kept until all are there"
    SERVING = "commands are logged as they come"
    CLOSED = "over"


# ---------------------------------------------------------------------------------------- sessions


class Sessions:
    """The sessions of a cluster process: at most one per domain. Used on one event loop."""

    def __init__(self, store: Consensus, cluster: str) -> None:
        self.store = store
        self.key = log_key(cluster)
        self.claim = 0
        """Of this process on the cluster; sessions of a process that has lost it are closed."""
        self._of: dict[Domain, Session] = {}

    def connect(self) -> Session:
        """A connection was made; its Hello decides whose it is."""
        return Session(self)

    def observe(self, state: ClusterState) -> None:
        """Close the sessions that others have superseded, as the log says."""
        for domain, session in list(self._of.items()):
            if state.claim > self.claim:
                session.close(CloseReason.MOVED, state.claimed_by)
                continue
            newest = state.sessions.get(domain)
            if newest is not None and newest.epoch > session.epoch > 0:
                session.close(CloseReason.SUPERSEDED, newest.holder)

    def swap(self, domain: Domain, session: Session, holder: str) -> str | None:
        """Make it the session of its domain; return what is wrong with that, if anything."""
        before = self._of.get(domain)
        if before is not None and before.nonce == session.nonce:
            return "the nonce of its Hello was used before"
        self._of[domain] = session
        if before is not None:
            before.close(CloseReason.SUPERSEDED, holder)
        return None

    def stage(self, domain: Domain, epoch: int) -> Stage:
        """How far the session of this epoch is; CLOSED if it is not of this process."""
        session = self._of.get(domain)
        return session.stage if session is not None and session.epoch == epoch else Stage.CLOSED

    def forget(self, session: Session) -> None:
        """A session is over."""
        if session.domain is not None and self._of.get(session.domain) is session:
            del self._of[session.domain]


class Session:
    """One connection of a controller."""

    def __init__(self, sessions: Sessions) -> None:
        self.stage = Stage.CONNECTED
        self.domain: Domain | None = None
        self.nonce = b""
        self.epoch = 0
        """0 until it is opened."""
        self._sessions = sessions
        self._commands: deque[Command] = deque()
        self._batch: tuple[Command, ...] | None = None
        """The first batch, when it is complete and not logged yet."""
        self._said = asyncio.Event()
        self._responses: asyncio.Queue[Response] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def receive(self, message: Message) -> None:
        """Take a message. Never waits; one that must not come now closes the session."""
        match message:
            case _ if self.stage is Stage.CLOSED:
                return  # crossed on the wire
            case Hello() if self.stage is Stage.CONNECTED:
                self._hello(message)
            case Hello():
                self.close(CloseReason.PROTOCOL, "Hello came a second time")
            case _ if self.stage is Stage.CONNECTED:
                self.close(CloseReason.PROTOCOL, "the first message must be Hello")
            case InitializationComplete() if self.stage is Stage.SERVING or self._complete:
                self.close(CloseReason.PROTOCOL, "InitializationComplete came a second time")
            case InitializationComplete():
                self._batch = tuple(self._commands)
                self._commands.clear()
                self._said.set()
            case _ if len(self._commands) >= WAITING_MAX:
                self.close(CloseReason.PROTOCOL, f"more than {WAITING_MAX:,} commands wait")
            case _:
                self._commands.append(message)
                self._said.set()

    async def responses(self) -> AsyncIterator[Response]:
        """Yield the answers, the last of which is `Closed`."""
        while True:
            response = await self._responses.get()
            yield response
            if isinstance(response, Closed):
                return

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """End the session at once; what it had to say and is not logged is forgotten."""
        if self.stage is Stage.CLOSED:
            return
        self.stage = Stage.CLOSED
        self._sessions.forget(self)
        self._commands.clear()
        while not self._responses.empty():
            self._responses.get_nowait()
        self._responses.put_nowait(Closed(reason=reason, detail=detail))
        if self._writer is not None:
            self._writer.cancel()  # what may land nevertheless is void, or was said while it could

    # ----------------------------------------------------------------------------------- details

    @property
    def _complete(self) -> bool:
        return self._batch is not None

    def _hello(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            found = f"protocol {hello.protocol}, and this cluster speaks {PROTOCOL}"
            self.close(CloseReason.PROTOCOL, f"{found}: use the same release for both")
            return
        self.nonce = hello.nonce
        if (wrong := self._sessions.swap(hello.domain, self, hello.holder)) is not None:
            self.close(CloseReason.PROTOCOL, wrong)
            return
        self.domain = hello.domain
        self.stage = Stage.OPENING
        self._writer = asyncio.create_task(
            self._write(hello), name=f"session of the {hello.domain} domain"
        )

    async def _write(self, hello: Hello) -> None:
        """Log what is said, in its order."""
        try:
            log = await StateLog.open(self._sessions.store, self._sessions.key, ClusterMachine())
            await self._open(log, hello)
            while True:
                await self._said.wait()
                self._said.clear()
                await self._log_batch(log, hello.domain)
                await self._log_commands(log, hello.domain)
        except PenstockError as error:
            _log.warning("the session of the %s domain ends: %s", hello.domain, error.what)
            self.close(CloseReason.FAILED, error.what)

    async def _open(self, log: StateLog[ClusterState, Diff], hello: Hello) -> None:
        opening = Open(domain=hello.domain, nonce=hello.nonce, holder=hello.holder)
        claim = self._sessions.claim
        committed = await log.append(lambda state: opening if state.claim == claim else None)
        if committed is None:
            self.close(CloseReason.MOVED, log.state.claimed_by)
            return
        self.epoch, self.stage = committed.state.epoch_of(hello.domain), Stage.INITIALIZING
        digests = {each.id: each.digest for each in committed.state.objects_of(hello.domain)}
        self._responses.put_nowait(Opened(epoch=self.epoch, digests=digests))

    async def _log_batch(self, log: StateLog[ClusterState, Diff], domain: Domain) -> None:
        if self.stage is not Stage.INITIALIZING or self._batch is None:
            return
        batch = Reconcile(domain=domain, epoch=self.epoch, batch=self._batch)
        await self._append(log, batch, initialized=True)
        self.stage = Stage.SERVING

    async def _log_commands(self, log: StateLog[ClusterState, Diff], domain: Domain) -> None:
        while self.stage is Stage.SERVING and self._commands:
            count = min(AT_ONCE, len(self._commands))
            said = tuple(self._commands.popleft() for _ in range(count))
            await self._append(log, Change(domain=domain, epoch=self.epoch, commands=said))

    async def _append(
        self,
        log: StateLog[ClusterState, Diff],
        diff: Reconcile | Change,
        *,
        initialized: bool = False,
    ) -> None:
        outcomes: tuple[CommandOutcome, ...] = ()

        def decide(state: ClusterState) -> Diff | None:
            nonlocal outcomes
            after, outcomes = step(state, diff)
            return diff if after != state else None

        committed = await log.append(decide)
        for outcome in outcomes:
            if outcome is CommandOutcome.UNKNOWN:
                _log.warning("a command of the %s domain is about nothing", diff.domain)
        if diff.epoch != log.state.epoch_of(diff.domain):
            self.close(CloseReason.SUPERSEDED, log.state.sessions[diff.domain].holder)
            return
        seqno = None if committed is None else committed.seqno
        self._responses.put_nowait(Done(seqno=seqno, outcomes=outcomes, initialized=initialized))
