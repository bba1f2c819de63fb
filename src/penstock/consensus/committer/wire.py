"""Values to protobuf and back, for both ends of the connection.

Errors are data: determinacy, kind and the whole chain of causes cross as a message. `status_error`
decides what a gRPC status proves: without the trailer, nothing about a failed call is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.consensus.backend import LivePage
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.snapshot import START, Behind
from penstock.consensus.store import (
    Batch,
    CasResult,
    CaughtUp,
    ConsensusError,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Heartbeat,
    Indeterminate,
    Resync,
    ResyncReason,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    WatchProgress,
    WatchResync,
    cause_chain,
)
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.secrets import mask

SERVICE = "penstock.consensus.v1.Consensus"

DETERMINACY_TRAILER = "penstock-determinacy"
DETERMINATE = "determinate"
RETRY_TRAILER = "retry-after-ms"
CLIENT_METADATA = "penstock-client-id"

ADMITTED = (("penstock-batch", "admitted"),)
"""Initial metadata of a batch whose first part was admitted. The client sends no other part before
it arrives: if the server refused while the client sends, gRPC would report that sending failed, and
not why."""

PART_BYTES = 512 << 10
"""A message ends at this size, so that with its keys and its last element it stays below
`MESSAGE_BYTES`."""

CALL_ELEMENTS = 1_000
CALL_BYTES = 4 << 20
"""Limits on one batch of independent elements; an element above them is a call of its own."""

STATUS = {
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
}
"""Refusals before execution, which are statuses with the trailer; all other errors are data."""

_KIND_OF_STATUS = {status: kind for kind, status in STATUS.items()} | {
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.TIMEOUT,
    grpc.StatusCode.INTERNAL: ErrorKind.INTERNAL,
}


M = TypeVar("M", bound=Message)


def decoded(data: bytes, message: type[M]) -> M:
    """Decode a message; a malformed one is the sender's mistake."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        what = f"the request is no {message.DESCRIPTOR.name} of this protocol"
        raise Determinate(ErrorKind.INVALID_ARGUMENT, what) from error


# --------------------------------------------------------------------------------------- entries


def to_versioned(entry: VersionedData) -> pb.Versioned:
    return pb.Versioned(seqno=entry.seqno, data=entry.data, revision=entry.revision)


def from_versioned(message: pb.Versioned) -> VersionedData:
    return VersionedData(message.seqno, message.data, message.revision)


def to_items(batch: Iterable[tuple[str, VersionedData]]) -> list[pb.CasItem]:
    return [pb.CasItem(key=key, new=to_versioned(entry)) for key, entry in batch]


def from_item(message: pb.CasItem | pb.CasRequest) -> tuple[str, VersionedData]:
    """Decode a compare-and-set; a missing entry is the sender's mistake, reported as data."""
    if not message.HasField("new"):
        raise Determinate(ErrorKind.INVALID_ARGUMENT, "the request has no `new`")
    return message.key, VersionedData(message.new.seqno, message.new.data)


def to_parts(batch: Batch, part_bytes: int = PART_BYTES) -> Iterator[pb.CasBatchRequest]:
    """Yield the messages that carry a batch."""
    part = pb.CasBatchRequest(bytes=sum(len(new.data) for _, new in batch))
    size = 0
    for key, new in batch:
        for at in range(0, max(1, len(new.data)), part_bytes):
            if size >= part_bytes:
                part.more = True
                yield part
                part, size = pb.CasBatchRequest(), 0
            data = new.data[at : at + part_bytes] if len(new.data) > part_bytes else new.data
            if at == 0:
                item = pb.CasItem(key=key, new=pb.Versioned(seqno=new.seqno, data=data))
            else:
                item = pb.CasItem(new=pb.Versioned(data=data), continued=True)
            part.items.append(item)
            size += len(key) + len(data)
    yield part


def to_calls(
    batch: Batch,
) -> Iterator[Batch]:
    """Split `batch`, in order, into pieces that each fit into one call."""
    start = size = 0
    for index, (_, new) in enumerate(batch):
        full = index - start >= CALL_ELEMENTS or size + len(new.data) > CALL_BYTES
        if index > start and full:
            yield batch[start:index]
            start, size = index, 0
        size += len(new.data)
    if start < len(batch):
        yield batch[start:]


class Assembly:
    """One batch, assembled from its parts."""

    def __init__(self, *, elements_max: int, bytes_max: int) -> None:
        self._elements_max = elements_max
        self._bytes_max = bytes_max
        self._batch: list[tuple[str, int, list[bytes]]] = []
        self._left: int | None = None

    def add(self, part: pb.CasBatchRequest) -> None:
        """Add a part, unless the batch passes its limits or the size its first part announced."""
        whole = self._left is None and not part.more
        if self._left is None:
            self._left = part.bytes
            if part.bytes > self._bytes_max:
                what = f"the batch has {part.bytes} bytes, {self._bytes_max} is the limit"
                raise Determinate(ErrorKind.TOO_LARGE, what)
        if len(self._batch) + len(part.items) > self._elements_max:
            count = len(self._batch) + len(part.items)
            what = f"the batch has {count} operations or more, {self._elements_max} is the limit"
            raise Determinate(ErrorKind.TOO_LARGE, what)
        for item in part.items:
            data = item.new.data
            self._left -= len(data)
            if item.continued and self._batch:
                self._batch[-1][2].append(data)
            else:
                key, new = from_item(item)
                self._batch.append((key, new.seqno, [data]))
        if not whole and self._left < 0:
            what = "the batch has more bytes than its first part said"
            raise Determinate(ErrorKind.INVALID_ARGUMENT, what)

    def batch(self) -> list[tuple[str, VersionedData]]:
        return [
            (key, VersionedData(seqno, data[0] if len(data) == 1 else b"".join(data)))
            for key, seqno, data in self._batch
        ]


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
    """Decode an error; an unknown kind or determinacy proves nothing."""
    kind = ErrorKind.__members__.get(message.kind, ErrorKind.INTERNAL)
    known = message.determinacy == pb.DETERMINATE
    return (Determinate if known else Indeterminate)(
        kind,
        message.message,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
    )


def status_error(error: aio.AioRpcError) -> ConsensusError:
    """Return what a failed call proves: nothing, unless its trailer says that it did not run.

    RESOURCE_EXHAUSTED in particular proves nothing: gRPC also reports it for a reply that was too
    large, after the call was executed.
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
        case WatchProgress(revision):
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
            return WatchProgress(message.progress)
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
