"""Messages over local sockets: what is sent arrives, and what is no message is refused."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.warm import wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@pytest.fixture
def ends() -> Iterator[tuple[wire.Channel, wire.Channel]]:
    left, right = (wire.Channel(end) for end in socket.socketpair())
    right.socket.settimeout(10)
    yield left, right
    left.close()
    right.close()


@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=4))
def test_messages_arrive_as_they_were_sent_and_in_order(messages: list[dict[str, Any]]) -> None:
    left, right = (wire.Channel(end) for end in socket.socketpair())
    for message in messages:
        left.send(message)
    left.close()
    assert [right.receive() for _ in messages] == messages
    assert right.receive() is None
    right.close()


def test_a_message_larger_than_a_buffer_arrives(ends: tuple[wire.Channel, wire.Channel]) -> None:
    left, right = ends
    message = {"environment": "x" * 2_000_000}
    sending = threading.Thread(target=left.send, args=[message])
    sending.start()
    assert right.receive() == message
    sending.join()


def test_descriptors_come_with_their_message(
    ends: tuple[wire.Channel, wire.Channel], tmp_path: Path
) -> None:
    left, right = ends
    file = tmp_path / "file"
    with file.open("w") as opened:
        left.send({"n": 1}, [opened.fileno(), opened.fileno()])
    message, descriptors = right.receive_all()
    assert message == {"n": 1}
    assert len(descriptors) == 2
    assert not any(os.get_inheritable(each) for each in descriptors)
    os.write(descriptors[1], b"through it")
    for each in descriptors:
        os.close(each)
    assert file.read_text() == "through it"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "a message of", id="another protocol"),
        pytest.param(struct.pack("!I", wire.MESSAGE_BYTES_MAX + 1), "a message of", id="too large"),
        pytest.param(b"\0\0", "half of a message", id="half of a length"),
        pytest.param(struct.pack("!I", 10) + b"{", "half of a message", id="half of a text"),
        pytest.param(struct.pack("!I", 2) + b"\xff{", "no JSON", id="no text"),
        pytest.param(struct.pack("!I", 2) + b"[]", "no object", id="no object"),
        pytest.param(
            struct.pack("!I", 100_000) + b"[" * 100_000, "no JSON", id="nested without end"
        ),
    ],
)
def test_what_is_no_message_is_refused(
    ends: tuple[wire.Channel, wire.Channel], sent: bytes, why: str
) -> None:
    left, right = ends
    left.socket.sendall(sent)
    left.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(wire.Garbled, match=why):
        right.receive()


def test_descriptors_that_nobody_asked_for_are_refused_and_closed(
    ends: tuple[wire.Channel, wire.Channel],
) -> None:
    left, right = ends
    before = set(Path("/proc/self/fd").iterdir())
    left.send({}, [0] * (wire.DESCRIPTORS_MAX + 3))
    with pytest.raises(wire.Garbled, match="more descriptors"):
        right.receive_all()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_message_that_is_too_large_is_not_sent(ends: tuple[wire.Channel, wire.Channel]) -> None:
    with pytest.raises(wire.Garbled):
        ends[0].send({"environment": "x" * wire.MESSAGE_BYTES_MAX})


def test_the_other_end_is_known(ends: tuple[wire.Channel, wire.Channel]) -> None:
    assert wire.peer_uid(ends[0].socket) == os.getuid()


def test_a_socket_may_be_in_a_directory_of_any_length(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["directory-of-a-long-name"] * 8)
    deep.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with wire.address(str(deep)) as address:
            listener.bind(address)
        listener.listen()
        with wire.address(str(deep)) as address:
            client.connect(address)
    assert (deep / wire.SOCKET).is_socket()


def test_a_change_of_the_code_is_seen() -> None:
    assert wire.code_stamp() == wire.code_stamp()
    assert wire.code_stamp()[0] > 100
