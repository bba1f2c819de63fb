"""A session: follows topics from where the committed state says, for as long as it is open.

Two roads. Where few records are left, a client follows the topics, and their documents come with
their sequences, milliseconds after the records. Where many are left, a sequence names ranges of
offsets, and Spark tasks read them; the client follows again from where they end.

Every couple of seconds the cluster is asked what the topics look like: how far they reach, whether
partitions were added, whether they are still the same topics, and whether something was removed
before it was read. Nothing is told to Kafka: no group, no offsets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock.connectors.kafka.cluster import Asking, Cluster, Interrupts, Trouble
from penstock.connectors.kafka.offsets import (
    Cursor,
    EndsBefore,
    Fits,
    Range,
    Recreated,
    Start,
    TopicLook,
    Verdict,
    reconcile,
    shares,
)
from penstock.connectors.kafka.reading import KafkaRead
from penstock.connectors.kafka.records import Form
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import (
    GIVEN_BYTES_MAX,
    CaptureSequence,
    Given,
    Idle,
    Opening,
    Polled,
)
from penstock.runtime.connector.common import ConnectorError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

_log = logging.getLogger("penstock.connectors")

LOOK_S: Final = 2.0
"""Seconds between two looks at the topics."""

SPARK_RECORDS: Final = 50_000
SPARK_BYTES: Final = 64 << 20
"""Records that are left, or about their bytes, from which on Spark reads them."""

SEQUENCE_RECORDS: Final = 1_000_000
SEQUENCE_BYTES: Final = 256 << 20
"""Records, and about their bytes, that Spark reads for one sequence."""

SPLIT_RECORDS: Final = 250_000
"""Offsets that one Spark task reads at most: one partition may keep several cores busy."""

GIVEN_RECORDS: Final = 20_000
LINGER_S: Final = 0.01
"""Seconds that a sequence waits for further records."""

SETTLE_S: Final = 1.0
"""Seconds after a sequence before the mere end of a transaction is worth a commit."""

_CONSUMED: Final = 500
_SLICE_S: Final = 0.1
_AGAIN_S: Final = 1.0
_WEIGH_S_MAX: Final = 1.0
_LOOKS_MAX: Final = 4
"""Looks, one after the other, before a topic that ends too early is believed to."""


@dataclass
class Followed:
    """One binding, as far as it was read."""

    index: int
    state_key: str
    form: Form
    start: Start
    committed: Cursor | None
    """As the sequences that were given leave it."""
    position: Cursor = field(default_factory=lambda: Cursor(topic_id=""))
    look: TopicLook = field(default_factory=lambda: TopicLook(topic_id="", partitions={}))
    goal: Mapping[int, int] = field(default_factory=dict)
    """Where the partitions ended when the session was opened."""

    @property
    def topic(self) -> str:
        return self.form.topic

    @property
    def is_at_goal(self) -> bool:
        return all(self.position.partitions.get(at, 0) >= end for at, end in self.goal.items())

    def advance(self, partition: int, offset: int) -> None:
        offsets = {**self.position.partitions, partition: offset}
        self.position = replace(self.position, partitions=offsets)

    def take_patch(self) -> Json:
        """Return how its state changes up to its position, which counts as given from now on."""
        patch = self.position.patch(self.committed)
        self.committed = self.position
        return None if patch is None else {self.state_key: patch}


class KafkaSession:
    """Topics that are followed (`CaptureSession`)."""

    def __init__(
        self, cluster: Cluster, opening: Opening, interrupts: Interrupts, *, skips_gaps: bool
    ) -> None:
        self._cluster = cluster
        self._interrupts = interrupts
        self._skips_gaps = skips_gaps
        self._ends = opening.ends
        state = opening.state if isinstance(opening.state, dict) else {}
        self._followed = {
            form.topic: Followed(
                index=binding.index,
                state_key=binding.state_key,
                form=form,
                start=binding.resource.value.get("startFrom", "earliest"),
                committed=Cursor.from_json(state.get(binding.state_key)),
            )
            for binding in opening.bindings
            for form in (Form.of(binding),)
        }
        self._using = threading.Lock()
        """Held by whoever uses the clients: `close` may come during a `poll`."""
        self._closed = False
        self._record_bytes = 0.0
        """About the size of a record; zero before one was seen."""
        self._asking = Asking(cluster, interrupts)
        self._trouble = Trouble()
        self._consumer: Consumer | None = None
        self._is_assigned = False
        self._refused: Message | None = None
        """Says that a partition has not the offset to go on from."""
        self._next_look = 0.0
        self._next_settle = 0.0
        self._look(first=True)

    # ------------------------------------------------------------------------------ the interface

    def poll(self, wait_s: float) -> Polled:
        deadline = time.monotonic() + wait_s
        with self._using, self._interrupts.on():
            if self._closed:
                return Idle.END
            if time.monotonic() >= self._next_look:
                self._look()
            if self._is_much():
                return self._read_by_spark()
            with self._cluster.explained(self._trouble):
                given = self._follow(deadline)
            return given or self._settled() or self._idle()

    def acknowledge(self, sequences: int) -> None:
        """Kafka is told nothing: what was read is known by the committed state alone."""

    def close(self) -> None:
        self._interrupts.interrupt()  # a poll that is under way ends soon
        with self._using:
            self._closed = True
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None

    @property
    def trouble(self) -> str | None:
        """What keeps the clients from the cluster, if anything does."""
        errors = (self._asking.trouble.error, self._trouble.error)
        found = next((error for error in errors if error is not None), None)
        return None if found is None else f"{self._cluster.name} ({found.str()})"

    # ------------------------------------------------------------------------------------- looks

    def _look(self, *, first: bool = False) -> None:
        """Ask for the topics, and compare them with what was read."""
        attempts = 1
        looks, verdicts = self._compared(first)
        while any(isinstance(each, EndsBefore) for each in verdicts.values()):
            if attempts == _LOOKS_MAX:
                break
            self._pause(_AGAIN_S)  # a broker that has just started may not know its end yet
            looks, verdicts = self._compared(first)
            attempts += 1
        self._trouble.clear()
        changed = False
        for topic, verdict in verdicts.items():
            each = self._followed[topic]
            fits = self._fitting(topic, verdict)
            changed |= fits.cursor != each.position
            each.position, each.look = fits.cursor, looks[topic]
            if first:
                each.goal = {at: bounds.end for at, bounds in looks[topic].partitions.items()}
        if changed and self._is_assigned:
            self._assign()
        if self._refused is not None and not changed:
            raise ConnectorError(
                "Kafka does not give an offset that it says it has",
                where=f"{self._cluster.name}, topic {self._refused.topic()}, "
                f"partition {self._refused.partition()}",
                fix="look at the log of the partition's leader",
                transient=True,
            )
        self._refused = None
        self._next_look = time.monotonic() + LOOK_S

    def _compared(self, first: bool) -> tuple[dict[str, TopicLook], dict[str, Verdict]]:
        looks = self._asking.look(list(self._followed))
        verdicts: dict[str, Verdict] = {}
        for topic, each in self._followed.items():
            known = each.committed if first else each.position
            verdicts[topic] = reconcile(known, looks[topic], each.start)
        return looks, verdicts

    def _fitting(self, topic: str, verdict: Verdict) -> Fits:
        where = f"{self._cluster.name}, topic {topic}"
        anew = "raise `backfill` of the binding to read the topic from its beginning"
        match verdict:
            case Recreated(why=why):
                raise ConnectorError(
                    "the topic was deleted and recreated", where=where, why=why, fix=anew
                )
            case EndsBefore(partition=at, cursor=cursor, end=end):
                raise ConnectorError(
                    "the topic ends before what was read of it",
                    where=f"{where}, partition {at}",
                    why=f"offset {cursor} comes next, and the partition ends at {end}: it has lost "
                    "records, or is another cluster's",
                    fix=f"check bootstrapServers; {anew}",
                )
            case Fits(gaps=()):
                return verdict
            case Fits(gaps=gaps):
                gone = "; ".join(map(str, gaps))
                if self._skips_gaps:
                    _log.warning("%s: skips offsets that Kafka has removed: %s", where, gone)
                    return verdict
                raise ConnectorError(
                    "documents were lost: Kafka removed records before they were captured",
                    where=where,
                    why=f"offsets that are gone: {gone}",
                    fix="onGap: skip continues without them; a longer retention.ms or "
                    "retention.bytes of the topic keeps it from happening again",
                )

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._interrupts.check()
            time.sleep(min(_SLICE_S, left))

    # ------------------------------------------------------------------------------- by the client

    def _follow(self, deadline: float) -> CaptureSequence | None:
        """Wait for records, and return those that come at once."""
        messages: list[Message] = []
        size = 0
        while not messages:
            self._interrupts.check()
            left = deadline - time.monotonic()
            if left <= 0 or self._refused is not None or (self._ends and self._is_done()):
                return None
            first = self._tail().poll(min(_SLICE_S, left))
            if first is not None:
                size += self._take(first, messages)
        while size < GIVEN_BYTES_MAX and len(messages) < GIVEN_RECORDS:
            more = self._tail().consume(_CONSUMED, LINGER_S)
            size += sum(self._take(message, messages) for message in more)
            if len(more) < _CONSUMED:
                break
        self._record_bytes = size / len(messages)
        return self._sequence(given=self._given(messages))

    def _take(self, message: Message, messages: list[Message]) -> int:
        """Advance past a message, and keep it if it is a record; return its size."""
        error, topic = message.error(), message.topic()
        each = self._followed.get(topic or "")
        if error is None and each is not None:
            each.advance(message.partition() or 0, (message.offset() or 0) + 1)
            messages.append(message)
            return len(message)
        if error is None:
            return 0
        match error.name():
            case "_PARTITION_EOF" if each is not None:
                offset, at = message.offset() or 0, message.partition() or 0
                if offset > each.position.partitions.get(at, 0):
                    each.advance(at, offset)
            case "_AUTO_OFFSET_RESET":
                self._refused = message  # the next look says what is gone
                self._next_look = 0.0
                self._is_assigned = False
            case "_TRANSPORT" | "_ALL_BROKERS_DOWN" | "_TIMED_OUT" | "_RESOLVE":
                self._trouble(error)  # the next look tells whether it lasts
            case _:
                raise self._cluster.explain(error, self._trouble, topic)
        return 0

    def _tail(self) -> Consumer:
        """The client, which follows all topics from their positions."""
        if self._consumer is None:
            self._consumer = self._cluster.consumer(self._trouble, follows=not self._ends)
        if not self._is_assigned:
            self._assign()
        return self._consumer

    def _assign(self) -> None:
        from confluent_kafka import TopicPartition

        if self._consumer is not None:
            self._consumer.assign(
                [
                    TopicPartition(topic, partition, offset)
                    for topic, each in self._followed.items()
                    for partition, offset in each.position.partitions.items()
                ]
            )
            self._is_assigned = True

    def _given(self, messages: list[Message]) -> tuple[Given, ...]:
        by_topic: dict[str, list[Message]] = {}
        for message in messages:
            by_topic.setdefault(message.topic() or "", []).append(message)
        return tuple(
            Given(
                binding=self._followed[topic].index,
                documents=self._followed[topic].form.documents(some),
                bytes=sum(map(len, some)),
            )
            for topic, some in by_topic.items()
        )

    # ----------------------------------------------------------------------------------- by Spark

    def _is_much(self) -> bool:
        left = sum(sum(each.position.lags(each.look).values()) for each in self._followed.values())
        return left > SPARK_RECORDS or left * self._record_bytes > SPARK_BYTES

    def _read_by_spark(self) -> CaptureSequence:
        if not self._record_bytes:
            self._weigh()
        wanted = {
            (topic, at): lag
            for topic, each in self._followed.items()
            for at, lag in each.position.lags(each.look).items()
        }
        total = min(SEQUENCE_RECORDS, int(SEQUENCE_BYTES / max(1.0, self._record_bytes)))
        ranges: dict[str, list[Range]] = {}
        for (topic, at), count in sorted(shares(wanted, max(1, total)).items()):
            begin = self._followed[topic].position.partitions.get(at, 0)
            whole = Range(partition=at, begin=begin, end=begin + count)
            ranges.setdefault(topic, []).extend(whole.split(SPLIT_RECORDS))
            self._followed[topic].advance(at, whole.end)
        self._is_assigned = False
        return self._sequence(
            reads=tuple(
                KafkaRead(
                    binding=self._followed[topic].index,
                    bytes=int(sum(each.count for each in some) * self._record_bytes),
                    cluster=self._cluster,
                    form=self._followed[topic].form,
                    ranges=tuple(some),
                )
                for topic, some in ranges.items()
            )
        )

    def _weigh(self) -> None:
        """Find out how large records are by some that come next; they are read again."""
        some: list[Message] = []
        until = time.monotonic() + _WEIGH_S_MAX
        while not some and time.monotonic() < until:
            self._interrupts.check()
            messages = self._tail().consume(_CONSUMED, _SLICE_S)
            some = [message for message in messages if message.error() is None]
        self._record_bytes = sum(map(len, some)) / len(some) if some else 1.0
        self._is_assigned = False

    # ---------------------------------------------------------------------------------- sequences

    def _sequence(
        self, *, given: tuple[Given, ...] = (), reads: tuple[KafkaRead, ...] = ()
    ) -> CaptureSequence:
        self._next_settle = time.monotonic() + SETTLE_S
        patches = (each.take_patch() for each in self._followed.values())
        return CaptureSequence(
            given=given, reads=reads, patches=tuple(patch for patch in patches if patch is not None)
        )

    def _settled(self) -> CaptureSequence | None:
        """Return a sequence without documents, if positions have moved without any for a while.

        The end of a transaction has an offset, too. If that were removed later, it would look like
        a record that is lost.
        """
        if time.monotonic() < self._next_settle and not self._ends:
            return None
        moved = any(each.position != each.committed for each in self._followed.values())
        return self._sequence() if moved else None

    def _is_done(self) -> bool:
        return all(each.is_at_goal for each in self._followed.values())

    def _idle(self) -> Idle:
        return Idle.NOTHING if self._is_done() else Idle.PENDING
