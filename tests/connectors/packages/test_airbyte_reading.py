"""A run of an Airbyte source, without one: which documents and states are given together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.packages.fakes import Message, binding, lines, record, state, status, trouble
from penstock.connectors.packages import pending
from penstock.connectors.packages.airbyte import difference
from penstock.connectors.packages.airbyte_protocol import Stream, choose, state_to_send
from penstock.connectors.packages.airbyte_reading import AirbyteReading, StatePolicy
from penstock.connectors.packages.messages import UnknownStream
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import CaptureSequence
from penstock.runtime.patches import apply_patches

FOUND: Message = {
    "supported_sync_modes": ["full_refresh", "incremental"],
    "source_defined_cursor": True,
    "source_defined_primary_key": [["id"]],
    "json_schema": {"type": "object"},
}


def streams(*names: str, mode: str = "incremental", backfill: int = 0) -> tuple[Stream, ...]:
    bindings = [
        binding(name, index=at, backfill=backfill, syncMode=mode) for at, name in enumerate(names)
    ]
    return choose(bindings, [{"name": name, **FOUND} for name in names], where="here")


def told(
    policy: StatePolicy, *messages: Message, names: str = "ab", mode: str = "incremental"
) -> list[tuple[dict[int, list[int]], Json]]:
    """After each message, the documents by binding and the patch of what could be given."""
    reading = AirbyteReading(streams(*names, mode=mode), policy)
    found = []
    for line in lines(messages):
        reading.take(line)
        if (sequence := reading.next()) is not None:
            found.append(shown(sequence))
    reading.finish()
    if (sequence := reading.next()) is not None:
        found.append(shown(sequence))
    return found


def shown(sequence: CaptureSequence) -> tuple[dict[int, list[int]], Json]:
    documents = {
        each.binding: [json.loads(text)["id"] for text in each.documents.texts or ()]
        for each in sequence.given
    }
    return documents, sequence.patches[0] if sequence.patches else None


def of(value: Json) -> Json:
    return {"state": json.dumps(value, separators=(",", ":"))}


def test_by_default_documents_go_as_they_come_and_the_state_with_the_end_of_the_stream() -> None:
    assert told(
        "stream_complete",
        record(1, "a"),
        state({"n": 1}, "a"),
        record(2, "a"),
        record(9, "b"),
        state({"n": 2}, "a"),
        status("COMPLETE", "a"),
        state({"n": 9}, "b"),
    ) == [
        ({0: [1]}, None),
        ({0: [2]}, None),
        ({1: [9]}, None),
        ({}, {"a.v0": of({"n": 2})}),
        ({}, {"b.v0": of({"n": 9})}),
    ]


def test_a_state_that_comes_after_its_stream_is_complete_counts_at_once() -> None:
    found = told("stream_complete", status("COMPLETE", "a"), record(1, "a"), state({"n": 1}, "a"))
    assert found == [({0: [1]}, None), ({}, {"a.v0": of({"n": 1})})]


def test_with_each_a_state_closes_the_documents_of_its_stream_only() -> None:
    assert told(
        "each",
        record(1, "a"),
        record(9, "b"),
        state({"n": 1}, "a"),
        record(2, "a"),
        state({"n": 9}, "b"),
    ) == [
        ({0: [1]}, {"a.v0": of({"n": 1})}),
        ({1: [9]}, {"b.v0": of({"n": 9})}),
        ({0: [2]}, None),
    ]


def test_with_each_a_state_for_all_closes_everything() -> None:
    shared = {
        "type": "GLOBAL",
        "global": {
            "shared_state": {"lsn": 5},
            "stream_states": [{"stream_descriptor": {"name": "a"}, "stream_state": {"x": None}}],
        },
    }
    found = told("each", record(1, "a"), record(9, "b"), {"type": "STATE", "state": shared})
    patch = {
        "a.v0": of({"x": None}),
        "b.v0": of(None),
        "_shared": {"type": "GLOBAL", **of({"lsn": 5})},  # type: ignore[dict-item]
    }
    assert found == [({0: [1], 1: [9]}, patch)]
    (sent,) = state_to_send(apply_patches({}, [patch]), streams("a", "b"))  # type: ignore[misc]
    assert sent == {
        "type": "GLOBAL",
        "global": {
            "shared_state": {"lsn": 5},
            "stream_states": [{"stream_descriptor": {"name": "a"}, "stream_state": {"x": None}}],
        },
    }


def test_a_state_of_the_old_kind_is_passed_back_as_it_came() -> None:
    legacy = {"type": "STATE", "state": {"data": {"a": {"n": 1}, "b": {"n": 2}}}}
    ((_, patch),) = told("stream_complete", legacy)
    kept = apply_patches({}, [patch])
    assert state_to_send(kept, streams("a", "b")) == {"a": {"n": 1}, "b": {"n": 2}}  # type: ignore[arg-type]
    again = (*streams("a"), *streams("x", "b", backfill=1)[1:])
    assert state_to_send(kept, again) == {"a": {"n": 1}}  # type: ignore[arg-type]


def test_a_stream_that_is_read_in_full_keeps_no_state() -> None:
    messages = (record(1, "a"), state({"done": True}, "a"), status("COMPLETE", "a"))
    assert told("stream_complete", *messages, names="a", mode="full_refresh") == [({0: [1]}, None)]
    assert told("each", *messages, names="a", mode="full_refresh") == [
        ({0: [1]}, {"a.v0": of({"done": True})}),
        ({}, {"a.v0": None}),
    ]


def test_a_state_keeps_its_nulls_and_replaces_the_one_before() -> None:
    before = apply_patches({}, [{"a.v0": of({"old": 1})}])
    ((_, patch),) = told("each", state({"x": None, "y": {"z": None}}, "a"), names="a")
    assert state_to_send(apply_patches(before, [patch]), streams("a")) == [  # type: ignore[arg-type]
        {
            "type": "STREAM",
            "stream": {
                "stream_descriptor": {"name": "a"},
                "stream_state": {"x": None, "y": {"z": None}},
            },
        }
    ]


def test_a_binding_that_is_read_again_has_no_state_and_others_keep_theirs() -> None:
    kept: dict[str, Any] = {"a.v0": of({"n": 1}), "b.v0": of({"n": 2})}
    both = (*streams("a", backfill=1), streams("x", "b")[1])
    sent: Any = state_to_send(kept, both)
    assert [each["stream"]["stream_descriptor"]["name"] for each in sent] == ["b"]
    assert state_to_send(kept, streams("c")) is None


def test_documents_without_a_state_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "DOCUMENTS_MAX", 3)
    found = told("each", *(record(n, "a") for n in range(8)), state({"n": 8}, "a"), names="a")
    assert found == [
        ({0: [0, 1, 2]}, None),
        ({0: [3, 4, 5]}, None),
        ({0: [6, 7]}, {"a.v0": of({"n": 8})}),
    ]


def test_streams_that_nobody_reads_and_texts_are_for_the_log() -> None:
    reading = AirbyteReading(streams("a"), "each")
    for line in (*lines([record(1, "zz"), record(2, "zz")]), b"plain words"):
        reading.take(line)
    reading.take(b'{"type": "LOG", "log": {"level": "WARN", "message": "careful"}}')
    assert reading.logs == [
        (20, "no binding reads the stream zz"),
        (20, "plain words"),
        (30, "careful"),
    ]
    assert reading.next() is None


def test_namespaces_tell_streams_of_one_name_apart() -> None:
    def named(namespace: str | None) -> Message:
        message = record(1, "a")
        message["record"]["namespace"] = namespace
        return message

    found = [{"name": "a", "namespace": "x"}, {"name": "a", "namespace": "y"}]
    both = [binding("a", namespace="x"), binding("a", index=1, namespace="y")]
    reading = AirbyteReading(choose(both, found, where="here"), "stream_complete")
    for line in lines([named("y")]):
        reading.take(line)
    sequence = reading.next()
    assert sequence is not None
    assert shown(sequence) == ({1: [1]}, None)
    for unclear in (None, "z"):
        with pytest.raises(UnknownStream):
            reading.take(*lines([named(unclear)]))
    alone = AirbyteReading(choose(both[:1], found, where="here"), "stream_complete")
    alone.take(*lines([named(None)]))
    assert alone.next() is not None
    with pytest.raises(UnknownStream):
        alone.take(*lines([named("z")]))
    plain = AirbyteReading(choose([binding("a")], [{"name": "a"}], where="here"), "each")
    plain.take(*lines([named("z")]))


def test_a_stream_that_is_not_complete_moves_no_state() -> None:
    reading = AirbyteReading(streams("a", "b"), "stream_complete")
    messages = (
        record(1, "a"),
        state({"n": 1}, "a"),
        status("INCOMPLETE", "a"),
        state({"n": 5}, "b"),
        trouble("no"),
    )
    for line in lines(messages):
        reading.take(line)
    reading.finish()
    sequence = reading.next()
    assert sequence is not None
    assert shown(sequence) == ({0: [1]}, {"b.v0": of({"n": 5})})
    assert reading.incomplete == ["a"]
    assert reading.error is not None
    assert reading.error["message"] == "no"


_MESSAGES = st.lists(
    st.one_of(
        st.sampled_from(["a", "b"]).map(lambda name: ("record", name)),
        st.sampled_from(["a", "b"]).map(lambda name: ("state", name)),
        st.sampled_from(["a", "b"]).map(lambda name: ("complete", name)),
        st.just(("give", "")),
    ),
    max_size=30,
)


@given(_MESSAGES, st.sampled_from(["each", "stream_complete"]))
def test_a_state_never_passes_over_a_document(
    steps: list[tuple[str, str]], policy: StatePolicy
) -> None:
    """Whenever it is cut, the documents up to a stream's committed state were given before."""
    reading = AirbyteReading(streams("a", "b"), policy)
    sent = {"a": 0, "b": 0}
    given: dict[str, list[int]] = {"a": [], "b": []}
    kept: Any = {}

    def give() -> None:
        nonlocal kept
        while (sequence := reading.next()) is not None:
            documents, patch = shown(sequence)
            for at, ids in documents.items():
                given["ab"[at]] += ids
            kept = apply_patches(kept, [patch] if patch else [])
        for name in "ab":
            if (found := kept.get(f"{name}.v0")) is not None:
                assert len(given[name]) >= json.loads(found["state"])["n"]
            assert given[name] == list(range(len(given[name])))

    for kind, name in steps:
        if kind == "record":
            reading.take(*lines([record(sent[name], name)]))
            sent[name] += 1
        elif kind == "state":
            reading.take(*lines([state({"n": sent[name]}, name)]))
        elif kind == "complete":
            reading.take(*lines([status("COMPLETE", name)]))
        else:
            give()
    reading.finish()
    give()
    assert {name: len(ids) for name, ids in given.items()} == sent


