"""Captures by a function in Python: `endpoint: {python: {module: …}}`.

The function runs in a process of its own, and yields rows and states. What it yields between two
states is one sequence.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from penstock.connectors.python_source.frames import Frame, FrameKind
from penstock.connectors.python_source.process import WorkerProcess
from penstock.connectors.python_source.progress import Progress
from penstock.connectors.python_source.spooling import Gathered, directory
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import (
    CaptureSequence,
    CaptureSession,
    Discovered,
    Idle,
    Opening,
    Polled,
    SourceBinding,
)
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.secrets import resolve
from penstock.servicekit.secrets import mask

_log = logging.getLogger("penstock.connectors")

ASK_S: Final = 120.0
"""Seconds that `check` and `discover` of a module may take."""

_DLT: Final = "dlt:"
_STEP_S: Final = 0.5


class PythonSource:
    """A source that is a module of the user's."""

    config_schema: ClassVar[ConfigSchema] = ConfigSchema({})
    """Not compared with anything: the configuration is the module's."""
    resource_schema: ClassVar[ConfigSchema] = ConfigSchema(
        {
            "stream": {
                "type": "string",
                "minLength": 1,
                "identity": True,
                "title": "the name of a stream",
                "description": "As the function yields it, beside its rows.",
                "examples": ["orders"],
            }
        },
        required=("stream",),
    )

    def __init__(self, config: Json, *, where: str, module: str, file: str | None = None) -> None:
        self._where = where
        self._config = config
        self._module = module
        self._file = file or "the module"
        self._workers: list[WorkerProcess] = []
        self._interrupted = False

    def check(self) -> None:
        """Load the module, and call its `check` if it has one."""
        self._ask("check")

    def discover(self) -> Sequence[Discovered]:
        """Call `discover` of the module."""
        found: list[dict[str, Any]] = []
        for frame in self._ask("discover"):
            if frame.kind is FrameKind.FOUND:
                given = json.loads(frame.payload)
                if given is None:
                    raise UserError(
                        "the module has no function discover",
                        where=self._where,
                        fix="add one that returns penstock.capture.Resource objects, or write "
                        "bindings by hand: {resource: {stream: orders}, target: acme/orders}",
                    )
                found += given
        return [
            Discovered(
                name=each["stream"],
                resource={"stream": each["stream"]},
                schema=each["schema"],
                key=tuple(each["key"]),
                note=each["note"],
            )
            for each in found
        ]

    def open(self, opening: Opening) -> CaptureSession:
        return PythonSession(self, opening)

    def interrupt(self) -> None:
        self._interrupted = True
        for worker in list(self._workers):
            worker.wake()

    def waits_for(self) -> str | None:
        return None

    # ---------------------------------------------------------------------------------- processes

    def start(self, what: str, state: Json, *, task: str) -> WorkerProcess:
        """Start a process that does something of the module's."""
        is_dlt = self._module.startswith(_DLT)
        request = {
            "do": what,
            "module": None if is_dlt else self._module,
            "dlt": self._module.removeprefix(_DLT).strip() if is_dlt else None,
            "file": self._file,
            "config": resolve(self._config, where=f"{self._where}: endpoint") or {},
            "state": state,
        }
        worker = WorkerProcess(request, task=task, where=self._where)
        self._workers.append(worker)
        return worker

    def end(self, worker: WorkerProcess) -> None:
        """End a process."""
        worker.close()
        with contextlib.suppress(ValueError):
            self._workers.remove(worker)

    def failed(self, frame: Frame) -> ConnectorError:
        """The error of the user's code, which a frame describes."""
        said = json.loads(frame.payload)
        place = self._where
        if said["file"]:
            inside = f", in {said['function']}" if said["function"] else ""
            place = f"{self._where}: {said['file']}, line {said['line']}{inside}"
        return ConnectorError(
            mask(said["what"]),
            where=place,
            fix=None if said["transient"] else "correct the module, and run the capture again",
            transient=said["transient"],
        )

    def _ask(self, what: str) -> list[Frame]:
        """Let a process answer; its frames."""
        self._interrupted = False
        worker = self.start(what, {}, task=self._where)
        try:
            return list(self._answer(worker))
        finally:
            self.end(worker)

    def _answer(self, worker: WorkerProcess) -> Iterator[Frame]:
        until = time.monotonic() + ASK_S
        while not self._interrupted and time.monotonic() < until:
            frame = worker.next_frame(_STEP_S)
            if frame is None:
                continue
            if frame.kind is FrameKind.FAILED:
                raise self.failed(frame)
            if frame.kind is FrameKind.DONE:
                return
            yield frame
        why = "it was interrupted" if self._interrupted else f"nothing came for {ASK_S:g} s"
        raise ConnectorError("the module did not answer", where=self._where, why=why)


