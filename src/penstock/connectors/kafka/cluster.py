"""A Kafka cluster as a catalog describes it, its clients, and its errors in words that help.

A `Cluster` holds references in place of secrets. They are resolved when a client is made: a
`Cluster` can be pickled, printed and sent to Spark tasks.

A client goes on trying to connect for ever, and calls of it just take long. What keeps it from
connecting is told to a callback: `Trouble` remembers that, for errors and for whoever asks what is
waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.connectors.kafka.offsets import Bounds, TopicLook
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.secrets import resolve
from penstock.servicekit.secrets import conceal, mask

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, TopicPartition
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")


def _text(title: str, description: str, example: str, **others: Json) -> dict[str, Json]:
    return {
        "type": "string",
        "minLength": 1,
        "title": title,
        "description": description,
        "examples": [example],
        **others,
    }


def _group(
    title: str, description: str, members: dict[str, Json], required: list[Json], example: Json
) -> dict[str, Json]:
    return {
        "type": "object",
        "title": title,
        "description": description,
        "properties": members,
        "required": required,
        "additionalProperties": False,
        "examples": [example],
    }


_PEM: Final[Json] = {"type": "string", "path": True, "title": "the path of a PEM file"}
CONFIG_SCHEMA: Final = ConfigSchema(
    {
        "bootstrapServers": _text(
            "hosts with their ports, separated by commas",
            "Some brokers of the cluster; they name the others.",
            "kafka-1.example.com:9092,kafka-2.example.com:9092",
            pattern=r"^[^\s,@/]+:\d+(,\s*[^\s,@/]+:\d+)*$",
        ),
        "sasl": _group(
            "a mapping of mechanism, username and password",
            "How to log in. Without it, there is no login.",
            {
                "mechanism": {
                    "type": "string",
                    "enum": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"],
                    "title": "a mechanism",
                },
                "username": {"type": "string", "minLength": 1, "title": "the name of a user"},
                "password": {"type": "string", "title": "a text", "secret": True},
            },
            ["mechanism", "username", "password"],
            {
                "mechanism": "SCRAM-SHA-512",
                "username": "penstock",
                "password": "${env:KAFKA_PASSWORD}",
            },
        ),
        "ssl": _group(
            "a mapping of certificates",
            "Use TLS; an empty mapping trusts the certificates that the system trusts.",
            {
                "ca": _PEM,
                "certificate": _PEM,
                "key": _PEM,
                "keyPassword": {"type": "string", "title": "a text", "secret": True},
                "verifyHostname": {"type": "boolean", "title": "true or false"},
            },
            [],
            {"ca": "/etc/kafka/ca.pem"},
        ),
        "onGap": {
            "type": "string",
            "enum": ["stop", "skip"],
            "default": "stop",
            "title": "stop or skip",
            "description": "What to do if Kafka removed records before they were captured.",
            "examples": ["stop"],
        },
        "options": _group(
            "a mapping of settings of the client",
            "Settings of the client, as librdkafka calls them; few are let through.",
            {
                "client.id": {"type": "string", "title": "a name"},
                "client.rack": {"type": "string", "title": "the name of a rack"},
                "broker.address.family": {
                    "type": "string",
                    "enum": ["any", "v4", "v6"],
                    "title": "a family of addresses",
                },
                "socket.keepalive.enable": {"type": "boolean", "title": "true or false"},
                "fetch.message.max.bytes": {
                    "type": "integer",
                    "minimum": 1024,
                    "maximum": 1_000_000_000,
                    "title": "a number of bytes; from 1024 to 1000000000",
                },
            },
            [],
            {"client.rack": "eu-west-1a"},
        ),
    },
    required=("bootstrapServers",),
)

_SSL: Final[Mapping[str, str]] = {
    "ca": "ssl.ca.location",
    "certificate": "ssl.certificate.location",
    "key": "ssl.key.location",
    "keyPassword": "ssl.key.password",
}

_PROTOCOLS: Final[Mapping[tuple[bool, bool], str]] = {
    (False, False): "PLAINTEXT",
    (False, True): "SSL",
    (True, False): "SASL_PLAINTEXT",
    (True, True): "SASL_SSL",
}
"""By whether there is a login, and TLS."""

CONNECT_S_MAX: Final = 6.0
"""Seconds that a question to the cluster may take, connecting included."""

QUEUED_KIB: Final = 32 << 10
"""Records that a client fetches ahead, in KiB."""

_FOLLOW_MS: Final = 500
_HURRY_MS: Final = 50
_SLICE_S: Final = 0.1
_AGAIN_S: Final = 0.2


class Interrupts:
    """Lets another thread end a call that blocks."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around a call: forget what ended the one before it."""
        self._asked.clear()
        yield

    def interrupt(self) -> None:
        self._asked.set()

    def check(self) -> None:
        """Raise, if the call under way is to end."""
        if self._asked.is_set():
            raise ConnectorError("the call was interrupted", transient=True)