# --------------------------------------------------------------------------------------- streams


def test_how_a_stream_is_read_if_the_binding_does_not_say() -> None:
    def mode(**found: object) -> tuple[str, tuple[str, ...]]:
        (stream,) = choose([binding("a")], [{"name": "a", **found}], where="here")
        return stream.mode, stream.cursor

    both = ["full_refresh", "incremental"]
    assert mode() == ("full_refresh", ())
    assert mode(supported_sync_modes=both) == ("full_refresh", ())
    assert mode(supported_sync_modes=both, source_defined_cursor=True) == ("incremental", ())
    cursor = mode(supported_sync_modes=both, default_cursor_field=["at"])
    assert cursor == ("incremental", ("at",))


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        ({"stream": "b"}, "there is no stream b"),
        ({"stream": "a", "namespace": "n"}, "there is no stream a"),
        ({"stream": "a", "syncMode": "incremental"}, "cannot be read as incremental"),
        ({"stream": "c", "syncMode": "incremental"}, "no cursor of its own"),
        ({"stream": "d"}, "there are several streams d"),
    ],
)
def test_a_stream_that_cannot_be_read_is_refused(resource: Message, message: str) -> None:
    found: list[Message] = [
        {"name": "a", "supported_sync_modes": ["full_refresh"]},
        {"name": "c", "supported_sync_modes": ["incremental"]},
        {"name": "d", "namespace": "x"},
        {"name": "d", "namespace": "y"},
    ]
    stream = resource.pop("stream")
    with pytest.raises(UserError, match=message):
        choose([binding(stream, **resource)], found, where="here")


def test_one_stream_for_two_bindings_is_refused() -> None:
    with pytest.raises(UserError, match="two bindings read the stream a"):
        choose([binding("a"), binding("a", index=1)], [{"name": "a"}], where="here")


_JSON = st.recursive(
    st.integers(0, 3) | st.booleans(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(st.sampled_from("abc"), _JSON, max_size=3)


@given(_OBJECTS, _OBJECTS)
def test_a_difference_makes_the_new_of_the_old(old: Json, new: Json) -> None:
    assert apply_patches(old, [difference(old, new)]) == new
