"""PURE: what a cluster is to run, as the state of its log, and every decision about that.

Two controllers say what is to run: one for the storage domain (captures and materializations), one
for the compute domain (derivations). They speak over sessions of their own, and what they say goes
to one state log. Its order is the order across both, the source of ids, and what a restarted
process goes on from; nothing else decides on any of the three.

**Sessions.** A controller opens a session of its domain, which raises the domain's epoch. A diff of
an older epoch is void: it may still be appended by a controller that was replaced while it spoke,
and does nothing. Domains do not fence each other.

**Claims.** One process at a time runs a cluster: the one that claimed it last. Claims are numbered,
and a process that finds a higher number than its own ends.

**Ids.** Each version of an object that is run is a *dataflow*, and gets its id from `next_id` when
it is created or altered; never again for another, and never for a restart. Everything that looks at
the log gives the same id to the same thing, in whatever process.

**Reconciling.** The first that a session says is everything that its domain is to run. What is
equal goes on, what differs is altered, what is missing is dropped. Saying it again changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from penstock.model.domain import Domain, domain_of
from penstock.runtime.ops import TaskKindName

DROPPED_MAX: Final = 10_000
"""Dropped objects that are remembered, to tell a late command from one about nothing."""


def object_id(kind: TaskKindName, name: str) -> str:
    """Return the id of a task as an object: tasks of several kinds may share a name."""
    return f"{kind}/{name}"


# ------------------------------------------------------------------------------------- commands


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Run this task, as the digest says that it is; a later one replaces it."""

    kind: TaskKindName
    name: str
    digest: str
    """Of everything that the task is built from: what is equal needs no restart."""

    @property
    def id(self) -> str:
        return object_id(self.kind, self.name)


class Compact(msgspec.Struct, frozen=True, kw_only=True, tag="compact"):
    """What lies below `since` is not needed any more; None: nothing of it is, so drop it."""

    id: str
    since: int | None = None


Command: TypeAlias = Put | Compact


class CommandOutcome(enum.Enum):
    """What became of a command."""

    APPLIED = "it changed the state"
    KEPT = "the object is like that already"
    DROPPED = "the object was dropped before"
    REGRESSION = "more was given up before"
    UNKNOWN = "there is no such object, and none is remembered"
    FOREIGN = "the object belongs to the other domain"
    FENCED = "a newer session has the domain"


# ---------------------------------------------------------------------------------------- diffs


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """A process has started, and runs the cluster from here on."""

    holder: str
    """Which one that is, for people."""


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """A controller has connected: its session is the domain's from here on."""

    domain: Domain
    nonce: bytes
    """Made up for this connection."""
    holder: str
    """Who that is, for people."""


class Reconcile(msgspec.Struct, frozen=True, kw_only=True, tag="reconcile"):
    """All that the domain is to run, as one entry: what it does not mention is dropped."""

    domain: Domain
    epoch: int
    batch: tuple[Command, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, tag="change"):
    """Commands of a session after its batch."""

    domain: Domain
    epoch: int
    commands: tuple[Command, ...]


Diff: TypeAlias = Claim | Open | Reconcile | Change


# ---------------------------------------------------------------------------------------- state


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """The newest session of a domain."""

    epoch: int
    nonce: bytes
    holder: str


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is to run."""

    kind: TaskKindName
    name: str
    digest: str
    dataflow_id: int
    since: int = 0

    @property
    def id(self) -> str:
        return object_id(self.kind, self.name)

    @property
    def domain(self) -> Domain:
        return domain_of(self.kind)


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, who says so, and the next id. Invariant: all ids given so far are below it."""

    sessions: Mapping[Domain, SessionState] = {}
    objects: Mapping[str, Object] = {}
    dropped: Mapping[str, int] = {}
    """The last dataflow id of dropped objects, the latest at the end."""
    next_id: int = 1
    claim: int = 0
    """The number of the last claim; 0: there was none."""
    claimed_by: str = ""

    def epoch_of(self, domain: Domain) -> int:
        session = self.sessions.get(domain)
        return 0 if session is None else session.epoch

    def objects_of(self, domain: Domain) -> list[Object]:
        return [each for each in self.objects.values() if each.domain is domain]


def step(state: ClusterState, diff: Diff) -> tuple[ClusterState, tuple[CommandOutcome, ...]]:
    """Return the state after `diff`, and what became of each of its commands."""
    if isinstance(diff, Claim):
        claimed = msgspec.structs.replace(state, claim=state.claim + 1, claimed_by=diff.holder)
        return claimed, ()
    if isinstance(diff, Open):
        opened = SessionState(
            epoch=state.epoch_of(diff.domain) + 1, nonce=diff.nonce, holder=diff.holder
        )
        sessions = {**state.sessions, diff.domain: opened}
        return msgspec.structs.replace(state, sessions=sessions), ()
    commands = diff.batch if isinstance(diff, Reconcile) else diff.commands
    if diff.epoch != state.epoch_of(diff.domain):
        return state, (CommandOutcome.FENCED,) * len(commands)
    if isinstance(diff, Reconcile):
        return reconcile(state, diff.domain, commands)
    change = _Change(state, diff.domain)
    outcomes = tuple(map(change.do, commands))
    return change.result(), outcomes


