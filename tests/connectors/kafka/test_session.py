"""Sessions against a real broker: what they give, from which state, and what they refuse."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from connectors.kafka.broker import PASSWORD, USER, Broker
from connectors.kafka.reading import Reader, binding, ids, in_order, record
from penstock.connectors.kafka import cluster, session
from penstock.connectors.kafka.offsets import Fits
from penstock.errors import UserError
from penstock.runtime.connector.capture import CaptureSequence, Idle
from penstock.runtime.connector.common import ConnectorError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["client", "spark"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The client follows, or Spark reads ranges."""
    if request.param == "spark":
        monkeypatch.setattr(session, "SPARK_RECORDS", 0)
        monkeypatch.setattr(session, "SEQUENCE_RECORDS", 700)
        monkeypatch.setattr(session, "SPLIT_RECORDS", 60)
    found: str = request.param
    return found


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_S", 0.1)


# ------------------------------------------------------------------------------------ exactly once


def test_every_record_of_many_partitions_is_given_once(broker: Broker, road: str) -> None:
    topic = broker.create(12)
    reader = Reader.of(broker, topic)
    seen: list[dict[str, Any]] = []
    for begin in (0, 2000, 2001):
        many = 2000 if begin != 2000 else 1
        records = [record(n, key=str(n % 37)) for n in range(begin, begin + many)]
        broker.produce(topic, records)
        got = reader.drain()
        assert sorted(ids(got)) == list(range(begin, begin + many))
        seen += got
    assert reader.drain() == []
    assert in_order(seen)
    assert (reader.reads > 0) == (road == "spark")
    keys = {document["_meta"]["key"] for document in seen}
    for key in keys:
        mine = [d["id"] for d in seen if d["_meta"]["key"] == key]
        assert mine == sorted(mine), "records of a key keep their order"
    state: Any = reader.state
    kept = state[f"{topic}.v0"]
    assert kept["topicId"] == broker.ids(topic)
    assert sum(kept["partitions"].values()) == 4001


def test_a_sequence_that_was_not_committed_is_given_again(broker: Broker, road: str) -> None:
    topic = broker.create(3)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(n) for n in range(50)])
    with reader.session() as opened:
        assert isinstance(opened.poll(5), CaptureSequence)  # and it is lost
    assert sorted(ids(reader.drain())) == list(range(50))


def test_records_of_aborted_transactions_are_never_seen(broker: Broker, road: str) -> None:
    topic = broker.create(2)
    reader = Reader.of(broker, topic)
    wanted = []
    for round_ in range(6):
        aborts = round_ % 2 == 1
        numbers = range(round_ * 100, round_ * 100 + 100)
        with broker.transaction(topic, aborts=aborts) as producer:
            for n in numbers:
                producer.produce(topic, **record(n, partition=n % 2))
        wanted += [] if aborts else list(numbers)
    got = reader.drain()
    assert sorted(ids(got)) == wanted
    assert in_order(got)
    assert reader.drain() == []


def test_a_topic_whose_last_records_were_aborted_comes_to_its_end(
    broker: Broker, road: str
) -> None:
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    with broker.transaction(topic, aborts=True) as producer:
        for n in range(90):
            producer.produce(topic, **record(n))
    assert reader.drain() == []
    state: Any = reader.state
    assert state[f"{topic}.v0"]["partitions"] == {"0": 91}


def test_an_open_transaction_holds_back_what_follows_it_and_nothing_else(broker: Broker) -> None:
    topic = broker.create(2)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(0, partition=0)])
    producer = broker.transactional()
    producer.begin_transaction()
    producer.produce(topic, **record(1, partition=0))
    producer.flush(10)
    broker.produce(topic, [record(2, partition=0), record(3, partition=1)])
    assert sorted(ids(reader.drain())) == [0, 3]
    producer.commit_transaction(10)
    broker.decided(topic)
    assert ids(reader.drain()) == [1, 2]


def test_the_end_of_a_transaction_is_no_record_that_could_be_lost(broker: Broker) -> None:
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    with broker.transaction(topic) as producer:
        producer.produce(topic, **record(1))
    assert ids(reader.drain()) == [1]
    broker.remove_before(topic, 0, 2)  # the record, and the mark of its commit
    assert reader.drain() == []


def test_nobody_is_told_what_was_read(broker: Broker) -> None:
    topic = broker.create(1)
    broker.produce(topic, [record(1)])
    Reader.of(broker, topic).drain()
    assert broker.groups() == []


# ------------------------------------------------------------------------------- topics that change


