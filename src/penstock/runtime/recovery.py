"""PURE: the durable state of a task, and how the next session continues from it.

A task's recovery log is a state log whose state is a map of keys to values. One `Persist` is one
diff: all of it becomes true, or none. What a leader has to know when it starts is decoded from the
map into a `Recovered`.

    key                                       value                                  written by
    FC:{journal}\\0{state key}\\0{producer}     producer frontier, cumulative          commit (join)
    FH:{journal}\\0{state key}\\0{producer}     the same, of the hinted transaction    hint
    AI                                        ACK intents of the last commit         commit
    MK:{state key}                            greatest packed key ever stored        hint (max)
    LS:{collection}                           newest source clock reported           hint (max)
    connector-state                           reduced JSON                           any, by patches
    trigger-params, trigger-params-hinted     variables awaiting delivery            commit, hint
    last-applied                              fingerprint and spec last applied      apply
    committed-close, hinted-close             clocks                                 commit, hint
    VK:{resource}                             least generation that may run          before apply
    CK:{resource}                             `backfill` of the catalog, as of then  before apply
    RK:{resource}                             request to fill it again that was met  before apply
    leader                                    the process that runs the task         taking over

**Hinted and committed.** A transaction's extents are *hinted* before anything visible
happens, and *committed* when it counts. In between it may or may not have reached the endpoint:
either the endpoint says that it did, and the hint is folded into what is committed, or exactly the
hinted extents are replayed.

**Between two sessions the catalog may change.** Positions are kept by *state key*, not by the index
of a binding: bindings may be added, removed, disabled and reordered. Entries of bindings that are
gone stay in the log and out of the session, and count all the same:

- A hinted transaction that the endpoint committed is folded in for *every* state key it hinted. A
  binding that is disabled just now finds its rows stored when it comes back.
- Of one that was not committed, the part of the bindings that are there is replayed. The rest never
  happened: it is read when the binding comes back.
- A backfill is a new state key: the resource and a *generation*, which rises by a higher `backfill`
  of the catalog, by a request, or by a change that the table cannot follow. It never goes down: the
  table is filled again for it, and positions under lower ones are dropped before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import msgspec
import numpy as np

from penstock.errors import PenstockError, UserError
from penstock.journal.transaction import Intents
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.json_order import Json
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.resume import PRUNE_BYTES, prepare_resume, prune_producers
from penstock.runtime.ops import TaskKindName
from penstock.runtime.patches import Patches, apply_patches
from penstock.runtime.patches import decode as decode_patches
from penstock.runtime.patches import encode as encode_patches

TASKS: Final = "task/"
"""The prefix of the keys of recovery logs."""


def recovery_key(log: str) -> str:
    """Return the key of the recovery log with this name (`log_name`)."""
    return f"{TASKS}{log}"


_LOGS: Final[Mapping[TaskKindName, str]] = {
    "capture": "=capture/",
    "derivation": "=derive/",
    "materialization": "",
}


def log_name(kind: TaskKindName, task: str) -> str:
    """Return the name of a task's recovery log: tasks of several kinds may share theirs."""
    return f"{_LOGS[kind]}{task}"


NO_INTENTS: Final = Intents()

UNKNOWN_KEY: Final = b"\xff"
"""A greatest key above every packed key. It means unknown: load every key."""

