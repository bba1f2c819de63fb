"""The process of a warm command: becomes like its client's, is stopped by it, and borrows Spark.

It has two connections. The client's brings signals, and its end means that the client is gone: the
command stops, as on SIGTERM. The host's brings Spark, and its end means that Spark is gone: the
process exits at once, which is safe at any time.
"""

from __future__ import annotations

import io
import os
import queue
import selectors
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Final

from penstock.engine import EngineOptions, Gateway
from penstock.warm import wire

GO_S: Final = 10.0
"""Seconds that a client may take to let its command run."""

STOPPED_S: Final = 20.0
"""Seconds that a command may take to stop without its client."""

HOST_GONE: Final = 75
"""Exit code of a command that ends because its host is gone."""

_NOT_COMPARED: Final = frozenset(
    {
        # what terminals, shells, sessions and editors tell of themselves
        "_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "PS1", "PROMPT_COMMAND", "HISTFILE",
        "HISTSIZE", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "TERM", "TERM_PROGRAM",
        "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "TERMINFO", "COLORTERM", "COLORFGBG", "TTY",
        "GPG_TTY", "WINDOWID", "VTE_VERSION", "KONSOLE_VERSION", "ITERM_SESSION_ID",
        "ITERM_PROFILE", "LC_TERMINAL", "LC_TERMINAL_VERSION", "TMUX", "TMUX_PANE", "STY",
        "WINDOW", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY",
        "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS", "XDG_VTNR", "XDG_SEAT",
        "DBUS_SESSION_BUS_ADDRESS", "SESSION_MANAGER", "INVOCATION_ID", "JOURNAL_STREAM",
        "SYSTEMD_EXEC_PID", "VSCODE_IPC_HOOK_CLI", "VSCODE_GIT_IPC_HANDLE", "FORCE_COLOR",
        "NO_COLOR", "CLICOLOR", "TTY_COMPATIBLE",
        # what make tells its commands
        "MAKEFLAGS", "MAKELEVEL", "MFLAGS",
        # settings of this process, and what it sets itself
        "PENSTOCK_DATA", "PENSTOCK_CONSENSUS", "PENSTOCK_BLOB", "PENSTOCK_CATALOG",
        "PENSTOCK_MASTER", "PENSTOCK_CONF", "PENSTOCK_LOG_LEVEL", "PENSTOCK_LOG_JSON",
        "PENSTOCK_JSON", "PENSTOCK_DEBUG", "PENSTOCK_FAILPOINT", "GRPC_ENABLE_FORK_SUPPORT",
        "GRPC_VERBOSITY", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE",
    }
)  # fmt: skip


class Guest:
    """A command that was forked for a client."""

    def __init__(
        self, client: wire.Channel, host: wire.Channel, place: str, environment: Mapping[str, str]
    ) -> None:
        """`place` and `environment` are the host's, which the tasks of its Spark have."""
        self._client = client
        self._host = host
        self._place = place
        self._environment = environment
        self._answers: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()

    def become(self, request: wire.Message, streams: list[int]) -> None:
        """Take on everything that a command reads: arguments, environment, directory, streams."""
        for number, each in enumerate(streams):
            os.dup2(each, number)
            os.close(each)
        os.chdir(request["directory"])
        os.umask(request["umask"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv[:] = ["penstock", *request["arguments"]]
        sys.path[:] = request["path"]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            _stream(number, *kind) for number, kind in enumerate(request["streams"], start=1)
        )

    def wait_for_go(self) -> bool:
        """Say that the command may run, and wait until it shall; False if it shall not."""
        self._client.socket.settimeout(GO_S)
        self._client.send({"ready": os.getpid()})
        message = self._client.receive()
        self._client.socket.settimeout(None)
        if message is None or "go" not in message:
            return False
        threading.Thread(target=self._watch, name="penstock-guest", daemon=True).start()
        return True

    def borrow(self, options: EngineOptions) -> Gateway | str:
        """Ask the host for its Spark; returns why it cannot be used, if it cannot."""
        if (why := self._difference()) is not None:
            return why
        try:
            self._host.send({"master": options.master, "conf": dict(options.conf)})
        except OSError:
            os._exit(HOST_GONE)
        answer = self._answers.get()
        if "refused" in answer:
            return str(answer["refused"])
        return Gateway(port=answer["port"], secret=answer["secret"])

    def _difference(self) -> str | None:
        """What tasks would see of the host, and not of the client."""
        if os.getcwd() != self._place:  # noqa: PTH109
            return f"the one that is running is in another directory, {self._place}"
        names = (self._environment.keys() | os.environ.keys()) - _NOT_COMPARED
        for name in sorted(names):
            if self._environment.get(name) != os.environ.get(name):
                return f"the one that is running has another {name} in its environment"
        return None

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for channel in (self._client, self._host):
                selector.register(channel.socket, selectors.EVENT_READ, channel)
            while True:
                for key, _ in selector.select():
                    channel = key.data
                    message = _received(channel)
                    if message is not None and "signal" in message:
                        _signal(message["signal"])
                    elif message is not None:
                        self._answers.put(message)
                    elif channel is self._host:
                        os._exit(HOST_GONE)
                    else:
                        selector.unregister(channel.socket)
                        _signal(signal.SIGTERM)
                        _exit_later()


def _received(channel: wire.Channel) -> wire.Message | None:
    try:
        return channel.receive()
    except (OSError, wire.Garbled):
        return None


def _signal(number: int) -> None:
    """Deliver it to the main thread, which may be waiting for something else."""
    if number in (signal.SIGINT, signal.SIGTERM) and (main := threading.main_thread().ident):
        signal.pthread_kill(main, number)


def _exit_later() -> None:
    timer = threading.Timer(STOPPED_S, os._exit, [1])
    timer.daemon = True
    timer.start()


def _stream(number: int, encoding: str, errors: str) -> io.TextIOWrapper:
    raw = open(number, "wb", closefd=False)  # noqa: SIM115
    lines = number == 2 or raw.isatty()
    return io.TextIOWrapper(raw, encoding=encoding, errors=errors, line_buffering=lines)