def test_a_session_follows_a_topic_that_grows(broker: Broker) -> None:
    topic = broker.create(3)
    reader = Reader.of(broker, topic)
    with reader.session() as opened:
        assert isinstance(opened.poll(0.1), CaptureSequence), "it notes where it begins"
        assert opened.poll(0.2) is Idle.NOTHING
        for begin in (0, 10, 20):
            broker.produce(topic, [record(n) for n in range(begin, begin + 10)])
            got = reader.until(opened, Idle.NOTHING, count=10)
            assert sorted(ids(got)) == list(range(begin, begin + 10))


def test_several_topics_are_one_capture(broker: Broker, road: str) -> None:
    one, other = broker.create(2), broker.create(1)
    reader = Reader.of(broker, one, other)
    broker.produce(one, [record(n) for n in range(30)])
    broker.produce(other, [record(n) for n in range(30, 40)])
    got = reader.drain()
    assert sorted(ids([d for d in got if d["_meta"]["topic"] == one])) == list(range(30))
    assert sorted(ids([d for d in got if d["_meta"]["topic"] == other])) == list(range(30, 40))


def test_new_partitions_are_read_from_their_beginning(broker: Broker, looks_often: None) -> None:
    topic = broker.create(1)
    reader = Reader(broker, (binding(topic, startFrom="latest"),))
    broker.produce(topic, [record(0)])
    with reader.session() as opened:
        assert reader.until(opened, Idle.NOTHING) == []
        broker.grow(topic, 3)
        broker.produce(topic, [record(1, partition=2), record(2, partition=0)])
        assert sorted(ids(reader.until(opened, Idle.NOTHING, count=2))) == [1, 2]
    broker.grow(topic, 4)
    broker.produce(topic, [record(3, partition=3)])
    assert ids(reader.drain()) == [3], "between sessions, too"


def test_the_latest_is_what_comes_after_the_first_session_began(broker: Broker) -> None:
    topic = broker.create(1)
    reader = Reader(broker, (binding(topic, startFrom="latest"),))
    broker.produce(topic, [record(0)])
    assert reader.drain() == []
    broker.produce(topic, [record(1)])
    assert ids(reader.drain()) == [1], "the beginning is committed, though nothing was read"


def test_removed_records_are_lost_documents(broker: Broker) -> None:
    topic = broker.create(2)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(n, partition=0) for n in range(10)])
    assert len(reader.drain()) == 10
    broker.produce(topic, [record(n, partition=0) for n in range(10, 20)])
    broker.remove_before(topic, 0, 15)
    with pytest.raises(ConnectorError, match="documents were lost") as refused:
        reader.drain()
    assert not refused.value.transient
    assert "partition 0: 10 to 14" in str(refused.value.why)
    assert "onGap: skip" in str(refused.value.fix)
    skipping = reader.with_config(onGap="skip")
    assert ids(skipping.drain()) == [15, 16, 17, 18, 19]
    assert skipping.drain() == []


def test_records_removed_while_a_session_reads_are_noticed(
    broker: Broker, looks_often: None
) -> None:
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    with reader.session() as opened:
        reader.until(opened, Idle.NOTHING)
        broker.produce(topic, [record(n) for n in range(10)])
        broker.remove_before(topic, 0, 5)
        got = []
        try:
            for _ in range(10):
                polled = opened.poll(0.3)
                got += reader.commit(polled) if isinstance(polled, CaptureSequence) else []
        except ConnectorError as error:
            assert "documents were lost" in error.what  # noqa: PT017
            assert got == []
        else:
            assert ids(got) == list(range(10)), "it was quicker"


def test_an_offset_that_is_refused_without_a_reason_is_an_error(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(n) for n in range(10)])
    with reader.session() as opened:
        broker.remove_before(topic, 0, 5)
        monkeypatch.setattr(
            session, "reconcile", lambda cursor, _look, _start: Fits(cursor=cursor)
        )  # which sees no gap
        with pytest.raises(ConnectorError, match="does not give an offset") as refused:
            reader.until(opened, Idle.END)
        assert refused.value.transient
        assert f"topic {topic}, partition 0" in str(refused.value.where)


def test_records_removed_before_a_task_reads_them_end_the_session(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SPARK_RECORDS", 0)
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(n) for n in range(10)])
    with reader.session(ends=True) as opened:
        polled = opened.poll(5)
        assert isinstance(polled, CaptureSequence)
        broker.remove_before(topic, 0, 5)
        with pytest.raises(ConnectorError, match="about to be read") as refused:
            Reader.of(broker, topic).commit(polled)
        assert refused.value.transient, "the next session says what is lost"