class Trouble:
    """What keeps a client from its cluster, if anything does."""

    def __init__(self) -> None:
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Called back by a client. That nobody can be reached says less than why."""
        if self.error is None or error.name() != "_ALL_BROKERS_DOWN":
            self.error = error

    def clear(self) -> None:
        self.error = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Brokers, and how to log in there."""

    config: Frozen = field(repr=False)
    where: str
    """The task that the endpoint belongs to, for errors."""

    @classmethod
    def of(cls, config: Json, where: str) -> Cluster:
        """Read an endpoint's configuration, and check what can be checked without its secrets."""
        given = CONFIG_SCHEMA.read(config, where=f"{where}: endpoint.connector.config")
        return cls(config=Frozen(given), where=where)

    @property
    def name(self) -> str:
        """The brokers as the catalog writes them."""
        return f"Kafka at {self.config.value['bootstrapServers']}"

    def _settings(self, trouble: Trouble) -> dict[str, Any]:
        at = f"{self.where}: endpoint.connector.config"
        config = CONFIG_SCHEMA.read(resolve(self.config.value, where=at), where=at)
        sasl, ssl = config.get("sasl"), config.get("ssl")
        settings: dict[str, Any] = {
            **config.get("options", {}),
            "bootstrap.servers": config["bootstrapServers"],
            "security.protocol": _PROTOCOLS[sasl is not None, ssl is not None],
            "error_cb": trouble,
            "log_level": 0,  # it would write to standard error; errors come by their callback
            "reconnect.backoff.max.ms": 1000,
            "socket.connection.setup.timeout.ms": 5000,
        }
        if sasl:
            conceal(sasl["password"], beside=(sasl["username"],))
            settings |= {
                "sasl.mechanisms": sasl["mechanism"],
                "sasl.username": sasl["username"],
                "sasl.password": sasl["password"],
            }
        if ssl is not None:
            if "keyPassword" in ssl:
                conceal(ssl["keyPassword"])
            settings |= {_SSL[name]: value for name, value in ssl.items() if name in _SSL}
            if not ssl.get("verifyHostname", True):
                settings["ssl.endpoint.identification.algorithm"] = "none"
        return settings

    def admin(self, trouble: Trouble) -> AdminClient:
        """Make a client that asks about topics."""
        _require_client()
        from confluent_kafka.admin import AdminClient

        with self.explained(trouble):
            return AdminClient(self._settings(trouble))

    def consumer(self, trouble: Trouble, *, follows: bool = False) -> Consumer:
        """Make a client that reads the records of committed transactions.

        One that `follows` lets a broker hold an answer back until there is something to say, which
        costs nothing while there is not; others hear soon that they are at an end.

        It belongs to no group: partitions are assigned to it, and offsets are kept by Penstock. The
        name of a group is asked for by the client, and used by nobody.
        """
        _require_client()
        from confluent_kafka import Consumer

        settings: dict[str, Any] = {
            **self._settings(trouble),
            "group.id": "penstock",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "check.crcs": True,
            "queued.max.messages.kbytes": QUEUED_KIB,
            "fetch.wait.max.ms": _FOLLOW_MS if follows else _HURRY_MS,
        }
        with self.explained(trouble):
            return Consumer(settings)

    # ----------------------------------------------------------------------------------- errors

    @contextmanager
    def explained(self, trouble: Trouble) -> Iterator[None]:
        """Within this, errors of a client are `ConnectorError`."""
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as error:
            raise self.explain(error.args[0], trouble) from None

    def explain(self, error: KafkaError, trouble: Trouble, topic: str | None = None) -> Exception:
        """Return an error of the client, or what it comes from, as one for people."""
        if error.name() in _SILENCES and trouble.error is not None:
            error = trouble.error
        what, fix, transient = _KNOWN.get(_kind(error), _UNKNOWN)
        about = f", topic {topic}" if topic else ""
        return ConnectorError(
            what,
            where=f"{self.name}{about}",
            why=mask(" ".join(error.str().split())),
            fix=fix,
            transient=transient,
        )


