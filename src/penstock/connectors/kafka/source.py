"""Kafka as a source: every record of a topic becomes a document, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.connectors.kafka import discovery
from penstock.connectors.kafka.cluster import CONFIG_SCHEMA, Asking, Cluster, Interrupts
from penstock.connectors.kafka.session import KafkaSession
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import Discovered, Opening

_TOPIC_CHARS_MAX: Final = 249


class Kafka:
    """`penstock/source-kafka`."""

    config_schema = CONFIG_SCHEMA
    resource_schema = ConfigSchema(
        {
            "topic": {
                "type": "string",
                "pattern": r"^[a-zA-Z0-9._-]+$",
                "maxLength": _TOPIC_CHARS_MAX,
                "identity": True,
                "title": f"the name of a topic; at most {_TOPIC_CHARS_MAX} letters, digits, dots, "
                "dashes and underscores",
                "description": "The topic.",
                "examples": ["orders"],
            },
            "format": {
                "type": "string",
                "enum": ["json", "text", "raw"],
                "default": "json",
                "title": "json, text or raw",
                "description": "What a record's value is: a JSON document; UTF-8 text, or any "
                "bytes, which become the member `value`, bytes in base64.",
                "examples": ["json"],
            },
            "startFrom": {
                "type": "string",
                "enum": ["earliest", "latest"],
                "default": "earliest",
                "title": "earliest or latest",
                "description": "Where to begin a topic that was never read: with what it has, or "
                "with what comes.",
                "examples": ["earliest"],
            },
        },
        required=("topic",),
    )

    def __init__(self, config: Json, *, where: str) -> None:
        self._cluster = Cluster.of(config, where)
        self._interrupts = Interrupts()
        self._session: KafkaSession | None = None

    def check(self) -> None:
        with self._interrupts.on():
            Asking(self._cluster, self._interrupts).topics()

    def interrupt(self) -> None:
        self._interrupts.interrupt()

    def waits_for(self) -> str | None:
        return self._cluster.name if self._session is None else self._session.trouble

    def discover(self) -> Sequence[Discovered]:
        with self._interrupts.on():
            return discovery.discover(self._cluster, self._interrupts)

    def open(self, opening: Opening) -> KafkaSession:
        topics = [str(binding.resource.value["topic"]) for binding in opening.bindings]
        for at, topic in enumerate(topics):
            if topic in topics[:at]:
                raise UserError(
                    f"two bindings read topic {topic}",
                    where=self._cluster.where,
                    fix="keep one of them, or move the other one to a separate capture",
                )
        self._session = None
        with self._interrupts.on():
            self._session = KafkaSession(
                self._cluster,
                opening,
                self._interrupts,
                skips_gaps=self._cluster.config.value.get("onGap") == "skip",
            )
        return self._session
