"""dlt resources: their rows, and their incremental cursor in our state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.python_source.reading import Reading
from penstock.runtime.connector.common import ConnectorError

pytest.importorskip("dlt", reason="dlt is not installed: pip install 'penstock[dlt]'")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME__DLTHUB_TELEMETRY", "false")
    tests = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", tests, prepend=":")


def shop(tmp_path: Path, name: str, **more: Any) -> Reading:  # noqa: ANN401
    module = f"dlt:connectors.python_source.dlt_shop:{name}"
    return Reading(tmp_path, module, streams=("orders", "plain", "tables"), **more)


def test_an_incremental_resource_goes_on_from_its_cursor(tmp_path: Path) -> None:
    found = shop(tmp_path, "orders", config={"up_to": 5}).run()
    assert sorted(found.ids()) == [0, 1, 2, 3, 4]
    found.config = {"up_to": 8}
    assert sorted(found.run().ids()) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sorted(found.run().ids()) == [0, 1, 2, 3, 4, 5, 6, 7], "nothing new"


def test_the_cursor_moves_with_the_rows_or_not_at_all(tmp_path: Path) -> None:
    found = shop(tmp_path, "orders", config={"up_to": 5})
    assert found.run(sequences_max=0).ids() == []
    assert sorted(found.run().ids()) == [0, 1, 2, 3, 4]
    assert len(found.sequences) == 1, "its rows come in no order, so it is one sequence"


def test_a_raised_backfill_begins_anew(tmp_path: Path) -> None:
    found = shop(tmp_path, "orders", config={"up_to": 2}).run()
    found.version = 1
    assert sorted(found.run().ids()) == [0, 0, 1, 1]


def test_plain_resources_and_times(tmp_path: Path) -> None:
    found = shop(tmp_path, "plain").run()
    assert found.ids("plain") == [1, 2, 3]
    assert found.documents[0][1]["at"].startswith("2026-11-17T00:00:00")


def test_tables(tmp_path: Path) -> None:
    assert shop(tmp_path, "tables").run().ids("tables") == [1, 2, 3]


def test_all_resources_of_a_source(tmp_path: Path) -> None:
    found = shop(tmp_path, "shop", config={"up_to": 2}).run()
    assert (sorted(found.ids()), found.ids("plain")) == ([0, 1], [1, 2, 3])


def test_discover(tmp_path: Path) -> None:
    orders, plain = shop(tmp_path, "shop", config={"up_to": 2}).source().discover()
    assert (orders.name, orders.key, orders.note) == ("orders", ("/id",), None)
    assert (plain.name, plain.key) == ("plain", ())
    assert "choose a key" in (plain.note or "")


@pytest.mark.parametrize(
    ("place", "config", "part"),
    [
        ("dlt:connectors.python_source.dlt_shop:nothing", {}, "has no nothing"),
        ("dlt:connectors.python_source.dlt_shop:no_resource", {}, "no dlt resource or source"),
        ("dlt:nowhere.at_all:orders", {}, "there is no module nowhere.at_all"),
        ("dlt:orders", {}, "names no resource"),
        ("dlt:connectors.python_source.dlt_shop:orders", {"other": 1}, "other"),
    ],
)
def test_mistakes(tmp_path: Path, place: str, config: dict[str, Any], part: str) -> None:
    with pytest.raises(ConnectorError) as raised:
        Reading(tmp_path, place, config).source().check()
    assert part in raised.value.what


def test_an_error_of_a_resource_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConnectorError) as raised:
        shop(tmp_path, "broken").run()
    assert "gone" in raised.value.what
    assert "dlt_shop.py, line" in (raised.value.where or "")
