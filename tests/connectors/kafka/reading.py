"""Reads topics through a session of the connector, as the runtime does, without Spark."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from connectors.kafka.broker import Broker
from penstock.connectors.kafka.records import META_MEMBERS
from penstock.connectors.kafka.session import KafkaSession
from penstock.connectors.kafka.source import Kafka
from penstock.model.json_order import Json
from penstock.model.spec import CollectionSpec, Frozen
from penstock.runtime.connector.capture import (
    CaptureSequence,
    Documents,
    Idle,
    Opening,
    SourceBinding,
)
from penstock.runtime.patches import apply_patches

Document = dict[str, Any]

OPEN: Final[Document] = {
    "type": "object",
    "properties": {"_meta": {"type": "object", "properties": dict(META_MEMBERS)}},
}
WAIT_S: Final = 0.5
WAIT_S_MAX: Final = 30.0


def binding(topic: str, index: int = 0, **resource: str) -> SourceBinding:
    return SourceBinding(
        index=index,
        state_key=f"{topic}.v0",
        resource=Frozen({"topic": topic, **resource}),
        collection=CollectionSpec(
            name=f"acme/{topic}",
            key=("/id",),
            write_schema=Frozen(OPEN),
            read_schema=Frozen(OPEN),
            fields=(),
        ),
    )


@dataclass
class Reader:
    """A capture of some topics, with the state that it committed."""

    broker: Broker
    bindings: tuple[SourceBinding, ...]
    config: Document = field(default_factory=dict)
    state: Json = field(default_factory=dict)
    reads: int = 0
    """Reads for Spark among what was given."""

    @classmethod
    def of(cls, broker: Broker, *topics: str, **config: object) -> Reader:
        made = tuple(binding(topic, index) for index, topic in enumerate(topics))
        return cls(broker, made, dict(config))

    @property
    def source(self) -> Kafka:
        config = {"bootstrapServers": self.broker.address, **self.config}
        return Kafka(config, where="capture acme/in")

    @contextlib.contextmanager
    def session(self, *, ends: bool = False) -> Iterator[KafkaSession]:
        opening = Opening(task="acme/in", bindings=self.bindings, state=self.state, ends=ends)
        opened = self.source.open(opening)
        try:
            yield opened
        finally:
            opened.close()

    def drain(self) -> list[Document]:
        """Everything that is there, each with its `_meta`; it is committed."""
        with self.session(ends=True) as session:
            return self.until(session, Idle.NOTHING)

    def until(self, session: KafkaSession, end: Idle, *, count: int = 0) -> list[Document]:
        """What a session gives until it is idle, and until there are so many."""
        found: list[Document] = []
        deadline = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < deadline:
            polled = session.poll(WAIT_S)
            if isinstance(polled, CaptureSequence):
                found += self.commit(polled)
                session.acknowledge(1)
            elif polled is end and len(found) >= count:
                return found
        raise AssertionError(f"it goes on and on, after {len(found)} documents")

    def commit(self, sequence: CaptureSequence) -> list[Document]:
        self.state = apply_patches(self.state, sequence.patches)
        found: list[Document] = []
        for given in sequence.given:
            found += shown(given.documents)
        for read in sequence.reads:
            self.reads += 1
            assert read.rows_max is not None
            for at, limit in enumerate(read.rows_max):
                ids = pa.RecordBatch.from_pydict({"id": [at]})
                rows = [row for some in read.documents(iter([ids])) for row in shown(some)]
                assert len(rows) < limit
                found += rows
        return found

    def with_config(self, **config: object) -> Reader:
        return replace(self, config={**self.config, **config})


def shown(documents: Documents) -> list[Document]:
    texts: Sequence[bytes] = documents.texts or ()
    assert documents.meta is not None
    metas = documents.meta.to_pylist()
    return [
        {**json.loads(text), "_meta": {k: v for k, v in meta.items() if v is not None}}
        for text, meta in zip(texts, metas, strict=True)
    ]


def ids(documents: Sequence[Document]) -> list[int]:
    return [document["id"] for document in documents]


def record(number: int, **others: object) -> Document:
    return {"value": json.dumps({"id": number}).encode(), **others}


def in_order(documents: Sequence[Document]) -> bool:
    """True if offsets rise in every partition, so that nothing comes twice."""
    last: dict[int, int] = {}
    for document in documents:
        at, offset = document["_meta"]["partition"], document["_meta"]["offset"]
        if offset <= last.get(at, -1):
            return False
        last[at] = offset
    return True
