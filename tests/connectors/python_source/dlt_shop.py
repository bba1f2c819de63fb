"""dlt resources of a shop, as users write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dlt

ROWS = [{"id": number, "updated_at": f"2026-11-{1 + number % 20:02d}"} for number in range(10)]


@dlt.resource(primary_key="id")
def orders(
    up_to: int = 10,
    updated_at: Any = dlt.sources.incremental("updated_at", initial_value="2026-01-01"),  # noqa: ANN401, B008
) -> Iterator[Any]:
    """Rows in no order, of which those that are new pass."""
    yield [row for row in reversed(ROWS) if row["id"] < up_to]


@dlt.resource
def plain() -> Iterator[Any]:
    import pendulum

    yield {"id": 1, "at": pendulum.datetime(2026, 11, 17)}
    yield [{"id": 2}, {"id": 3}]


@dlt.source
def shop(up_to: int) -> Any:  # noqa: ANN401 - dlt's own
    return [orders(up_to), plain]


@dlt.resource
def broken() -> Iterator[Any]:
    yield {"id": 1}
    raise ConnectionError("gone")


@dlt.resource
def tables() -> Iterator[Any]:
    import pandas as pd
    import pyarrow as pa

    yield pa.table({"id": [1, 2]})
    yield pd.DataFrame({"id": [3]})


no_resource = 7
