"""The host of warm commands: lets others of its user use the Spark of this process.

A command runs in a process of its own, a fork of the **forker**: one that has imported what
commands need and does nothing but fork. So whatever a command reads (environment, directory, files,
secrets) is its client's, and whatever it does wrong is its own. Of this process it uses only Spark,
through a gateway that is opened for it and closed with it: on loopback, with a secret of its own.

The jobs of a gateway have a tag, so that what a killed command leaves running is cancelled.

Commands have a thread each here, because calls into the JVM block: the event loop of the host is
never held up, and need not be free.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.engine import EngineOptions, open_spark, runs_here
from penstock.errors import PenstockError
from penstock.settings import Settings
from penstock.warm import wire

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("penstock.warm")

COMMANDS_MAX: Final = 16
"""Commands at a time; one more starts a Spark of its own."""

REQUEST_S: Final = 5.0
"""Seconds that a client may take to say what it wants."""

STOP_S: Final = 12.0
"""Seconds that commands may take to stop when their host does: ten are for a transaction."""

_FORK_DELAY_S: Final = 10.0
"""The forker takes two seconds of a core to start, which the host itself needs first. A command
that comes earlier starts it."""

_FORKER: Final = "penstock.cli.forker"
_DESCRIPTORS: Final = 3


class WarmHost:
    """Offers the Spark of this process, while the block runs.

    If it cannot (another process does, the directory is another user's), the log says so, and
    nothing else changes.
    """

    def __init__(self, settings: Settings) -> None:
        self._options = EngineOptions(master=settings.master, conf=settings.conf)
        self._directory = settings.data.absolute() / wire.DIRECTORY
        self._identity = wire.identity()
        self._stopping = threading.Event()
        self._room = threading.BoundedSemaphore(2 * COMMANDS_MAX)
        """For clients: those with commands, and those that have not said what they want."""
        self._commands: set[wire.Channel] = set()
        self._changed = threading.Condition()
        self._forker = _Forker()
        self._resources = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._stop)

    # --------------------------------------------------------------------------- start and stop

    def _start(self) -> None:
        try:
            listener = self._listen()
        except OSError as error:
            why = error.strerror or str(error)
            _log.warning("other commands start their own Spark: %s: %s", self._directory, why)
            return
        except BlockedByAnother:
            _log.info("another process offers its Spark in %s", self._directory)
            return
        timer = threading.Timer(_FORK_DELAY_S, self._forker.start)
        timer.daemon = True
        timer.start()
        self._resources.callback(timer.cancel)
        _thread(self._accept, listener)

    def _listen(self) -> socket.socket:
        directory = self._directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if directory.stat().st_uid != os.getuid():
            raise PermissionError(1, "it belongs to another user")
        directory.chmod(0o700)
        with contextlib.ExitStack() as opening:
            lock = os.open(directory / wire.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opening.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockedByAnother from None
            path = directory / wire.SOCKET
            path.unlink(missing_ok=True)  # of a process that was killed: it would have the lock
            listener = opening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with wire.address(str(directory)) as address:
                listener.bind(address)
            opening.callback(path.unlink, missing_ok=True)
            path.chmod(0o600)
            listener.listen(COMMANDS_MAX)
            opening.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes who accepts
            self._resources = opening.pop_all()
        return listener

    def _stop(self) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._resources.close()
        with self._changed:
            for channel in self._commands:
                with contextlib.suppress(OSError):
                    channel.send({"signal": int(signal.SIGTERM)})
            self._changed.wait_for(lambda: not self._commands, STOP_S)
            for channel in self._commands:
                channel.close()  # which ends its command at once
            self._changed.wait_for(lambda: not self._commands, REQUEST_S)
        self._forker.stop()

    # ------------------------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                if not self._stopping.wait(0.1):
                    continue  # too many open files, perhaps: not for ever
                return
            if self._room.acquire(blocking=False):
                _thread(self._serve, connection)
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Take a command from a client, let it be run, and give it Spark when it asks."""
        with (
            contextlib.ExitStack() as stack,
            contextlib.suppress(OSError, wire.Garbled),
            connection,
        ):
            stack.callback(self._room.release)
            if wire.peer_uid(connection) != os.getuid():
                return
            connection.settimeout(REQUEST_S)
            client = wire.Channel(connection)
            request, streams = client.receive_all(_DESCRIPTORS)
            with _closing(streams):
                if request is None:
                    return
                if (why := self._refusal(request, len(streams))) is not None:
                    client.send({"refused": why})
                    return
                ours, theirs = socket.socketpair()
                control = wire.Channel(ours)
                with contextlib.closing(control), self._command(control):
                    with theirs:
                        connection.settimeout(None)
                        passed = [connection.fileno(), theirs.fileno(), *streams]
                        self._forker.send(request, passed)
                        _log.debug("runs penstock %s for another process", request["arguments"][0])
                    connection.close()
                    for each in streams:
                        os.close(each)
                    streams.clear()
                    self._lend(control)

    def _refusal(self, request: wire.Message, streams: int) -> str | None:
        """Why this command is not run here, if it is not."""
        if self._stopping.is_set():
            return "the process that has one is stopping"
        if any(request.get(name) != value for name, value in self._identity.items()):
            return "the process that has one runs another version or another Python"
        if streams != _DESCRIPTORS or not _is_command(request):
            return "the process that has one does not understand the command"
        if len(self._commands) >= COMMANDS_MAX:
            return f"{COMMANDS_MAX} commands use the one that is running"
        return None

    @contextlib.contextmanager
    def _command(self, control: wire.Channel) -> Iterator[None]:
        with self._changed:
            self._commands.add(control)
        try:
            yield
        finally:
            with self._changed:
                self._commands.discard(control)
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------ Spark

    def _lend(self, control: wire.Channel) -> None:
        """Answer a command that asks for Spark, until it has ended."""
        with contextlib.ExitStack() as gateways:
            while (asked := control.receive()) is not None:
                try:
                    answer = self._answer(asked, gateways)
                except PenstockError as error:
                    answer = {"refused": error.what}
                except Exception as error:  # Spark's and py4j's: the command starts its own
                    _log.exception("a command cannot use Spark")
                    answer = {"refused": f"{type(error).__name__} in the process that has one"}
                control.send(answer)

    def _answer(self, asked: wire.Message, gateways: contextlib.ExitStack) -> dict[str, Any]:
        ours = {"master": self._options.master, "conf": dict(self._options.conf)}
        for name, value in ours.items():
            if asked.get(name) != value:
                return {"refused": f"the one that is running has another --{name}"}
        spark = open_spark(self._options)
        if not runs_here(spark):
            return {"refused": "the one that is running has its executors elsewhere"}
        gateway = _Gateway(spark)
        gateways.callback(gateway.close)
        return {"port": gateway.port, "secret": gateway.secret}


class BlockedByAnother(Exception):
    """Another process has the lock."""


class _Gateway:
    """A way into the JVM for one command."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = context = spark.sparkContext
        self._tag = f"penstock-{uuid.uuid4().hex}"
        jvm: Any = spark._jvm  # noqa: SLF001 - pyspark opens no second gateway
        # The threads of the server inherit the tag from the one that starts it, which is this one.
        context.addJobTag(self._tag)
        try:
            self._server = jvm.org.apache.spark.api.python.Py4JServer(context._jsc.sc().conf())  # noqa: SLF001
            self._server.start()
        finally:
            context.removeJobTag(self._tag)
        self.port = int(self._server.getListeningPort())
        self.secret = str(self._server.secret())

    def close(self) -> None:
        """End what the command left behind, and forget its objects."""
        with contextlib.suppress(Exception):  # the JVM may be gone
            self._context.cancelJobsWithTag(self._tag)
            self._server.shutdown()


class _Forker:
    """The process that commands are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment = dict(os.environ)
        """As it is now: while Spark starts, there is more in it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: wire.Channel | None = None
        self._stopped = False

    def start(self) -> None:
        with self._lock:
            self._started()

    def send(self, request: wire.Message, descriptors: list[int]) -> None:
        """Let a command be run; once more, if the process that should have done it was killed."""
        with self._lock:
            try:
                self._started().send(request, descriptors)
            except OSError:
                self._forget()
                self._started().send(request, descriptors)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._forget()

    def _started(self) -> wire.Channel:
        if self._stopped:
            raise OSError("it is stopped")
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:
                # In a session of its own: Ctrl-C of the host's terminal is not for commands.
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-m", _FORKER, str(theirs.fileno())],
                    env=self._environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            ours.settimeout(REQUEST_S)
            self._channel = wire.Channel(ours)
        return self._channel

    def _forget(self) -> None:
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None:
            try:
                process.wait(REQUEST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_command(request: wire.Message) -> bool:
    """True if a request has what the process of the command is set up with."""
    variables, pairs = request.get("environment"), request.get("streams")
    return (
        all(_are_texts(request.get(name)) for name in ("arguments", "path"))
        and isinstance(variables, dict)
        and _are_texts(list(variables.values()))
        and isinstance(request.get("directory"), str)
        and isinstance(request.get("umask"), int)
        and isinstance(pairs, list)
        and [_are_texts(pair) and len(pair) for pair in pairs] == [2, 2]
    )


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


def _thread(call: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=call, args=arguments, name="penstock-warm", daemon=True).start()


@contextlib.contextmanager
def _closing(descriptors: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in descriptors:
            os.close(each)
