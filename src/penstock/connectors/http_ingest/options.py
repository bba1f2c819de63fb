"""The configuration of `source-http-ingest`, and of its bindings."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import UsageError, UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.native.take import TEXT_MAX
from penstock.runtime.secrets import resolve
from penstock.servicekit.guarded import check_guarded
from penstock.servicekit.rpc.address import is_loopback, parse_listen
from penstock.servicekit.rpc.tokens import TokenFile
from penstock.servicekit.secrets import conceal

LISTEN: Final = "127.0.0.1:8780"
RESERVED: Final = ("healthz", "openapi.json")
"""Paths that are not for documents."""

TOKEN_CHARS_MIN: Final = 16


def _whole(title: str, default: int, description: str, *, most: int = 1 << 40) -> Json:
    return {
        "type": "integer",
        "minimum": 1,
        "maximum": most,
        "default": default,
        "title": f"a number of {title}; from 1 to {most}",
        "description": description,
        "examples": [default],
    }


def _seconds(default: int, description: str) -> Json:
    return {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 3600,
        "default": default,
        "title": "a number of seconds; up to 3600",
        "description": description,
        "examples": [default],
    }


def _file(description: str, example: str) -> Json:
    return {
        "type": "string",
        "minLength": 1,
        "path": True,
        "title": "the path of a file",
        "description": description,
        "examples": [example],
    }


CONFIG: Final = ConfigSchema(
    {
        "listen": {
            "type": "string",
            "pattern": r"^.+:[0-9]+$",
            "default": LISTEN,
            "exclusive": True,
            "title": "HOST:PORT",
            "description": "Where to listen. Off loopback, TLS and a token are required.",
            "examples": [LISTEN],
        },
        "token": {
            "type": "string",
            "minLength": TOKEN_CHARS_MIN,
            "secret": True,
            "title": f"a text; of at least {TOKEN_CHARS_MIN} characters",
            "description": "The bearer token that every client sends.",
            "examples": ["${env:INGEST_TOKEN}"],
        },
        "tokenFile": _file(
            "Several tokens with names, path prefixes and expiry, instead of one token.",
            "/etc/penstock/ingest.tokens",
        ),
        "certFile": _file("The certificate chain, in PEM.", "/etc/penstock/ingest.pem"),
        "keyFile": _file("The certificate's private key, in PEM.", "/etc/penstock/ingest.key"),
        "maxBodyBytes": _whole(
            "bytes", 4 << 20, "Size of the body of a request; beyond, 413.", most=4 * TEXT_MAX
        ),
        "maxDocuments": _whole("documents", 10_000, "Documents in one request; beyond, 413."),
        "maxConnections": _whole(
            "connections", 1024, "An idle connection makes room for a new one."
        ),
        "maxInflightBytes": _whole(
            "bytes", 64 << 20, "Bytes that are read or wait for a commit; beyond, 429."
        ),
        "maxInflightRequests": _whole(
            "requests", 1024, "Requests that wait for a commit; beyond, 429.", most=50_000
        ),
        "requestsPerSecond": {
            "type": "integer",
            "minimum": 1,
            "title": "a number of requests, 1 or more",
            "description": "Of all clients together; beyond, 429. No limit by default.",
            "examples": [1000],
        },
        "headerTimeout": _seconds(10, "Time for the headers of a request, and a TLS handshake."),
        "bodyTimeout": _seconds(30, "Time for the body of a request; beyond, 408."),
    }
)
RESOURCE: Final = ConfigSchema(
    {
        "path": {
            "type": "string",
            "pattern": r"^(?!(healthz|openapi\.json)$)[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
            r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*$",
            "maxLength": 255,
            "identity": True,
            "title": "the path of a URL, without a slash at its beginning; letters, digits, "
            f"._~- and / between parts; not {' or '.join(RESERVED)}",
            "description": "Documents are sent by POST to this path.",
            "examples": ["orders"],
        }
    },
    required=("path",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much there may be of everything that grows."""

    body_bytes: int
    documents: int
    connections: int
    inflight_bytes: int
    inflight_requests: int
    requests_per_s: int | None
    header_s: float
    body_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where to listen, for whom, and how much."""

    host: str
    port: int
    limits: Limits
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def guarded(self) -> bool:
        """True if clients need a token."""
        return self.token is not None or self.token_file is not None

    def open_tokens(self, where: str) -> TokenFile | None:
        """The tokens of the file, if there is one."""
        if self.token_file is None:
            return None
        try:
            return TokenFile(self.token_file)
        except OSError as error:
            raise UserError(
                f"tokenFile cannot be read: {self.token_file}", where=where, why=error.strerror
            ) from None

    def check_certificate(self, where: str) -> None:
        """Refuse a certificate or key that cannot be used, or that others can change."""
        if self.cert is None or self.key is None:
            return
        try:
            check_guarded(self.key)
            check_guarded(self.cert)
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            raise UserError(
                "certFile and keyFile are not a certificate and its key",
                where=where,
                why=error.reason or "they cannot be read as PEM",
                fix="name PEM files; the key without a password",
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot read {error.filename or self.cert}", where=where, why=error.strerror
            ) from None


def read_options(config: Json, *, where: str) -> Options:
    """Read and check a configuration; its references are resolved here."""
    given: dict[str, Any] = CONFIG.read(resolve(config, where=where), where=where)
    try:
        host, port = parse_listen(given.get("listen", LISTEN))
    except UsageError as error:
        raise UserError(error.what, where=f"{where}: listen", fix=f"listen: {LISTEN}") from None
    token = given.get("token")
    if token is not None:
        conceal(token)
    options = Options(
        host=host,
        port=port,
        token=token,
        token_file=_path(given, "tokenFile"),
        cert=_path(given, "certFile"),
        key=_path(given, "keyFile"),
        limits=Limits(
            body_bytes=given.get("maxBodyBytes", 4 << 20),
            documents=given.get("maxDocuments", 10_000),
            connections=given.get("maxConnections", 1024),
            inflight_bytes=given.get("maxInflightBytes", 64 << 20),
            inflight_requests=given.get("maxInflightRequests", 1024),
            requests_per_s=given.get("requestsPerSecond"),
            header_s=float(given.get("headerTimeout", 10)),
            body_s=float(given.get("bodyTimeout", 30)),
        ),
    )
    if (options.cert is None) != (options.key is None):
        raise UserError("certFile and keyFile belong together", where=where, fix="give both")
    if token is not None and options.token_file is not None:
        raise UserError("token and tokenFile exclude each other", where=where, fix="give one")
    _check_exposed(options, where)
    return options


def _path(given: dict[str, Any], name: str) -> Path | None:
    return Path(given[name]) if name in given else None


def _check_exposed(options: Options, where: str) -> None:
    """Refuse to let other machines in without TLS and a token."""
    if is_loopback(options.host):
        return
    missing = [] if options.cert else ["certFile and keyFile"]
    missing += [] if options.guarded else ["token (or tokenFile)"]
    if missing:
        raise UserError(
            f"refusing to listen on {options.address} without {' and '.join(missing)}",
            where=where,
            why="other machines reach this address: anybody could send documents, or read them "
            "on their way",
            fix=f"add {' and '.join(missing)}, or listen: {LISTEN}",
        )
