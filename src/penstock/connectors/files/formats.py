"""Reads parts of files as documents: JSON lines, CSV and Parquet.

Nothing is guessed. A CSV field is text, and becomes what the collection's schema says it is only if
its text is that, exactly: `007` is no integer, and stays text where text is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from penstock.connectors.files.cursor import Found
from penstock.connectors.files.places import FilePlace
from penstock.model.columns import Column, Kind
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import Broken, Documents
from penstock.runtime.connector.common import ConnectorError

pa: Any = pyarrow
pc: Any = pyarrow.compute

CHUNK_BYTES: Final = 2 << 20
"""Bytes of a file that are read at once."""

LINE_BYTES_MAX: Final = 16 << 20

Format = Literal["jsonl", "csv", "parquet"]

_SUFFIXES: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvOptions:
    """How CSV files are written."""

    delimiter: str | None = None
    """A comma, or a tab in `.tsv` files, if None."""
    quote: str = '"'
    header: bool = True
    columns: tuple[str, ...] = ()
    """Names of columns, where files have no header."""
    nulls: tuple[str, ...] = ("",)
    """Texts, not in quotes, that stand for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReading:
    """How the files of a binding are read; picklable."""

    place: FilePlace
    format: Format | None
    """By the file's name if None."""
    csv: CsvOptions = CsvOptions()
    meta: bool = False
    """Say which file and row each document comes from."""
    root: Column | None = field(default=None, repr=False)
    """The layout of the collection, to which CSV fields are fitted."""

    def format_of(self, path: str) -> Format:
        """Return the format of a file; raises if its name does not say."""
        bare, _ = _uncompressed(path)
        found = self.format or next(
            (kind for suffix, kind in _SUFFIXES.items() if bare.lower().endswith(suffix)), None
        )
        if found is None:
            raise ConnectorError(
                "the format of a file is not known",
                where=self.place.name(path),
                why=f"its name ends in none of {', '.join(_SUFFIXES)}",
                fix="give the binding's resource a format: jsonl, csv or parquet",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A part of a file, read by one task: a whole one if `end` is None."""

    file: Found
    start: int = 0
    """The first byte; of a Parquet file, the first row group."""
    end: int | None = None
    row: int = 0
    """Rows of the file before it."""


def compression_of(path: str) -> str | None:
    """Return the compression that a file's name says."""
    return _uncompressed(path)[1]


def _uncompressed(path: str) -> tuple[str, str | None]:
    for suffix, name in _COMPRESSIONS.items():
        if path.lower().endswith(suffix):
            return path[: -len(suffix)], name
    return path, None


def read_split(reading: FileReading, split: FilePart) -> Iterator[Documents]:
    """Read a part of a file; raises if the file is not the one that was listed."""
    _check(reading, split.file)
    match reading.format_of(split.file.path):
        case "jsonl":
            yield from _read_lines(reading, split)
        case "csv":
            yield from _read_csv(reading, split)
        case "parquet":
            yield from _read_parquet(reading, split)
    _check(reading, split.file)


def _check(reading: FileReading, file: Found) -> None:
    now = reading.place.look(file.path)
    if now == file:
        return
    raise ConnectorError(
        "a file vanished while it was read" if now is None else "a file changed while it was read",
        where=reading.place.name(file.path),
        why="it was listed, but is gone"
        if now is None
        else f"it had {file.size:,} bytes when it was listed, and has {now.size:,} now",
        fix="write files under another name, and rename them when they are complete",
        transient=True,
    )


def _documents(
    reading: FileReading,
    path: str,
    rows: Sequence[int],
    *,
    texts: Sequence[bytes] | None = None,
    columns: pyarrow.RecordBatch | None = None,
    broken: tuple[Broken, ...] = (),
) -> Documents:
    """Documents of these rows of a file, which count from 1."""
    name = reading.place.name(path)
    mark = ":" if reading.format_of(path) == "jsonl" else ", row "
    meta = None
    if reading.meta:
        files = pa.repeat(pa.scalar(path), len(rows))
        meta = pa.RecordBatch.from_arrays(
            [files, pa.array(rows, pa.int64())], names=["file", "row"]
        )
    return Documents(
        texts=texts,
        columns=columns,
        meta=meta,
        broken=broken,
        origin=lambda at: f"{name}{mark}{rows[at]}",
    )


# ------------------------------------------------------------------------------------- JSON lines


def _read_lines(reading: FileReading, split: FilePart) -> Iterator[Documents]:
    path = split.file.path
    row = split.row
    with reading.place.open(path, compression_of(path)) as file:
        for data in _chunks(file, split, reading.place.name(path)):
            lines = data.split(b"\n")
            if not lines[-1]:
                lines.pop()
            if row == 0 and lines:
                lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            numbers: Sequence[int] = range(row + 1, row + 1 + len(lines))
            row += len(lines)
            if not all(lines) or b"\r" in data:
                kept = [(at, line) for at, line in zip(numbers, lines, strict=True) if line.strip()]
                numbers = [at for at, _ in kept]
                lines = [line.strip() for _, line in kept]
            if lines:
                yield _documents(reading, path, numbers, texts=lines)


def _chunks(file: Any, split: FilePart, name: str) -> Iterator[bytes]:  # noqa: ANN401 - Arrow's file
    """Whole lines of a part of a file, some at a time."""
    if split.start:
        file.seek(split.start)
    left = None if split.end is None else split.end - split.start
    rest = b""
    while True:
        data = file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
        if not data:
            break
        if left is not None:
            left -= len(data)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut]
            rest = data[cut:]
        else:
            rest += data
        if len(rest) > LINE_BYTES_MAX:
            raise ConnectorError(
                f"a line is longer than {LINE_BYTES_MAX} bytes",
                where=name,
                fix="see whether the file has one document in each line",
            )
    if rest:
        yield rest


