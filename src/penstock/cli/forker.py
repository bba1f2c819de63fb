"""`python -m penstock.cli.forker FD`: the process that warm commands are forked from.

A host starts it (`penstock.warm.host`). It imports what commands need, which takes a second or two,
and then forks for each command that the host sends. It has one thread and opens nothing, so that a
fork is a sound process. What its forks end with, it tells their clients.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import selectors
import signal
import socket
import sys
from typing import Final, NoReturn

from penstock.warm import wire
from penstock.warm.guest import HOST_GONE, Guest

_NEEDED: Final = (
    "penstock.catalog",
    "penstock.connectors.files",
    "penstock.connectors.postgres",
    "penstock.connectors.sqlite",
    "penstock.consensus",
    "penstock.deployment",
    "penstock.journal",
    "penstock.model",
    "penstock.native",
    "penstock.runtime",
    "penstock.shuffle",
    "penstock.testing.deployment_world",
    "pandas",
    "pyarrow.pandas_compat",
    "pyspark.sql.classic.dataframe",
    "pyspark.sql.pandas.map_ops",
    "pyspark.testing.utils",
    "rich._emoji_codes",
    "rich.progress",
)
"""What most commands need. Of Penstock's own packages, all modules; with what they import."""


def main() -> None:
    """Fork for every command that comes, until the host is gone."""
    host = wire.Channel(socket.socket(fileno=int(sys.argv[1])))
    os.set_inheritable(host.socket.fileno(), False)
    _import_all()
    _rehearse()
    gc.collect()
    gc.freeze()  # a fork shares what it does not touch
    _Forker(host).run()


def _import_all() -> None:
    from penstock.cli.main import commands

    commands()
    for name in _NEEDED:
        found = importlib.import_module(name)
        if name.startswith("penstock."):
            for module in pkgutil.walk_packages(getattr(found, "__path__", ()), f"{name}."):
                if ".templates" not in module.name:  # code as users would write it
                    importlib.import_module(module.name)


def _rehearse() -> None:
    """Do what every task does first, where it takes long only once."""
    from penstock.journal.schemas import layout
    from penstock.native.arrow import to_arrow
    from penstock.runtime import ops

    to_arrow([{}], layout(ops.STATS.write_schema.text))


class _Forker:
    def __init__(self, host: wire.Channel) -> None:
        self._host = host
        self._environment = dict(os.environ)
        self._place = os.getcwd()  # noqa: PTH109
        self._clients: dict[int, socket.socket] = {}
        self._ended, self._ends = socket.socketpair()
        for each in (self._ended, self._ends):
            each.setblocking(False)
        signal.set_wakeup_fd(self._ends.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._host.socket, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            host_is_there = True
            while host_is_there or self._clients:  # commands end without it, and very soon
                for key, _ in selector.select():
                    if key.fileobj is self._ended:
                        self._ended.recv(1 << 12)
                        self._tell()
                        continue
                    request, descriptors = self._host.receive_all()
                    if request is not None:
                        self._fork(request, descriptors, selector)
                        del request  # the environment of one command is nothing to the next
                    else:
                        host_is_there = False
                        selector.unregister(self._host.socket)

    def _fork(
        self, request: wire.Message, descriptors: list[int], selector: selectors.BaseSelector
    ) -> None:
        client, control, *streams = descriptors
        child = os.fork()
        if child == 0:
            selector.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for opened in (self._host.socket, self._ended, self._ends, *self._clients.values()):
                opened.close()
            host, own = (wire.Channel(socket.socket(fileno=each)) for each in (control, client))
            _run(Guest(own, host, self._place, self._environment), request, streams)
        self._clients[child] = socket.socket(fileno=client)
        for each in (control, *streams):
            os.close(each)

    def _tell(self) -> None:
        """Tell the clients of commands that have ended how they did."""
        for child in list(self._clients):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            code = os.waitstatus_to_exitcode(status)
            with (
                contextlib.closing(self._clients.pop(child)) as client,
                contextlib.suppress(OSError),
            ):
                if code == HOST_GONE:
                    continue  # the end of the connection says so
                client.settimeout(1)  # a few bytes always fit, unless somebody never reads
                wire.Channel(client).send({"exit": code if code >= 0 else 128 - code})


def _run(guest: Guest, request: wire.Message, streams: list[int]) -> NoReturn:
    """Run the command, in the process that was forked for it."""
    code = 1
    try:
        guest.become(request, streams)
        if guest.wait_for_go():
            code = _command(guest)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()  # noqa: SLF001 - os._exit has none
        os._exit(code)


def _command(guest: Guest) -> int:
    from penstock import engine
    from penstock.cli import frame, main

    frame.look_at_terminal()
    engine.borrow_from(guest.borrow)
    try:
        main.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    main()
