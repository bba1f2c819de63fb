"""Reductions that an endpoint does itself, at the limits of their types, against the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.places import SECRET, VARIABLE, PostgresPlace
from penstock.model.columns import LONG_MAX, LONG_MIN
from penstock.model.reduce import ReductionError
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.materialize.fields import Mode
from penstock.testing.sink_harness import Bind, Document, SqlPlace, expected, merging_schema, start

DOUBLE_MAX = sys.float_info.max

REDUCED = Bind(
    schema=merging_schema(
        whole={"type": "integer", "reduce": {"strategy": "sum"}},
        float={"type": "number", "reduce": {"strategy": "sum"}},
        low={"type": "number", "reduce": {"strategy": "minimize"}},
        high={"type": "integer", "reduce": {"strategy": "maximize"}},
        least={"type": "string", "reduce": {"strategy": "minimize"}},
        greatest={"type": "string", "reduce": {"strategy": "maximize"}},
        first={"type": "integer", "reduce": {"strategy": "firstWriteWins"}},
        last={"type": "number"},
    )
)

INTEGERS = st.sampled_from([LONG_MIN, LONG_MIN + 1, -1, 0, 1, LONG_MAX - 1, LONG_MAX])
NUMBERS = st.sampled_from(
    [-DOUBLE_MAX, -DOUBLE_MAX / 2, -5e-324, -0.0, 0.0, 0.1, 5e-324, DOUBLE_MAX / 2, DOUBLE_MAX]
) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.sampled_from(["", "a", "A", "a\u0301", "\uffff", "\U00010000", "\U0010ffff", "ä", "z"])
DOCUMENTS = st.fixed_dictionaries(
    {"k": st.integers(0, 1)},
    optional={
        "whole": INTEGERS,
        "float": NUMBERS,
        "low": NUMBERS,
        "high": INTEGERS,
        "least": TEXTS,
        "greatest": TEXTS,
        "first": INTEGERS,
        "last": NUMBERS,
    },
)


def _rows(place: SqlPlace) -> dict[int, Document]:
    return {
        row["k"]: {name: value for name, value in row.items() if value is not None}
        for row in place.rows()
    }


def _model(documents: list[Document]) -> dict[int, Document] | None:
    """The rows that the model makes of documents; None if it refuses, or a column cannot hold."""
    try:
        states = expected(REDUCED, documents).values()
    except ReductionError:
        return None
    if any(not LONG_MIN <= state.get("whole", 0) <= LONG_MAX for state in states):
        return None
    return {state["k"]: dict(state) for state in states}


def test_reductions_at_their_limits_are_those_of_the_model(place: SqlPlace) -> None:
    """A transaction whose sum overflows is refused as a whole, and changes nothing."""
    run = start(place, REDUCED)
    assert run.built.targets[0].mode is Mode.PUSHDOWN

    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.lists(DOCUMENTS, min_size=1, max_size=8))
    def holds(documents: list[Document]) -> None:
        place.execute("DELETE FROM t")
        stored: list[Document] = []
        for document in documents:
            wanted = _model([*stored, document])
            if wanted is None:
                before = _rows(place)
                with pytest.raises(ConnectorError, match=r"sum|range|outgrown|overflow") as refused:
                    run.transaction([document])
                assert not refused.value.transient
                assert _rows(place) == before
            else:
                run.transaction([document])
                stored.append(document)
                assert _rows(place) == wanted

    holds()


@pytest.mark.parametrize("value", [DOUBLE_MAX, -DOUBLE_MAX])
def test_a_sum_of_numbers_that_overflows_is_refused_and_never_infinite(
    place: SqlPlace, value: float
) -> None:
    run = start(place, REDUCED)
    run.transaction([{"k": 1, "float": value}])
    with pytest.raises(ConnectorError) as refused:
        run.transaction([{"k": 1, "float": value}])
    assert "infinity" not in str(refused.value).lower()
    assert refused.value.fix is not None
    found: list[Any] = place.rows()
    assert [row["float"] for row in found] == [value]


@pytest.mark.postgres
def test_an_integer_sum_stays_an_integer_where_its_column_could_hold_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A foreign NUMERIC column would continue where every reader of the collection fails."""
    monkeypatch.setenv(VARIABLE, SECRET)
    place = PostgresPlace(tmp_path, request.getfixturevalue("postgres").url())
    place.execute("CREATE TABLE t (k bigint PRIMARY KEY, whole numeric)")
    bind = Bind(schema=merging_schema(whole={"type": "integer", "reduce": {"strategy": "sum"}}))
    run = start(place, bind)
    run.transaction([{"k": 1, "whole": LONG_MAX}])
    with pytest.raises(ConnectorError, match="range"):
        run.transaction([{"k": 1, "whole": 1}])
    assert place.rows() == [{"k": 1, "whole": LONG_MAX}]
    run.close()
