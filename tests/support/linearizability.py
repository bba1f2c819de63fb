"""Check whether a correct store could have produced a history.

Compare-and-set names the slot that an entry takes, and tokens are unique, so the order of a key's
versions is known and needs no search. What remains is time: version n became the head at some
instant c_n, and every answer narrows c_n down. L_n is the latest instant before which it cannot
have been the head: its writer had not asked yet, a read still saw an older head, or the previous
version was not the head yet either. U_n is the earliest instant by which it must have been: its
writer had its answer, a read saw it or a later version, or the next version existed. The commits
and linearizable reads of a key are possible iff L_n <= U_n for all n, which takes one pass in each
direction.

Mismatches, truncations, stale heads, atomic batches and revisions add rules of their own. Small
histories also go through an exact search (`exact.py`), which judges all operations of a key
together and keeps this module honest.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from support import exact
from support.history import (
    Cas,
    Head,
    Op,
    Outcome,
    Scan,
    Stream,
    Truncate,
    Version,
)

EXACT_OPS_MAX = 1500
"""Keys with more operations than this are not searched: the search may be exponential."""


class Rule(enum.Enum):
    """A rule that a store must never break."""

    TWO_ENTRIES = "a slot held two different entries"
    PHANTOM = "an entry is in the log that nobody wrote there"
    ORDER = "an acknowledged entry was missing later, or a read was out of date"
    SPURIOUS_MISMATCH = "a compare-and-set lost although the head was what it expected"
    HOLE = "entries are missing from the middle of the log"
    FLOOR = "truncated entries came back"
    STALE_HEAD = "a committer returned a head older than one it had returned before"
    TORN_BATCH = "an atomic batch happened in part"
    REVISION = "revisions disagree with the order of commits"
    NOT_LINEARIZABLE = "no order of the operations explains all answers"
    STREAM = "a subscription has a gap, or delivered something else than the log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    rule: Rule
    key: str
    detail: str

    def __str__(self) -> str:
        return f"{self.key}: {self.rule.value}: {self.detail}"


@dataclass(slots=True)
class _Log:
    """What all operations together prove about one key."""

    key: str
    ops: list[Op]
    writers: dict[str, Op] = field(default_factory=dict)
    """Maps a token to the compare-and-set that carried it."""
    versions: dict[int, Version] = field(default_factory=dict)
    head: int = -1
    """The highest slot known to be taken."""
    after: list[float] = field(default_factory=list)
    """L_n."""
    before: list[float] = field(default_factory=list)
    """U_n."""


def check(ops: Iterable[Op], streams: Iterable[Stream] = ()) -> list[Violation]:
    """Return every violation in a history; none if it is possible."""
    by_key: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        by_key[op.key].append(op)
    logs: dict[str, _Log] = {}
    found: list[Violation] = []
    for key, mine in sorted(by_key.items()):
        logs[key] = log = _Log(key, mine)
        found += _collect(log)
        _bound(log)
        found += _check_order(log)
        found += _check_floor(log)
        found += _check_stale_heads(log)
        if len(mine) <= EXACT_OPS_MAX and not exact.explain(mine, log.versions):
            found.append(_violation(Rule.NOT_LINEARIZABLE, log, f"{len(mine)} operations"))
    found += _check_mismatches(logs)
    found += _check_batches(logs)
    found += _check_revisions(logs)
    for stream in streams:
        found += _check_stream(stream, logs.get(stream.key))
    return found


def _violation(rule: Rule, log: _Log, detail: str) -> Violation:
    return Violation(rule=rule, key=log.key, detail=detail)


# ------------------------------------------------------------------------------ entries and slots


def _seen(op: Op) -> Sequence[Version]:
    """Return the entries that `op` proves to be in the log."""
    if op.outcome is not Outcome.OK:
        return ()
    match op.call:
        case Cas(seqno=seqno, token=token):
            return (Version(seqno, token),)
        case Head(seen=Version() as version):
            return (version,)
        case Scan(seen=versions):
            return versions
        case _:
            return ()


def _collect(log: _Log) -> Iterator[Violation]:
    for op in log.ops:
        if isinstance(op.call, Cas):
            log.writers[op.call.token] = op
    for op in log.ops:
        for version in _seen(op):
            known = log.versions.setdefault(version.seqno, version)
            if known.token != version.token:
                detail = f"entry {version.seqno} was {known.token}, then {version.token}"
                yield _violation(Rule.TWO_ENTRIES, log, f"{detail} ({_describe(op)})")
            elif known.revision == 0:
                log.versions[version.seqno] = version
            elif version.revision not in (0, known.revision):
                detail = f"entry {version.seqno}: {known.revision}, then {version.revision}"
                yield _violation(Rule.REVISION, log, detail)
        if op.outcome is Outcome.OK and isinstance(op.call, Truncate):
            log.head = max(log.head, op.call.seqno)
    log.head = max(log.head, *log.versions, -1)
    for seqno, version in sorted(log.versions.items()):
        writer = log.writers.get(version.token)
        if writer is None or not isinstance(writer.call, Cas) or writer.call.seqno != seqno:
            yield _violation(Rule.PHANTOM, log, f"entry {seqno} is {version.token}")
        elif writer.outcome in (Outcome.MISMATCH, Outcome.FAILED):
            detail = f"entry {seqno} is {version.token}, although its writer got another answer"
            yield _violation(Rule.PHANTOM, log, f"{detail} ({_describe(writer)})")


# ------------------------------------------------------------------------------------ time bounds


def _heads(op: Op) -> tuple[int | None, int | None]:
    """Return the (lowest, highest) head that a linearizable operation proves at its instant."""
    match op.outcome, op.call:
        case Outcome.OK, Head(fresh=True, seen=seen):
            head = -1 if seen is None else seen.seqno
            return head, head
        case Outcome.OK, Scan(seen=()) as scan:
            return None, scan.from_ - 1 if scan.complete else None
        case Outcome.OK, Scan(seen=(*_, last)) as scan:
            return last.seqno, last.seqno if scan.complete else None
        case Outcome.OK, Head(fresh=False, seen=Version(seqno)):
            return seqno, None
        case Outcome.OK, Truncate(seqno=seqno):
            return seqno, None
        case Outcome.MISMATCH, Truncate(seqno=seqno):
            return None, seqno - 1
        case _:
            return None, None


def _bound(log: _Log) -> None:
    """Compute L_n and U_n for every taken slot, and for the one after the last."""
    slots = log.head + 2
    after, before = [-math.inf] * slots, [math.inf] * slots
    claims: dict[int, float] = {}
    for op in log.ops:
        if isinstance(op.call, Cas) and op.outcome in (Outcome.OK, Outcome.UNKNOWN):
            claims[op.call.seqno] = min(claims.get(op.call.seqno, math.inf), op.invoke)
            if op.outcome is Outcome.OK:
                before[op.call.seqno] = min(before[op.call.seqno], op.back)
        at_least, at_most = _heads(op)
        if at_least is not None and 0 <= at_least < slots:
            before[at_least] = min(before[at_least], op.back)
        if at_most is not None and at_most + 1 < slots:
            after[at_most + 1] = max(after[at_most + 1], op.invoke)
    for seqno in range(slots):
        version = log.versions.get(seqno)
        writer = log.writers.get(version.token) if version else None
        # No read saw a slot that was truncated early: any writer that asked for it may have it.
        asked = writer.invoke if writer else claims.get(seqno, math.inf)
        after[seqno] = max(after[seqno], asked, after[seqno - 1] if seqno else -math.inf)
    for seqno in range(slots - 2, -1, -1):
        before[seqno] = min(before[seqno], before[seqno + 1])
    log.after, log.before = after, before


def _check_order(log: _Log) -> Iterator[Violation]:
    for seqno in range(log.head + 1):
        if log.after[seqno] > log.before[seqno]:
            late = (log.after[seqno] - log.before[seqno]) / 1e6
            yield _violation(
                Rule.ORDER,
                log,
                f"entry {seqno} was not there yet {late:.3f} ms after it had been there",
            )


def _check_mismatches(logs: Mapping[str, _Log]) -> Iterator[Violation]:
    """An atomic batch loses if one of its slots was not next: one reason is enough."""
    reasons: dict[str, list[bool]] = defaultdict(list)
    lost: dict[str, Op] = {}
    for log in logs.values():
        for op in log.ops:
            if op.outcome is Outcome.MISMATCH and isinstance(op.call, Cas):
                name = op.call.batch or op.call.token
                reasons[name].append(not _certainly_next(log, op.call.seqno, op))
                lost[name] = op
    for name, op in lost.items():
        if not any(reasons[name]):
            yield _violation(Rule.SPURIOUS_MISMATCH, logs[op.key], f"{name} ({_describe(op)})")


def _certainly_next(log: _Log, seqno: int, op: Op) -> bool:
    """True if `seqno` was the slot after the head for the whole duration of `op`."""
    if seqno > log.head + 1:
        return False
    expected_since = log.before[seqno - 1] if seqno else -math.inf
    return expected_since <= op.invoke and op.back < log.after[seqno]


# ----------------------------------------------------------------------------------- truncation


def _check_floor(log: _Log) -> Iterator[Violation]:
    """Scans are contiguous; the floor only rises, and only to where an operation truncated."""
    asked: dict[int, int] = {}
    raised: list[tuple[int, int]] = []  # (instant, floor): from then on the floor is at least this
    lows: list[
        tuple[int, int, Op]
    ] = []  # (instant, floor): then or later the floor was at most this
    jumps: list[tuple[int, int, Op]] = []  # scanned from the first, began at the second
    for op in log.ops:
        match op.call:
            case Truncate(seqno=seqno) if op.outcome in (Outcome.OK, Outcome.UNKNOWN):
                asked[seqno] = min(asked.get(seqno, op.invoke), op.invoke)
                if op.outcome is Outcome.OK:
                    raised.append((op.back, seqno))
            case Scan(from_=from_, seen=(first, *_) as seen) if op.outcome is Outcome.OK:
                lows.append((op.invoke, first.seqno, op))
                if first.seqno > from_:
                    raised.append((op.back, first.seqno))
                    jumps.append((from_, first.seqno, op))
                if any(b.seqno != a.seqno + 1 for a, b in itertools.pairwise(seen)):
                    yield _violation(Rule.HOLE, log, f"inside a scan ({_describe(op)})")
            case _:
                pass
    for from_, floor, op in jumps:
        if asked.get(floor, math.inf) > op.back:
            detail = f"asked from {from_}, began at {floor}, and nobody truncated there"
            yield _violation(Rule.HOLE, log, f"{detail} ({_describe(op)})")
    highest, raised_so_far = -1, iter(sorted(raised))
    pending = next(raised_so_far, None)
    for invoke, floor, op in sorted(lows, key=lambda low: low[:2]):
        while pending is not None and pending[0] < invoke:
            highest = max(highest, pending[1])
            pending = next(raised_so_far, None)
        if floor < highest:
            detail = f"entry {floor} was read after the floor had been {highest}"
            yield _violation(Rule.FLOOR, log, f"{detail} ({_describe(op)})")


# ------------------------------------------------------------------------------------ stale heads


def _check_stale_heads(log: _Log) -> Iterator[Violation]:
    """A later head through a committer shows all that it returned or committed before."""
    by_committer: dict[str, list[Op]] = defaultdict(list)
    for op in log.ops:
        if op.outcome is Outcome.OK:
            by_committer[op.via].append(op)
    for via, ops in by_committer.items():
        known = sorted((op.back, max((v.seqno for v in _seen(op)), default=-1)) for op in ops)
        highest, position = -1, 0
        for op in sorted(ops, key=lambda op: op.invoke):
            while position < len(known) and known[position][0] < op.invoke:
                highest = max(highest, known[position][1])
                position += 1
            if isinstance(op.call, Head) and not op.call.fresh:
                seqno = -1 if op.call.seen is None else op.call.seen.seqno
                if seqno < highest:
                    detail = f"{via or 'the store'} returned {seqno} after {highest}"
                    yield _violation(Rule.STALE_HEAD, log, f"{detail} ({_describe(op)})")


# ------------------------------------------------------------------------------------ across keys


def _check_batches(logs: Mapping[str, _Log]) -> Iterator[Violation]:
    there: dict[str, list[Version]] = defaultdict(list)
    missing: dict[str, list[_Log]] = defaultdict(list)
    for log in logs.values():
        for op in log.ops:
            if not isinstance(op.call, Cas) or op.call.batch is None:
                continue
            version = log.versions.get(op.call.seqno)
            if version is not None and version.token == op.call.token:
                there[op.call.batch].append(version)
            elif version is not None or op.call.seqno > log.head:
                missing[op.call.batch].append(log)
    for batch, versions in sorted(there.items()):
        for log in missing[batch]:
            detail = f"batch {batch} is not here, and elsewhere it is"
            yield _violation(Rule.TORN_BATCH, log, detail)
        revisions = {version.revision for version in versions} - {0}
        if len(revisions) > 1:
            detail = f"an atomic batch has revisions {sorted(revisions)}"
            yield Violation(rule=Rule.REVISION, key=batch, detail=detail)


def _check_revisions(logs: Mapping[str, _Log]) -> Iterator[Violation]:
    """If one commit certainly precedes another, the later one has the higher revision."""
    known = [
        (log, seqno, version.revision)
        for log in logs.values()
        for seqno, version in sorted(log.versions.items())
        if version.revision
    ]
    done = sorted((log.before[seqno], revision) for log, seqno, revision in known)
    highest, position = 0, 0
    for log, seqno, revision in sorted(known, key=lambda each: each[0].after[each[1]]):
        while position < len(done) and done[position][0] < log.after[seqno]:
            highest = max(highest, done[position][1])
            position += 1
        if revision <= highest:
            detail = f"entry {seqno} has {revision}, and {highest} was committed before it"
            yield _violation(Rule.REVISION, log, detail)
    for log in logs.values():
        numbered = [v for _, v in sorted(log.versions.items()) if v.revision]
        for a, b in itertools.pairwise(numbered):
            if a.revision > b.revision:
                detail = f"entry {a.seqno} has {a.revision}, entry {b.seqno} has {b.revision}"
                yield _violation(Rule.REVISION, log, detail)


def _check_stream(stream: Stream, log: _Log | None) -> Iterator[Violation]:
    log = log or _Log(stream.key, [])
    following = stream.from_
    for version in stream.seen:
        if version.seqno > following:
            detail = f"{stream.process} got entry {version.seqno} when {following} was due"
            yield _violation(Rule.STREAM, log, detail)
        following = max(following, version.seqno + 1)
        known = log.versions.get(version.seqno)
        if known is not None and known.token != version.token:
            detail = f"{stream.process} got {version.token} as entry {version.seqno}"
            yield _violation(Rule.STREAM, log, detail)
    if stream.waited_for is not None and following <= stream.waited_for:
        detail = f"{stream.process} never got entry {following} of {stream.waited_for}"
        yield _violation(Rule.STREAM, log, detail)


def _describe(op: Op) -> str:
    return f"{op.process} got {op.outcome.value}, {(op.back - op.invoke) / 1e6:.1f} ms"
