"""PURE: lets the shards of a task find each other, and agree on what they are.

Planned: no command reaches this module yet. It is for the cluster's leader service, where shards
of one task join from several machines; today a task's shards are tasks of one Spark job.

Every shard reads the topology of its task from the catalog, at some revision, and sends it to the
leader: a `Join`. The session begins when all shards have sent the *same* one. If two differ,
one of them read an older revision: all are sent away, to read again at the newest revision
that any of them has seen, and so they converge without a timeout.

A shard that went away leaves its slot taken. Its next join is then a disagreement, everybody
retries, and the second round is clean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.errors import PenstockError


class InvalidJoin(PenstockError):
    """A join that no shard of a sound topology sends; it is not even parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """A shard's labels in the catalog; alike on all shards but for the ranges."""

    task: str
    build: str = ""
    stats_journal: str = ""
    key_begin: int = 0
    r_clock_begin: int = 0
    flags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyMember:
    """One member of a topology."""

    id: str
    host: str
    """Where it is assigned; empty while it is not."""
    create_revision: int = 0
    """Revision of its assignment: another one is another incarnation."""
    labels: Labels | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A shard presents itself, and the topology as it knows it."""

    revision: int
    """Revision of the catalog at which the topology was read."""
    shards: tuple[TopologyMember, ...]
    """Ordered by (key begin, r-clock begin)."""
    shard_index: int
    work_dir: str
    endpoint: str = ""
    leader_endpoint: str = ""

    @property
    def task(self) -> str:
        """The name under which to meet; of a join that passed `check`."""
        labels = self.shards[0].labels
        return labels.task if labels else ""

    def check(self) -> None:
        """Refuse what cannot be meant. That ranges tile the key space is the shuffle's to check."""
        if not self.shards:
            raise InvalidJoin("a join without shards")
        if not 0 <= self.shard_index < len(self.shards):
            raise InvalidJoin(
                f"a join as shard {self.shard_index} of a task that has {len(self.shards)}"
            )
        if not self.work_dir:
            raise InvalidJoin("a join without a working directory")
        for index, shard in enumerate(self.shards):
            where = f"shard {index} of the topology"
            if not shard.id:
                raise InvalidJoin("a join names a shard without an id", where=where)
            if not shard.host:
                raise InvalidJoin("a join names a shard without a host", where=where)
            if shard.labels is None:
                raise InvalidJoin("a join names a shard without labels", where=where)
            if not shard.labels.task:
                raise InvalidJoin("a join names a shard without a task", where=where)
            if shard.labels.task != self.task:
                raise InvalidJoin(
                    f"a join names shards of both {self.task} and {shard.labels.task}", where=where
                )


# ------------------------------------------------------------------------------------ the leader


@dataclass(frozen=True, slots=True)
class Parked:
    """The joins of a task that wait for the others: a slot for each shard, at least one taken."""

    slots: tuple[Join | None, ...]

    @property
    def joins(self) -> tuple[Join, ...]:
        return tuple(join for join in self.slots if join is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Parked: others are still to come."""

    filled: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllJoined:
    """All shards agree: a session begins. By index, whatever the order of arrival."""

    joins: tuple[Join, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """All of these are to be released: `Joined(max_revision)`, then the end of the stream."""

    joins: tuple[Join, ...]
    """The parked ones by index, then the one that did not fit."""

    @property
    def max_revision(self) -> int:
        return max(join.revision for join in self.joins)


Outcome: TypeAlias = Pending | AllJoined | Disagreement


def register(parked: Parked | None, join: Join) -> tuple[Parked | None, Outcome]:
    """Let one more shard of a task in: what is parked then, and what came of it.

    Revisions are not compared: a topology may have been read twice at different ones.
    """
    join.check()
    if parked is None:
        parked = Parked((None,) * len(join.shards))
    elif not _agrees(parked, join):
        return None, Disagreement(joins=(*parked.joins, join))
    at = join.shard_index
    parked = replace(parked, slots=(*parked.slots[:at], join, *parked.slots[at + 1 :]))
    if len(parked.joins) < len(parked.slots):
        return parked, Pending(filled=len(parked.joins), target=len(parked.slots))
    return None, AllJoined(joins=parked.joins)


def _agrees(parked: Parked, join: Join) -> bool:
    return (
        join.shard_index < len(parked.slots)
        and parked.slots[join.shard_index] is None
        and join.shards == parked.joins[0].shards
    )


# ------------------------------------------------------------------------------------- the shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The leader's answer: zero if all agree, else the revision to read the topology at, again."""

    max_revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTopologyAt:
    """Wait until the catalog is at this revision, and read the topology anew."""

    revision: int


def await_assignment(
    shards: Iterable[TopologyMember], observed_revision: int
) -> ReadTopologyAt | None:
    """Return when to look again, until every shard of the task is assigned; then None: join."""
    if all(shard.host for shard in shards):
        return None
    return ReadTopologyAt(revision=observed_revision + 1)


def after_joined(joined: Joined, rest: Sequence[object] = ()) -> ReadTopologyAt | None:
    """Return what a shard does about the leader's answer and what followed it; None: go on."""
    if joined.max_revision == 0:
        return None
    if rest:
        raise PenstockError(
            "the leader sent a shard away, and then went on talking",
            why=f"expected the end of the stream, got {type(rest[0]).__name__}",
        )
    return ReadTopologyAt(revision=joined.max_revision)