# ------------------------------------------------------------------------------------- persisting


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """One atomic record. What is absent changes nothing; deletes come before puts.

    Frontiers and keys are by the index of a binding; `Layout` gives them their durable names.
    """

    committed_close: Clock = NEVER
    committed_frontier: Frontier | None = None
    """Folded into what is committed: a delta."""
    ack_intents: Intents | None = None
    """Replaces those of the last commit."""
    hinted_close: Clock = NEVER
    hinted_frontier: Frontier | None = None
    """Replaces what was hinted."""
    commit_hinted: bool = False
    """All that was hinted is committed now, whichever bindings the session has."""
    patches: Patches = ()
    """Merged into the connector's state, in order."""
    max_keys: Mapping[int, bytes] = field(default_factory=dict)
    """Greatest packed keys by binding; the greater one is kept."""
    last_source_clocks: Mapping[str, Clock] = field(default_factory=dict)
    """Newest source clocks by collection; the later one is kept."""
    last_applied: bytes | None = None
    trigger_params: bytes | None = None
    delete_trigger_params: bool = False
    hinted_trigger_params: bytes | None = None
    delete_hinted_trigger_params: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The state that a session starts from."""

    committed_close: Clock = NEVER
    committed_frontier: Frontier = field(default_factory=lambda: EMPTY)
    ack_intents: Intents = NO_INTENTS
    hinted_close: Clock = NEVER
    hinted_frontier: Frontier = field(default_factory=lambda: EMPTY)
    connector_state: Json = field(default_factory=dict)
    max_keys: Mapping[int, bytes] = field(default_factory=dict)
    last_source_clocks: Mapping[str, Clock] = field(default_factory=dict)
    last_applied: bytes | None = None
    trigger_params: bytes | None = None
    hinted_trigger_params: bytes | None = None
    others_committed: bool = False
    """Positions are committed of bindings that this session does not have."""

    @property
    def resume(self) -> Frontier:
        """Where to read on; with unresolved hints, one transaction is replayed exactly."""
        return prepare_resume(self.committed_frontier, self.hinted_frontier)


# ------------------------------------------------------------------------------------- the log

Entries = Mapping[bytes, bytes]
"""The state of a recovery log."""

Op = tuple[Literal["put", "join", "max", "merge", "del", "del-prefix"], bytes, bytes]
"""`join` reduces a position into the one that is there: a hint that was resolved has a commit and
no place. `max` keeps the greater value as bytes, `merge` applies JSON merge patches to JSON."""

_COMMITTED: Final = b"FC:"
_HINTED: Final = b"FH:"
_INTENTS: Final = b"AI"
_MAX_KEY: Final = b"MK:"
_LAST_SOURCE: Final = b"LS:"
_STATE: Final = b"connector-state"
_TRIGGER: Final = b"trigger-params"
_TRIGGER_HINTED: Final = b"trigger-params-hinted"
_APPLIED: Final = b"last-applied"
_COMMITTED_CLOSE: Final = b"committed-close"
_HINTED_CLOSE: Final = b"hinted-close"
_LEAST_BACKFILL: Final = b"VK:"
_SEEN_BACKFILL: Final = b"CK:"
_MET_REQUEST: Final = b"RK:"
LEADER: Final = b"leader"
"""Says nothing of the task itself (`runtime.leadership`)."""

_PREFIX_BYTES: Final = 3
_CLOCK_BYTES: Final = 8
_PRODUCER_BYTES: Final = 6
_NOBODY: Final = 1 << 40
"""A producer for positions whose own is in their key."""

_encode = msgspec.msgpack.Encoder().encode
_decode_ops = msgspec.msgpack.Decoder(list[Op]).decode
_decode_entries = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode
_decode_position = msgspec.msgpack.Decoder(tuple[int, int, int]).decode


class MalformedLog(PenstockError):
    """A recovery log that holds what this release cannot read."""


class RecoveryMachine:
    """The meaning of a task's recovery log (`consensus.replica.Machine`)."""

    format = 1

    def initial(self) -> Entries:
        return {}

    def apply(self, state: Entries, diff: tuple[Op, ...], revision: int) -> Entries:
        """The entries after a record; `revision` does not matter here."""
        after = dict(state)
        for what, key, value in diff:
            match what:
                case "put":
                    after[key] = value
                case "join":
                    after[key] = _joined(after.get(key), value)
                case "max":
                    after[key] = max(after.get(key, b""), value)
                case "merge":
                    merged = apply_patches(_json(after.get(key, b"{}")), decode_patches(value))
                    after[key] = msgspec.json.encode(merged)
                case "del":
                    after.pop(key, None)
                case "del-prefix":
                    for stale in [old for old in after if old.startswith(key)]:
                        del after[stale]
        return after

    def encode_diff(self, diff: tuple[Op, ...]) -> bytes:
        return _encode(diff)

    def decode_diff(self, data: bytes, format: int) -> tuple[Op, ...]:  # noqa: A002
        return tuple(_decode_ops(data))

    def encode_state(self, state: Entries) -> bytes:
        return _encode(dict(sorted(state.items())))

    def decode_state(self, data: bytes, format: int, revision: int) -> Entries:  # noqa: A002
        return _decode_entries(data)


