"""The client of a warm command: finds the process to run it, hands it over, and waits for its end.

    client                       host (`penstock up`, …)           the command's own process
      ── command, environment, ──▶ checks, passes on ──▶ forker ──fork──▶ is set up like the client
         directory, descriptors
      ◀──────────────────────────────── ready ─────────────────────────── waits
      ──────────────────────────────── go, signal ──────────────────────▶ runs, and prints
      ◀──── how it ended ─────────────────────────────── forker            to the client's terminal

What the command reads and writes is the client's: arguments, environment, directory, terminal. Up
to "go" it can be run here instead, and after that it cannot: it may have begun. A client that dies
closes the connection, and the command stops.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from penstock.warm import wire

COMMANDS: Final = ("run", "preview", "read", "test")
"""The commands that are handed over for the sake of Spark."""

_QUICKER: Final = ("apply",)
"""Those that need none, and are handed over because they start in a tenth of the time."""

OWN_SPARK: Final = "--own-spark"

COMMON_VALUES: Final = frozenset(
    ("--data", "--consensus", "--blob", "--catalog", "--master", "--conf", "--log-level")
)
COMMON_FLAGS: Final = frozenset(("--log-json", "--json", "--debug"))
"""The common options, which may stand before the command, too."""

READY_S: Final = 10.0
"""Seconds until the command is run here instead."""

_REPORT_S: Final = 2.0
_SIGNALS_MAX: Final = 4
"""Ctrl-C so many times ends this process, whatever the command does."""


class _RunHere(Exception):
    """The command was not begun elsewhere, and this is why."""


def run_elsewhere(arguments: Sequence[str]) -> int | None:
    """Run a command in a process that has Spark, and return its exit code; None: run it here."""
    arguments = command_first(arguments)
    if not _wanted(arguments):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not _connected(connection, os.path.join(_data(arguments), wire.DIRECTORY)):  # noqa: PTH118
            return None
        channel = wire.Channel(connection)
        _begin(channel, arguments)
        return _ended(channel)
    except _RunHere as why:
        if arguments[0] in COMMANDS:
            _say(f"starting Spark for this command alone: {why}")
        return None
    finally:
        connection.close()


def command_first(arguments: Sequence[str]) -> list[str]:
    """Move common options from before the command to after it: `--data x run`, `run --data x`."""
    at = 0
    while at < len(arguments):
        name, equals, _ = arguments[at].partition("=")
        if name in COMMON_VALUES:
            at += 1 if equals else 2
        elif arguments[at] in COMMON_FLAGS:
            at += 1
        else:
            break
    if at >= len(arguments) or arguments[at].startswith("-"):
        return list(arguments)
    return [arguments[at], *arguments[:at], *arguments[at + 1 :]]


def _wanted(arguments: Sequence[str]) -> bool:
    if not arguments or arguments[0] not in (*COMMANDS, *_QUICKER):
        return False
    return {OWN_SPARK, "--help", "-h"}.isdisjoint(arguments)


def _data(arguments: Sequence[str]) -> str:
    """Where the data directory should be, found as the command will."""
    given: dict[str, str] = {}
    files = []
    for at, argument in enumerate(arguments):
        if argument == "--data":
            given["data"] = arguments[at + 1] if at + 1 < len(arguments) else ""
        elif argument.startswith("--data="):
            given["data"] = argument.partition("=")[2]
        elif not argument.startswith("-"):
            files.append(argument)
    written = [
        place
        for place in (*map(os.path.dirname, files), "")
        if os.path.isfile(os.path.join(place, "penstock.toml"))  # noqa: PTH113, PTH118
    ]
    if not written:
        return given.get("data") or os.environ.get("PENSTOCK_DATA") or ".penstock"
    from pathlib import Path

    from penstock.settings import Settings

    return str(Settings.resolve(given, os.environ, [Path(place) for place in written]).data)


def _connected(connection: socket.socket, directory: str) -> bool:
    """Connect to the process that listens there; False if there is none."""
    connection.settimeout(READY_S)
    try:
        with wire.address(directory) as address:
            connection.connect(address)
    except OSError:  # not there, or left by a process that was killed
        return False
    owner = wire.peer_uid(connection)
    if owner != os.getuid():  # it would be given this environment, with all that is secret in it
        raise _RunHere(f"the process that listens in {directory} is of another user ({owner})")
    return True


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _begin(channel: wire.Channel, arguments: Sequence[str]) -> None:
    """Hand the command over, and let it run."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if None in streams:
        raise _RunHere("standard input, output or error is closed")
    try:
        channel.send(_request(arguments), [stream.fileno() for stream in streams])
        answer = _answer(channel)
    except TimeoutError:
        raise _RunHere(f"the process that has one did not answer within {READY_S:g} s") from None
    except wire.Garbled as error:
        raise _RunHere(f"there would be {error}") from None
    except (OSError, ValueError):
        answer = None
    if answer is None or "ready" not in answer:
        why = (answer or {}).get("refused", "the process that has one is going away")
        raise _RunHere(str(why))
    channel.socket.settimeout(None)
    _forward_signals(channel)
    try:
        channel.send({"go": True})
    except OSError:
        raise _RunHere("the process that has one has gone away") from None


def _answer(channel: wire.Channel) -> wire.Message | None:
    """The first answer; whoever waits for it is told so."""
    until = time.monotonic() + READY_S
    channel.socket.settimeout(_REPORT_S)
    try:
        return channel.receive()
    except TimeoutError:
        _say("waiting for the process that has Spark")
    channel.socket.settimeout(max(0.1, until - time.monotonic()))
    return channel.receive()


def _request(arguments: Sequence[str]) -> dict[str, Any]:
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        **wire.identity(),
        "arguments": list(arguments),
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109
        "umask": mask,
        "path": sys.path,
        "streams": [[stream.encoding, stream.errors] for stream in (sys.stdout, sys.stderr)],
    }


def _forward_signals(channel: wire.Channel) -> None:
    """From now on, stop signals are for the command, which knows how to end."""
    asked = 0

    def forward(number: int, _: object) -> None:
        nonlocal asked
        asked += 1
        if asked >= _SIGNALS_MAX:
            os._exit(128 + number)
        try:
            channel.send({"signal": number})
        except OSError:  # the end of the connection is seen where it is read
            return

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)


def _ended(channel: wire.Channel) -> int:
    """Wait for the end of the command, and return its exit code."""
    try:
        message = channel.receive() or {}
    except (OSError, wire.Garbled):
        message = {}
    code = message.get("exit")
    if isinstance(code, int):
        return code
    _say(
        "penstock: the process whose Spark this command used has ended, and the command with it\n"
        "  fix   run it again: it continues after the last transaction"
    )
    return 1