_Known = tuple[str, str | None, bool]
_DOWN: Final[_Known] = ("Kafka cannot be reached", "is it running, and is the address right?", True)
_SILENCES: Final = frozenset({"_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT_QUEUE"})
_UNKNOWN: Final[_Known] = ("Kafka did not do what was asked", None, True)
_ACLS: Final = "let the user describe and read the topic, by an ACL"
_LOGIN: Final[_Known] = (
    "Kafka does not let the user in",
    "check sasl and ssl; a password reference is read where the task runs",
    False,
)
_KNOWN: Final[Mapping[str, _Known]] = {
    **dict.fromkeys([*_SILENCES, "_RESOLVE"], _DOWN),
    **dict.fromkeys(["_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED"], _LOGIN),
    "UNSUPPORTED_SASL_MECHANISM": _LOGIN,
    "_SSL": ("Kafka and this client do not agree on TLS", "check ssl", False),
    "_INVALID_ARG": ("the client refuses its settings", "check the configuration", False),
    "TOPIC_AUTHORIZATION_FAILED": ("the user may not read the topic", _ACLS, False),
    "CLUSTER_AUTHORIZATION_FAILED": ("the user may not ask the cluster", _ACLS, False),
    "UNKNOWN_TOPIC_OR_PART": (
        "there is no such topic",
        "create it, correct the binding's `topic`, or disable the binding",
        False,
    ),
    "_UNKNOWN_TOPIC": ("there is no such topic", "create it, or correct `topic`", False),
}
_AT_ONCE: Final = frozenset({"_AUTHENTICATION", "_SSL", "UNSUPPORTED_SASL_MECHANISM"})
"""Trouble that no further try mends."""


def _kind(error: KafkaError) -> str:
    """The name of an error. A broker that refuses a certificate merely hangs up, with an alert."""
    return "_SSL" if "SSL routines" in error.str() else error.name()


def _require_client() -> None:
    try:
        import confluent_kafka  # noqa: F401
    except ImportError:
        raise UserError(
            "the client of Kafka is not installed",
            why="source-kafka reads with the package confluent-kafka, which is an extra",
            fix="pip install 'penstock[kafka]', on every machine that runs tasks",
        ) from None


_MOVING: Final = frozenset(
    {
        "NOT_LEADER_FOR_PARTITION",
        "LEADER_NOT_AVAILABLE",
        "OFFSET_NOT_AVAILABLE",
        "FENCED_LEADER_EPOCH",
        "UNKNOWN_LEADER_EPOCH",
    }
)
"""Errors of a moment: a partition is about to be led by another broker, or has just begun to be."""


