"""A real Apache Kafka broker, one node that is its own controller, started by the tests.

Its jars are fetched once, with the machine's own `mvn` and its settings, and kept in the user's
cache. Where Maven is out of reach, the tests that need a broker are skipped, and say why.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import admin as admin_module
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.engine import find_java
from servicekit.rpc.certificates import certificate

VERSION = "4.3.1"
START_S_MAX = 60.0
USER, PASSWORD = "penstock", "kafka-test-secret"

_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId><artifactId>broker</artifactId><version>1</version>
  <packaging>pom</packaging>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version>
  </dependency></dependencies>
</project>
"""

_PROPERTIES = r"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},\
  SSL://127.0.0.1:{ssl},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},\
  SSL://127.0.0.1:{ssl}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,\
  SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL
ssl.client.auth=required
ssl.keystore.type=PEM
ssl.keystore.location={directory}/broker-both.pem
ssl.truststore.type=PEM
ssl.truststore.location={directory}/ca.pem
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config={login} required user_{user}="{password}";
log.dirs={directory}/log
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
num.network.threads=2
num.io.threads=2
background.threads=2
log.cleaner.enable=false
"""


class OutOfReach(Exception):
    """The broker cannot be had on this machine."""


def jars() -> Path:
    """The directory of the broker's jars, which are fetched if they were not before."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "penstock" / "jars" / f"kafka_2.13-{VERSION}"
    if target.exists():
        return target
    if (mvn := shutil.which("mvn")) is None:
        raise OutOfReach("there is no mvn, which fetches Apache Kafka")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _fetch(mvn, target)
    return target