# -------------------------------------------------------------------------------------------- CSV

_INTEGER: Final = r"^-?(?:0|[1-9][0-9]*)$"
_NUMBER: Final = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"
_BOOLEAN: Final = r"^(?:true|false)$"


def _read_csv(reading: FileReading, split: FilePart) -> Iterator[Documents]:
    path = split.file.path
    name = reading.place.name(path)
    options = reading.csv
    names = csv_names(reading, split.file)
    skip = 1 if options.header and split.start == 0 else 0
    broken: list[Broken] = []

    def invalid(row: Any) -> str:  # noqa: ANN401 - Arrow's own class
        broken.append(
            Broken(
                origin=name if row.number is None else f"{name}, line {row.number}",
                text=row.text,
                reason=f"a row has {row.actual_columns} fields instead of {row.expected_columns}",
            )
        )
        return "skip"

    row = split.row
    with reading.place.open(path, compression_of(path)) as opened:
        file: Any = _Part(opened, split) if split.start or split.end is not None else opened
        try:
            reader = pyarrow.csv.open_csv(
                file,
                read_options=pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=CHUNK_BYTES, column_names=names, skip_rows=skip
                ),
                parse_options=_parse_options(options, path, invalid),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.utf8()),
                    null_values=list(options.nulls),
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    check_utf8=True,
                ),
            )
            for batch in reader:
                numbers = range(row + 1, row + 1 + batch.num_rows)
                row += batch.num_rows
                found, broken[:] = tuple(broken), []
                yield _typed(reading, path, numbers, batch, found)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            if "Empty CSV file" in str(error):
                return
            raise ConnectorError(
                "a CSV file cannot be read",
                where=f"{name}, after row {row}",
                why=str(error).splitlines()[0],
                fix="correct the file, or the binding's csv options",
            ) from None
    if broken:
        yield _documents(reading, path, (), texts=(), broken=tuple(broken))


def _parse_options(options: CsvOptions, path: str, invalid: Any) -> Any:  # noqa: ANN401
    bare, _ = _uncompressed(path)
    delimiter = options.delimiter or ("\t" if bare.lower().endswith(".tsv") else ",")
    return pyarrow.csv.ParseOptions(
        delimiter=delimiter,
        quote_char=options.quote or False,
        double_quote=True,
        newlines_in_values=True,
        invalid_row_handler=invalid,
    )


def csv_names(reading: FileReading, file: Found) -> list[str]:
    """Return the names of a CSV file's columns; raises if they are not usable."""
    options, where = reading.csv, reading.place.name(file.path)
    if not options.header:
        if not options.columns:
            raise ConnectorError(
                "the columns of a CSV file have no names",
                where=where,
                fix="list them: csv: {header: false, columns: [id, name]}",
            )
        return list(options.columns)
    with reading.place.open(file.path, compression_of(file.path)) as opened:
        head = opened.read(1 << 16).removeprefix(b"\xef\xbb\xbf")
    line = head.split(b"\n", 1)[0].rstrip(b"\r")
    if not line:
        return []
    table = pyarrow.csv.read_csv(
        pa.BufferReader(line + b"\n"),
        read_options=pyarrow.csv.ReadOptions(autogenerate_column_names=True),
        parse_options=_parse_options(options, file.path, None),
        convert_options=pyarrow.csv.ConvertOptions(column_types={}),
    )
    names = [str(column[0].as_py() or "") for column in table.columns]
    if "" in names or len(set(names)) < len(names):
        raise ConnectorError(
            "the header of a CSV file is not usable",
            where=where,
            why=f"a name is empty or there twice: {', '.join(names)[:200]}",
            fix="correct the header, or give names: csv: {header: false, columns: […]}",
        )
    return names


