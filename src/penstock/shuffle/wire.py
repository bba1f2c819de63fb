"""Checkpoints and errors to protobuf and back, for both ends of a session's stream.

A checkpoint may hold tens of thousands of fragments and a frontier of a hundred thousand journals.
It is sent in parts of about `PART_BYTES`, each of which brings the fragments that it refers to, so
neither end ever holds a large message, and a delivery may go on from one part to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from penstock.errors import Bug, PenstockError, Unavailable, UsageError, UserError
from penstock.journal.blobs import MissingBlob
from penstock.journal.codec import decode_page, encode_page
from penstock.journal.committed import VisibleRows
from penstock.journal.state import Fragment
from penstock.model import frontier_codec
from penstock.model.clock import Clock, Producer
from penstock.model.frontier import EMPTY, Frontier
from penstock.model.frontier_codec import CorruptFrontier
from penstock.model.sequence import SequenceError
from penstock.servicekit.secrets import mask
from penstock.shuffle.binding import Binding
from penstock.shuffle.checkpoint import Stalled
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.proto import shuffle_pb2 as pb
from penstock.shuffle.reads import RecoveryImpossible

SERVICE: Final = "penstock.shuffle.v1.Shuffle"
SESSION: Final = f"/{SERVICE}/Session"

ADMITTED: Final = (("penstock-session", "admitted"),)
"""The initial metadata of a session. Until it has come, the client sends nothing: to a client
that sends while the server refuses, gRPC reports that sending failed, and not why."""

PART_BYTES: Final = 512 << 10
"""A part ends when it has this much. What is added last is at most the 60 KB of one fragment."""

_ROWS_BYTES: Final = 24
_DELIVERY_BYTES: Final = 64


class MalformedMessage(PenstockError):
    """The other end sent a message that no release of ours sends."""


# --------------------------------------------------------------------------------------- opening


def open_requests(
    name: str, resume: Frontier, part_bytes: int = PART_BYTES
) -> Iterator[pb.SessionRequest]:
    """The messages that open a session."""
    data = frontier_codec.encode(resume)
    for at in range(0, len(data), part_bytes):
        opening = pb.Open(resume=data[at : at + part_bytes], more=at + part_bytes < len(data))
        if at == 0:
            opening.name, opening.shards = name, 1
        yield pb.SessionRequest(open=opening)


def decode_request(data: bytes) -> pb.SessionRequest:
    """A request as it was sent; what is none is the client's mistake."""
    try:
        return pb.SessionRequest.FromString(data)
    except DecodeError:
        raise UserError(
            "a message was sent that is none of this protocol",
            fix="use a client of this release",
        ) from None


def decode_resume(data: bytes) -> Frontier:
    """The frontier that the parts of an opening add up to."""
    try:
        return frontier_codec.decode(data) if data else EMPTY
    except CorruptFrontier as error:
        raise UserError(
            "the session cannot resume: this is no frontier",
            why=error.what if error.why is None else f"{error.what}: {error.why}",
            fix="pass the frontier that a session of this task has handed out",
        ) from None


def encode_opened(bindings: Iterable[Binding]) -> pb.Opened:
    """Describe the bindings of a session to its client."""
    return pb.Opened(
        bindings=[
            pb.Binding(
                index=binding.index,
                collection=binding.collection.name,
                read_suffix=binding.read_suffix,
                priority=binding.priority,
            )
            for binding in bindings
        ]
    )


# ----------------------------------------------------------------------------------- checkpoints


def checkpoint_parts(
    number: int, checkpoint: Checkpoint, part_bytes: int = PART_BYTES
) -> Iterator[pb.CheckpointPart]:
    """A checkpoint as the messages that carry it."""
    part = _Part(number)
    frontier = frontier_codec.encode(checkpoint.frontier)
    for at in range(0, len(frontier), part_bytes):
        part.add_frontier(frontier[at : at + part_bytes])
        if part.bytes >= part_bytes:
            yield part.message(more=True)
            part = _Part(number)
    for delivery in checkpoint.deliveries:
        part.begin(delivery)
        for rows in delivery.rows:
            if part.bytes >= part_bytes:
                yield part.message(more=True)
                part = _Part(number)
                part.go_on()
            part.add_rows(delivery.journal, rows)
    yield part.message(more=False)


