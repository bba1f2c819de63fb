"""The configuration of a cluster: what reaches the client, and what reaches nobody."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.connectors.kafka.cluster import Cluster, Trouble
from penstock.connectors.kafka.source import Kafka
from penstock.errors import UserError

SECRET = "hunter2-of-kafka"  # noqa: S105 - in a test
CONFIG: dict[str, Any] = {
    "bootstrapServers": "a:9092,b:9092",
    "sasl": {"mechanism": "SCRAM-SHA-512", "username": "me", "password": "${env:KAFKA_PW}"},
    "ssl": {"ca": "/etc/ca.pem", "verifyHostname": False},
    "options": {"client.rack": "eu"},
}


def settings(config: dict[str, Any]) -> dict[str, Any]:
    return Cluster.of(config, "capture acme/in")._settings(Trouble())


def test_login_and_certificates_reach_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PW", SECRET)
    made = settings(CONFIG)
    wanted = {
        "bootstrap.servers": "a:9092,b:9092",
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": SECRET,
        "ssl.ca.location": "/etc/ca.pem",
        "ssl.endpoint.identification.algorithm": "none",
        "client.rack": "eu",
    }
    assert {name: made[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("left_out", "protocol"),
    [(("sasl",), "SSL"), (("ssl",), "SASL_PLAINTEXT"), (("sasl", "ssl"), "PLAINTEXT")],
)
def test_what_is_configured_is_used(
    monkeypatch: pytest.MonkeyPatch, left_out: tuple[str, ...], protocol: str
) -> None:
    monkeypatch.setenv("KAFKA_PW", SECRET)
    config = {name: value for name, value in CONFIG.items() if name not in left_out}
    assert settings(config)["security.protocol"] == protocol


def test_no_secret_is_shown_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PW", SECRET)
    cluster = Cluster.of(CONFIG, "capture acme/in")
    cluster._settings(Trouble())
    assert SECRET not in repr(cluster)
    assert SECRET.encode() not in pickle.dumps(cluster)
    assert SECRET not in cluster.name


def test_a_secret_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_PW", raising=False)
    with pytest.raises(UserError, match="environment variable KAFKA_PW is not set"):
        settings(CONFIG)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, '"bootstrapServers" is missing'),
        ({"bootstrapServers": "nowhere"}, "expected hosts with their ports"),
        ({"bootstrapServers": "a:1", "options": {"debug": "all"}}, 'unknown key "debug"'),
        ({"bootstrapServers": "a:1", "onGap": "ignore"}, "expected one of stop, skip"),
        ({"bootstrapServers": "a:1", "sasl": {"mechanism": "PLAIN"}}, '"username" is missing'),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Kafka(config, where="capture acme/in")