def _fetch(mvn: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        (Path(work) / "pom.xml").write_text(_POM.format(version=VERSION))
        asked = subprocess.run(
            [
                *(mvn, "-B", "-q", "-f", f"{work}/pom.xml", "dependency:copy-dependencies"),
                *("-DincludeScope=runtime", f"-DoutputDirectory={work}/jars"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if asked.returncode:
            lines = [line for line in asked.stdout.splitlines() if "ERROR" in line]
            raise OutOfReach(f"mvn cannot fetch Apache Kafka: {(lines or ['no reason'])[0]}")
        (Path(work) / "jars").rename(target)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Broker:
    """A broker in a process of its own."""

    directory: Path
    port: int
    sasl_port: int
    ssl_port: int
    """Asks for a certificate that `ca.pem` in its directory has signed, such as `me.pem`."""
    process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._log = (self.directory / "broker.log").open("ab")
        self.process = subprocess.Popen(
            [*_java(320), "kafka.Kafka", str(self.directory / "server.properties")],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
        )
        deadline = time.monotonic() + START_S_MAX
        while True:
            with contextlib.suppress(KafkaException):
                if self.admin.list_topics(timeout=0.5).brokers:
                    return
            log = self.directory / "broker.log"
            assert self.process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"it did not start: {log.read_text()[-2000:]}"

    def kill(self) -> None:
        """As kill -9 does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        if self._log is not None:
            self._log.close()

    # What tests do with it

    @property
    def admin(self) -> AdminClient:
        if "admin" not in self._clients:
            self._clients["admin"] = AdminClient(
                {"bootstrap.servers": self.address, "log_level": 0}
            )
        found: AdminClient = self._clients["admin"]
        return found

    def create(self, partitions: int = 1, *, name: str | None = None) -> str:
        """Make a topic; its name."""
        name = name or f"t-{uuid.uuid4().hex[:12]}"
        self._done(self.admin.create_topics([NewTopic(name, partitions, 1)]))
        while name not in self.admin.list_topics(timeout=10).topics:
            time.sleep(0.02)
        return name

    def delete(self, name: str) -> None:
        self._done(self.admin.delete_topics([name]))
        while name in self.admin.list_topics(timeout=10).topics:
            time.sleep(0.02)

    def grow(self, name: str, partitions: int) -> None:
        self._done(self.admin.create_partitions([NewPartitions(name, partitions)]))
        while len(self.admin.list_topics(name, timeout=10).topics[name].partitions) < partitions:
            time.sleep(0.02)

    def remove_before(self, name: str, partition: int, offset: int) -> None:
        """Move the beginning of a partition, as retention does."""
        self._done(self.admin.delete_records([TopicPartition(name, partition, offset)]))

    def ids(self, name: str) -> str:
        described = self.admin.describe_topics(TopicCollection([name]))[name].result()
        return str(described.topic_id)

    def groups(self) -> list[str]:
        """Groups that have ever committed an offset."""
        listed = self.admin.list_consumer_groups().result().valid
        found = []
        for group in listed:
            asked = ConsumerGroupTopicPartitions(group.group_id)
            offsets = self.admin.list_consumer_group_offsets([asked])[group.group_id].result()
            if offsets.topic_partitions:
                found.append(group.group_id)
        return found

    def produce(self, topic: str, records: Sequence[dict[str, Any]]) -> None:
        """Records by what `Producer.produce` takes: value, key, partition, headers."""
        if "producer" not in self._clients:
            self._clients["producer"] = Producer(
                {
                    "bootstrap.servers": self.address,
                    "enable.idempotence": True,  # so that records keep their order
                    "linger.ms": 2,
                    "log_level": 0,
                }
            )
        _send(self._clients["producer"], topic, records)

    @contextlib.contextmanager
    def transaction(self, topic: str, *, aborts: bool = False) -> Iterator[Producer]:
        """A transaction, which is over at the end, and known to be."""
        producer = self.transactional()
        producer.begin_transaction()
        yield producer
        producer.flush(30)
        if aborts:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
        self.decided(topic)

    def decided(self, topic: str) -> None:
        """Wait until no transaction over a topic is open: its end is written a moment later."""
        described = self.admin.describe_topics(TopicCollection([topic]))[topic].result()
        spec: Any = admin_module  # without types for this
        partitions = [TopicPartition(topic, each.id) for each in described.partitions]
        latest = dict.fromkeys(partitions, spec.OffsetSpec.latest())
        while True:
            stable, all_ = (
                [
                    f.result().offset
                    for f in self.admin.list_offsets(latest, isolation_level=level).values()
                ]
                for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
            )
            if stable == all_:
                return
            time.sleep(0.02)

    def transactional(self) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "transactional.id": uuid.uuid4().hex,
                "log_level": 0,
            }
        )
        producer.init_transactions(30)
        return producer

    def _done(self, futures: dict[Any, Any]) -> None:
        for future in futures.values():
            future.result(30)


def _send(producer: Producer, topic: str, records: Sequence[dict[str, Any]]) -> None:
    failed: list[object] = []

    def on_delivery(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    # One that learns of a new topic while it has records for it loses some, once in 200 times.
    producer.list_topics(topic, timeout=10)
    for at, record in enumerate(records):
        while True:
            try:
                producer.produce(topic, on_delivery=on_delivery, **record)
                break
            except BufferError:
                producer.poll(0.1)
            except KafkaException as error:
                if error.args[0].name() != "_UNKNOWN_PARTITION":
                    raise
                producer.list_topics(topic, timeout=10)  # it does not know of new ones yet
        if not at % 10_000:
            producer.poll(0)
    assert producer.flush(60) == 0
    assert not failed


def _java(megabytes: int) -> list[str]:
    return [
        str(find_java().executable),
        f"-Xmx{megabytes}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{jars()}/*",
    ]


@contextlib.contextmanager
def running_broker() -> Iterator[Broker]:
    """A broker with an empty log; raises `OutOfReach`."""
    jars()
    with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as made:
        directory = Path(made)
        plain, sasl, ssl, controller = _free_ports(4)
        certificate(directory, "ca")
        certificate(directory, "me", "ca")
        both = certificate(directory, "broker", "ca")
        (directory / "broker-both.pem").write_text("".join(each.read_text() for each in both))
        properties = directory / "server.properties"
        properties.write_text(
            _PROPERTIES.format(
                plain=plain,
                sasl=sasl,
                ssl=ssl,
                controller=controller,
                directory=directory,
                login=_LOGIN,
                user=USER,
                password=PASSWORD,
            )
        )
        # Its first byte is fixed: an id that began with a dash would be taken for an option.
        cluster = base64.urlsafe_b64encode(b"k" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        subprocess.run(
            [*_java(128), "kafka.tools.StorageTool", "format", "-t", cluster, "-c", properties],
            check=True,
            capture_output=True,
            cwd=directory,
        )
        broker = Broker(directory, plain, sasl, ssl)
        broker.start()
        try:
            yield broker
        finally:
            broker._clients.clear()
            broker.kill()
