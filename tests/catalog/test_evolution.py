"""Migrations of a derivation only grow."""

from __future__ import annotations

from typing import Literal

import pytest

from penstock.catalog.evolution import changed_migrations
from penstock.model.spec import CollectionSpec, DerivationSpec, Frozen, Shards


def derived(*migrations: str, using: Literal["sqlite", "spark"] = "sqlite") -> CollectionSpec:
    schema = Frozen({"type": "object"})
    return CollectionSpec(
        name="acme/stock",
        key=("/id",),
        write_schema=schema,
        read_schema=schema,
        fields=(),
        derivation=DerivationSpec(
            using=using,
            transforms=(),
            shuffle_key_types=(),
            shards=Shards(max_txn_s=1),
            migrations=migrations,
        ),
    )


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        pytest.param(derived("a", "b"), [], id="as they were"),
        pytest.param(derived("a", "b", "c"), [], id="one more"),
        pytest.param(derived("a\n", "  b"), [], id="space around them"),
        pytest.param(derived("a", "x", "c"), ["migration 2 changed"], id="changed"),
        pytest.param(
            derived("b", "a"), ["migration 1 changed", "migration 2 changed"], id="another order"
        ),
        pytest.param(derived("a"), ["migration 2 was removed"], id="the last removed"),
        pytest.param(
            derived(using="spark"),
            ["migration 1 was removed", "migration 2 was removed"],
            id="another language",
        ),
    ],
)
def test_what_was_applied_stays_as_it_was(after: CollectionSpec, wrong: list[str]) -> None:
    found = list(changed_migrations(derived("a", "b"), after))
    assert [p.message for p in found] == [f"{each} since it was applied" for each in wrong]
    assert {p.code for p in found} <= {"E-MIGRATION"}
