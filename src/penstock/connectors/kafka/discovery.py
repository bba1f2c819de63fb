"""What topics a cluster has, and the collections they might fill."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.connectors.kafka.cluster import Asking, Cluster, Interrupts, Trouble
from penstock.connectors.kafka.offsets import TopicLook
from penstock.connectors.kafka.records import META_MEMBERS, Format
from penstock.model import pointer
from penstock.model.infer import to_schema
from penstock.model.json_order import Json
from penstock.model.shape import Arrays, Objects, Property, Shape, of_type, type_of, union
from penstock.runtime.connector.capture import Discovered

SAMPLED: Final = 100
"""Records of a topic that are looked at."""

_SAMPLE_S_MAX: Final = 3.0
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
    return [
        propose(topic, list(_samples(cluster, interrupts, topic, look)))
        for topic, look in looks.items()
    ]


def _samples(
    cluster: Cluster, interrupts: Interrupts, topic: str, look: TopicLook
) -> Iterator[Sample]:
    """Yield some of the last records of a topic."""
    from confluent_kafka import TopicPartition

    filled = [(at, each) for at, each in look.partitions.items() if each.end > each.begin]
    filled = sorted(filled, key=lambda each: each[1].begin - each[1].end)[:_PARTITIONS_SAMPLED]
    if not filled:
        return
    back = max(1, SAMPLED // len(filled))
    trouble = Trouble()
    consumer = cluster.consumer(trouble)
    try:
        consumer.assign(
            [TopicPartition(topic, at, max(each.begin, each.end - back)) for at, each in filled]
        )
        until, open_partitions, seen = time.monotonic() + _SAMPLE_S_MAX, len(filled), 0
        while open_partitions and seen < SAMPLED and time.monotonic() < until:
            interrupts.check()
            message = consumer.poll(_SLICE_S)
            if message is None:
                continue
            error = message.error()
            if error is None:
                seen += 1
                yield Sample(message.key(), message.value())
            elif error.name() == "_PARTITION_EOF":
                open_partitions -= 1
            else:
                raise cluster.explain(error, trouble, topic)
    finally:
        consumer.close()


# ---------------------------------------------------------------------------------------- proposals


def propose(topic: str, samples: Sequence[Sample]) -> Discovered:
    """Propose a collection for a topic. Pure."""
    values = [sample.value for sample in samples if sample.value is not None]
    form, note = _format(values)
    resource: dict[str, Json] = {"topic": topic}
    if form != "json":
        resource["format"] = form
    shape = _document_shape(values, form)
    schema: Any = to_schema(shape)
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
    """The shape of values like this one."""
    match value:
        case dict():
            members = {
                name: Property(shape=shape_of(each), required=True) for name, each in value.items()
            }
            return Shape(types=frozenset(["object"]), objects=Objects(properties=members))
        case list():
            items = [shape_of(each) for each in value]
            return Shape(
                types=frozenset(["array"]),
                arrays=Arrays(items=functools.reduce(union, items) if items else None),
            )
        case _:
            return of_type(type_of(value))
