"""Packages for tests: real programs that speak a protocol, well or badly, as their config says."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.connectors.packages.airbyte import Airbyte
from penstock.connectors.packages.singer import Singer
from penstock.model.json_order import Json
from penstock.model.spec import CollectionSpec, Frozen
from penstock.runtime.connector.capture import (
    CaptureSequence,
    CaptureSession,
    Idle,
    Opening,
    Polled,
    SourceBinding,
)
from penstock.runtime.patches import apply_patches

Message = dict[str, Any]

ITEMS = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
}

_COMMON = """#!{python}
import json, os, signal, sys, time

def argument(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None

def loaded(name):
    path = argument(name)
    return json.load(open(path)) if path else None

config = loaded("--config") or {{}}
if "notes" in config:
    with open(config["notes"], "a") as notes:
        notes.write(json.dumps({{
            "argv": sys.argv[1:], "pid": os.getpid(), "group": os.getpgid(0),
            "environ": dict(os.environ), "state": loaded("--state"),
            "catalog": loaded("--catalog"), "config": config,
            "modes": [os.stat(p).st_mode & 0o777 for p in sys.argv if p.endswith(".json")],
        }}) + "\\n")

def say(message):
    sys.stdout.write(json.dumps(message) + "\\n")

def perform(steps):
    for step in steps:
        if "raw" in step:
            sys.stdout.write(step["raw"])
        elif "error" in step:
            sys.stderr.write(step["error"] + "\\n"); sys.stderr.flush()
        elif "sleep" in step:
            sys.stdout.flush(); time.sleep(step["sleep"])
        elif "changes" in step:
            say({{"type": "CONTROL", "control": {{"type": "CONNECTOR_CONFIG",
                "connectorConfig": {{"config": {{**config, **step["changes"]}}}}}}}})
        elif "deaf" in step:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif "child" in step:
            sys.stdout.flush()
            if os.fork() == 0:
                open(step["child"], "w").write(str(os.getpid())); time.sleep(600); os._exit(0)
        elif "exit" in step:
            sys.stdout.flush(); os._exit(step["exit"])
        elif "flood" in step:
            message = step["message"]
            for number in range(step["flood"]):
                (message["record"].get("data") or message["record"])["id"] = number
                say(message)
        elif "huge" in step:
            sys.stdout.write('{{"type": "RECORD", "x": "')
            for _ in range(step["huge"]):
                sys.stdout.write("x" * (1 << 20))
            sys.stdout.write('"}}\\n')
        else:
            say(step)
    sys.stdout.flush()
"""

AIRBYTE = (
    _COMMON
    + """
command = sys.argv[1]
if command == "check":
    perform(config.get("check", [
        {{"type": "CONNECTION_STATUS", "connectionStatus": {{"status": "SUCCEEDED"}}}}
    ]))
elif command == "discover":
    perform(config.get("discover", [{{"type": "CATALOG", "catalog": {{"streams": [
        {{"name": name, "json_schema": {{"type": "object", "properties": {{
            "id": {{"type": ["null", "integer"]}}, "text": {{"type": ["null", "string"]}}}}}},
          "supported_sync_modes": ["full_refresh", "incremental"],
          "source_defined_cursor": True, "source_defined_primary_key": [["id"]]}}
        for name in config.get("streams", ["items"])]}}}}]))
elif command == "read":
    if "source" in config:
        states = {{s["stream"]["stream_descriptor"]["name"]: s["stream"]["stream_state"]
                  for s in loaded("--state") or []}}
        for stream in loaded("--catalog")["streams"]:
            name = stream["stream"]["name"]
            at = states.get(name, {{"n": 0}})["n"]
            rows = [json.loads(line) for line in open(config["source"]) if line.strip()]
            for number, row in enumerate(rows):
                if number < at:
                    continue
                about = {{"stream": name, "data": row, "emitted_at": 7}}
                say({{"type": "RECORD", "record": about}})
                if (number + 1) % config.get("slice", 10) == 0:
                    # It lags behind what it has given.
                    state = {{"n": max(at, number + 1 - config.get("lag", 0)), "gone": None}}
                    say({{"type": "STATE", "state": {{"type": "STREAM", "stream": {{
                        "stream_descriptor": {{"name": name}}, "stream_state": state}}}}}})
            say({{"type": "STATE", "state": {{"type": "STREAM", "stream": {{
                "stream_descriptor": {{"name": name}}, "stream_state": {{"n": len(rows)}}}}}}}})
            say({{"type": "TRACE", "trace": {{"type": "STREAM_STATUS", "stream_status": {{
                "stream_descriptor": {{"name": name}}, "status": "COMPLETE"}}}}}})
            sys.stdout.flush()
    perform(config.get("read", []))
"""
)

SINGER = (
    _COMMON
    + """
if "--discover" in sys.argv:
    perform(config.get("discover", [{{"streams": [
        {{"tap_stream_id": name, "stream": name, "key_properties": ["id"],
          "schema": {{"type": "object", "properties": {{"id": {{"type": "integer"}},
                                                       "text": {{"type": ["null", "string"]}}}}}},
          "metadata": [{{"breadcrumb": [], "metadata": {{"valid-replication-keys": ["id"]}}}},
                       {{"breadcrumb": ["properties", "text"],
                         "metadata": {{"inclusion": "available"}}}}]}}
        for name in config.get("streams", ["items"])]}}]))
else:
    if "source" in config:
        state = loaded("--state") or {{"bookmarks": {{}}}}
        say({{"type": "STATE", "value": state}})
        for stream in loaded("--catalog")["streams"]:
            if not stream["metadata"][0]["metadata"]["selected"]:
                continue
            name = stream["stream"]
            say({{"type": "SCHEMA", "stream": name, "schema": stream["schema"],
                 "key_properties": ["id"]}})
            rows = [json.loads(line) for line in open(config["source"]) if line.strip()]
            at = state["bookmarks"].get(name, {{"n": 0}})["n"]
            for number, row in enumerate(rows):
                if number < at:
                    continue
                say({{"type": "RECORD", "stream": name, "record": row}})
                if (number + 1) % config.get("slice", 10) == 0:
                    state["bookmarks"][name] = {{"n": number + 1}}
                    say({{"type": "STATE", "value": state}})
            state["bookmarks"][name] = {{"n": len(rows)}}
            say({{"type": "STATE", "value": state}})
            sys.stdout.flush()
    perform(config.get("read", []))
"""
)


def put(home: Path, image: str, program: str, version: str = "1.0") -> Path:
    """Write a package where installed ones are: below XDG_DATA_HOME."""
    name = image.replace(":", "-")
    directory = home / "penstock" / "connectors" / name
    (directory / "bin").mkdir(parents=True, exist_ok=True)
    path = directory / "bin" / image.partition(":")[2]
    path.write_text(program.format(python=sys.executable))
    path.chmod(0o755)
    record = {"image": image, "distribution": name, "version": version, "program": str(path)}
    (directory / "penstock.json").write_text(json.dumps(record))
    return path


# ------------------------------------------------------------------------------------ connectors


def airbyte(config: Message, **others: object) -> Airbyte:
    return Airbyte({"config": config, **others}, where="capture acme/items", package="source-fake")


def singer(config: Message, **others: object) -> Singer:
    return Singer({"config": config, **others}, where="capture acme/items", package="tap-fake")


def binding(
    stream: str = "items",
    *,
    index: int = 0,
    backfill: int = 0,
    schema: Message = ITEMS,
    **resource: object,
) -> SourceBinding:
    frozen = Frozen(schema)
    collection = CollectionSpec(
        name=f"acme/{stream}", key=("/id",), write_schema=frozen, read_schema=frozen, fields=()
    )
    return SourceBinding(
        index=index,
        state_key=f"{stream}.v{backfill}",
        resource=Frozen({"stream": stream, **resource}),
        collection=collection,
    )


def opening(*bindings: SourceBinding, state: Json = None, ends: bool = True) -> Opening:
    return Opening(
        task="acme/items", bindings=bindings or (binding(),), state=state or {}, ends=ends
    )


class Run:
    """A session that is polled to its end, by hand or at once."""

    def __init__(self, session: CaptureSession, state: Json = None) -> None:
        self.session = session
        self.sequences: list[CaptureSequence] = []
        self.state: Any = state or {}

    def poll(self, within_s: float = 30.0) -> Polled:
        """The next sequence, or the end."""
        deadline = time.monotonic() + within_s
        while (polled := self.session.poll(0.1)) is Idle.PENDING:
            assert time.monotonic() < deadline, "nothing came"
        if isinstance(polled, CaptureSequence):
            self.sequences.append(polled)
            self.state = apply_patches(self.state, polled.patches)
        return polled

    def to_end(self) -> Run:
        try:
            while self.poll() is not Idle.END:
                pass
        finally:
            self.session.close()
        return self

    def documents(self, at: int = 0) -> list[Any]:
        return [
            json.loads(text)
            for sequence in self.sequences
            for given in sequence.given
            if given.binding == at
            for text in given.documents.texts or ()
        ]

    def ids(self, at: int = 0) -> list[int]:
        return [document["id"] for document in self.documents(at)]


def notes(path: Path) -> list[Message]:
    """What the runs of a package noted about themselves."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def eventually(holds: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# -------------------------------------------------------------------------------------- messages


def record(number: int, stream: str = "items", **others: object) -> Message:
    """An Airbyte record."""
    data = {"id": number, **others}
    return {"type": "RECORD", "record": {"stream": stream, "data": data, "emitted_at": 5}}


def state(value: Json, stream: str = "items") -> Message:
    described = {"stream_descriptor": {"name": stream}, "stream_state": value}
    return {"type": "STATE", "state": {"type": "STREAM", "stream": described}}


def status(word: str, stream: str = "items") -> Message:
    described = {"stream_descriptor": {"name": stream}, "status": word}
    return {"type": "TRACE", "trace": {"type": "STREAM_STATUS", "stream_status": described}}


def trouble(message: str, kind: str = "system_error") -> Message:
    about = {"message": message, "internal_message": "inside", "failure_type": kind}
    return {"type": "TRACE", "trace": {"type": "ERROR", "emitted_at": 1, "error": about}}


def tapped(number: int, stream: str = "items") -> Message:
    """A Singer record."""
    return {"type": "RECORD", "stream": stream, "record": {"id": number}}


def bookmark(value: Json) -> Message:
    return {"type": "STATE", "value": value}


def lines(messages: Sequence[Message]) -> list[bytes]:
    return [json.dumps(message).encode() for message in messages]
