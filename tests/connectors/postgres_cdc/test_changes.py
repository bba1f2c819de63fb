"""Snapshots and changes of a real server, session by session."""

from __future__ import annotations

import pytest

from connectors.postgres_cdc.changing import Driver, ran

pytestmark = pytest.mark.postgres

ITEMS = "CREATE TABLE items (id int PRIMARY KEY, name text, amount int)"


def test_a_snapshot_and_the_changes_after_it_equal_the_table(url: str) -> None:
    ran(url, ITEMS, "INSERT INTO items SELECT i, 'n' || i, i FROM generate_series(1, 10) i")
    driver = Driver(url, ["items"])
    driver.run()
    assert len(driver.documents["items"]) == 10
    assert all(each["_meta"]["source"]["snapshot"] for each in driver.documents["items"])
    driver.check()
    ran(
        url,
        "INSERT INTO items VALUES (11, NULL, 11)",
        "UPDATE items SET amount = 0 WHERE id < 4",
        "DELETE FROM items WHERE id = 5",
    )
    driver.run()
    assert [each["_meta"]["op"] for each in driver.documents["items"][10:]] == list("cuuud")
    driver.check()
    driver.run()
    assert len(driver.documents["items"]) == 15, "nothing is given twice"
