"""Sources that speak the Airbyte protocol: `airbyte:source-faker`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from penstock.connectors.packages.airbyte_protocol import (
    CONFIG as CHANGED,
)
from penstock.connectors.packages.airbyte_protocol import (
    READER,
    AirbyteMessage,
    choose,
    kept,
    state_to_send,
)
from penstock.connectors.packages.airbyte_reading import AirbyteReading, StatePolicy
from penstock.connectors.packages.discovered import discovered
from penstock.connectors.packages.hosting import (
    CONFIG,
    PackageSession,
    PackageSource,
    conceal_secrets,
)
from penstock.connectors.packages.messages import BrokenMessage
from penstock.connectors.packages.process import PackageProcess
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json, canonical_json
from penstock.runtime.connector.capture import Discovered, Idle, Opening
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.patches import apply_patches

_log = logging.getLogger("penstock.connectors")

_MANIFEST: Final = "__injected_declarative_manifest"
"""The member of its configuration in which a package without code of its own finds its manifest."""

_LOGGED_BYTES: Final = 2_000

_ROUNDS: Final = 50_000
"""Of the hash that tells one configuration from another: it must not give secrets away."""


class AirbyteSession(PackageSession):
    """A run of `read`."""

    def __init__(
        self,
        source: Airbyte,
        opening: Opening,
        process: PackageProcess,
        reading: AirbyteReading,
        settings: dict[str, Any],
        given: str,
    ) -> None:
        """`settings` are the catalog's, and `given` tells them from others."""
        super().__init__(source, opening, process, reading)
        self._airbyte = source
        self._run = reading
        self._settings = settings
        self._given = given
        self.after_line()

    def after_line(self) -> None:
        if self._run.config is None:
            return
        wanted, self._run.config = self._run.config, None
        conceal_secrets(wanted)
        change = kept(difference(self._settings, wanted))
        self._run.change({CHANGED: {"change": change, "of": self._given}})

    def judge_end(self, code: int) -> None:
        if self._run.error is None:
            super().judge_end(code)
            return
        self._airbyte.forget_streams()
        self._airbyte.fail_as_said(self._run.error, retry_after_s=self.retry_after_s)

    def last(self) -> Idle:
        if self._run.incomplete:
            self.source.fail(
                self.process,
                f"could not read {', '.join(self._run.incomplete)} to the end",
                transient=True,
                retry_after_s=self.retry_after_s,
            )
        return super().last()