class _Part:
    """A part of a file as a file, for Arrow's reader."""

    def __init__(self, file: Any, split: FilePart) -> None:  # noqa: ANN401 - Arrow's file
        self._file = file
        file.seek(split.start)
        self._left = split.file.size - split.start if split.end is None else split.end - split.start
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data: bytes = self._file.read(size) if size else b""
        self._left -= len(data)
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def _typed(
    reading: FileReading,
    path: str,
    rows: Sequence[int],
    batch: pyarrow.RecordBatch,
    broken: tuple[Broken, ...],
) -> Documents:
    """Text fields as what the schema says they are; by columns where all of them are that."""
    kinds = _kinds(reading.root)
    arrays = []
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        typed = _typed_column(kinds.get(name, Kind.STRING), values)
        if typed is None:
            texts = [msgspec.json.encode(_typed_row(kinds, row)) for row in batch.to_pylist()]
            return _documents(reading, path, rows, texts=texts, broken=broken)
        arrays.append(typed)
    columns = pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
    return _documents(reading, path, rows, columns=columns, broken=broken)


def _kinds(root: Column | None) -> dict[str, Kind]:
    if root is None:
        return {}
    return {m.name: m.column.kind for m in root.members if m.column is not None}


def _typed_column(kind: Kind, values: Any) -> Any | None:  # noqa: ANN401 - Arrow
    match kind:
        case Kind.STRING:
            return values
        case Kind.LONG:
            return _cast(values, _INTEGER, pa.int64())
        case Kind.DOUBLE:
            return _cast(values, _NUMBER, pa.float64())
        case Kind.BOOLEAN:
            return _cast(values, _BOOLEAN, pa.bool_())
        case _:
            return None


def _cast(values: Any, pattern: str, kind: Any) -> Any | None:  # noqa: ANN401 - Arrow
    if pc.all(pc.match_substring_regex(values, pattern)).as_py() is False:
        return None
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return None


def _typed_row(kinds: dict[str, Kind], row: dict[str, str | None]) -> dict[str, Json]:
    return {
        name: _typed_value(kinds.get(name, Kind.STRING), text)
        for name, text in row.items()
        if text is not None
    }


def _typed_value(kind: Kind, text: str) -> Json:
    match kind:
        case Kind.LONG if re.fullmatch(_INTEGER, text):
            return int(text)
        case Kind.DOUBLE | Kind.DECIMAL if re.fullmatch(_NUMBER, text):
            return _number(text)
        case Kind.BOOLEAN if text in ("true", "false"):
            return text == "true"
        case Kind.STRUCT | Kind.ARRAY | Kind.MAP | Kind.JSON:
            try:
                value: Json = msgspec.json.decode(text)
            except msgspec.MsgspecError:
                return text
            # JSON text that is a number or a word may be just text: 007, true.
            return value if kind is not Kind.JSON or isinstance(value, dict | list) else text
        case _:
            return text


def _number(text: str) -> Json:
    if re.fullmatch(_INTEGER, text):
        return int(text)
    value: Json = msgspec.json.decode(text)
    return value


# ---------------------------------------------------------------------------------------- Parquet


def _read_parquet(reading: FileReading, split: FilePart) -> Iterator[Documents]:
    path = split.file.path
    row = split.row
    with reading.place.open(path) as file:
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            groups = range(split.start, parquet.num_row_groups if split.end is None else split.end)
            for batch in parquet.iter_batches(batch_size=16_384, row_groups=list(groups)):
                numbers = range(row + 1, row + 1 + batch.num_rows)
                row += batch.num_rows
                yield _documents(reading, path, numbers, columns=batch)
        except pa.ArrowException as error:
            raise ConnectorError(
                "a Parquet file cannot be read",
                where=f"{reading.place.name(path)}, after row {row}",
                why=str(error).splitlines()[0],
                fix="see whether it is complete, and a Parquet file",
            ) from None
