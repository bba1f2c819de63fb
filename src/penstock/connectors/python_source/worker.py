"""The process in which a capture in Python runs; started as a module, by `process.py`.

Standard input has one line, the request, and stays open: when it ends, so does this process,
whatever the function does. Frames go to the descriptor that the first argument names. What the
function prints goes to standard error.
"""

from __future__ import annotations

import datetime
import inspect
import io
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec

from penstock.capture import Resource, Schema, State
from penstock.connectors.python_source.frames import Frame, FrameKind, encode

ROWS_BYTES: Final = 256 << 10
"""Size of rows that are written at once."""

ARROW_ROWS: Final = 16_384
MODULE: Final = "_penstock_capture"


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a row has
    """What msgspec does not know: kinds of what it knows, and numbers of numpy."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str(value)
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON value")


_encode_row = msgspec.json.Encoder(enc_hook=_plain, decimal_format="number").encode
_ended = False


class Mistake(Exception):
    """What the user's code is wrong about, found by this process."""


# ------------------------------------------------------------------------------------------ writing


class Writer:
    """Writes frames; rows of a stream are gathered until there are enough."""

    def __init__(self, pipe: io.RawIOBase) -> None:
        self._pipe = pipe
        self._rows: dict[str, list[bytes]] = {}
        self._size = 0

    def write(self, frame: Frame) -> None:
        """Write a frame, after the rows before it."""
        self._flush()
        self._send(frame)

    def rows(self, stream: str, rows: Iterable[Any]) -> None:
        """Take rows, each a mapping."""
        texts = self._rows.setdefault(stream, [])
        for row in rows:
            if not isinstance(row, Mapping):
                raise Mistake(f"a row of {stream!r} is a {type(row).__name__}, and not a dict")
            try:
                text = _encode_row(row)
            except (TypeError, ValueError, OverflowError) as error:
                raise Mistake(f"a row of {stream!r} cannot be written as JSON: {error}") from None
            texts.append(text)
            self._size += len(text)
            if self._size >= ROWS_BYTES:
                self._flush()
                texts = self._rows.setdefault(stream, [])

    def arrow(self, stream: str, table: Any) -> None:  # noqa: ANN401 - a table or a batch
        """Take rows, as Arrow has them."""
        import pyarrow as pa

        self._flush()
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        for batch in table.to_batches(max_chunksize=ARROW_ROWS):
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, batch.schema) as written:
                written.write_batch(batch)
            self._send(Frame(FrameKind.ARROW, stream, sink.getvalue()))

    def _flush(self) -> None:
        gathered, self._rows, self._size = self._rows, {}, 0
        for stream, texts in gathered.items():
            if texts:
                self._send(Frame(FrameKind.ROWS, stream, b"\n".join(texts)))

    def _send(self, frame: Frame) -> None:
        data = memoryview(encode(frame))
        while data:
            data = data[self._pipe.write(data) :]


def write_all(made: Iterable[Any], out: Writer) -> None:
    """Write everything that a function yields."""
    for item in made:
        match item:
            case State(value, merge):
                if not isinstance(value, Mapping):
                    raise Mistake(f"State has a {type(value).__name__}, and not a dict")
                payload = _json({"value": value, "merge": merge}, "the State")
                out.write(Frame(FrameKind.STATE, "", payload))
            case Schema(stream, schema):
                out.write(Frame(FrameKind.SCHEMA, stream, _json(schema, "the Schema")))
            case (str() as stream, rows):
                _write_rows(stream, rows, out)
            case _:
                raise Mistake(
                    f"read yielded a {type(item).__name__}; it may yield (stream, rows), State "
                    "or Schema"
                )
    out.write(Frame(FrameKind.DONE))


def _write_rows(stream: str, rows: Any, out: Writer) -> None:  # noqa: ANN401 - whatever is yielded
    if _is_arrow(rows):
        out.arrow(stream, rows)
    elif isinstance(rows, Mapping):
        out.rows(stream, (rows,))
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        out.rows(stream, rows)
    else:
        raise Mistake(
            f"rows of {stream!r} are a {type(rows).__name__}; expected a dict, a list of them, or "
            "an Arrow table"
        )


def _is_arrow(rows: object) -> bool:
    if "pyarrow" not in sys.modules:
        return False
    import pyarrow as pa

    return isinstance(rows, pa.Table | pa.RecordBatch)


