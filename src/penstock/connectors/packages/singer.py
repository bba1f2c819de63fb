"""Sources that speak the Singer protocol: `singer:tap-github`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.connectors.packages.discovered import discovered
from penstock.connectors.packages.hosting import CONFIG, PackageSession, PackageSource
from penstock.connectors.packages.singer_protocol import (
    choose,
    key_properties,
    state_to_send,
    stream_id,
    unread,
)
from penstock.connectors.packages.singer_reading import BatchRefused, SingerReading
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import Discovered, Opening, Polled


class SingerSession(PackageSession):
    """A run of a tap."""

    def poll(self, wait_s: float) -> Polled:
        try:
            return super().poll(wait_s)
        except BatchRefused:
            self.source.fail(
                None,
                "sends files of documents (BATCH), which are not read here",
                fix="turn that off in its configuration: without batch_config, taps send documents",
                transient=False,
            )


class Singer(PackageSource):
    """A Singer tap, in an environment of its own."""

    config_schema = ConfigSchema(CONFIG)
    resource_schema = ConfigSchema(
        {
            "stream": {
                "type": "string",
                "minLength": 1,
                "identity": True,
                "title": "the name of a stream",
                "description": "The stream, as the tap's catalog has it (tap_stream_id).",
                "examples": ["public-users"],
            },
            "replicationMethod": {
                "enum": ["FULL_TABLE", "INCREMENTAL", "LOG_BASED"],
                "title": "FULL_TABLE, INCREMENTAL or LOG_BASED",
                "description": "How the tap reads it; INCREMENTAL if it names a replication key.",
                "examples": ["INCREMENTAL"],
            },
            "replicationKey": {
                "type": "string",
                "minLength": 1,
                "title": "the name of a member",
                "description": "The member that tells what is new.",
                "examples": ["updated_at"],
            },
        },
        required=("stream",),
    )

    def __init__(self, config: Json, *, where: str, package: str) -> None:
        super().__init__(config, where=where, protocol="singer", package=package)

    def check(self) -> None:
        """Find the streams: taps have no other way to try their configuration."""
        self._discover()

    def discover(self) -> Sequence[Discovered]:
        return [
            discovered(
                stream_id(stream),
                {"stream": stream_id(stream)},
                stream.get("schema"),
                [[name] for name in key_properties(stream)],
            )
            for stream in self._discover().get("streams") or ()
        ]

    def open(self, opening: Opening) -> SingerSession:
        state: Any = opening.state
        found = self.remembered(self._discover)
        catalog, streams = choose(opening.bindings, found, where=self.where)
        files: dict[str, Json] = {"config.json": self.settings(), "catalog.json": catalog}
        arguments = ["--config", "config.json", "--catalog", "catalog.json"]
        if (sent := state_to_send(state, streams)) is not None:
            files["state.json"] = sent
            arguments += ["--state", "state.json"]
        process = self.start(arguments, files)
        others = unread(found, streams)
        return SingerSession(self, opening, process, SingerReading(streams, sent, others))

    def _discover(self) -> dict[str, Any]:
        files: dict[str, Json] = {"config.json": self.settings()}
        lines = list(self.lines(["--config", "config.json", "--discover"], files))
        text = b"\n".join(lines)
        begin = next((at for at, line in enumerate(lines) if line.lstrip().startswith(b"{")), 0)
        try:
            catalog: dict[str, Any] = json.loads(b"\n".join(lines[begin:]))
        except ValueError:
            wrote = text[:200].decode(errors="replace") or "nothing"
            self.fail(
                None,
                "did not say which streams it has",
                why=f"it wrote: {wrote}",
                fix="only taps with --discover can be read",
                transient=False,
            )
        return catalog
