"""Addresses are read strictly, and one that cannot work where it is sent is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.consensus.committer.address import (
    DEFAULT_ADMIN_PORT,
    DEFAULT_PORT,
    CommitterAddress,
    check_routable,
    is_own_listener,
    join,
    listening,
    parse_listen,
)
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("grpc://db:7000", CommitterAddress(host="db", port=7000)),
        ("grpc://db", CommitterAddress(host="db", port=DEFAULT_PORT)),
        ("grpc://[::1]:7000/", CommitterAddress(host="::1", port=7000)),
        ("grpc://db:1?tls=on", CommitterAddress(host="db", port=1, tls=True)),
        ("grpc://db:1?ca=/ca", CommitterAddress(host="db", port=1, tls=True, ca=Path("/ca"))),
        (
            "grpc://db:1?token_file=t",
            CommitterAddress(host="db", port=1, token_file=Path("t")),
        ),
    ],
)
def test_what_a_url_means(url: str, want: CommitterAddress) -> None:
    assert CommitterAddress.parse(url) == want


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
        CommitterAddress.parse(url)
    assert caught.value.fix
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("text", ["6882", ":6882", "host", "host:", "host:x", "host:70000"])
def test_listening_needs_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UsageError):
        parse_listen(text)


def test_the_bound_literal_is_the_one_that_is_dialled() -> None:
    """B9: nobody replaces 127.0.0.1 by a name that may resolve elsewhere."""
    host, port = parse_listen("127.0.0.1:6882")
    assert CommitterAddress.parse(f"grpc://{join(host, port)}").target == "127.0.0.1:6882"
    host, port = parse_listen("[::1]:6882")
    assert CommitterAddress.parse(f"grpc://{join(host, port)}").target == "[::1]:6882"


def test_default_ports_are_distinct() -> None:
    """B28."""
    assert DEFAULT_PORT != DEFAULT_ADMIN_PORT


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost"])
def test_a_loopback_committer_is_not_handed_to_another_host(host: str) -> None:
    """B26: there, it would be the other host's own, where nobody listens."""
    url = f"grpc://{host}:6882"
    assert check_routable(url, remote=False) == url
    with pytest.raises(UsageError):
        check_routable(url, remote=True)


def test_a_routable_committer_is_handed_on_as_it_is() -> None:
    assert check_routable("grpc://192.0.2.7:6882", remote=True) == "grpc://192.0.2.7:6882"


def test_own_listeners_are_recognised_by_whatever_name() -> None:
    with listening("0.0.0.0", 7000):  # noqa: S104
        assert is_own_listener(CommitterAddress.parse("grpc://127.0.0.1:7000"))
        assert is_own_listener(CommitterAddress.parse("grpc://localhost:7000"))
        assert not is_own_listener(CommitterAddress.parse("grpc://127.0.0.1:7001"))
        assert not is_own_listener(CommitterAddress.parse("grpc://192.0.2.7:7000"))
    assert not is_own_listener(CommitterAddress.parse("grpc://127.0.0.1:7000"))


def test_a_resolver_that_prefers_ipv6_does_not_change_the_literal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B9."""

    def v6_first(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET6, 0, 0, "", ("::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", v6_first)
    assert CommitterAddress.parse("grpc://127.0.0.1:1").target == "127.0.0.1:1"
