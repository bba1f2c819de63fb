"""Addresses are read strictly, and a process knows its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.servicekit.rpc.address import (
    DEFAULT_PORT,
    ServiceAddress,
    dial_target,
    is_own_listener,
    parse_listen,
    register_listener,
)


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("grpc://db:7000", ServiceAddress(host="db", port=7000)),
        ("grpc://db", ServiceAddress(host="db", port=DEFAULT_PORT)),
        ("grpc://[::1]:7000/", ServiceAddress(host="::1", port=7000)),
        ("grpc://db:1?tls=on", ServiceAddress(host="db", port=1, tls=True)),
        ("grpc://db:1?ca=/ca", ServiceAddress(host="db", port=1, tls=True, ca=Path("/ca"))),
        (
            "grpc://db:1?token_file=t",
            ServiceAddress(host="db", port=1, token_file=Path("t")),
        ),
    ],
)
def test_what_a_url_means(url: str, want: ServiceAddress) -> None:
    assert ServiceAddress.parse(url) == want


@pytest.mark.parametrize(
    "url",
    [
        "grpc://",
        "http://db:1",
        "grpc://db:1/path",
        "grpc://db:99999",
        "grpc://db:x",
        "grpc://db:1?tsl=on",
        "grpc://db:1?tls=maybe",
        "grpc://db:1?cert=c",
        "grpc://db:1?token=sesame",
        "grpc://me:sesame@db:1",
    ],
)
def test_what_cannot_be_meant_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        ServiceAddress.parse(url)
    assert caught.value.fix
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("text", ["6882", ":6882", "host", "host:", "host:x", "host:70000"])
def test_listening_needs_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UsageError):
        parse_listen(text)


def test_the_bound_literal_is_the_one_that_is_dialled() -> None:
    """Nobody replaces 127.0.0.1 by a name that may resolve elsewhere."""
    host, port = parse_listen("127.0.0.1:6882")
    assert ServiceAddress.parse(f"grpc://{dial_target(host, port)}").target == "127.0.0.1:6882"
    host, port = parse_listen("[::1]:6882")
    assert ServiceAddress.parse(f"grpc://{dial_target(host, port)}").target == "[::1]:6882"


def test_own_listeners_are_recognised_by_whatever_name() -> None:
    with register_listener("0.0.0.0", 7000):  # noqa: S104
        assert is_own_listener(ServiceAddress.parse("grpc://127.0.0.1:7000"))
        assert is_own_listener(ServiceAddress.parse("grpc://localhost:7000"))
        assert not is_own_listener(ServiceAddress.parse("grpc://127.0.0.1:7001"))
        assert not is_own_listener(ServiceAddress.parse("grpc://192.0.2.7:7000"))
    assert not is_own_listener(ServiceAddress.parse("grpc://127.0.0.1:7000"))


def test_a_resolver_that_prefers_ipv6_does_not_change_the_literal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def v6_first(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET6, 0, 0, "", ("::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", v6_first)
    assert ServiceAddress.parse("grpc://127.0.0.1:1").target == "127.0.0.1:1"
