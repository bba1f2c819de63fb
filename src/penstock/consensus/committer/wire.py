"""Values to protobuf and back, for both ends of the connection.

Errors are data (R6): determinacy, kind and the whole chain of causes cross as a message. What a
gRPC status says is decided here too, in `status_error`: without the trailer that proves it,
nothing about a failed call is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.consensus.backend import LivePage
from penstock.consensus.committer.grpcio import aio, grpc
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.snapshot import START, Behind
from penstock.consensus.store import (
    CasResult,
    CaughtUp,
    ConsensusError,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Heartbeat,
    Indeterminate,
    Progress,
    Resync,
    ResyncReason,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    WatchResync,
    cause_chain,
)
from penstock.servicekit.secrets import mask

SERVICE = "penstock.consensus.v1.Consensus"

DETERMINACY_TRAILER = "penstock-determinacy"
DETERMINATE = "determinate"
RETRY_TRAILER = "retry-after-ms"
CLIENT_METADATA = "penstock-client-id"

COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    # No limit on either side, in either direction: one that is met turns into a retry of the same
    # too large message for ever (R8, B11). The cap on an entry is ours, and says so.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Find out about a dead peer within 15 s, also between calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

STATUS = {
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
}
"""Refusals before execution: these are statuses, with the trailer; all other errors are data."""

_KIND_OF_STATUS = {status: kind for kind, status in STATUS.items()} | {
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.TIMEOUT,
    grpc.StatusCode.INTERNAL: ErrorKind.INTERNAL,
}


# --------------------------------------------------------------------------------------- entries


def to_versioned(entry: VersionedData) -> pb.Versioned:
    return pb.Versioned(seqno=entry.seqno, data=entry.data, revision=entry.revision)


def from_versioned(message: pb.Versioned) -> VersionedData:
    return VersionedData(message.seqno, message.data, message.revision)


def to_items(batch: Iterable[tuple[str, VersionedData]]) -> list[pb.CasItem]:
    return [pb.CasItem(key=key, new=to_versioned(entry)) for key, entry in batch]


def from_item(message: pb.CasItem | pb.CasRequest) -> tuple[str, VersionedData]:
    """A compare-and-set as sent; a missing entry is the sender's mistake, told as data (B31)."""
    if not message.HasField("new"):
        raise Determinate(ErrorKind.INVALID_ARGUMENT, "the request has no `new`")
    return message.key, VersionedData(message.new.seqno, message.new.data)


def from_items(messages: Sequence[pb.CasItem]) -> list[tuple[str, VersionedData]]:
    return [from_item(message) for message in messages]


def to_snapshot_request(prefix: str, behind: Behind) -> pb.SnapshotRequest:
    if isinstance(behind, int):
        return pb.SnapshotRequest(prefix=prefix, revision=behind)
    key, seqno = behind
    return pb.SnapshotRequest(prefix=prefix, position=pb.Position(key=key, seqno=seqno))


def from_behind(message: pb.SnapshotRequest) -> Behind:
    if message.HasField("revision"):
        return message.revision
    return (message.position.key, message.position.seqno) if message.HasField("position") else START


def from_snapshot_ok(message: pb.SnapshotOk) -> LivePage:
    return LivePage(
        entries=tuple((item.key, from_versioned(item.new)) for item in message.entries),
        revision=message.revision,
        more=message.more,
    )


# ---------------------------------------------------------------------------------------- errors


def to_error(error: ConsensusError) -> pb.OpError:
    return pb.OpError(
        determinacy=pb.DETERMINATE if isinstance(error, Determinate) else pb.INDETERMINATE,
        kind=error.kind.name,
        message=mask(cause_chain(error)),
        retry_after_ms=error.retry_after_ms,
    )


def from_error(message: pb.OpError) -> ConsensusError:
    """The error as a value; an unknown kind or determinacy is never read as proof of anything."""
    kind = ErrorKind.__members__.get(message.kind, ErrorKind.INTERNAL)
    known = message.determinacy == pb.DETERMINATE
    return (Determinate if known else Indeterminate)(
        kind,
        message.message,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
    )


