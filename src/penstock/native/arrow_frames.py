"""Frames of other libraries as Arrow batches: Arrow's own, pandas, and what exports itself.

pandas writes a missing value in several ways (NaN, NaT, None, NA); all of them are NULL here. Its
index is left out unless it has a name. Frames of other libraries are read through Arrow's C stream,
in which NaN is a number like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pyarrow

from penstock.errors import UserError
from penstock.native.plain import plain

pa: Any = pyarrow


def record_batches(value: Any) -> Iterable[pyarrow.RecordBatch] | None:  # noqa: ANN401
    """The batches of a frame; None if it is not one."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        value = _pandas_table(value)
    if isinstance(value, pyarrow.RecordBatch):
        value = pyarrow.Table.from_batches([value])
    if not hasattr(value, "__arrow_c_stream__"):
        return None
    reader: pyarrow.RecordBatchReader = pa.RecordBatchReader.from_stream(value)
    check_names(reader.schema.names)
    return reader


def check_names(names: Iterable[str]) -> None:
    """Refuse a frame in which one of two columns would be lost."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(f"the frame has two columns called {name}", fix="rename one of them")
        seen.add(name)


def _pandas_table(frame: Any) -> pyarrow.Table:  # noqa: ANN401
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    names = [str(name) for name in frame.columns]
    check_names(names)
    columns = [_pandas_column(frame.iloc[:, at], name) for at, name in enumerate(names)]
    table: pyarrow.Table = pa.table(columns, names)
    return table


def _pandas_column(column: Any, name: str) -> Any:  # noqa: ANN401
    try:
        return pa.array(column, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError):
        pass  # objects, of which Arrow does not know all
    try:
        missing = column.isna()
        values = [None if no else plain(value) for value, no in zip(column, missing, strict=True)]
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(
            f"column {name} of the frame has values of several types",
            why=str(error),
            fix=f'make them one: df["{name}"].astype(str); or append dicts: df.to_dict("records")',
        ) from None
