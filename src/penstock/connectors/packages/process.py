"""A package's process: started in a group of its own, read with limited memory, ended for certain.

Its standard output is read by a thread, which stops reading while `WAITING_BYTES_MAX` wait to be
taken: then the pipe fills, and the package waits. Its standard error goes to the task's log.
Its configuration is in a file that only this user can read, in a directory that lives as long as
the process; the command line names the file. Of the environment it sees what `ENVIRONMENT` names.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from penstock.connectors.packages import guard
from penstock.connectors.packages.line_splitter import LineSplitter, LineTooLong
from penstock.model.json_order import Json

WAITING_BYTES_MAX: Final = 8 << 20
"""Bytes of lines that wait to be taken before the reader stops reading."""

ENVIRONMENT: Final = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"),
        *("ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("all_proxy", "ftp_proxy", "http_proxy", "https_proxy", "no_proxy"),
        *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"),
    }
)
"""Variables that a package sees, beside those that begin with `LC_` and those of its config."""

_CHUNK_BYTES: Final = 1 << 18
_SAID_LINES: Final = 20
_SAID_CHARS: Final = 1_000
_JOIN_S: Final = 5.0
_LOOK_S: Final = 0.02
_LINGER_S: Final = 30.0
"""Seconds that a process may live on after the end of its output."""

_log = logging.getLogger("penstock.connectors")


class Interrupted(Exception):
    """The process was ended by an interrupt."""


class PackageProcess:
    """A command that runs. `read` is called by one thread, and everything else by any."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        files: Mapping[str, Json],
        *,
        environ: Mapping[str, str] = os.environ,
        added: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. An argument that names one of `files` becomes the path of that file."""
        self.name = name
        self.said: deque[str] = deque(maxlen=_SAID_LINES)
        """The last lines of its standard error."""
        self._ready = threading.Condition()
        self._lines: deque[tuple[list[bytes], int]] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._too_long: LineTooLong | None = None
        self._interrupted = False
        self._closed = False
        self._ending = threading.Lock()
        self._heard = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-package-"))
        try:
            paths = {file: self._write(file, value) for file, value in files.items()}
            self._process = subprocess.Popen(  # noqa: S603 - a package that the user installed
                [
                    *(sys.executable, "-I", "-S", guard.__file__, str(self._directory)),
                    *(paths.get(argument, argument) for argument in command),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                cwd=Path.cwd(),
                env=environment(environ, Path(command[0]).parent, added or {}),
            )
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._threads = [
            self._thread(self._read_output, self._process.stdout),
            self._thread(self._read_errors, self._process.stderr),
        ]

    def _write(self, name: str, value: Json) -> str:
        """Write a file that nobody else can read."""
        path = self._directory / name
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
        return str(path)

    def _thread(
        self, work: Callable[[IO[bytes]], None], stream: IO[bytes] | None
    ) -> threading.Thread:
        context = contextvars.copy_context()  # its log is the task's
        thread = threading.Thread(
            target=lambda: context.run(work, stream),  # type: ignore[arg-type]
            name=f"penstock-package-{self.name}",
            daemon=True,
        )
        thread.start()
        return thread

    # ------------------------------------------------------------------------------------ reading

    def read(self, wait_s: float) -> list[bytes] | None:
        """Return some lines; none if none came in time, and None at the end of the output.

        Raises `Interrupted`, or `LineTooLong`.
        """
        with self._ready:
            self._ready.wait_for(lambda: self._lines or self._ended or self._interrupted, wait_s)
            if self._interrupted:
                raise Interrupted
            if self._lines:
                lines, size = self._lines.popleft()
                self._waiting_bytes -= size
                self._ready.notify_all()
                return lines
            if self._too_long is not None:
                raise self._too_long
            return None if self._ended else []

    @property
    def silent_s(self) -> float:
        """Seconds since it said anything, or since it was listened to."""
        return time.monotonic() - self._heard

    def _read_output(self, stream: IO[bytes]) -> None:
        splitter = LineSplitter()
        try:
            while chunk := stream.read(_CHUNK_BYTES):
                if not self._give(splitter.feed(chunk), len(chunk)):
                    return
            self._give(splitter.end(), 0)
        except LineTooLong as error:
            self._too_long = error
        except (OSError, ValueError):
            pass  # closed by `stop`
        finally:
            with self._ready:
                self._ended = True
                self._ready.notify_all()

    def _give(self, lines: list[bytes], size: int) -> bool:
        """Wait for room, and leave lines to be taken; False if nobody will."""
        self._heard = time.monotonic()
        if not lines:
            return True
        with self._ready:
            self._ready.wait_for(
                lambda: self._waiting_bytes < WAITING_BYTES_MAX or self._closed or self._interrupted
            )
            if self._closed or self._interrupted:
                return False
            self._lines.append((lines, size))
            self._waiting_bytes += size
            self._ready.notify_all()
        self._heard = time.monotonic()
        return True

    def _read_errors(self, stream: IO[bytes]) -> None:
        splitter = LineSplitter()
        with contextlib.suppress(OSError, ValueError, LineTooLong):
            while chunk := stream.read(_CHUNK_BYTES):
                self._heard = time.monotonic()
                self._say(splitter.feed(chunk))
            self._say(splitter.end())
        while stream.closed is False:  # a line without end: nobody waits for a full pipe
            with contextlib.suppress(OSError, ValueError):
                if stream.read(_CHUNK_BYTES):
                    continue
            return

    def _say(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line[:_SAID_CHARS].decode(errors="replace").rstrip()
            self.said.append(text)
            _log.info("%s: %s", self.name, text)

    # ------------------------------------------------------------------------------------- ending

    def wait(self) -> int:
        """After the end of its output, return its exit code; end what it left running.

        Raises `Interrupted`.
        """
        self._wait_exited(_LINGER_S)
        code = self._reap()
        if self._interrupted:
            raise Interrupted
        return code

    def stop(self) -> None:
        """Ask it to end, wait, and kill it if it does not."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._wait_exited(guard.TERM_S + guard.KILL_S)
        self._reap()

    def interrupt(self) -> None:
        """End it at once."""
        with self._ready:
            self._interrupted = True
            self._ready.notify_all()
        with self._ending:
            self._kill()

    def _wait_exited(self, seconds: float) -> None:
        """Wait until the guard has exited, for so long at most; it is not reaped."""
        deadline = time.monotonic() + seconds
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < deadline:
            try:
                if os.waitid(os.P_PID, self._process.pid, options) is not None:
                    return
            except ChildProcessError:
                return  # another thread has reaped it
            time.sleep(_LOOK_S)

    def _reap(self) -> int:
        """Kill what is left of the group, and release everything."""
        with self._ending:
            self._kill()
            code = self._process.wait()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        return code

    def _kill(self) -> None:
        """Kill the group, whose number is its own until the guard is reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def environment(
    environ: Mapping[str, str], programs: Path, added: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a package: what is allowed, and what its configuration adds."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in ENVIRONMENT or name.startswith("LC_")
    }
    path = os.pathsep.join([str(programs), *filter(None, [kept.get("PATH", os.defpath)])])
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **added}
