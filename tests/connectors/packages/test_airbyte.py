"""Airbyte sources as processes: fakes that behave, and fakes that do not."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from connectors.packages.fakes import (
    ITEMS,
    Message,
    Run,
    airbyte,
    binding,
    eventually,
    is_alive,
    notes,
    opening,
    record,
    state,
    status,
    trouble,
)
from penstock.connectors.builtin import BUILTIN, PACKAGES
from penstock.connectors.packages import environments, hosting, process
from penstock.connectors.packages.airbyte import Airbyte
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.model.schema_check import check_schema
from penstock.native.take import Taker
from penstock.runtime.connector.capture import CaptureSequence, Idle
from penstock.runtime.connector.common import ConnectorError
from penstock.servicekit.secrets import mask

pytestmark = pytest.mark.usefixtures("home")


def run(config: Message, *, kept: Json = None, **others: object) -> Run:
    session = airbyte(config, **others).open(opening(state=kept))
    return Run(session, kept).to_end()


def failing(config: Message, **others: object) -> tuple[Run, ConnectorError]:
    """What a run gave before it failed, and its error."""
    session = airbyte(config, **others).open(opening(ends=False))
    found = Run(session)
    with pytest.raises(ConnectorError) as failed:
        found.to_end()
    return found, failed.value


def source(tmp_path: Path, count: int) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": f"t{n}"}) + "\n" for n in range(count)))
    return path


# ------------------------------------------------------------------------------------- good runs


def test_a_run_gives_every_document_and_the_next_one_what_is_new(tmp_path: Path) -> None:
    path = source(tmp_path, 25)
    first = run({"source": str(path)})
    assert first.ids() == list(range(25))
    source(tmp_path, 30)
    second = run({"source": str(path), "notes": str(tmp_path / "notes")}, kept=first.state)
    assert second.ids() == list(range(25, 30))
    sent = notes(tmp_path / "notes")[-1]["state"]
    assert sent[0]["stream"]["stream_state"] == {"n": 25}
    assert sent[0]["type"] == "STREAM"


def test_documents_say_where_they_come_from_if_the_schema_names_it(tmp_path: Path) -> None:
    schema: Message = {**ITEMS, "required": ["id", "_meta"]}
    schema["properties"] = {
        **ITEMS["properties"],  # type: ignore[dict-item]
        "_meta": {
            "type": "object",
            "required": ["source"],
            "properties": {
                "source": {
                    "type": "object",
                    "required": ["stream", "emitted_at", "id"],
                    "properties": {
                        "stream": {"type": "string"},
                        "emitted_at": {"type": "integer"},
                        "id": {"type": "string"},
                    },
                }
            },
        },
    }
    config = {"read": [record(1), record(1), record(2)]}
    found = Run(airbyte(config).open(opening(binding(schema=schema)))).to_end()
    documents = [given.documents for each in found.sequences for given in each.given]
    metas = [row["source"] for each in documents for row in each.meta.to_pylist()]  # type: ignore[union-attr]
    assert {(meta["stream"], meta["emitted_at"]) for meta in metas} == {("items", 5)}
    assert metas[0]["id"] == metas[1]["id"] != metas[2]["id"]
    taker = Taker(compiled(json.dumps(schema)))
    taken = taker.take_texts(documents[0].texts or (), documents[0].meta)
    assert taken.refused == ()
    assert taken.rows.num_rows == len(documents[0].texts or ())
    assert documents[0].origin(0) == "items, record 1"


def test_the_schema_of_the_stream_comes_with_its_first_documents() -> None:
    found = run({"read": [record(1), {"sleep": 0.3}, record(2)]})
    assert [list(each.schemas) for each in found.sequences] == [[0], []]
    assert found.ids() == [1, 2]


def test_the_package_sees_its_files_and_few_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TOKEN", "geheim-4711")
    monkeypatch.setenv("UNRELATED", "1")
    config = {"notes": str(tmp_path / "notes"), "token": "${env:PENSTOCK_TEST_TOKEN}"}
    run(config, environment={"EXTRA": "yes"})
    noted = notes(tmp_path / "notes")[-1]
    assert noted["config"]["token"] == "geheim-4711"  # noqa: S105 - a fake one
    assert noted["modes"] == [0o600, 0o600]
    assert "geheim" not in json.dumps(noted["argv"])
    assert noted["environ"]["EXTRA"] == "yes"
    assert {"UNRELATED", "PENSTOCK_TEST_TOKEN"}.isdisjoint(noted["environ"])
    assert noted["group"] != os.getpgid(0)
    assert [path for path in noted["argv"] if path.endswith(".json") and Path(path).exists()] == []


def test_a_configuration_that_the_package_changes_is_used_by_the_next_run(tmp_path: Path) -> None:
    changes = {"changes": {"token": "new-token"}}
    with_read: Message = {
        "notes": str(tmp_path / "notes"),
        "token": "old-token",
        "keep": 1,
        "read": [changes, record(1), {"sleep": 0.5}, record(2)],
    }
    first = Run(airbyte(with_read).open(opening()))
    assert first.poll() != Idle.END
    assert "_config" in first.state, "it is given at once: an old token may be worth nothing"
    first.to_end()
    second = Run(airbyte(with_read).open(opening(state=first.state)), first.state).to_end()
    assert [each["config"]["token"] for each in notes(tmp_path / "notes")] == [
        "old-token", "old-token", "new-token", "new-token",
    ]  # fmt: skip
    assert "new-token" not in mask("it said new-token")
    other = {**with_read, "keep": 2}
    Run(airbyte(other).open(opening(state=second.state))).to_end()
    assert notes(tmp_path / "notes")[-1]["config"]["token"] == "old-token"  # noqa: S105


def test_a_manifest_becomes_part_of_the_configuration(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text("version: 1.0.0\ntype: DeclarativeSource\n")
    run({"notes": str(tmp_path / "notes")}, manifest=str(manifest))
    sent = notes(tmp_path / "notes")[-1]["config"]["__injected_declarative_manifest"]
    assert sent == {"version": "1.0.0", "type": "DeclarativeSource"}
    with pytest.raises(UserError, match=r"the manifest none\.yaml cannot be read"):
        run({}, manifest="none.yaml")


def test_streams_are_looked_for_once_and_again_after_a_failure(tmp_path: Path) -> None:
    config = {"notes": str(tmp_path / "notes"), "read": [{"exit": 3}]}
    connector = airbyte(config)
    for _ in range(2):
        with pytest.raises(ConnectorError, match="exit code 3"):
            Run(connector.open(opening())).to_end()
    good = airbyte({"notes": str(tmp_path / "good")})
    for _ in range(2):
        Run(good.open(opening())).to_end()
    asked = [each["argv"][0] for each in notes(tmp_path / "notes")]
    assert asked == ["discover", "read", "discover", "read"]
    assert [each["argv"][0] for each in notes(tmp_path / "good")] == ["discover", "read", "read"]


# -------------------------------------------------------------------------------------- bad runs


def test_a_run_that_crashes_gives_what_it_gave_and_moves_no_state() -> None:
    read = [record(1), state({"n": 1}), {"sleep": 0.3}, record(2), {"error": "boom"}, {"exit": 1}]
    found, error = failing({"read": read})
    assert found.ids() in ([1], [1, 2]), "what comes is given; what was not, is dropped"
    assert found.state == {}
    assert "ended with exit code 1" in error.what
    assert error.why == "boom"
    assert error.transient
    assert error.retry_after_s == 300


def test_with_each_a_crash_drops_what_no_state_covers() -> None:
    read = [record(1), state({"n": 1}), record(2), {"sleep": 0.3}, record(3), {"exit": 1}]
    found, _ = failing({"read": read}, statePolicy="each")
    assert found.ids() == [1]
    assert json.loads(found.state["items.v0"]["state"]) == {"n": 1}


def test_a_complete_stream_keeps_its_state_though_another_one_fails() -> None:
    read = [record(1), state({"n": 1}), status("COMPLETE"), {"sleep": 0.3}, {"exit": 1}]
    found, _ = failing({"read": read})
    assert json.loads(found.state["items.v0"]["state"]) == {"n": 1}


def test_an_error_that_the_package_names_is_the_error() -> None:
    _, error = failing({"read": [record(1), trouble("the moon is full"), {"exit": 1}]})
    assert error.what == "airbyte:source-fake failed: the moon is full"
    assert error.why == "inside"
    assert error.transient
    _, error = failing({"read": [trouble("wrong password", "config_error")]})
    assert not error.transient


def test_a_batch_run_does_not_wait_for_the_interval() -> None:
    with pytest.raises(ConnectorError) as failed:
        run({"read": [{"exit": 1}]})
    assert failed.value.retry_after_s == 0


def test_a_stream_that_is_not_complete_is_an_error_at_the_end() -> None:
    found, error = failing({"read": [record(1), state({"n": 1}), status("INCOMPLETE")]})
    assert found.ids() == [1]
    assert found.state == {}
    assert "could not read items to the end" in error.what


def test_words_on_the_standard_output_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = run({"read": [{"raw": "hello there\n"}, {"error": "on stderr"}, record(1)]})
    assert found.ids() == [1]
    assert "source-fake: hello there" in caplog.messages
    assert "source-fake: on stderr" in caplog.messages


def test_a_torn_message_is_an_error_and_no_document_is_lost() -> None:
    found, error = failing(
        {"read": [record(1), {"sleep": 0.3}, {"raw": '{"type": "RECORD", "r\n'}]}
    )
    assert found.ids() == [1]
    assert "sent a message that cannot be read" in error.what
    assert '{"type": "RECORD", "r' in str(error.why)


def test_a_message_that_is_too_long_is_an_error() -> None:
    _, error = failing({"read": [{"huge": 65}]})
    assert "more than 64 MiB" in error.what
    assert not error.transient
    assert len(str(error.why)) < 300


def test_a_last_line_without_its_end_counts() -> None:
    assert run({"read": [{"raw": json.dumps(record(7))}]}).ids() == [7]


def test_a_flood_waits_in_the_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "WAITING_BYTES_MAX", 1 << 16)
    message = record(0, text="x" * 1000)
    session = airbyte({"read": [{"flood": 20_000, "message": message}]}).open(opening())
    found = Run(session)
    assert isinstance(found.poll(), CaptureSequence)
    running = session.process
    eventually(lambda: running._waiting_bytes >= 1 << 16, "it is read ahead")
    for _ in range(20):
        threading.Event().wait(0.02)
        assert running._waiting_bytes < (1 << 16) + (1 << 19), "and not without limit"
    found.to_end()
    assert found.ids() == list(range(20_000))
    sizes = [sequence.given_documents for sequence in found.sequences]
    assert max(sizes) <= 4_000
    assert max(sequence.bytes for sequence in found.sequences) < 6 << 20


def test_a_sequence_is_limited_however_much_waits() -> None:
    session = airbyte({"read": [{"flood": 9_000, "message": record(0)}]}).open(opening())
    eventually(lambda: session.process._ended, "it has written everything")
    found = Run(session).to_end()
    assert [each.given_documents for each in found.sequences] == [4_000, 4_000, 1_000]
    assert found.ids() == list(range(9_000))


def test_a_run_that_hangs_is_ended_after_its_silence(tmp_path: Path) -> None:
    config = {"notes": str(tmp_path / "notes"), "read": [record(1), {"sleep": 600}]}
    found, error = failing(config, silenceTimeout=0.5)
    assert found.ids() == [1]
    assert "said nothing for" in error.what
    assert error.transient
    eventually(lambda: not is_alive(notes(tmp_path / "notes")[-1]["pid"]), "it lives")


def test_silence_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosting, "_REPORT_S", 0.2)
    connector = airbyte({"read": [{"sleep": 600}]})
    session = connector.open(opening())
    try:
        eventually(
            lambda: session.poll(0.1) is Idle.PENDING and "said nothing" in caplog.text, "no word"
        )
        assert "said nothing" in str(connector.waits_for())
    finally:
        connector.interrupt()
        session.close()


# ------------------------------------------------------------------------------------- stopping


def started(tmp_path: Path, *read: Message) -> tuple[Airbyte, Any, int]:
    """A run that has given its first document, and the number of its process."""
    config = {"notes": str(tmp_path / "notes"), "read": [*read, record(1), {"sleep": 600}]}
    connector = airbyte(config)
    session = connector.open(opening())
    assert isinstance(Run(session).poll(), CaptureSequence)
    return connector, session, notes(tmp_path / "notes")[-1]["pid"]


def test_closing_ends_the_process_and_what_it_started(tmp_path: Path) -> None:
    _, session, pid = started(tmp_path, {"child": str(tmp_path / "child")})
    eventually(lambda: (tmp_path / "child").exists(), "no child")
    eventually(lambda: (tmp_path / "child").read_text() != "", "no child")
    session.close()
    eventually(lambda: not is_alive(pid), "it lives")
    eventually(lambda: not is_alive(int((tmp_path / "child").read_text())), "its child lives")
    assert not Path(session.process._directory).exists()


def test_a_process_that_ignores_signals_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.guard, "KILL_S", 0.3)
    _, session, pid = started(tmp_path, {"deaf": True})
    session.close()
    eventually(lambda: not is_alive(pid), "it lives")


def test_an_interrupt_ends_a_poll_at_once(tmp_path: Path) -> None:
    connector, session, pid = started(tmp_path, {"deaf": True})
    threading.Timer(0.2, connector.interrupt).start()
    with pytest.raises(ConnectorError, match="was interrupted"):
        session.poll(600.0)
    session.close()
    eventually(lambda: not is_alive(pid), "it lives")
    again = Run(connector.open(opening()))
    assert isinstance(again.poll(), CaptureSequence), "the next session is not interrupted"
    connector.interrupt()
    again.session.close()


def test_an_interrupt_ends_a_check() -> None:
    connector = airbyte({"check": [{"sleep": 600}]})
    threading.Timer(0.3, connector.interrupt).start()
    with pytest.raises(ConnectorError, match="was interrupted"):
        connector.check()


def test_a_package_does_not_outlive_a_killed_penstock(tmp_path: Path, home: Path) -> None:
    program = (
        "from connectors.packages.fakes import *\n"
        f"config = {{'notes': {str(tmp_path / 'notes')!r}}}\n"
        "config['read'] = [record(1), {'sleep': 600}]\n"
        "run = Run(airbyte(config).open(opening()))\n"
        "run.poll()\n"
        "print(run.session.process._directory, flush=True)\n"
        "run.session.poll(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as killed:
        assert killed.stdout is not None
        directory = Path(killed.stdout.readline().strip())
        pid = notes(tmp_path / "notes")[-1]["pid"]
        assert is_alive(pid)
        assert directory.exists()
        killed.send_signal(signal.SIGKILL)
    eventually(lambda: not is_alive(pid), "it lives")
    eventually(lambda: not directory.exists(), "its configuration is still there")


def test_the_configuration_goes_with_the_package_whoever_is_there_to_see_it() -> None:
    """Penstock may be killed after the package has ended, and before it has noticed."""
    session = airbyte({"read": [record(1)]}).open(opening())
    eventually(lambda: not session.process._directory.exists(), "it is still there")
    assert Run(session).to_end().ids() == [1]


# --------------------------------------------------------------------------- check and discover


def test_check() -> None:
    airbyte({}).check()
    refused = {
        "type": "CONNECTION_STATUS",
        "connectionStatus": {"status": "FAILED", "message": "wrong password"},
    }
    with pytest.raises(ConnectorError, match="cannot be used as it is configured") as failed:
        airbyte({"check": [refused]}).check()
    assert failed.value.why == "wrong password"
    with pytest.raises(ConnectorError, match="did not say whether"):
        airbyte({"check": []}).check()
    with pytest.raises(ConnectorError, match="failed: no config"):
        airbyte({"check": [trouble("no config", "config_error"), {"exit": 1}]}).check()


def test_discover() -> None:
    (items,) = airbyte({}).discover()
    assert (items.name, items.key, items.resource) == ("items", ("/id",), {"stream": "items"})
    schema: Any = items.schema
    assert schema["required"] == ["id"]
    assert schema["properties"]["id"]["type"] == "integer"
    assert schema["properties"]["text"]["type"] == ["null", "string"]
    assert items.note is None


def test_a_discovered_schema_claims_no_formats_and_one_that_cannot_be_used_is_left_out() -> None:
    dated = {"at": {"type": "string", "format": "date-time", "airbyte_type": "x"}}
    streams = [
        {"name": "a", "json_schema": {"$schema": "x", "properties": dated}},
        {"name": "b", "json_schema": {"properties": {"id": {"type": "nonsense"}}}},
    ]
    catalog = {"type": "CATALOG", "catalog": {"streams": streams}}
    first, second = airbyte({"discover": [catalog]}).discover()
    schema: Any = first.schema
    assert "$schema" not in schema
    assert "format" not in schema["properties"]["at"]
    schema = second.schema
    assert list(schema["properties"]) == ["_meta"]
    assert "cannot be used" in str(second.note)


def test_a_stream_without_a_key_is_told_apart_by_a_hash() -> None:
    stream = {"name": "Log Lines", "namespace": "Ops", "json_schema": {"properties": {}}}
    catalog = {"type": "CATALOG", "catalog": {"streams": [stream]}}
    (found,) = airbyte({"discover": [catalog]}).discover()
    assert found.name == "ops_log_lines"
    assert found.key == ("/_meta/source/id",)
    assert found.resource == {"stream": "Log Lines", "namespace": "Ops"}
    assert "names no key" in str(found.note)
    schema: Any = found.schema
    assert schema["required"] == ["_meta"]


def test_a_package_that_is_not_installed_says_how_to_install_it() -> None:
    connector = Airbyte({}, where="capture acme/items", package="source-none==1.2")
    with pytest.raises(ConnectorError, match="airbyte:source-none is not installed") as failed:
        connector.check()
    assert failed.value.fix == "penstock connector install airbyte:source-none==1.2"
    assert not failed.value.transient
    other = Airbyte({}, where="capture acme/items", package="source-fake==2.0")
    with pytest.raises(ConnectorError, match=r"installed in version 1\.0"):
        other.check()


def test_a_program_that_is_gone_is_an_error(home: Path) -> None:
    Path(environments.find(environments.parse("airbyte:source-fake"), where="").program).unlink()
    with pytest.raises(ConnectorError, match="exit code 127") as failed:
        airbyte({}).check()
    assert "No such file" in str(failed.value.why)


@pytest.mark.parametrize("protocol", sorted(PACKAGES))
def test_the_schemas_of_a_protocol_are_sound_and_fit_their_examples(protocol: str) -> None:
    schemas = BUILTIN.schemas("capture", f"{protocol}:anything")
    assert schemas is not None
    for schema in (schemas.config, schemas.resource):
        assert [p for p in check_schema(schema.value) if p.code.startswith("E-")] == []
        members = schema.value["properties"]
        assert all(m["title"] and m["description"] and m["examples"] for m in members.values())
        assert schema.problems({n: m["examples"][0] for n, m in members.items()}) == ()
