"""Captures of topics, as a deployment runs them: by the client and by Spark, through crashes."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connectors.kafka.broker import Broker
from connectors.kafka.capturing import COLLECTION, KafkaPlace
from connectors.kafka.reading import record
from penstock.connectors.kafka import cluster, session
from penstock.failpoints import FAILPOINTS
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from penstock.runtime.capture.jobs import DocumentsRefused
from runtime.crash_world import CRASHED
from runtime.sessions import task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

WAIT_S_MAX = 120.0


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> KafkaPlace:
    return KafkaPlace(tmp_path, spark)


@pytest.fixture(params=["client", "spark"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The client follows, or Spark reads ranges, of which a partition has several."""
    if request.param == "spark":
        by_spark(monkeypatch)
    found: str = request.param
    return found


def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SPARK_RECORDS", 0)
    monkeypatch.setattr(session, "SPLIT_RECORDS", 150)


def test_a_topic_and_its_collection_are_equal(broker: Broker, place: KafkaPlace, road: str) -> None:
    topic = broker.create(4)
    place.capture(broker, topic)
    for begin in (0, 1000):
        some = range(begin, begin + 1000)
        broker.produce(topic, [record(n, key=str(n % 11)) for n in some])
        with broker.transaction(topic, aborts=True) as producer:
            producer.produce(topic, **record(-1))
        place.run_once()
    place.run_once()
    events = place.events()
    assert sorted(event["id"] for event in events) == list(range(2000))
    assert place.jobs_count() == 2000
    for key in {event["_meta"]["key"] for event in events}:
        mine = [event["id"] for event in events if event["_meta"]["key"] == key]
        assert sorted(mine) == [n for n in range(2000) if str(n % 11) == key]


LISTS = {
    "key": ["/key"],
    "schema": {
        "type": "object",
        "required": ["key"],
        "reduce": {"strategy": "merge"},
        "properties": {
            "key": {"type": "integer"},
            "numbers": {
                "type": "array",
                "items": {"type": "integer"},
                "reduce": {"strategy": "append"},
            },
        },
    },
}


def test_documents_of_a_key_keep_their_order_where_a_partition_is_split(
    broker: Broker, place: KafkaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of clocks decides what a reduction takes for the last."""
    by_spark(monkeypatch)
    topic = broker.create(1)
    view = {"source": COLLECTION, "resource": {"table": "lists"}}
    views = task("sqlite", {"path": place.database()}, [view])
    lists = {"collections": {COLLECTION: LISTS}, "materializations": {"acme/views": views}}
    place.capture(broker, topic, lists)
    values = [json.dumps({"key": n % 2, "numbers": [n]}).encode() for n in range(600)]
    broker.produce(topic, [{"value": value} for value in values])
    place.run_once()
    assert place.run("acme/views")["acme/views"].error is None
    rows = place.table("lists", "flow_document", key="key")
    found = {key: json.loads(row["flow_document"])["numbers"] for key, row in rows.items()}
    assert found == {key: list(range(key, 600, 2)) for key in (0, 1)}


# ------------------------------------------------------------------------------------ bad documents

BAD = [
    record(1, partition=0),
    {"value": b'{"id": ', "partition": 0},
    record(2, partition=0),
    {"value": b'{"id": "text"}', "partition": 0},
    record(3, partition=0),
]


def test_a_bad_value_stops_the_capture_and_is_named(
    broker: Broker, place: KafkaPlace, road: str
) -> None:
    topic = broker.create(1)
    place.capture(broker, topic)
    broker.produce(topic, BAD)
    with pytest.raises(DocumentsRefused, match="2 documents do not fit") as refused:
        place.run_once()
    assert f"topic {topic}, partition 0, offset 1: " in str(refused.value.why)
    assert f"topic {topic}, partition 0, offset 3: /id" in str(refused.value.why)
    assert place.ids() == []
    place.capture(broker, topic, onInvalid="skip")
    place.run_once()
    assert place.ids() == [1, 2, 3], "nothing was lost by the stop"
    assert place.quarantined() == []


def test_bad_values_are_put_aside_with_their_place(
    broker: Broker, place: KafkaPlace, road: str
) -> None:
    topic = broker.create(1)
    place.capture(broker, topic, onInvalid="quarantine")
    broker.produce(topic, BAD)
    place.run_once()
    place.run_once()
    assert place.ids() == [1, 2, 3]
    assert [(d["origin"], d["text"]) for d in place.quarantined()] == [
        (f"topic {topic}, partition 0, offset 1", '{"id": '),
        (f"topic {topic}, partition 0, offset 3", '{"id": "text"}'),
    ]


# ------------------------------------------------------------------------------------------- faults


def wait_for(place: KafkaPlace, count: int) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while len(place.ids()) < count:
        assert time.monotonic() < deadline, f"it has {len(place.ids())} of {count}"
        time.sleep(0.1)


def test_a_running_capture_survives_kills_of_the_broker(
    broker: Broker, place: KafkaPlace, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S_MAX", 2.0)
    topic = broker.create(3)
    place.capture(broker, topic)
    broker.produce(topic, [record(n) for n in range(500)])
    with place.running() as check:
        if road == "client":
            wait_for(place, 500)
        broker.kill()
        time.sleep(1)
        broker.start()
        broker.produce(topic, [record(n) for n in range(500, 900)])
        broker.decided(topic)
        wait_for(place, 900)
        check()
    assert sorted(place.ids()) == list(range(900))


POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith(("capture.", "statelog.after"))
    or name
    in {
        "publisher.rows",
        "publisher.flushed",
        "publisher.intents",
        "publisher.acks",
        "leader.after-epoch",
        "leader.after-stats",
        "leader.after-commit-record",
        "leader.after-intents",
    }
)
BY_SPARK = ("capture.after-poll", "capture.after-publish", "publisher.adopted", "publisher.rows")
CASES = [*((point, "client") for point in POINTS), *((point, "spark") for point in BY_SPARK)]


@pytest.fixture(scope="module")
def prepared(
    broker: Broker, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> KafkaPlace:
    """A capture with one transaction behind it, and one before it."""
    place = KafkaPlace(tmp_path_factory.mktemp("prepared"), spark)
    topic = broker.create(3)
    place.capture(broker, topic)
    broker.produce(topic, [record(n) for n in range(200)])
    place.run_once()
    broker.produce(topic, [record(n) for n in range(200, 400)])
    return place


@pytest.mark.parametrize(("point", "by"), CASES)
def test_a_crash_loses_nothing_and_doubles_nothing(
    prepared: KafkaPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, by: str
) -> None:
    if by == "spark":
        by_spark(monkeypatch)
    case = prepared.copy(tmp_path / "case")
    assert case.run_forked(f"{point}:1") == CRASHED
    assert case.run_forked() == 0
    assert sorted(case.ids()) == list(range(400))
    assert case.jobs_count() == 400


def test_a_capture_begins_again_with_a_backfill(broker: Broker, place: KafkaPlace) -> None:
    topic = broker.create(2)
    place.capture(broker, topic)
    broker.produce(topic, [record(n) for n in range(20)])
    place.run_once()
    place.capture(broker, topic, backfill=1)
    place.run_once()
    everything = [d["id"] for d in place.read("acme/events")]
    assert sorted(everything) == sorted(itertools.chain(range(20), range(20)))