class Airbyte(PackageSource):
    """A source of the Airbyte protocol, in an environment of its own."""

    config_schema = ConfigSchema(
        {
            **CONFIG,
            "manifest": {
                "type": "string",
                "minLength": 1,
                "path": True,
                "title": "the path of a file",
                "description": "The YAML manifest of a source without code, for "
                "airbyte:source-declarative-manifest.",
                "examples": ["github.yml"],
            },
            "statePolicy": {
                "enum": ["stream_complete", "each"],
                "default": "stream_complete",
                "title": "stream_complete or each",
                "description": "When a state of the package counts: at the end of its stream, or "
                "each as it comes, for packages that resume well.",
                "examples": ["each"],
            },
        }
    )
    resource_schema = ConfigSchema(
        {
            "stream": {
                "type": "string",
                "minLength": 1,
                "identity": True,
                "title": "the name of a stream",
                "description": "The stream.",
                "examples": ["users"],
            },
            "namespace": {
                "type": "string",
                "minLength": 1,
                "identity": True,
                "title": "the namespace of a stream",
                "description": "Its namespace, if several streams have its name.",
                "examples": ["public"],
            },
            "syncMode": {
                "enum": ["full_refresh", "incremental"],
                "title": "full_refresh or incremental",
                "description": "Read everything in each run, or what is new; incremental if the "
                "stream can be read so.",
                "examples": ["incremental"],
            },
            "cursorField": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "title": "a list of names",
                "description": "The path to the member that tells what is new, where the stream "
                "has none of its own.",
                "examples": [["updated_at"]],
            },
        },
        required=("stream",),
    )

    def __init__(self, config: Json, *, where: str, package: str) -> None:
        super().__init__(config, where=where, protocol="airbyte", package=package)
        self._policy: StatePolicy = self._given.get("statePolicy", "stream_complete")

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        path = self._given.get("manifest")
        return settings if path is None else {**settings, _MANIFEST: self._manifest(Path(path))}

    def _manifest(self, path: Path) -> Json:
        import yaml

        try:
            manifest: Json = yaml.safe_load(path.read_text(encoding="utf-8"))
            json.dumps(manifest)
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise UserError(
                f"the manifest {path} cannot be read",
                where=f"{self.where}: manifest",
                why=getattr(error, "strerror", None) or " ".join(str(error).split()),
                fix="give the path of a YAML file, relative to the catalog",
            ) from None
        return manifest

    def check(self) -> None:
        status = self._ask("check", self.settings(), _Answers()).status
        if status is None:
            self.fail(None, "did not say whether it can be used", transient=False)
        if status.get("status") != "SUCCEEDED":
            self.fail(
                None,
                "cannot be used as it is configured",
                why=str(status.get("message") or "it does not say why"),
                transient=False,
            )

    def discover(self) -> Sequence[Discovered]:
        return [
            discovered(
                "_".join(filter(None, [stream.get("namespace"), stream["name"]])),
                {
                    "stream": stream["name"],
                    **({"namespace": stream["namespace"]} if stream.get("namespace") else {}),
                },
                stream.get("json_schema"),
                stream.get("source_defined_primary_key") or [],
            )
            for stream in self._discover(self.settings())
        ]

    def open(self, opening: Opening) -> AirbyteSession:
        state: Any = opening.state
        written = self.settings()
        given = fingerprint(written)
        settings = written
        if (changed := state.get(CHANGED)) is not None and changed["of"] == given:
            merged: Any = apply_patches(written, [json.loads(changed["change"])])
            conceal_secrets(merged)
            settings = merged
        answers = _Answers()
        found = self.remembered(lambda: self._discover(settings, answers))
        streams = choose(opening.bindings, found, where=self.where)
        reading = AirbyteReading(streams, self._policy)
        if answers.config is not None:
            reading.config, settings = answers.config, answers.config
        files: dict[str, Json] = {
            "config.json": settings,
            "catalog.json": {"streams": [stream.configured() for stream in streams]},
        }
        arguments = ["read", "--config", "config.json", "--catalog", "catalog.json"]
        if (sent := state_to_send(state, streams)) is not None:
            files["state.json"] = sent
            arguments += ["--state", "state.json"]
        process = self.start(arguments, files)
        return AirbyteSession(self, opening, process, reading, written, given)

    def _discover(
        self, settings: dict[str, Any], answers: _Answers | None = None
    ) -> list[dict[str, Any]]:
        found = self._ask("discover", settings, answers or _Answers())
        if found.catalog is None:
            self.fail(None, "did not say which streams it has", transient=False)
        return list(found.catalog.get("streams") or ())

    def _ask(self, command: str, settings: dict[str, Any], answers: _Answers) -> _Answers:
        """Run a command, and gather what it answers."""
        files: dict[str, Json] = {"config.json": settings}
        failure: ConnectorError | None = None
        try:
            for line in self.lines([command, "--config", "config.json"], files):
                answers.take(line)
        except ConnectorError as error:
            failure = error
        if answers.error is not None and (failure or not answers.has_answer):
            self.fail_as_said(answers.error)
        if failure is not None:
            raise failure
        return answers

    def fail_as_said(self, error: Mapping[str, Any], *, retry_after_s: float = 0.0) -> NoReturn:
        """Raise the error that the package names."""
        self.fail(
            None,
            f"failed: {error.get('message') or 'it does not say why'}",
            why=error.get("internal_message"),
            transient=error.get("failure_type") != "config_error",
            retry_after_s=retry_after_s,
        )


@dataclass(slots=True)
class _Answers:
    """What a command has answered."""

    catalog: dict[str, Any] | None = None
    status: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    config: dict[str, Any] | None = None

    @property
    def has_answer(self) -> bool:
        return self.catalog is not None or self.status is not None

    def take(self, line: bytes) -> None:
        """Take one line in; what is neither answer nor trouble is for the log, in detail."""
        try:
            message = READER.read(line)
        except BrokenMessage:
            message = None
        match message:
            case AirbyteMessage(catalog=dict() as catalog):
                self.catalog = catalog
            case AirbyteMessage(connectionStatus=dict() as status):
                self.status = status
            case AirbyteMessage(trace={"type": "ERROR", "error": dict() as error}):
                self.error = error
            case AirbyteMessage(control={"connectorConfig": {"config": dict() as config}}):
                self.config = config
            case _:
                _log.debug("%s", line[:_LOGGED_BYTES].decode(errors="replace"))


# ------------------------------------------------------------------- configurations that change


def difference(old: Json, new: Json) -> Json:
    """Return the merge patch that makes `new` of `old`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch: dict[str, Json] = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old or old[name] != value:
            patch[name] = difference(old.get(name), value)
    return patch


def fingerprint(settings: Json) -> str:
    """Tell a configuration from others: what a package changed of another one is forgotten."""
    text = canonical_json(settings).encode()
    return hashlib.pbkdf2_hmac("sha256", text, b"penstock", _ROUNDS).hex()[:32]