class _LeaderMoves(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Asking:
    """Questions about topics. Used by one thread at a time."""

    def __init__(self, cluster: Cluster, interrupts: Interrupts) -> None:
        self.trouble = Trouble()
        self._cluster = cluster
        self._interrupts = interrupts
        self._admin = cluster.admin(self.trouble)

    def topics(self) -> list[str]:
        """Return the names of all topics that are not Kafka's own."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + CONNECT_S_MAX
        while True:
            self._interrupts.check()
            try:
                found = self._admin.list_topics(timeout=0.5)
            except KafkaException as error:
                self._admin.poll(0)
                if time.monotonic() > deadline or self._is_hopeless():
                    raise self._cluster.explain(error.args[0], self.trouble) from None
            else:
                self.trouble.clear()
                return sorted(name for name in found.topics if not name.startswith("__"))

    def look(self, names: list[str]) -> dict[str, TopicLook]:
        """Describe topics, as far as transactions are decided."""
        deadline = time.monotonic() + CONNECT_S_MAX
        while True:
            try:
                return self._look(names)
            except _LeaderMoves as moving:
                if time.monotonic() > deadline:
                    raise moving.error from None
            self._interrupts.check()
            time.sleep(_AGAIN_S)

    def _look(self, names: list[str]) -> dict[str, TopicLook]:
        import confluent_kafka.admin
        from confluent_kafka import TopicCollection, TopicPartition

        described = self._answers(
            lambda: self._admin.describe_topics(
                TopicCollection(names), request_timeout=CONNECT_S_MAX
            ),
            lambda name: str(name),
        )
        places = [
            TopicPartition(name, partition.id)
            for name, topic in described.items()
            for partition in topic.partitions
        ]
        kinds: Any = confluent_kafka.admin  # it has types, and not for this
        begins = self._offsets(places, kinds.OffsetSpec.earliest())
        ends = self._offsets(places, kinds.OffsetSpec.latest())
        self.trouble.clear()
        partitions: dict[str, dict[int, Bounds]] = {name: {} for name in names}
        for place in places:
            found = Bounds(begins[place].offset, ends[place].offset)
            partitions[place.topic][place.partition] = found
        return {
            name: TopicLook(topic_id=str(described[name].topic_id), partitions=partitions[name])
            for name in names
        }

    def _offsets(self, places: list[TopicPartition], which: Any) -> dict[Any, Any]:  # noqa: ANN401
        from confluent_kafka import IsolationLevel

        return self._answers(
            lambda: self._admin.list_offsets(
                dict.fromkeys(places, which),
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=CONNECT_S_MAX,
            ),
            lambda place: str(place.topic),
            # A broker that does not know yet what was just described: describing it again tells.
            passing=_MOVING | {"UNKNOWN_TOPIC_OR_PART"},
        )

    def _answers(
        self,
        ask: Callable[[], Mapping[Any, Future[Any]]],
        topic: Callable[[Any], str],
        *,
        passing: frozenset[str] = _MOVING,
    ) -> dict[Any, Any]:
        """Ask for futures, and wait for all of them; errors of `passing` are worth another try."""
        from confluent_kafka import KafkaException

        with self._cluster.explained(self.trouble):
            futures = ask()
        answers: dict[Any, Any] = {}
        for about, future in futures.items():
            try:
                answers[about] = self._wait(future)
            except KafkaException as error:
                explained = self._cluster.explain(error.args[0], self.trouble, topic(about))
                if error.args[0].name() in passing:
                    raise _LeaderMoves(explained) from None
                raise explained from None
        return answers

    def _wait(self, future: Future[T]) -> T:
        """Wait for an answer; an interrupt, and trouble that does not pass, end it."""
        while True:
            try:
                return future.result(_SLICE_S)
            except Late:
                if future.done():
                    raise
                self._admin.poll(0)  # which calls back about trouble
                self._interrupts.check()
                if self.trouble.error is not None and self._is_hopeless():
                    raise self._cluster.explain(self.trouble.error, self.trouble) from None

    def _is_hopeless(self) -> bool:
        return self.trouble.error is not None and _kind(self.trouble.error) in _AT_ONCE