def status_error(error: aio.AioRpcError) -> ConsensusError:
    """What a failed call proves: nothing, unless its trailer says that it did not run.

    In particular not RESOURCE_EXHAUSTED: gRPC says that too of a reply that was too large, after
    the call had been executed.
    """
    trailers = dict(error.trailing_metadata() or ())
    proven = trailers.get(DETERMINACY_TRAILER) == DETERMINATE
    retry = str(trailers.get(RETRY_TRAILER, ""))
    kind = _KIND_OF_STATUS.get(error.code(), ErrorKind.UNAVAILABLE)
    if not proven and kind in STATUS:
        kind = ErrorKind.UNAVAILABLE
    return (Determinate if proven else Indeterminate)(
        kind,
        mask(f"{error.code().name}: {error.details() or 'no details'}"),
        retry_after_ms=int(retry) if retry.isdecimal() else None,
    )


def to_outcome(outcome: CasResult | ConsensusError) -> pb.CasOutcome:
    if isinstance(outcome, ConsensusError):
        return pb.CasOutcome(err=to_error(outcome))
    return pb.CasOutcome(ok=pb.CasOk(committed=outcome is CasResult.COMMITTED))


def from_outcome(message: pb.CasOutcome) -> CasResult | ConsensusError:
    if message.HasField("ok"):
        return from_cas_ok(message.ok)
    return from_error(message.err)


def from_cas_ok(message: pb.CasOk) -> CasResult:
    return CasResult.COMMITTED if message.committed else CasResult.EXPECTATION_MISMATCH


# ---------------------------------------------------------------------------------------- events


def to_subscribe_event(event: SubscribeEvent, incarnation: bytes) -> pb.SubscribeEvent:
    message = pb.SubscribeEvent(incarnation=incarnation)
    match event:
        case Entry(data):
            message.entry.CopyFrom(to_versioned(data))
        case CaughtUp(seqno):
            message.caught_up.CopyFrom(pb.CaughtUp(seqno=seqno))
        case Resync(floor=floor, head=head, reason=reason):
            message.resync.CopyFrom(pb.Resync(floor=floor, head=head, reason=reason.name))
        case Heartbeat(head=seqno):
            message.heartbeat.CopyFrom(pb.Heartbeat(head=seqno))
    return message


def from_subscribe_event(message: pb.SubscribeEvent) -> SubscribeEvent:
    match message.WhichOneof("event"):
        case "entry":
            return Entry(from_versioned(message.entry))
        case "caught_up":
            known = message.caught_up.HasField("seqno")
            return CaughtUp(message.caught_up.seqno if known else None)
        case "resync":
            resync = message.resync
            return Resync(floor=resync.floor, head=resync.head, reason=_reason(resync.reason))
        case "heartbeat":
            known = message.heartbeat.HasField("head")
            return Heartbeat(
                head=message.heartbeat.head if known else None, incarnation=message.incarnation
            )
        case "err":
            raise from_error(message.err)
        case unknown:
            raise Indeterminate(ErrorKind.INTERNAL, f"the committer sent an unknown {unknown!r}")


def to_watch_event(event: WatchEvent, incarnation: bytes) -> pb.WatchEvent:
    message = pb.WatchEvent(incarnation=incarnation)
    match event:
        case Entries(revision, entries):
            message.entries.CopyFrom(pb.Entries(revision=revision, entries=to_items(entries)))
        case Progress(revision):
            message.progress = revision
        case WatchResync(revision=revision, heads=heads, reason=reason):
            message.resync.CopyFrom(
                pb.WatchResync(revision=revision, heads=dict(heads), reason=reason.name)
            )
    return message


def from_watch_event(message: pb.WatchEvent) -> WatchEvent:
    match message.WhichOneof("event"):
        case "entries":
            entries = message.entries.entries
            return Entries(
                message.entries.revision, tuple((e.key, from_versioned(e.new)) for e in entries)
            )
        case "progress":
            return Progress(message.progress)
        case "resync":
            resync = message.resync
            return WatchResync(
                revision=resync.revision, heads=dict(resync.heads), reason=_reason(resync.reason)
            )
        case "err":
            raise from_error(message.err)
        case unknown:
            raise Indeterminate(ErrorKind.INTERNAL, f"the committer sent an unknown {unknown!r}")


def _reason(name: str) -> ResyncReason:
    return ResyncReason.__members__.get(name, ResyncReason.SLOW)