def _json(value: Any, what: str) -> bytes:  # noqa: ANN401 - whatever the user has
    try:
        return _encode_row(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Mistake(f"{what} cannot be written as JSON: {error}") from None


# ------------------------------------------------------------------------------- the user's module


def load(text: str, file: str) -> types.ModuleType:
    """Run a module's text, as the file that it is from."""
    module = types.ModuleType(MODULE)
    module.__file__ = file
    sys.modules[MODULE] = module  # where pickles and dataclasses look their module up
    exec(compile(text, file, "exec"), module.__dict__)  # noqa: S102 - the user's own code
    return module


class Source:
    """What a module offers: `read`, and perhaps `discover` and `check`."""

    def __init__(self, module: types.ModuleType, config: dict[str, Any]) -> None:
        self._config = config
        made = getattr(module, "Capture", None)
        self._instance = _made(made, config) if isinstance(made, type) else None
        self._module = module

    def read(self, state: dict[str, Any]) -> Iterable[Any]:
        function = self._find("read")
        if function is None:
            raise Mistake("the module has no function read, and no class Capture that has one")
        made = _call(function, state) if self._instance else _call(function, self._config, state)
        if inspect.isasyncgen(made) or inspect.iscoroutine(made):
            raise Mistake("read is async; write it as an ordinary generator")
        if not isinstance(made, Iterator):
            raise Mistake("read returns no generator; it has to yield rows and States")
        return made

    def discover(self) -> list[dict[str, Any]] | None:
        function = self._find("discover")
        if function is None:
            return None
        found = _call(function) if self._instance else _call(function, self._config)
        return [_resource(each) for each in found]

    def check(self) -> None:
        """Raise what the module's own check raises; it must have a `read` in any case."""
        if self._find("read") is None:
            self.read({})
        function = self._find("check")
        if function is not None:
            _ = _call(function) if self._instance else _call(function, self._config)

    def _find(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._instance or self._module, name, None)
        return found if callable(found) else None


def _made(kind: type, config: dict[str, Any]) -> Any:  # noqa: ANN401 - the user's own
    """An object of the class, which may have no use for the configuration."""
    return kind() if kind.__init__ is object.__init__ else _call(kind, config)  # type: ignore[misc]


def _call(function: Callable[..., Any], *given: Any) -> Any:  # noqa: ANN401 - the user's own
    """Call, after a look at whether that is possible."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        name = getattr(function, "__name__", "it")
        raise Mistake(f"{name} cannot be called with {len(given)} arguments: {error}") from None
    return function(*given)


def _resource(found: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever the user has
    if not isinstance(found, Resource):
        raise Mistake(f"discover gave a {type(found).__name__}, and not a Resource")
    return {
        "stream": found.stream,
        "schema": dict(found.schema),
        "key": list(found.key),
        "note": found.note,
    }


# ------------------------------------------------------------------------------------------ errors


def failure(error: BaseException, files: Iterable[str], made: object) -> dict[str, Any]:
    """Describe an error, and where in the user's files it came up.

    `made`: the generator, which has just yielded what a `Mistake` is about.
    """
    while type(error).__module__.partition(".")[0] == "dlt" and error.__cause__ is not None:
        error = error.__cause__  # dlt says which resource, and what the resource raised is inside
    known, place = set(files), None
    if isinstance(made, types.GeneratorType) and made.gi_frame is not None:
        code = made.gi_frame.f_code
        place = (code.co_filename, made.gi_frame.f_lineno, code.co_name)
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename in known:
            place = (code.co_filename, step.tb_lineno, code.co_name)
        step = step.tb_next
    if isinstance(error, SyntaxError) and error.filename in known:
        place = (error.filename or "", error.lineno or 1, "")
    ours = isinstance(error, Mistake)
    text = str(error)
    what = text if ours else f"{type(error).__name__}{': ' + text if text else ''}"
    file, line, function = place or (None, None, None)
    transient = isinstance(error, OSError) and not isinstance(
        error, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError
    )
    return {"what": what, "file": file, "line": line, "function": function, "transient": transient}


# ------------------------------------------------------------------------------------- the process


def perform(request: dict[str, Any], out: Writer) -> None:
    """Do what is asked for, and write what comes of it; errors too."""
    file, made = request["file"], None
    files = [file]
    try:
        if request["dlt"]:
            from penstock.connectors.python_source.dlt_resource import DltSource

            source: Any = DltSource(request["dlt"], request["config"])
            files = source.files
        else:
            source = Source(load(request["module"], file), request["config"])
        match request["do"]:
            case "read":
                made = source.read(request["state"])
                write_all(made, out)
            case "discover":
                out.write(Frame(FrameKind.FOUND, "", _json(source.discover(), "what is found")))
                out.write(Frame(FrameKind.DONE))
            case _:
                source.check()
                out.write(Frame(FrameKind.DONE))
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:
        if _ended:
            raise
        out.write(Frame(FrameKind.FAILED, "", json.dumps(failure(error, files, made)).encode()))


def _end_with_parent() -> None:
    """End when standard input does: the process that started this one is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def _end(_: int, __: object) -> NoReturn:
    global _ended  # of the process
    _ended = True
    sys.exit(143)


def main() -> None:
    """Read the request and perform it."""
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 20)
    request = json.loads(line)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    perform(request, Writer(pipe))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the user's code do not keep it


if __name__ == "__main__":
    main()
