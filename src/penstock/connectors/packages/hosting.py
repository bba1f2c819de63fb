"""Sources and sessions that run a package; what differs by protocol is in its own module."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

from penstock.connectors.packages.environments import Installed, find, parse
from penstock.connectors.packages.line_splitter import LINE_BYTES_MAX, LineTooLong
from penstock.connectors.packages.messages import BrokenMessage, UnknownStream
from penstock.connectors.packages.process import Interrupted, PackageProcess
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import CaptureSequence, Idle, Opening, Polled
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.secrets import referenced, resolve
from penstock.servicekit.secrets import conceal, sounds_secret

SILENCE_S: Final = 3600.0
"""Seconds after which a package that says nothing is ended."""

COMMAND_S: Final = 600.0
"""Seconds that a package may take to check or discover its endpoint."""

_REPORT_S: Final = 60.0
"""Seconds of silence after which the log says so, and again whenever they have doubled."""

_CATALOG_S: Final = 7200.0
"""Seconds for which the streams that a package has are remembered."""

_LOGGED_CHARS: Final = 2_000
_LOOK_S: Final = 0.5

_log = logging.getLogger("penstock.connectors")

CONFIG: Final[Mapping[str, Json]] = {
    "config": {
        "type": "object",
        "title": "a mapping",
        "description": "The package's own configuration.",
        "examples": [{"count": 1000}],
    },
    "environment": {
        "type": "object",
        "additionalProperties": {"type": "string", "title": "a text"},
        "title": "a mapping of names to texts",
        "description": "Environment variables for the package, which sees few others.",
        "examples": [{"AWS_REGION": "eu-central-1"}],
    },
    "silenceTimeout": {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": SILENCE_S,
        "title": "a number of seconds, above 0",
        "description": "Seconds after which a run that says nothing is ended, and tried again.",
        "examples": [600],
    },
}
"""Members of the configuration that are the same for every protocol."""


class Reading(Protocol):
    """A run, message by message."""

    logs: list[tuple[int, str]]

    @property
    def is_full(self) -> bool: ...

    def take(self, line: bytes) -> None: ...

    def finish(self) -> None: ...

    def next(self) -> CaptureSequence | None: ...


class PackageSource:
    """A capture by a package. Nothing is started before a call that needs it.

    The configuration is kept with its references: what they stand for is only in the file that a
    process is given.
    """

    config_schema: ConfigSchema

    def __init__(self, config: Json, *, where: str, protocol: str, package: str) -> None:
        self.where = where
        self._given = self.config_schema.read(config, where=f"{where}: endpoint.connector.config")
        self.package = parse(package, protocol=protocol)
        self._running: list[PackageProcess] = []
        self._lock = threading.Lock()
        self._streams: tuple[float, Any] | None = None

    @property
    def silence_s(self) -> float:
        return float(self._given.get("silenceTimeout", SILENCE_S))

    def installed(self) -> Installed:
        """Return its environment; raises if it is not installed."""
        return find(self.package, where=self.where)

    def settings(self) -> dict[str, Any]:
        """Return the package's own configuration, with its secrets, which are concealed."""
        written = self._given.get("config", {})
        for text in _texts(written):
            for value in referenced(text, where=self.where):
                conceal(value)
        resolved: Any = resolve(written, where=f"{self.where}: config")
        conceal_secrets(resolved)
        found: dict[str, Any] = resolved
        return found

    # --------------------------------------------------------------------------------- processes

    def start(self, arguments: Sequence[str], files: Mapping[str, Json]) -> PackageProcess:
        """Start the package; arguments that name one of `files` become its path."""
        program = self.installed().program
        added: Any = resolve(self._given.get("environment", {}), where=self.where)
        conceal_secrets(added)
        with self._lock:
            process = PackageProcess(self.package.name, [program, *arguments], files, added=added)
            self._running.append(process)
        return process

    def ended(self, process: PackageProcess) -> None:
        """Forget a process."""
        with self._lock, contextlib.suppress(ValueError):
            self._running.remove(process)

    def interrupt(self) -> None:
        with self._lock:
            running = list(self._running)
        for process in running:
            process.interrupt()

    def waits_for(self) -> str | None:
        with self._lock:
            silent_s = max((process.silent_s for process in self._running), default=0.0)
        if silent_s < _REPORT_S:
            return None
        return f"{self.package.name}, which has said nothing for {silent_s:.0f} s"

    def lines(self, arguments: Sequence[str], files: Mapping[str, Json]) -> Iterator[bytes]:
        """Run a command that ends by itself, and yield its lines; raises if it fails."""
        process = self.start(arguments, files)
        deadline = time.monotonic() + COMMAND_S
        try:
            with explained(self, process):
                while (lines := process.read(_LOOK_S)) is not None:
                    yield from lines
                    if time.monotonic() > deadline:
                        self.fail(process, f"did not end within {COMMAND_S:.0f} s", transient=True)
                code = process.wait()
            if code:
                self.fail(process, f"ended with exit code {code}", transient=True)
        finally:
            process.stop()
            self.ended(process)

    def remembered(self, discover: Callable[[], Any]) -> Any:  # noqa: ANN401 - of the protocol
        """Return the streams that the package has, as found lately; starting it takes seconds."""
        now = time.monotonic()
        if self._streams is None or now - self._streams[0] > _CATALOG_S:
            self._streams = now, discover()
        return self._streams[1]

    def forget_streams(self) -> None:
        """Look anew at the next session."""
        self._streams = None

    def fail(
        self,
        process: PackageProcess | None,
        what: str,
        *,
        why: str | None = None,
        fix: str | None = None,
        transient: bool,
        retry_after_s: float = 0.0,
    ) -> NoReturn:
        """Raise the error of a run, with the last that the package said."""
        said = list(process.said)[-3:] if process is not None else []
        raise ConnectorError(
            f"{self.package.image} {what}",
            where=self.where,
            why=why or " | ".join(said) or None,
            fix=fix,
            transient=transient,
            retry_after_s=retry_after_s,
        )


