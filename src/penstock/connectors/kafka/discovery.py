"""What topics a cluster has, and the collections they might fill."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.connectors.kafka.cluster import Asking, Cluster, Interrupts, Trouble
from penstock.connectors.kafka.offsets import TopicLook
from penstock.connectors.kafka.records import META_MEMBERS, Format
from penstock.model import pointer
from penstock.model.infer import to_schema
from penstock.model.json_order import Json
from penstock.model.shape import NOTHING, Arrays, Objects, Property, Shape, of_type, type_of, union
from penstock.runtime.connector.capture import Discovered

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

SAMPLED: Final = 100
"""Records of a topic that are looked at."""

_SAMPLE_S_MAX: Final = 5.0
_PLACES_AT_ONCE: Final = 200
"""Partitions that are read at a time, and seconds that this may take."""

_PARTITIONS_SAMPLED: Final = 8
_SLICE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """A record of a topic."""

    key: bytes | None
    value: bytes | None


def discover(cluster: Cluster, interrupts: Interrupts) -> list[Discovered]:
    """Look at all topics, and at some of their last records. Blocks."""
    asking = Asking(cluster, interrupts)
    names = asking.topics()
    looks = asking.look(names) if names else {}
    samples: dict[str, list[Sample]] = {topic: [] for topic in looks}
    places = [place for topic, look in looks.items() for place in _places(topic, look)]
    trouble = Trouble()
    consumer = cluster.consumer(trouble)
    try:
        for at in range(0, len(places), _PLACES_AT_ONCE):
            for message in _read(consumer, interrupts, places[at : at + _PLACES_AT_ONCE]):
                topic = message.topic() or ""
                if (error := message.error()) is not None:
                    raise cluster.explain(error, trouble, topic)
                if len(samples[topic]) < SAMPLED:
                    samples[topic].append(Sample(message.key(), message.value()))
    finally:
        consumer.close()
    return [propose(topic, some) for topic, some in samples.items()]


def _places(topic: str, look: TopicLook) -> list[tuple[str, int, int]]:
    """Topic, partition and offset of some of the last records."""
    filled = [(at, each) for at, each in look.partitions.items() if each.end > each.begin]
    filled = sorted(filled, key=lambda each: each[1].begin - each[1].end)[:_PARTITIONS_SAMPLED]
    back = max(1, SAMPLED // max(1, len(filled)))
    return [(topic, at, max(each.begin, each.end - back)) for at, each in filled]


def _read(
    consumer: Consumer, interrupts: Interrupts, places: Sequence[tuple[str, int, int]]
) -> Iterator[Message]:
    """Yield the records from these places on, and errors, until all are at their end."""
    from confluent_kafka import TopicPartition

    consumer.assign([TopicPartition(*place) for place in places])
    until, going_on = time.monotonic() + _SAMPLE_S_MAX, {place[:2] for place in places}
    while going_on and time.monotonic() < until:
        interrupts.check()
        message = consumer.poll(_SLICE_S)
        if message is None:
            continue
        error = message.error()
        if error is not None and error.name() == "_PARTITION_EOF":
            going_on.discard((message.topic() or "", message.partition() or 0))
        else:
            yield message


# ---------------------------------------------------------------------------------------- proposals


def propose(topic: str, samples: Sequence[Sample]) -> Discovered:
    """Propose a collection for a topic. Pure."""
    values = [sample.value for sample in samples if sample.value is not None]
    form, note = _format(values)
    resource: dict[str, Json] = {"topic": topic}
    if form != "json":
        resource["format"] = form
    shape = _document_shape(values, form)
    schema: Any = _open(to_schema(shape))
    key = _record_key(samples, shape) if form == "json" else ()
    meta: dict[str, Json] = {"type": "object", "properties": dict(META_MEMBERS)}
    if not key:
        key = ("/_meta/partition", "/_meta/offset")
        meta["required"] = ["partition", "offset"]
    else:
        # A tombstone has the members of its key, and no others.
        schema["required"] = sorted(pointer.parse(each)[0] for each in key)
        schema["reduce"] = {"strategy": "lastWriteWins"}
        schema["if"] = {
            "required": ["_meta"],
            "properties": {"_meta": {"required": ["op"], "properties": {"op": {"const": "d"}}}},
        }
        schema["then"] = {"reduce": {"strategy": "lastWriteWins", "delete": True}}
    schema["properties"] = {**schema.get("properties", {}), "_meta": meta}
    schema["required"] = sorted({*schema.get("required", ()), "_meta"})
    name = re.sub(r"[^\w.-]+", "_", topic)
    return Discovered(name=name, resource=resource, schema=schema, key=key, note=note)


def _open(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """The same schema, where objects may have other members, and empty lists items, too."""
    if not isinstance(schema, dict):
        return schema
    found = {name: _open(each) for name, each in schema.items() if each is not False}
    if "properties" in schema:
        found["properties"] = {name: _open(each) for name, each in schema["properties"].items()}
    return found


def _format(values: Sequence[bytes]) -> tuple[Format, str | None]:
    if not values:
        return "json", "the topic has no records to look at: format and schema are guesses"
    if all(isinstance(_decoded(value), dict) for value in values):
        return "json", None
    try:
        for value in values:
            value.decode()
    except UnicodeDecodeError:
        return "raw", "values are neither JSON nor text: they are captured as base64"
    return "text", "values are not all JSON objects: they are captured as text"


def _document_shape(values: Sequence[bytes], form: Format) -> Shape:
    if form != "json":
        return Shape(
            types=frozenset(["object"]),
            objects=Objects(properties={"value": Property(shape=of_type("string"), required=True)}),
        )
    shapes = [shape_of(_decoded(value)) for value in values]
    return functools.reduce(union, shapes) if shapes else of_type("object")


def _record_key(samples: Sequence[Sample], shape: Shape) -> tuple[str, ...]:
    """The members of the records' keys, if all keys are objects of the same scalars.

    Documents have them, too, and there is at least one.
    """
    keys = [_decoded(sample.key) if sample.key is not None else None for sample in samples]
    names = set(keys[0]) if keys and isinstance(keys[0], dict) else set()
    for key in keys:
        if not isinstance(key, dict) or set(key) != names:
            return ()
        if not all(isinstance(value, str | int) for value in key.values()):
            return ()
    properties = shape.objects.properties
    if not all(name in properties and properties[name].required for name in names):
        return ()
    return tuple(pointer.render([name]) for name in sorted(names))


def _decoded(data: bytes) -> Json:
    try:
        value: Json = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    return value


def shape_of(value: Json) -> Shape:
    """The shape of values like this one, with no other members, and no items if there are none."""
    match value:
        case dict():
            members = {
                name: Property(shape=shape_of(each), required=True) for name, each in value.items()
            }
            return Shape(
                types=frozenset(["object"]),
                objects=Objects(properties=members, additional=NOTHING),
            )
        case list():
            items = functools.reduce(union, map(shape_of, value), NOTHING)
            return Shape(types=frozenset(["array"]), arrays=Arrays(items=items))
        case _:
            return of_type(type_of(value))
