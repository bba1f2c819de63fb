from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.model.clock import Clock, duration, from_unix
from penstock.model.schema import compiled
from penstock.runtime.materialize.stats import BindingStats, by_collection
from penstock.runtime.ops import STATS
from penstock.runtime.stats import Counts, ShardName, rfc3339, transaction_stats, with_phases

OPEN = from_unix(1_700_000_000, 123_456_700)
SHARD = ShardName(kind="materialization", name="acme/orders-view", build="0123")
EARLY, LATE = from_unix(1_600_000_010), from_unix(1_600_000_020)


def document(*bindings: BindingStats) -> dict[str, Any]:
    return transaction_stats(
        SHARD,
        open_clock=OPEN,
        close_clock=Clock(OPEN + duration(2, 500_000_000)),
        section="materialize",
        content=by_collection(bindings),
    )


def test_the_document_of_an_empty_transaction_counts_it_and_nothing_else() -> None:
    assert document(BindingStats(collection="acme/orders", bytes_behind=7)) == {
        "shard": {
            "kind": "materialization",
            "name": "acme/orders-view",
            "keyBegin": "00000000",
            "rClockBegin": "00000000",
            "build": "0123",
        },
        "ts": "2023-11-14T22:13:20.123456700Z",
        "openSecondsTotal": 2.5,
        "txnCount": 1,
        "materialize": {},
    }


def test_existing_documents_are_left_new_ones_right_and_stored_ones_out_b15() -> None:
    stats = document(
        BindingStats(
            collection="acme/orders",
            loaded=Counts(2, 20),
            sourced=Counts(3, 30),
            stored=Counts(4, 40),
            last_source=LATE,
        )
    )
    assert stats["materialize"] == {
        "acme/orders": {
            "left": {"docsTotal": 2, "bytesTotal": 20},
            "right": {"docsTotal": 3, "bytesTotal": 30},
            "out": {"docsTotal": 4, "bytesTotal": 40},
            "bytesBehind": 0,
            "lastSourcePublishedAt": rfc3339(LATE),
        }
    }


@pytest.mark.parametrize("clocks", [(LATE, EARLY), (EARLY, LATE)], ids=["late first", "late last"])
def test_bindings_of_a_collection_add_up_and_the_newest_source_wins_b7(
    clocks: tuple[Clock, Clock],
) -> None:
    stats = document(
        BindingStats(
            collection="acme/orders", sourced=Counts(1, 10), bytes_behind=5, last_source=clocks[0]
        ),
        BindingStats(
            collection="acme/orders", sourced=Counts(2, 20), bytes_behind=6, last_source=clocks[1]
        ),
        BindingStats(collection="acme/stock", sourced=Counts(4, 40)),
    )
    assert stats["materialize"] == {
        "acme/orders": {
            "right": {"docsTotal": 3, "bytesTotal": 30},
            "bytesBehind": 11,
            "lastSourcePublishedAt": rfc3339(LATE),
        },
        "acme/stock": {"right": {"docsTotal": 4, "bytesTotal": 40}, "bytesBehind": 0},
    }


def test_bytes_behind_is_an_integer_of_json_however_large_b16() -> None:
    huge = (1 << 53) + 1
    stats = document(
        BindingStats(collection="acme/orders", sourced=Counts(1, 1), bytes_behind=huge)
    )
    for text in (json.dumps(stats), msgspec.json.encode(stats)):
        behind = json.loads(text)["materialize"]["acme/orders"]["bytesBehind"]
        assert behind == huge
        assert isinstance(behind, int)


def test_a_gauge_below_zero_is_zero() -> None:
    stats = document(
        BindingStats(collection="a", sourced=Counts(1, 1), bytes_behind=-5),
        BindingStats(collection="a", sourced=Counts(1, 1), bytes_behind=3),
    )
    assert stats["materialize"]["a"]["bytesBehind"] == 3


def test_zero_counts_are_left_out() -> None:
    stats = document(BindingStats(collection="a", stored=Counts(1, 0)))
    assert stats["materialize"]["a"] == {
        "out": {"docsTotal": 1, "bytesTotal": 0},
        "bytesBehind": 0,
    }


def test_phases_are_added_where_there_are_any_and_older_documents_stay_valid() -> None:
    older = document(BindingStats(collection="acme/orders"))
    newer = with_phases(older, {"read": 0.0001, "stage": 1.23456, "commit": 0.5})
    assert newer["phases"] == {"stage": 1.235, "commit": 0.5}
    assert with_phases(older, {"read": 0.0}) == older
    schema = compiled(STATS.write_schema.text)
    for each in (older, newer):
        assert not schema.violations(each)
