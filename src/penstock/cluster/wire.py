"""Messages of sessions to protobuf and back, for both ends of a stream.

What comes from a controller is checked here: nothing that cannot be meant reaches a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from penstock.cluster.proto import cluster_pb2 as pb
from penstock.cluster.sessions import (
    Closed,
    CloseReason,
    Done,
    Hello,
    InitializationComplete,
    Message,
    Opened,
    Response,
)
from penstock.cluster.state import CommandOutcome, Compact, Put
from penstock.consensus.store import SEQNO_MAX
from penstock.errors import UserError
from penstock.model.domain import Domain
from penstock.runtime.ops import TASK_KINDS

SERVICE: Final = "penstock.cluster.v1.Cluster"
SESSION: Final = f"/{SERVICE}/Session"

ADMITTED: Final = (("penstock-session", "admitted"),)
"""The initial metadata of a session. Until it has come, the client sends nothing: to a client
that sends while the server refuses, gRPC reports that sending failed, and not why."""

NAME_BYTES_MAX: Final = 512
"""Bytes of the name of a task."""

NONCE_BYTES: Final = 16
_TEXT_BYTES_MAX: Final = 256


# ------------------------------------------------------------------------------------ to a cluster


def encode_message(message: Message) -> pb.ToCluster:
    match message:
        case Hello():
            hello = pb.Hello(
                domain=message.domain.value,
                nonce=message.nonce,
                holder=message.holder,
                protocol=message.protocol,
            )
            return pb.ToCluster(hello=hello)
        case Put():
            put = pb.Put(kind=message.kind, name=message.name, digest=message.digest)
            return pb.ToCluster(put=put)
        case Compact():
            return pb.ToCluster(compact=pb.Compact(id=message.id, since=message.since))
        case InitializationComplete():
            complete = pb.InitializationComplete()
            return pb.ToCluster(initialization_complete=complete)


def decode_message(data: bytes) -> Message:
    """Return what a controller says; `UserError` if no release of ours says that."""
    try:
        sent = pb.ToCluster.FromString(data)
    except DecodeError as error:
        raise UserError("a message that cannot be decoded") from error
    match sent.WhichOneof("message"):
        case "hello":
            return _hello(sent.hello)
        case "put":
            kind = next((each for each in TASK_KINDS if each == sent.put.kind), None)
            if kind is None:
                raise UserError(f"{sent.put.kind[:40]!r} is no kind of a task")
            name = _checked("the name of a task", sent.put.name, NAME_BYTES_MAX)
            return Put(kind=kind, name=name, digest=_checked("a digest", sent.put.digest))
        case "compact":
            if sent.compact.since > SEQNO_MAX:
                raise UserError(f"since {sent.compact.since} is outside 0 … 2^63-1")
            id_ = _checked("the id of an object", sent.compact.id, 2 * NAME_BYTES_MAX)
            has_since = sent.compact.HasField("since")
            return Compact(id=id_, since=sent.compact.since if has_since else None)
        case "initialization_complete":
            return InitializationComplete()
        case _:
            raise UserError("a message that this release does not know")


def _hello(sent: pb.Hello) -> Hello:
    domain = next((each for each in Domain if each.value == sent.domain), None)
    if domain is None:
        raise UserError(f"{sent.domain[:40]!r} is no domain: storage and compute are")
    if len(sent.nonce) != NONCE_BYTES:
        raise UserError(f"a nonce of {len(sent.nonce)} bytes, and not {NONCE_BYTES}")
    holder = _checked("the name of a controller", sent.holder)
    return Hello(domain=domain, nonce=sent.nonce, holder=holder, protocol=sent.protocol)


def _checked(what: str, text: str, bytes_max: int = _TEXT_BYTES_MAX) -> str:
    if not 0 < len(text.encode()) <= bytes_max or not text.isprintable():
        raise UserError(f"{what} has 1 to {bytes_max} bytes of printable text")
    return text


# -------------------------------------------------------------------------------- from a cluster


def encode_response(response: Response) -> pb.FromCluster:
    match response:
        case Opened():
            opened = pb.Opened(epoch=response.epoch, digests=response.digests)
            return pb.FromCluster(opened=opened)
        case Done():
            done = pb.Done(
                seqno=response.seqno,
                outcomes=[each.name for each in response.outcomes],
                initialized=response.initialized,
            )
            return pb.FromCluster(done=done)
        case Closed():
            closed = pb.Closed(reason=response.reason.name, detail=response.detail)
            return pb.FromCluster(closed=closed)


def decode_response(sent: pb.FromCluster) -> Response:
    """Return what a cluster answers; `UserError` if no release of ours answers that."""
    try:
        return _RESPONSES[sent.WhichOneof("message") or "nothing"](sent)
    except KeyError as error:
        raise UserError(
            f"the cluster answers what this release does not know: {error}",
            fix="use the same release for both",
        ) from error


def _opened(sent: pb.FromCluster) -> Opened:
    return Opened(epoch=sent.opened.epoch, digests=dict(sent.opened.digests))


def _done(sent: pb.FromCluster) -> Done:
    outcomes = tuple(CommandOutcome[name] for name in sent.done.outcomes)
    seqno = sent.done.seqno if sent.done.HasField("seqno") else None
    return Done(seqno=seqno, outcomes=outcomes, initialized=sent.done.initialized)


def _closed(sent: pb.FromCluster) -> Closed:
    return Closed(reason=CloseReason[sent.closed.reason], detail=sent.closed.detail)


_RESPONSES: Final[Mapping[str, Callable[[pb.FromCluster], Response]]] = {
    "opened": _opened,
    "done": _done,
    "closed": _closed,
}