class _Part:
    """One message in the making, and about how long it is."""

    def __init__(self, number: int) -> None:
        self._message = pb.CheckpointPart(checkpoint=number)
        self._journals: dict[str, int] = {}
        self._fragments: dict[tuple[str, int], int] = {}
        self.bytes = 0

    def add_frontier(self, data: bytes) -> None:
        self._message.frontier = data
        self.bytes += len(data)

    def begin(self, delivery: Delivery) -> None:
        self._message.deliveries.append(
            pb.Delivery(
                journal=self._journal(delivery.journal),
                binding=delivery.binding,
                producer=int(delivery.producer),
                commit=delivery.commit,
                bytes=delivery.bytes,
                level=delivery.level,
            )
        )
        self.bytes += _DELIVERY_BYTES

    def go_on(self) -> None:
        self._message.deliveries.append(pb.Delivery(continued=True))

    def add_rows(self, journal: str, rows: VisibleRows) -> None:
        self._message.deliveries[-1].rows.append(
            pb.VisibleRows(
                fragment=self._fragment(journal, rows.fragment),
                run=rows.fragment.runs.index(rows.run),
                clock_gt=rows.clock_gt,
                running_max=rows.running_max,
            )
        )
        self.bytes += _ROWS_BYTES

    def message(self, *, more: bool) -> pb.CheckpointPart:
        self._message.more = more
        return self._message

    def _journal(self, name: str) -> int:
        if name not in self._journals:
            self._journals[name] = len(self._journals)
            self._message.journals.append(name)
            self.bytes += len(name)
        return self._journals[name]

    def _fragment(self, journal: str, fragment: Fragment) -> int:
        key = journal, fragment.begin
        if key not in self._fragments:
            self._fragments[key] = len(self._fragments)
            data = encode_page([fragment])
            self._message.fragments.append(data)
            self.bytes += len(data)
        return self._fragments[key]


class CheckpointAssembly:
    """One checkpoint in the making, from its parts."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._frontier = bytearray()
        self._deliveries: list[tuple[pb.Delivery, str, list[VisibleRows]]] = []

    def add(self, part: pb.CheckpointPart) -> Checkpoint | None:
        """The checkpoint, if `part` is its last one."""
        try:
            return self._add(part)
        except (IndexError, ValueError, CorruptFrontier, msgspec.MsgspecError) as error:
            raise MalformedMessage("a checkpoint cannot be read", why=str(error)) from None

    def _add(self, part: pb.CheckpointPart) -> Checkpoint | None:
        if self.number not in (None, part.checkpoint):
            raise ValueError(f"checkpoint {part.checkpoint} within {self.number}")
        self.number = part.checkpoint
        self._frontier += part.frontier
        fragments = [_fragment_of(data) for data in part.fragments]
        for message in part.deliveries:
            if not message.continued:
                self._deliveries.append((message, part.journals[message.journal], []))
            added = (_rows_of(rows, fragments[rows.fragment]) for rows in message.rows)
            self._deliveries[-1][2].extend(added)
        if part.more:
            return None
        return Checkpoint(
            frontier=frontier_codec.decode(bytes(self._frontier)),
            deliveries=tuple(_delivery_of(*each) for each in self._deliveries),
        )


def _fragment_of(data: bytes) -> Fragment:
    (record,) = decode_page(data)
    if not isinstance(record, Fragment):
        raise ValueError("an ACK where a fragment is wanted")  # noqa: TRY004 - data, not code
    return record


def _rows_of(message: pb.VisibleRows, fragment: Fragment) -> VisibleRows:
    return VisibleRows(
        fragment=fragment,
        run=fragment.runs[message.run],
        clock_gt=Clock(message.clock_gt),
        running_max=message.running_max,
    )


def _delivery_of(message: pb.Delivery, journal: str, rows: Iterable[VisibleRows]) -> Delivery:
    return Delivery(
        journal=journal,
        binding=message.binding,
        producer=Producer(message.producer),
        commit=Clock(message.commit),
        rows=tuple(rows),
        bytes=message.bytes,
        level=Clock(message.level),
    )


# ---------------------------------------------------------------------------------------- errors


_KINDS: Final[dict[str, type[PenstockError]]] = {
    kind.__name__: kind
    for kind in (
        Bug,
        MalformedMessage,
        MissingBlob,
        RecoveryImpossible,
        SequenceError,
        Stalled,
        Unavailable,
        UsageError,
        UserError,
    )
}


def encode_failure(error: PenstockError) -> pb.Failure:
    """An error as a message, without anything that must not be seen."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    return pb.Failure(
        kind=next(known, PenstockError.__name__),
        what=mask(error.what),
        where=mask(error.where or ""),
        why=mask(error.why or ""),
        fix=mask(error.fix or ""),
    )


def decode_failure(message: pb.Failure) -> PenstockError:
    """The error that a message carries."""
    return _KINDS.get(message.kind, PenstockError)(
        message.what,
        where=message.where or None,
        why=message.why or None,
        fix=message.fix or None,
    )
