"""A Unix socket is socket_file only where its directory protects it."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from penstock.errors import Unavailable, UsageError
from penstock.servicekit.rpc.address import ServiceAddress, socket_of
from penstock.servicekit.rpc.sockets import socket_file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run" / "p.sock"


def bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.parametrize(
    ("mode", "tokens", "says"),
    [
        (0o755, False, "chmod 700"),
        (0o750, False, "chmod 700"),
        (0o1777, False, "chmod 700"),
        (0o777, True, "chmod go-w"),
        (0o770, True, "chmod go-w"),
        (0o700, False, None),
        (0o755, True, None),
    ],
)
def test_a_directory_that_protects_too_little_is_refused(
    place: Path, mode: int, tokens: bool, says: str | None
) -> None:
    place.parent.mkdir()
    place.parent.chmod(mode)
    if says is None:
        with socket_file(place, lambda: bind(place).close(), tokens=tokens):
            assert stat.S_IMODE(place.stat().st_mode) == (0o666 if tokens else 0o600)
        assert not place.exists()
        return
    with pytest.raises(UsageError) as caught, socket_file(place, lambda: None, tokens=tokens):
        pass
    assert says in str(caught.value)


def test_only_the_socket_of_a_dead_process_is_removed(place: Path) -> None:
    place.parent.mkdir(mode=0o700)
    place.write_text("a file")
    with (
        pytest.raises(UsageError, match="no socket"),
        socket_file(place, lambda: None, tokens=False),
    ):
        pass
    assert place.read_text() == "a file"
    place.unlink()
    with bind(place):
        other = socket_file(place, lambda: None, tokens=False)
        with pytest.raises(Unavailable, match="cannot listen"), other:
            pass
    with socket_file(place, lambda: bind(place).close(), tokens=False):
        place.unlink()
        place.write_text("of another")
    assert place.read_text() == "of another"


@pytest.mark.parametrize(
    "url",
    [
        "grpc+unix://host/p.sock",
        "grpc+unix:///",
        "grpc+unix:///p.sock?tls=on",
        "grpc+unix:///p.sock?ca=x",
    ],
)
def test_urls_that_cannot_be_meant_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        ServiceAddress.parse(url)


def test_addresses() -> None:
    address = ServiceAddress.parse("grpc+unix:///run/p%20q/p.sock?token_file=t")
    assert address.target == "unix:/run/p q/p.sock"
    assert address.token_file == Path("t")
    assert socket_of("unix:/run/p.sock") == socket_of("unix:///run/p.sock") == Path("/run/p.sock")
    assert socket_of("127.0.0.1:0") is None
    for wrong in ("unix:", "unix:p.sock"):
        with pytest.raises(UsageError):
            socket_of(wrong)
