"""Singer taps as processes, and their states."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from connectors.packages.fakes import (
    Message,
    Run,
    binding,
    bookmark,
    lines,
    notes,
    opening,
    singer,
    tapped,
)
from penstock.connectors.packages import pending
from penstock.connectors.packages.messages import UnknownStream
from penstock.connectors.packages.singer_protocol import (
    choose,
    key_properties,
    state_patch,
    state_to_send,
    unread,
)
from penstock.connectors.packages.singer_reading import SingerReading
from penstock.errors import UserError
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.patches import apply_patches

CATALOG: Message = {
    "streams": [
        {"tap_stream_id": "public-a", "stream": "a", "schema": {"type": "object"}, "metadata": []},
        {"tap_stream_id": "public-b", "stream": "b", "schema": {}, "metadata": []},
    ]
}
A, B = binding("public-a"), binding("public-b", index=1)
STREAMS = choose([A, B], CATALOG, where="here")[1]


def given(reading: SingerReading) -> tuple[dict[int, list[int]], Any] | None:
    sequence = reading.next()
    if sequence is None:
        return None
    documents = {
        each.binding: [json.loads(text)["id"] for text in each.documents.texts or ()]
        for each in sequence.given
    }
    patch: Any = sequence.patches[0] if sequence.patches else None
    return documents, patch and json.loads(patch["_state"]["text"])


def take(reading: SingerReading, *messages: Message) -> None:
    for line in lines(messages):
        reading.take(line)


# ---------------------------------------------------------------------------------- without a tap


def test_a_state_closes_everything_before_it_and_documents_after_it_wait() -> None:
    reading = SingerReading(STREAMS, None)
    take(reading, tapped(1, "a"), tapped(2, "b"))
    assert given(reading) is None
    take(reading, bookmark({"n": 2}), tapped(3, "a"))
    assert given(reading) == ({0: [1], 1: [2]}, {"n": 2})
    assert given(reading) is None
    reading.finish()
    assert given(reading) == ({0: [3]}, None)


def test_a_stream_is_known_by_both_of_its_names_unless_another_one_has_it_too() -> None:
    reading = SingerReading(STREAMS, None, unread(CATALOG, STREAMS))
    take(reading, tapped(1, "a"), tapped(2, "public-a"), bookmark({"n": 1}))
    assert given(reading) == ({0: [1, 2]}, {"n": 1})
    twins: Message = {"streams": [{"tap_stream_id": f"{n}-a", "stream": "a"} for n in ("x", "y")]}
    _, streams = choose([binding("x-a")], twins, where="here")
    reading = SingerReading(streams, None, unread(twins, streams))
    take(reading, tapped(1, "x-a"), tapped(2, "y-a"), bookmark({"n": 1}))
    assert given(reading) == ({0: [1]}, {"n": 1})
    assert reading.logs == [(20, "no binding reads the stream y-a")]
    with pytest.raises(UnknownStream):
        take(reading, tapped(3, "a"))
    with pytest.raises(UnknownStream):
        take(reading, tapped(3, "other"))


def test_of_several_states_the_last_one_counts() -> None:
    reading = SingerReading(STREAMS, None)
    take(reading, tapped(1, "a"), bookmark({"n": 1}), tapped(2, "a"), bookmark({"n": 2}))
    assert given(reading) == ({0: [1, 2]}, {"n": 2})


def test_the_state_that_the_tap_was_given_is_no_progress() -> None:
    reading = SingerReading(STREAMS, {"n": 1})
    take(reading, bookmark({"n": 1}))
    assert given(reading) is None
    take(reading, tapped(1, "a"), bookmark({"n": 1}))
    assert given(reading) == ({0: [1]}, {"n": 1})
    take(reading, bookmark({"n": 1}))
    assert given(reading) is None


def test_documents_without_a_state_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "DOCUMENTS_MAX", 2)
    reading = SingerReading(STREAMS, None)
    take(reading, tapped(1, "a"), tapped(2, "a"))
    assert reading.is_full
    assert given(reading) == ({0: [1, 2]}, None)
    take(reading, tapped(3, "a"), bookmark({"n": 3}), tapped(4, "a"))
    assert given(reading) == ({0: [3]}, {"n": 3})


def test_a_binding_that_is_read_again_has_no_bookmark_and_others_keep_theirs() -> None:
    value = {"bookmarks": {"public-a": {"n": 1}, "public-b": {"n": None}}, "currently_syncing": "x"}
    kept: Any = apply_patches({}, [state_patch(value, STREAMS)])
    assert state_to_send(kept, STREAMS) == value
    again = choose([binding("public-a", backfill=1), B], CATALOG, where="here")[1]
    assert state_to_send(kept, again) == {"bookmarks": {"public-b": {"n": None}}}
    both = [binding("public-a", backfill=1), binding("public-b", index=1, backfill=1)]
    assert state_to_send(kept, choose(both, CATALOG, where="here")[1]) is None
    plain: Any = apply_patches({}, [state_patch({"since": 5}, STREAMS)])
    assert state_to_send(plain, again) is None


def test_the_catalog_selects_the_streams_of_bindings_only() -> None:
    found: Message = {
        "streams": [
            {
                "tap_stream_id": "public-a",
                "stream": "a",
                "schema": {"type": "object"},
                "metadata": [
                    {"breadcrumb": [], "metadata": {"valid-replication-keys": ["at", "id"]}},
                    {"breadcrumb": ["properties", "x"], "metadata": {"inclusion": "available"}},
                    {"breadcrumb": ["properties", "y"], "metadata": {"inclusion": "unsupported"}},
                    {"breadcrumb": ["properties", "z"], "metadata": {"selected": False}},
                ],
            },
            {"tap_stream_id": "public-b", "stream": "b", "schema": {"type": "object"}},
        ]
    }
    chosen, (stream,) = choose([A], found, where="here")
    assert (stream.name, stream.aliases) == ("public-a", {"public-a", "a"})
    first, second = chosen["streams"]
    whole, x, y, z = [each["metadata"] for each in first["metadata"]]
    assert whole["selected"] is True
    assert (whole["replication-method"], whole["replication-key"]) == ("INCREMENTAL", "at")
    assert (x["selected"], "selected" in y, z["selected"]) == (True, False, False)
    assert second["metadata"] == [{"breadcrumb": [], "metadata": {"selected": False}}]
    assert "metadata" not in found["streams"][1], "what was found is not changed"
    full = binding("public-a", replicationMethod="FULL_TABLE")
    (about, *_), *_ = [each["metadata"] for each in choose([full], found, where="x")[0]["streams"]]
    assert about["metadata"]["replication-method"] == "FULL_TABLE"
    assert "replication-key" not in about["metadata"]


def test_a_stream_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="there is no stream c") as refused:
        choose([binding("c")], CATALOG, where="here")
    assert "public-a, public-b" in str(refused.value.why)
    with pytest.raises(UserError, match="two bindings read the stream public-a"):
        choose([A, binding("public-a", index=1)], CATALOG, where="here")


def test_keys_are_found_where_taps_put_them() -> None:
    about = {"breadcrumb": [], "metadata": {"table-key-properties": ["x", "y"]}}
    assert key_properties({"metadata": [about]}) == ["x", "y"]
    assert key_properties({"key_properties": ["id"]}) == ["id"]
    assert key_properties({}) == []


# ------------------------------------------------------------------------------------- with a tap


@pytest.mark.usefixtures("home")
def test_a_run_gives_every_document_and_the_next_one_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n}) + "\n" for n in range(25)))
    config = {"source": str(path), "notes": str(tmp_path / "notes"), "streams": ["items", "more"]}
    first = Run(singer(config).open(opening())).to_end()
    assert first.ids() == list(range(25))
    path.write_text("".join(json.dumps({"id": n}) + "\n" for n in range(30)))
    second = Run(singer(config).open(opening(state=first.state)), first.state).to_end()
    assert second.ids() == list(range(25, 30))
    noted = notes(tmp_path / "notes")
    assert noted[1]["state"] is None
    assert noted[-1]["state"] == {"bookmarks": {"items": {"n": 25}}}
    assert noted[-1]["modes"] == [0o600] * 3
    again = Run(singer(config).open(opening(binding(backfill=1), state=second.state))).to_end()
    assert again.ids() == list(range(30))


@pytest.mark.usefixtures("home")
def test_a_tap_that_crashes_loses_nothing_that_a_state_covers() -> None:
    read = [tapped(1), bookmark({"n": 1}), tapped(2), {"sleep": 0.3}, {"error": "x"}, {"exit": 2}]
    found = Run(singer({"read": read}).open(opening(ends=False)))
    with pytest.raises(ConnectorError, match="exit code 2") as failed:
        found.to_end()
    assert found.ids() == [1]
    assert json.loads(found.state["_state"]["text"]) == {"n": 1}
    assert failed.value.transient
    assert failed.value.retry_after_s == 300


@pytest.mark.usefixtures("home")
def test_the_schema_comes_with_documents_and_a_version_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {"type": "SCHEMA", "stream": "items", "schema": {"type": "object"}}
    activate = {"type": "ACTIVATE_VERSION", "stream": "items", "version": 7}
    with caplog.at_level(logging.INFO):
        found = Run(singer({"read": [schema, activate, tapped(1)]}).open(opening())).to_end()
    assert found.sequences[0].schemas == {0: {"type": "object"}}
    assert "documents of older versions stay" in caplog.text


@pytest.mark.usefixtures("home")
def test_documents_of_a_stream_that_was_not_described_are_an_error() -> None:
    found = Run(singer({"read": [tapped(1, "other"), bookmark({})]}).open(opening()))
    with pytest.raises(ConnectorError, match="a stream that it did not describe: other") as failed:
        found.to_end()
    assert not failed.value.transient
    assert found.state == {}


@pytest.mark.usefixtures("home")
def test_files_of_documents_are_refused() -> None:
    found = Run(singer({"read": [tapped(1), {"type": "BATCH", "stream": "items"}]}).open(opening()))
    with pytest.raises(ConnectorError, match=r"sends files of documents \(BATCH\)") as failed:
        found.to_end()
    assert not failed.value.transient


@pytest.mark.usefixtures("home")
def test_check_and_discover() -> None:
    singer({}).check()
    (items,) = singer({}).discover()
    assert (items.name, items.key, items.resource) == ("items", ("/id",), {"stream": "items"})
    singer({"discover": [{"raw": "INFO starting\n"}, {"raw": '{\n"streams": []\n}\n'}]}).check()
    with pytest.raises(ConnectorError, match="did not say which streams it has"):
        singer({"discover": [{"raw": "usage: tap\n"}]}).check()
    with pytest.raises(ConnectorError, match="exit code 1") as failed:
        singer({"discover": [{"error": "KeyError: host"}, {"exit": 1}]}).check()
    assert failed.value.why == "KeyError: host"