def _reads_all(binding: int, journal: str) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How often a resource was filled from its beginning, and for what."""

    current: int
    seen: int
    """The `backfill` of the catalog that counts; only a higher one fills the resource again."""
    met: int = 0
    """The request that was met last."""

    def next(self, *, backfill: int, request: int) -> int:
        """Return the generation to run, given the catalog's counter and the last request."""
        if backfill > self.seen or request not in (0, self.met):
            return max(self.current + 1, backfill)
        return self.current


def generations(entries: Entries) -> dict[str, Generation]:
    """Return what a recovery log knows of the resources that were ever filled, by name."""
    current = {name: _counter_in(value) for name, value in _under(entries, _LEAST_BACKFILL)}
    for key in filter(_is_of_binding, entries):
        resource, generation = split_state_key(_state_key_of(key))
        current[resource] = max(current.get(resource, 0), generation)
    seen = {name: _counter_in(value) for name, value in _under(entries, _SEEN_BACKFILL)}
    met = {name: _counter_in(value) for name, value in _under(entries, _MET_REQUEST)}
    return {
        name: Generation(current=at, seen=seen.get(name, at), met=met.get(name, 0))
        for name, at in current.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a binding was asked for when its generation was chosen."""

    backfill: int
    request: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The durable names of a task's bindings: their state keys, by index."""

    state_keys: Mapping[int, str]
    reads: Callable[[int, str], bool] = _reads_all
    """True if a binding reads a journal, as its source is selected now. Only what is read can be
    replayed."""
    wanted: Mapping[int, Wanted] = field(default_factory=dict)
    """Of bindings whose generation is kept in the log; it is their catalog's counter otherwise."""

    def encode(self, persist: Persist, entries: Entries) -> tuple[Op, ...]:
        """Encode a `Persist` as the record to append to these entries."""
        return tuple(self._ops(persist, entries))

    def _ops(self, persist: Persist, entries: Entries) -> Iterator[Op]:
        if persist.ack_intents is not None:
            yield "put", _INTENTS, persist.ack_intents.encode()
        if persist.committed_close:
            yield "put", _COMMITTED_CLOSE, _clock_out(persist.committed_close)
        if persist.committed_frontier is not None:
            yield from self._positions("join", _COMMITTED, persist.committed_frontier)
        if persist.commit_hinted:
            for key in sorted(entries):
                if key.startswith(_HINTED):
                    yield "join", _COMMITTED + key.removeprefix(_HINTED), entries[key]
            yield "del-prefix", _HINTED, b""
        if persist.patches:
            yield "merge", _STATE, encode_patches(persist.patches)
        if persist.hinted_close:
            yield "put", _HINTED_CLOSE, _clock_out(persist.hinted_close)
        if persist.hinted_frontier is not None:
            yield "del-prefix", _HINTED, b""
            yield from self._positions("put", _HINTED, persist.hinted_frontier)
        if persist.last_applied is not None:
            yield "put", _APPLIED, persist.last_applied
        for binding, key in sorted(persist.max_keys.items()):
            yield "max", _MAX_KEY + self.state_keys[binding].encode(), key
        if persist.delete_trigger_params:
            yield "del", _TRIGGER, b""
        if persist.trigger_params is not None:
            yield "put", _TRIGGER, persist.trigger_params
        if persist.delete_hinted_trigger_params:
            yield "del", _TRIGGER_HINTED, b""
        if persist.hinted_trigger_params is not None:
            yield "put", _TRIGGER_HINTED, persist.hinted_trigger_params
        for collection, clock in sorted(persist.last_source_clocks.items()):
            yield "max", _LAST_SOURCE + collection.encode(), _clock_out(clock)

    def _positions(
        self, what: Literal["put", "join"], prefix: bytes, frontier: Frontier
    ) -> Iterator[Op]:
        for read in frontier:
            for entry in read.producers:
                key = self._key(prefix, read.journal, read.binding, entry.producer)
                yield what, key, _position_out(entry)

    def _key(self, prefix: bytes, journal: str, binding: int, producer: Producer) -> bytes:
        place = f"{journal}\0{self.state_keys[binding]}\0".encode()
        return prefix + place + int(producer).to_bytes(_PRODUCER_BYTES, "big")

    def decode(self, entries: Entries) -> Recovered:
        """Decode what a recovery log says of these bindings. Keys of other kinds are left alone."""
        bindings = {state_key: index for index, state_key in self.state_keys.items()}
        max_keys = {
            bindings[name]: value for name, value in _under(entries, _MAX_KEY) if name in bindings
        }
        intents = entries.get(_INTENTS)
        return Recovered(
            committed_close=_clock_of(entries, _COMMITTED_CLOSE),
            committed_frontier=_frontier(entries, _COMMITTED, bindings),
            ack_intents=Intents() if intents is None else Intents.decode(intents),
            hinted_close=_clock_of(entries, _HINTED_CLOSE),
            hinted_frontier=_frontier(entries, _HINTED, bindings, self.reads),
            connector_state=_json(entries.get(_STATE, b"{}")),
            max_keys=max_keys,
            last_source_clocks={
                name: _clock_in(value, name) for name, value in _under(entries, _LAST_SOURCE)
            },
            last_applied=entries.get(_APPLIED),
            trigger_params=entries.get(_TRIGGER),
            hinted_trigger_params=entries.get(_TRIGGER_HINTED),
            others_committed=any(
                _place(key, _COMMITTED)[1] not in bindings
                for key in entries
                if key.startswith(_COMMITTED)
            ),
        )

    def supersede(self, entries: Entries) -> tuple[Op, ...]:
        """Return the record that raised generations need before their tables are filled again.

        Raises `UserError` for one that went down: its positions would be those of a table that was
        filled again since.
        """
        known = {key: split_state_key(_state_key_of(key)) for key in entries if _is_of_binding(key)}
        before = generations(entries)
        record: list[Op] = []
        for index, state_key in sorted(self.state_keys.items()):
            resource, generation = split_state_key(state_key)
            was = before.get(resource)
            if was is not None and generation < was.current:
                raise _lowered(index, resource, generation, was.current)
            old = [key for key, of in known.items() if of[0] == resource and of[1] < generation]
            wanted = self.wanted.get(index)
            if old or wanted is not None:
                record.append(("max", _LEAST_BACKFILL + resource.encode(), _counter(generation)))
            record += [("del", key, b"") for key in sorted(old)]
            if wanted is not None:
                record.append(
                    ("put", _SEEN_BACKFILL + resource.encode(), _counter(wanted.backfill))
                )
            if wanted is not None and wanted.request:
                record.append(("put", _MET_REQUEST + resource.encode(), _counter(wanted.request)))
        return tuple(op for op in record if op[0] == "del" or entries.get(op[1]) != op[2])

    def rename(self, entries: Entries, renames: Mapping[int, str]) -> tuple[Op, ...]:
        """Return the record that gives bindings what is kept under the former name of a resource.

        `renames` are former names by binding. A name that nothing is kept under was moved before.
        """
        current = {split_state_key(state_key)[0] for state_key in self.state_keys.values()}
        filled = {split_state_key(_state_key_of(key))[0] for key in entries if _is_of_binding(key)}
        known = generations(entries)
        record: list[Op] = []
        for index, old in sorted(renames.items()):
            new, _ = split_state_key(self.state_keys[index])
            if old == new or old not in known:
                continue
            if old in current or {old, new} <= filled:
                raise _not_renamed(index, old, new, is_bound=old in current)
            record += _renamed(entries, old, new)
        return tuple(record)

    def forget(self, entries: Entries, kept: Frontier) -> tuple[Op, ...]:
        """Return the record that drops committed positions of these bindings that `kept` lacks."""
        wanted = {
            self._key(_COMMITTED, read.journal, read.binding, entry.producer)
            for read in kept
            for entry in read.producers
        }
        known = set(self.state_keys.values())
        return tuple(
            ("del", key, b"")
            for key in sorted(entries)
            if key.startswith(_COMMITTED)
            and key not in wanted
            and _place(key, _COMMITTED)[1] in known
        )


def last_applied(entries: Entries) -> bytes | None:
    """Return the task as it was applied last, if a log knows of it."""
    return entries.get(_APPLIED)


def has_progress(entries: Entries) -> bool:
    """True if a task has read or stored anything, by any binding, present or past."""
    known = entries.get(_STATE, b"{}") not in (b"{}", b"null")
    return known or any(key.startswith((_COMMITTED, _HINTED)) for key in entries)


def task_of(log: str) -> str:
    """Return the task whose recovery log has this name (`log_name`)."""
    return log.removeprefix(_LOGS["capture"]).removeprefix(_LOGS["derivation"])


def _frontier(
    entries: Entries,
    prefix: bytes,
    bindings: Mapping[str, int],
    reads_it: Callable[[int, str], bool] = _reads_all,
) -> Frontier:
    """Return the positions under a prefix, of bindings that are still there."""
    reads: dict[tuple[str, int], list[ProducerFrontier]] = {}
    for key, value in entries.items():
        if not key.startswith(prefix):
            continue
        journal, state_key, producer = _place(key, prefix)
        if state_key not in bindings or not reads_it(bindings[state_key], journal):
            continue
        entry = _position_in(value, producer)
        reads.setdefault((journal, bindings[state_key]), []).append(entry)
    return Frontier.gather(
        JournalFrontier(journal=journal, binding=binding, producers=tuple(producers))
        for (journal, binding), producers in reads.items()
    )


def _joined(before: bytes | None, value: bytes) -> bytes:
    """A committed position, further on. Hints above its commit were discharged: it is committed."""
    nobody = Producer(_NOBODY)
    entry = _position_in(value, nobody)
    if before is not None:
        entry = entry.reduce(_position_in(before, nobody))
    return _position_out(
        msgspec.structs.replace(entry, hinted_commit=NEVER) if entry.is_unresolved else entry
    )


def _position_out(entry: ProducerFrontier) -> bytes:
    return _encode((entry.last_commit, entry.hinted_commit, entry.offset))


def _position_in(value: bytes, producer: Producer) -> ProducerFrontier:
    last_commit, hinted_commit, offset = _decode_position(value)
    return ProducerFrontier(
        producer=producer,
        last_commit=Clock(last_commit),
        hinted_commit=Clock(hinted_commit),
        offset=offset,
    )


def _place(key: bytes, prefix: bytes) -> tuple[str, str, Producer]:
    """Parse the key of a position. Names have no NUL, but the bytes of a producer may."""
    place, producer = key[len(prefix) : -_PRODUCER_BYTES], key[-_PRODUCER_BYTES:]
    try:
        journal, state_key, _ = place.decode().split("\0")
        return journal, state_key, Producer(int.from_bytes(producer, "big"))
    except ValueError as error:
        raise MalformedLog(
            "a position has a malformed key", where=repr(key), why=str(error)
        ) from None


def _is_of_binding(key: bytes) -> bool:
    return key.startswith((_COMMITTED, _HINTED, _MAX_KEY))


def _state_key_of(key: bytes) -> str:
    if key.startswith(_MAX_KEY):
        return key.removeprefix(_MAX_KEY).decode()
    return _place(key, _COMMITTED)[1]  # prefixes of positions are of one length


def split_state_key(state_key: str) -> tuple[str, int]:
    """Split a state key into its resource and its generation."""
    resource, _, counter = state_key.rpartition(".v")
    return (resource, int(counter)) if counter.isdecimal() else (state_key, 0)


def _renamed(entries: Entries, old: str, new: str) -> Iterator[Op]:
    """Yield what moves all that is kept under one resource to another."""
    for key, value in sorted(entries.items()):
        prefix = key[:_PREFIX_BYTES]
        if _is_of_binding(key):
            resource, generation = split_state_key(_state_key_of(key))
            state_key = f"{new}.v{generation}"
            if resource != old:
                continue
            if prefix == _MAX_KEY:
                moved = prefix + state_key.encode()
            else:
                journal, _, _ = _place(key, prefix)
                moved = prefix + f"{journal}\0{state_key}\0".encode() + key[-_PRODUCER_BYTES:]
        elif prefix in (_LEAST_BACKFILL, _SEEN_BACKFILL, _MET_REQUEST) and (
            key[_PREFIX_BYTES:] == old.encode()
        ):
            moved = prefix + new.encode()
        else:
            continue
        yield "del", key, b""
        yield "put", moved, value


def _not_renamed(index: int, old: str, new: str, *, is_bound: bool) -> UserError:
    return UserError(
        f"binding {index} cannot go on as {new} from where {old} was",
        where=f"binding {index}: renamedFrom",
        why=f"another binding of the task is {old}" if is_bound else "both have stored documents",
        fix="remove renamedFrom, or name the resource that the binding had before",
    )


def _counter(counter: int) -> bytes:
    return counter.to_bytes(_CLOCK_BYTES, "big")  # bytes sort as counters do


def _counter_in(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _lowered(index: int, resource: str, backfill: int, least: int) -> UserError:
    return UserError(
        f"`backfill` of binding {index} went down to {backfill}: it was {least} before",
        where=f"resource {resource}",
        why="the table was emptied for the higher counter, and what the lower one had stored there "
        "is gone",
        fix=f"`backfill: {least}` goes on with the table as it is, "
        f"`backfill: {least + 1}` fills it anew",
    )


def _under(entries: Entries, prefix: bytes) -> Iterator[tuple[str, bytes]]:
    return (
        (key[len(prefix) :].decode(), value)
        for key, value in sorted(entries.items())
        if key.startswith(prefix)
    )


def _clock_out(clock: Clock) -> bytes:
    return clock.to_bytes(_CLOCK_BYTES, "big")  # bytes sort as clocks do


def _clock_in(value: bytes, name: str) -> Clock:
    if len(value) != _CLOCK_BYTES:
        raise MalformedLog(f"a clock has {_CLOCK_BYTES} bytes, not {len(value)}", where=name)
    return Clock(int.from_bytes(value, "big"))


def _clock_of(entries: Entries, key: bytes) -> Clock:
    value = entries.get(key)
    return NEVER if value is None else _clock_in(value, key.decode())


def _json(data: bytes) -> Json:
    try:
        value: Json = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise MalformedLog("connector state is not JSON", why=str(error)) from None
    return value


# --------------------------------------------------------------------------------- reconciliation


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCheckpoint:
    """The record that an endpoint which commits by itself stores with its rows, atomically."""

    close: Clock
    """Close clock of the transaction it committed last."""
    ack_intents: Intents = NO_INTENTS

    def encode(self) -> bytes:
        return _encode((1, self.close, self.ack_intents.encode()))

    @classmethod
    def decode(cls, data: bytes) -> EndpointCheckpoint:
        """Decode what `encode` wrote."""
        try:
            version, close, intents = _decode_checkpoint(data)
        except msgspec.MsgspecError as error:
            raise MalformedLog(
                "the endpoint's checkpoint cannot be read",
                why=str(error),
                fix="something else wrote to penstock_checkpoints; restore it, or backfill",
            ) from None
        if version != 1:
            raise MalformedLog(
                f"the endpoint's checkpoint has format {version}; this release reads 1",
                fix="run the release that wrote it",
            )
        return cls(close=Clock(close), ack_intents=Intents.decode(intents))


_decode_checkpoint = msgspec.msgpack.Decoder(tuple[int, int, bytes]).decode


class EndpointMismatch(PenstockError):
    """The endpoint is at a transaction that the recovery log does not know."""


def reconcile(
    recovered: Recovered, endpoint: EndpointCheckpoint | None, *, endpoint_commits: bool
) -> Persist | None:
    """Return what to persist before reading on, given the endpoint's checkpoint; None in sync.

    An endpoint that commits by itself is never behind the log's last commit, and ahead of it by the
    hinted transaction at most. If it is ahead, that transaction counts: it is folded in, and its
    ACKs and triggers are still to be done.
    """
    ahead = _ahead(recovered, endpoint, endpoint_commits=endpoint_commits)
    return ahead or _uneventful(recovered)


def _uneventful(recovered: Recovered) -> Persist | None:
    """Return what to persist of a hinted transaction that read no commit: none of it is replayed.

    It is as good as committed, and a session that resumes behind it reports only what it hears
    itself. Spans that were open there would be forgotten with the next commit.
    """
    resume = recovered.resume
    if resume.unresolved_hints or resume == recovered.committed_frontier:
        return None
    return Persist(committed_frontier=recovered.hinted_frontier)


def _ahead(
    recovered: Recovered, endpoint: EndpointCheckpoint | None, *, endpoint_commits: bool
) -> Persist | None:
    """Return what to persist if the endpoint has committed the hinted transaction.

    Where no position is left, every table is filled anew, and nothing depends on the endpoint's
    past.
    """
    depends = bool(recovered.committed_frontier) or recovered.others_committed
    if endpoint is None:
        if endpoint_commits and recovered.committed_close and depends:
            raise EndpointMismatch(
                "the endpoint has lost its checkpoint",
                why=f"the recovery log committed {recovered.committed_close:#x}, "
                "and the endpoint committed nothing",
                fix="was the database replaced, or emptied? Bring it back, or raise `backfill` of "
                "all bindings, also of disabled ones, to build their tables anew",
            )
        return None
    if endpoint.close == recovered.committed_close:
        return None
    if endpoint.close == recovered.hinted_close:
        return Persist(
            committed_close=recovered.hinted_close,
            commit_hinted=True,
            ack_intents=endpoint.ack_intents,
            trigger_params=recovered.hinted_trigger_params,
            delete_hinted_trigger_params=True,
        )
    if not depends:
        return None
    raise EndpointMismatch(
        f"the endpoint committed transaction {endpoint.close:#x}, which this task does not know",
        why=f"the recovery log committed {recovered.committed_close:#x} "
        f"and hinted {recovered.hinted_close:#x}",
        fix="was the endpoint, or the consensus store, restored from a backup? "
        "Raise `backfill` of all bindings, also of disabled ones, to build their tables anew",
    )


def prune(
    recovered: Recovered,
    *,
    byte_position: Callable[[str, int], int],
    retired: Container[Producer] = frozenset(),
    prune_bytes: int = PRUNE_BYTES,
) -> Recovered:
    """Drop the producers that will not be heard of again; those that were hinted stay."""
    hinted = recovered.hinted_frontier.table
    # A hint that nothing can have read yet guards every entry that was hinted, resolved or not.
    guards = replace(
        hinted.without_bytes(),
        hinted_commit=np.full(len(hinted.producer), CLOCK_MAX),
        last_commit=np.zeros(len(hinted.producer), np.int64),
        offset=np.zeros(len(hinted.producer), np.int64),
    )
    guarded = recovered.committed_frontier.reduce(Frontier(table=guards))
    kept = prune_producers(
        guarded, byte_position=byte_position, retired=retired, prune_bytes=prune_bytes
    )
    return replace(recovered, committed_frontier=_common(recovered.committed_frontier, kept))


def _common(frontier: Frontier, kept: Frontier) -> Frontier:
    """Return the entries of `frontier` that `kept` has too."""
    mine, _ = frontier.table.join(kept.table)
    rows = np.zeros(len(frontier.table.producer), np.bool_)
    rows[mine] = True
    return replace(frontier, table=frontier.table.take(rows))