def test_a_topic_that_was_created_anew_is_another_topic(broker: Broker, looks_often: None) -> None:
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(1)])
    with reader.session() as opened:
        assert ids(reader.until(opened, Idle.NOTHING, count=1)) == [1]
        broker.delete(topic)
        broker.create(1, name=topic)
        broker.produce(topic, [record(2), record(3)])
        with pytest.raises(ConnectorError, match=r"recreated|no such topic"):
            reader.until(opened, Idle.END)
    with pytest.raises(ConnectorError, match="deleted and recreated") as refused:
        reader.drain()
    assert not refused.value.transient
    assert "backfill" in str(refused.value.fix)
    again = Reader(broker, (binding(topic),))
    assert ids(again.drain()) == [2, 3]


def test_a_topic_that_ends_before_what_was_read_is_refused(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_AGAIN_S", 0.01)
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(1)])
    reader.drain()
    state: Any = reader.state
    state[f"{topic}.v0"]["partitions"]["0"] = 17
    with pytest.raises(ConnectorError, match="ends before what was read") as refused:
        reader.drain()
    assert "17" in str(refused.value.why)
    assert not refused.value.transient


def test_a_topic_that_is_missing_is_named(broker: Broker) -> None:
    with pytest.raises(ConnectorError, match="no such topic") as refused:
        Reader.of(broker, "never-made").drain()
    assert "never-made" in str(refused.value.where)
    assert not refused.value.transient


def test_two_bindings_of_one_topic_are_refused(broker: Broker) -> None:
    topic = broker.create(1)
    with pytest.raises(UserError, match=f"two bindings read topic {topic}"):
        Reader.of(broker, topic, topic).drain()


# --------------------------------------------------------------------------------- what records are


def test_keys_headers_and_tombstones_come_with_their_records(broker: Broker, road: str) -> None:
    topic = broker.create(1)
    broker.produce(
        topic,
        [
            record(1, key=b'{"id": 1}', headers=[("trace", b"abc"), ("trace", b"\xff")]),
            {"value": None, "key": b'{"id": 1}'},
            {"value": None, "key": b"no object"},
            record(2, key=b"\xff"),
        ],
    )
    first, gone, second = Reader.of(broker, topic).drain()
    assert first["id"] == gone["id"] == 1
    assert [d["_meta"]["op"] for d in (first, gone, second)] == ["u", "d", "u"]
    assert [d["_meta"]["offset"] for d in (first, gone, second)] == [0, 1, 3]
    assert first["_meta"]["headers"] == [
        {"name": "trace", "value": "abc", "valueBase64": None},
        {"name": "trace", "value": None, "valueBase64": "/w=="},
    ]
    assert first["_meta"]["key"] == '{"id": 1}'
    assert second["_meta"]["keyBase64"] == "/w=="
    assert first["_meta"]["timestamp"].endswith("Z")


def test_raw_values_are_base64(broker: Broker) -> None:
    topic = broker.create(1)
    broker.produce(topic, [{"value": b"\x00\xff"}])
    (document,) = Reader(broker, (binding(topic, format="raw"),)).drain()
    assert document["value"] == "AP8="


def test_topics_are_discovered_by_their_records(broker: Broker) -> None:
    keyed, empty = broker.create(2), broker.create(1)
    broker.produce(keyed, [record(n, key=json.dumps({"id": n}).encode()) for n in range(30)])
    found = {each.name: each for each in Reader.of(broker).source.discover()}
    assert found[keyed].key == ("/id",)
    assert found[empty].note is not None
    assert not any(name.startswith("__") for name in found)


# ------------------------------------------------------------------------------------------- faults


def elsewhere(port: int, **config: object) -> Reader:
    class Nobody:
        address = f"127.0.0.1:{port}"

    return Reader(Nobody(), (binding("t"),), dict(config))  # type: ignore[arg-type]


def test_a_cluster_that_is_down_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S_MAX", 1.0)
    reader = elsewhere(1)
    for act in (reader.drain, reader.source.check, reader.source.discover):
        with pytest.raises(ConnectorError, match="Kafka cannot be reached") as refused:
            act()
        assert refused.value.transient
        assert "127.0.0.1:1" in str(refused.value.where)