@contextlib.contextmanager
def explained(
    source: PackageSource, process: PackageProcess, *, retry_after_s: float = 0.0
) -> Iterator[None]:
    """Within this, what is wrong with the output of a package is a `ConnectorError`."""
    try:
        yield
    except Interrupted:
        source.fail(None, "was interrupted", transient=True)
    except LineTooLong as error:
        source.fail(
            process,
            f"sent a message of more than {LINE_BYTES_MAX >> 20} MiB",
            why=f"it begins: {error.beginning.decode(errors='replace')}",
            fix="leave that stream out, or let the source send less in one document",
            transient=False,
        )
    except UnknownStream as error:
        source.fail(
            process,
            f"sent a document of a stream that it did not describe: {error.name}",
            fix="report it to the maintainers of the package, or install another version",
            transient=False,
        )
    except BrokenMessage as error:
        source.fail(
            process,
            "sent a message that cannot be read",
            why=f"it begins: {error.beginning}",
            fix="report it to the maintainers of the package, or install another version",
            transient=True,
            retry_after_s=retry_after_s,
        )


class PackageSession:
    """A run, from its start to its end: then the session has given all that it will."""

    def __init__(
        self, source: PackageSource, opening: Opening, process: PackageProcess, reading: Reading
    ) -> None:
        self.source = source
        self.process = process
        self._reading = reading
        self._lines: deque[bytes] = deque()
        self._over = False
        self._reported_s = _REPORT_S
        self.retry_after_s = 0.0 if opening.ends else opening.interval_s

    def poll(self, wait_s: float) -> Polled:
        deadline = time.monotonic() + wait_s
        with explained(self.source, self.process, retry_after_s=self.retry_after_s):
            while not self._over:
                self._take_lines()
                if self._reading.is_full and (sequence := self._reading.next()) is not None:
                    return sequence
                lines = self.process.read(0)
                if lines == []:
                    if (sequence := self._reading.next()) is not None:
                        return sequence
                    lines = self.process.read(max(0.0, deadline - time.monotonic()))
                if lines is None:
                    self._end()
                elif lines:
                    self._lines.extend(lines)
                else:
                    self._judge_silence()
                    return Idle.PENDING
        return self._reading.next() or self.last()

    def _take_lines(self) -> None:
        """Take lines in until there is enough for a sequence."""
        while self._lines and not self._reading.is_full:
            self._reading.take(self._lines.popleft())
            self.after_line()
            for level, text in self._reading.logs:
                _log.log(level, "%s: %s", self.source.package.name, text[:_LOGGED_CHARS])
            self._reading.logs.clear()

    def after_line(self) -> None:
        """Look at what a line has changed."""

    def _end(self) -> None:
        """The output has ended: everything counts, or nothing that was not given."""
        self.judge_end(self.process.wait())
        self._over = True
        self._reading.finish()

    def judge_end(self, code: int) -> None:
        """Raise the error of a run that failed."""
        if code:
            self.source.forget_streams()
            self.source.fail(
                self.process,
                f"ended with exit code {code}",
                transient=True,
                retry_after_s=self.retry_after_s,
            )

    def last(self) -> Idle:
        """Everything is given."""
        return Idle.END

    def _judge_silence(self) -> None:
        silent_s = self.process.silent_s
        if silent_s > self.source.silence_s:
            self.source.fail(
                self.process,
                f"said nothing for {silent_s:.0f} s, and was ended",
                fix="is its source down? If it needs longer: silenceTimeout",
                transient=True,
                retry_after_s=self.retry_after_s,
            )
        if silent_s < _REPORT_S:
            self._reported_s = _REPORT_S
        elif silent_s > self._reported_s:
            self._reported_s *= 2
            _log.warning("%s has said nothing for %.0f s", self.source.package.name, silent_s)

    def acknowledge(self, sequences: int) -> None:
        """Nobody is told: a package learns by the state that its next run is given."""

    def close(self) -> None:
        self.process.stop()
        self.source.ended(self.process)


# ---------------------------------------------------------------------------------------- secrets


def conceal_secrets(value: Json, name: str = "") -> None:
    """Hide the texts of members that sound secret, wherever they appear from now on."""
    match value:
        case dict():
            for member, inner in value.items():
                conceal_secrets(inner, member)
        case list():
            for inner in value:
                conceal_secrets(inner, name)
        case str() if sounds_secret(name):
            conceal(value)
        case _:
            pass


def _texts(value: Json) -> Iterator[str]:
    match value:
        case dict():
            for inner in value.values():
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)
        case str():
            yield value
        case _:
            pass
