"""The process of a capture in Python, as the leader sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO, Any, Final

from penstock.connectors.python_source.frames import Frame, FrameReader, NoFrame
from penstock.runtime.connector.common import ConnectorError
from penstock.servicekit.secrets import mask

_log = logging.getLogger("penstock.connectors")

END_S: Final = 2.0
"""Seconds that the function has for its `finally`, after which its process is killed."""

_READ_BYTES: Final = 256 << 10
_LINE_CHARS_MAX: Final = 2000
_WORKER: Final = "penstock.connectors.python_source.worker"


class WorkerProcess:
    """A process that runs a function of the user's."""

    def __init__(self, request: dict[str, Any], *, task: str, where: str) -> None:
        self._task = task
        self._where = where
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._ended = False
        self._reading = threading.Lock()
        """Held while the pipe is read: it is not closed then."""
        self._wake_in, self._wake_out = os.pipe()
        self._frames_in, frames_out = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and our own module
                [sys.executable, "-m", _WORKER, str(frames_out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[frames_out],
                start_new_session=True,
            )
        except OSError as error:
            for descriptor in (self._wake_in, self._wake_out, self._frames_in):
                os.close(descriptor)
            raise ConnectorError(
                "cannot start Python", where=where, why=error.strerror, transient=True
            ) from None
        finally:
            os.close(frames_out)
        printed = self._process.stdout
        self._printed = threading.Thread(
            target=self._log_lines, args=(printed,), name="python-capture", daemon=True
        )
        self._printed.start()
        line = json.dumps(request).encode() + b"\n"
        self._asking = threading.Thread(
            target=self._ask, args=(line,), name="python-request", daemon=True
        )
        self._asking.start()

    def _ask(self, line: bytes) -> None:
        """Send the request, in a thread: a state may be larger than a pipe."""
        asked = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            if asked is not None:
                asked.write(line)
                asked.flush()

    def _log_lines(self, printed: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := printed.readline(_LINE_CHARS_MAX):
                text = line.decode(errors="replace").rstrip()
                if text:
                    _log.info("%s: %s", self._task, mask(text))

    # ------------------------------------------------------------------------------------- reading

    def next_frame(self, wait_s: float) -> Frame | None:
        """Return the next frame; None if there is none for so long, or `wake` was called."""
        until = time.monotonic() + wait_s
        with self._reading:
            while not self._frames:
                left_s = max(0.0, until - time.monotonic())
                if self._ended or not self._read_some(left_s):
                    return None
            return self._frames.popleft()

    def _read_some(self, wait_s: float) -> bool:
        """Read what there is; False if there is nothing for so long, or `wake` was called."""
        ready, _, _ = select.select([self._frames_in, self._wake_in], [], [], wait_s)
        if self._wake_in in ready:
            os.read(self._wake_in, 4096)
            return False
        if not ready:
            return False
        data = os.read(self._frames_in, _READ_BYTES)
        if not data:
            raise self._died()
        try:
            self._frames.extend(self._reader.feed(data))
        except (NoFrame, UnicodeDecodeError) as error:
            raise ConnectorError(
                "the process of the module wrote something unknown to its pipe",
                where=self._where,
                why=str(error),
                fix="the module must leave descriptors alone that it has not opened",
            ) from None
        return True

    def wake(self) -> None:
        """Let `next_frame` return soon."""
        with contextlib.suppress(OSError):
            os.write(self._wake_out, b".")

    def _died(self) -> ConnectorError:
        """It ended without a word."""
        if not self._has_exited(END_S):
            return ConnectorError("the module closed the pipe to Penstock", where=self._where)
        self._signal(signal.SIGKILL)  # what it has started, and left behind
        code = self._process.wait()
        why = f"it exited with {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                why = f"it was ended by {signal.Signals(-code).name}"
        return ConnectorError(
            "the process of the module died",
            where=self._where,
            why=why,
            fix="what it printed is in the log; out of memory, the system kills it"
            if code == -signal.SIGKILL
            else "what it printed is in the log",
            transient=code in (-signal.SIGKILL, -signal.SIGTERM),
        )

    # -------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self._ended:
            return
        self._ended = True
        self.wake()
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            self._has_exited(END_S)
            self._signal(signal.SIGKILL)
            self._process.wait()
        for thread in (self._asking, self._printed):
            thread.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with self._reading:
            for descriptor in (self._frames_in, self._wake_in, self._wake_out):
                os.close(descriptor)

    def _has_exited(self, wait_s: float) -> bool:
        """True if it has exited, or does within some seconds. Its number stays taken."""
        until = time.monotonic() + wait_s
        while self._process.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._process.pid, options) is not None:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def _signal(self, number: int) -> None:
        """Signal its group, as long as its number is taken."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