class PythonSession:
    """A function that is being read from."""

    def __init__(self, source: PythonSource, opening: Opening) -> None:
        self._source = source
        self._task = opening.task
        self._bindings: dict[str, SourceBinding] = {}
        for binding in opening.bindings:
            given = PythonSource.resource_schema.read(
                binding.resource.value, where=f"{opening.task}: binding {binding.index}"
            )
            self._bindings[given["stream"]] = binding
        keys = {stream: binding.state_key for stream, binding in self._bindings.items()}
        self._progress = Progress.of(opening.state, keys)
        self._read_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self._ending = contextlib.ExitStack()
        self._directory = self._ending.enter_context(directory())
        self._sequences = 0
        self._rows = self._gather()
        self._schemas: dict[int, Json] = {}
        self._given: deque[Gathered] = deque()
        self._unbound: set[str] = set()
        self._done = False
        try:
            self._worker = source.start("read", self._progress.value, task=opening.task)
        except BaseException:
            self._ending.close()
            raise

    def poll(self, wait_s: float) -> Polled:
        until = time.monotonic() + wait_s
        while not self._done:
            frame = self._worker.next_frame(max(0.0, until - time.monotonic()))
            if frame is None:
                return Idle.PENDING
            sequence = self._take(frame)
            if sequence is not None:
                return sequence
            if time.monotonic() > until:
                return Idle.PENDING
        return Idle.END

    def acknowledge(self, sequences: int) -> None:
        for _ in range(sequences):
            self._given.popleft().discard()

    def close(self) -> None:
        self._source.end(self._worker)
        self._rows.discard()
        self._ending.close()

    def _take(self, frame: Frame) -> CaptureSequence | None:
        """Take a frame in; returns the sequence that it completes."""
        match frame.kind:
            case FrameKind.ROWS | FrameKind.ARROW:
                if frame.stream in self._bindings:
                    self._rows.add(frame)
                else:
                    self._leave_out(frame.stream)
            case FrameKind.SCHEMA:
                if frame.stream in self._bindings:
                    schema = json.loads(frame.payload)
                    self._schemas[self._bindings[frame.stream].index] = schema
            case FrameKind.STATE:
                said = json.loads(frame.payload)
                return self._sequence(
                    self._progress.advance(said["value"], merge=bool(said["merge"]))
                )
            case FrameKind.FAILED:
                raise self._source.failed(frame)
            case FrameKind.DONE:
                self._done = True
                if not self._rows.is_empty or self._schemas:
                    return self._sequence(self._progress.stay())
            case FrameKind.FOUND:
                pass
        return None

    def _sequence(self, patches: tuple[Json, ...]) -> CaptureSequence:
        given, reads = self._rows.finish()
        self._given.append(self._rows)
        self._rows = self._gather()
        schemas, self._schemas = self._schemas, {}
        return CaptureSequence(given=given, reads=reads, patches=patches, schemas=schemas)

    def _gather(self) -> Gathered:
        self._sequences += 1
        return Gathered(self._directory, self._sequences, self._bindings, self._read_at)

    def _leave_out(self, stream: str) -> None:
        if stream not in self._unbound:
            self._unbound.add(stream)
            _log.warning(
                "%s: rows of stream %s are left out: no binding has it", self._task, stream
            )
