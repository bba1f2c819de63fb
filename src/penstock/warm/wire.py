"""Messages over a local socket: a JSON object behind its length, with file descriptors beside it.

Both ends belong to one user, which each checks of the other before it sends anything. What is read
is bounded, and is data only. Nothing but the standard library is imported: the client of a warm
command has a few milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

MESSAGE_BYTES_MAX: Final = 4 << 20
"""Of one message; an environment and a command line have at most half of it on Linux."""

DESCRIPTORS_MAX: Final = 5

DIRECTORY: Final = "warm"
"""The directory below the data directory, which its user alone may enter."""

SOCKET: Final = "socket"
LOCK: Final = "lock"

_PATH_BYTES_MAX: Final = 107 if sys.platform == "linux" else 103
_LENGTH: Final = struct.Struct("!I")

Message = Mapping[str, Any]


class Garbled(Exception):
    """The other end sent something that is no message, or went away in the middle of one."""


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; `OSError` if the other end is gone."""
        text = json.dumps(message).encode()
        if len(text) > MESSAGE_BYTES_MAX:
            raise Garbled(f"a message of {len(text)} bytes")
        head = _LENGTH.pack(len(text))
        if descriptors:
            sent = socket.send_fds(self.socket, [head], list(descriptors))
            head = head[sent:]
        self.socket.sendall(head + text)

    def receive(self) -> Message | None:
        """Return the next message; None if the other end has closed."""
        message, descriptors = self.receive_all(descriptors_max=0)
        for each in descriptors:
            os.close(each)
        return message

    def receive_all(
        self, descriptors_max: int = DESCRIPTORS_MAX
    ) -> tuple[Message | None, list[int]]:
        """Return the next message and the descriptors that came with it, which are the caller's."""
        descriptors: list[int] = []
        try:
            return self._receive(descriptors, descriptors_max), descriptors
        except BaseException:
            for each in descriptors:
                os.close(each)
            raise

    def _receive(self, descriptors: list[int], descriptors_max: int) -> Message | None:
        head = b""
        while len(head) < _LENGTH.size:
            more, came, flags, _ = socket.recv_fds(
                self.socket, _LENGTH.size - len(head), descriptors_max
            )
            for each in came:
                os.set_inheritable(each, False)
            descriptors += came
            if flags & socket.MSG_CTRUNC or len(descriptors) > descriptors_max:
                raise Garbled("more descriptors than were expected")
            if not more and not head:
                return None
            if not more:
                raise Garbled("half of a message")
            head += more
        (length,) = _LENGTH.unpack(head)
        if length > MESSAGE_BYTES_MAX:
            raise Garbled(f"a message of {length} bytes")
        text = bytearray()
        while len(text) < length:
            more = self.socket.recv(min(length - len(text), 1 << 16))
            if not more:
                raise Garbled("half of a message")
            text += more
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise Garbled("a message that is no JSON") from None
        if not isinstance(message, dict):
            raise Garbled("a message that is no object")
        return message

    def close(self) -> None:
        """Close this end; whoever waits for a message on it gets none."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end, as the kernel knows them."""
    linux = getattr(socket, "SO_PEERCRED", None)
    if linux is not None:  # struct ucred: process, user, group
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, linux, 12))[1])
    # macOS: LOCAL_PEERCRED of a local socket, a struct xucred: version, user, groups
    return int(struct.unpack_from("2I", connection.getsockopt(0, 1, 76))[1])


@contextmanager
def address(directory: str) -> Iterator[str]:
    """The address of the socket in a directory, however long the directory's name is."""
    path = os.path.join(directory, SOCKET)  # noqa: PTH118 - pathlib takes longer to import
    if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
        yield path
        return
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


def code_stamp() -> list[int]:
    """Return what tells whether the code of this package was changed: files, bytes, last change."""
    files = size = changed = 0
    pending = [os.path.dirname(os.path.dirname(__file__))]  # noqa: PTH120
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in found:
                if entry.name.endswith(".py"):
                    about = entry.stat()
                    files, size = files + 1, size + about.st_size
                    changed = max(changed, about.st_mtime_ns)
                elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return [files, size, changed]


def identity() -> dict[str, Any]:
    """Return what must be alike in two processes for one to run the command of the other."""
    return {"python": sys.hexversion, "prefix": sys.prefix, "code": code_stamp()}