def test_waiting_for_a_cluster_can_be_interrupted_and_says_so() -> None:
    source = elsewhere(1).source
    failed: list[Exception] = []

    def run(act: Callable[[], object]) -> None:
        try:
            act()
        except ConnectorError as error:
            failed.append(error)

    thread = threading.Thread(target=run, args=[source.check])
    thread.start()
    time.sleep(0.3)
    assert source.waits_for() == "Kafka at 127.0.0.1:1"
    while thread.is_alive():
        source.interrupt()
        thread.join(0.1)
    assert "interrupted" in str(failed[0])


def test_a_poll_can_be_interrupted_and_a_session_closed_meanwhile(broker: Broker) -> None:
    topic = broker.create(1)
    reader = Reader.of(broker, topic)
    with reader.session() as opened:
        reader.until(opened, Idle.NOTHING)
        ended = threading.Event()

        def poll() -> None:
            with pytest.raises(ConnectorError, match="interrupted"):
                opened.poll(60)
            ended.set()

        thread = threading.Thread(target=poll)
        thread.start()
        time.sleep(0.2)
        opened.close()
        thread.join()
        assert ended.is_set()
        assert opened.poll(1) is Idle.END


def sasl(password: str) -> dict[str, object]:
    return {"sasl": {"mechanism": "PLAIN", "username": USER, "password": password}}


def test_a_login_is_used(broker: Broker) -> None:
    topic = broker.create(1)
    broker.produce(topic, [record(1)])
    reader = elsewhere(broker.sasl_port, **sasl(PASSWORD))
    reader.bindings = (binding(topic),)
    assert ids(reader.drain()) == [1]


def test_a_wrong_password_is_said_at_once_and_not_shown(broker: Broker) -> None:
    reader = elsewhere(broker.sasl_port, **sasl("wrong-and-secret"))
    for act in (reader.drain, reader.source.check):
        with pytest.raises(ConnectorError, match="does not let the user in") as refused:
            act()
        assert not refused.value.transient
        assert "wrong-and-secret" not in str(refused.value)


CERTIFICATES = {"ca": "ca.pem", "certificate": "me.pem", "key": "me.key"}


def test_certificates_are_used_and_checked(broker: Broker) -> None:
    topic = broker.create(1)
    broker.produce(topic, [record(1)])
    made = {name: str(broker.directory / file) for name, file in CERTIFICATES.items()}
    reader = elsewhere(broker.ssl_port, ssl=made)
    reader.bindings = (binding(topic),)
    assert ids(reader.drain()) == [1]
    for left_out in ({"ca"}, {"certificate", "key"}):
        some = {name: path for name, path in made.items() if name not in left_out}
        with pytest.raises(ConnectorError, match="TLS") as refused:
            elsewhere(broker.ssl_port, ssl=some).source.check()
        assert not refused.value.transient


def test_a_client_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UserError, match="not installed") as refused:
        elsewhere(1).source.check()
    assert "penstock[kafka]" in str(refused.value.fix)


# ------------------------------------------------------------------------------ errors of a moment


class Unsettled:
    """An admin client whose broker answers the first questions about offsets with an error."""

    def __init__(self, admin: Any, *errors: int) -> None:  # noqa: ANN401 - of librdkafka
        self._admin = admin
        self._errors = list(errors)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._admin, name)

    def list_offsets(self, places: dict[Any, Any], **how: object) -> dict[Any, Future[Any]]:
        if not self._errors:
            found: dict[Any, Future[Any]] = self._admin.list_offsets(places, **how)
            return found
        failed: Future[Any] = Future()
        failed.set_exception(KafkaException(KafkaError(self._errors.pop(0))))
        return dict.fromkeys(places, failed)


def test_a_partition_whose_leader_moves_is_asked_again(broker: Broker) -> None:
    topic = broker.create(2)
    reader = Reader.of(broker, topic)
    broker.produce(topic, [record(n) for n in range(10)])
    with reader.session() as opened:
        opened._asking._admin = Unsettled(
            opened._asking._admin,
            KafkaError.UNKNOWN_LEADER_EPOCH,
            KafkaError.FENCED_LEADER_EPOCH,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError.NOT_LEADER_FOR_PARTITION,
        )
        look = opened._asking.look([topic])[topic]
    assert sum(bounds.end for bounds in look.partitions.values()) == 10


def test_another_error_about_offsets_is_told(broker: Broker) -> None:
    topic = broker.create(1)
    with Reader.of(broker, topic).session() as opened:
        refused = KafkaError.TOPIC_AUTHORIZATION_FAILED
        opened._asking._admin = Unsettled(opened._asking._admin, refused)
        with pytest.raises(ConnectorError, match=topic):
            opened._asking.look([topic])