def reconcile(
    state: ClusterState, domain: Domain, batch: Sequence[Command]
) -> tuple[ClusterState, tuple[CommandOutcome, ...]]:
    """Make `batch` all that the domain runs: as if by dropping everything and then doing `batch`,
    but what is equal before and after goes on, with its id.
    """
    change = _Change(state, domain)
    wanted: dict[str, tuple[int, Put]] = {}
    given_up: list[str] = []
    since: list[tuple[int, Compact]] = []
    outcomes: dict[int, CommandOutcome] = {}
    for at, command in enumerate(batch):
        match command:
            case Put() if domain_of(command.kind) is domain:
                if (earlier := wanted.pop(command.id, None)) is not None:
                    outcomes[earlier[0]] = CommandOutcome.KEPT  # the later definition counts
                wanted[command.id] = (at, command)
            case Put():
                outcomes[at] = CommandOutcome.FOREIGN
            case Compact(since=None):
                if (put := wanted.pop(command.id, None)) is not None:
                    outcomes[put[0]] = CommandOutcome.DROPPED
                    given_up.append(command.id)
                outcomes[at] = change.missing(command.id) or CommandOutcome.APPLIED
            case Compact() if command.id in wanted:
                since.append((at, command))
            case Compact():
                outcomes[at] = change.missing(command.id) or CommandOutcome.DROPPED
    for each in state.objects_of(domain):
        if each.id not in wanted:
            change.drop(each.id)
    for id_ in given_up:
        if id_ not in wanted and id_ not in state.objects:
            change.remember_dropped(id_)
    for at, last_put in wanted.values():
        outcomes[at] = change.do(last_put)
    for at, compact in since:
        outcomes[at] = change.do(compact) if compact.id in wanted else CommandOutcome.DROPPED
    return change.result(), tuple(outcomes[at] for at in range(len(batch)))


class _Change:
    """A state that commands of one domain are being applied to."""

    def __init__(self, state: ClusterState, domain: Domain) -> None:
        self._state = state
        self._domain = domain
        self._objects = dict(state.objects)
        self._dropped = dict(state.dropped)
        self._next_id = state.next_id

    def do(self, command: Command) -> CommandOutcome:
        if isinstance(command, Put):
            return self._put(command)
        if (why := self.missing(command.id)) is not None:
            return why
        if command.since is not None:
            return self._compact(command.id, command.since)
        self.drop(command.id)
        return CommandOutcome.APPLIED

    def missing(self, id_: str) -> CommandOutcome | None:
        """Return why there is nothing to do for an object; None if this domain runs it."""
        found = self._objects.get(id_)
        if found is None:
            return CommandOutcome.DROPPED if id_ in self._dropped else CommandOutcome.UNKNOWN
        return None if found.domain is self._domain else CommandOutcome.FOREIGN

    def drop(self, id_: str) -> None:
        self.remember_dropped(id_, self._objects.pop(id_).dataflow_id)

    def remember_dropped(self, id_: str, dataflow_id: int = 0) -> None:
        """Remember that there is no such object any more; 0: it was never run."""
        if dataflow_id or id_ not in self._dropped:
            self._dropped.pop(id_, None)  # to the end: the oldest are forgotten first
            self._dropped[id_] = dataflow_id
        while len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]

    def result(self) -> ClusterState:
        return msgspec.structs.replace(
            self._state, objects=self._objects, dropped=self._dropped, next_id=self._next_id
        )

    def _put(self, put: Put) -> CommandOutcome:
        if domain_of(put.kind) is not self._domain:
            return CommandOutcome.FOREIGN
        before = self._objects.get(put.id)
        if before is not None and before.digest == put.digest:
            return CommandOutcome.KEPT
        self._dropped.pop(put.id, None)
        self._objects[put.id] = Object(
            kind=put.kind,
            name=put.name,
            digest=put.digest,
            dataflow_id=self._next_id,
            since=0 if before is None else before.since,
        )
        self._next_id += 1
        return CommandOutcome.APPLIED

    def _compact(self, id_: str, since: int) -> CommandOutcome:
        before = self._objects[id_]
        if since <= before.since:
            return CommandOutcome.KEPT if since == before.since else CommandOutcome.REGRESSION
        self._objects[id_] = msgspec.structs.replace(before, since=since)
        return CommandOutcome.APPLIED


# --------------------------------------------------------------------------------------- the log

_DIFFS: Final[msgspec.msgpack.Decoder[Diff]] = msgspec.msgpack.Decoder(Diff)
_STATES: Final = msgspec.msgpack.Decoder(ClusterState)
_encode = msgspec.msgpack.Encoder().encode


def log_key(cluster: str) -> str:
    """Return the key of a cluster's log."""
    return f"cluster/{cluster}"


class ClusterMachine:
    """The log's machine (`consensus.replica.Machine`)."""

    format = 1

    def initial(self) -> ClusterState:
        return ClusterState()

    def apply(self, state: ClusterState, diff: Diff, revision: int) -> ClusterState:
        return step(state, diff)[0]

    def encode_diff(self, diff: Diff) -> bytes:
        return _encode(diff)

    def decode_diff(self, data: bytes, format: int) -> Diff:  # noqa: A002
        return _DIFFS.decode(data)

    def encode_state(self, state: ClusterState) -> bytes:
        return _encode(state)

    def decode_state(self, data: bytes, format: int, revision: int) -> ClusterState:  # noqa: A002
        return _STATES.decode(data)
