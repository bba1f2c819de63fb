"""The server's end of a gRPC connection: options, TLS and tokens, and where it listens."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import Unavailable, UsageError, UserError
from penstock.servicekit.guarded import read_guarded
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.address import is_loopback, parse_listen, socket_of
from penstock.servicekit.rpc.channel import COMMON_OPTIONS
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.rpc.sockets import socket_file
from penstock.servicekit.rpc.tokens import TokenFile

log = logging.getLogger("penstock.auth")

MESSAGE_BYTES = 1 << 20
"""The largest message that a client sends; a server may accept larger ones."""

_LOOKAHEAD_BYTES = 64 << 10
"""How much a client may send of a message that is not read yet; gRPC would allow megabytes."""

_IDENTITY_ONLY = 1
"""Accepted compression: none, so that a message cannot be larger than it says."""

_HANDSHAKE_MS = 10_000
"""How long a handshake may take; gRPC would wait two minutes."""

_SETTLE_S = 0.1
"""Many times what a thread takes from asking for certificates to using them."""


def server_options(message_bytes_max: int = MESSAGE_BYTES) -> tuple[tuple[str, int], ...]:
    """Options of a gRPC server that reads no more than it has to."""
    options = {
        **COMMON_OPTIONS,
        "grpc.max_receive_message_length": message_bytes_max,
        "grpc.compression_enabled_algorithms_bitset": _IDENTITY_ONLY,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": _LOOKAHEAD_BYTES,
        # Clients ping every 10 s; gRPC would count that as abuse and hang up.
        "grpc.http2.min_ping_interval_without_data_ms": 5_000,
        "grpc.http2.min_recv_ping_interval_without_data_ms": 5_000,
        "grpc.http2.max_ping_strikes": 0,
        # Two daemons on one port would otherwise share it, and each see half of the calls.
        "grpc.so_reuseport": 0,
    }
    return tuple(options.items())


def is_exposed(listen: str, *, tls: bool, tokens: bool) -> bool:
    """True if other hosts reach `listen`, and not both TLS and tokens protect it."""
    if socket_of(listen) is not None:
        return False
    host, _ = parse_listen(listen)
    return not (tls and tokens) and not is_loopback(host)


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Refuse a certificate without its key, or a key without its certificate."""
    if (cert is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key belong together")


def open_tokens(path: Path | None) -> TokenFile | None:
    """Open a token file; None without one."""
    try:
        return None if path is None else TokenFile(path)
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}", why=error.strerror) from error


@contextlib.contextmanager
def bind_server(
    server: aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None,
    *,
    tokens: TokenFile | None,
) -> Iterator[tuple[str, int]]:
    """Make `server` listen, with TLS if there are credentials; yield host and port.

    A Unix socket is a host with the port 0; its file exists while the block runs.
    """
    if (path := socket_of(listen)) is None:
        host, port = parse_listen(listen)
        _check_free(host, port, listen)
        yield host, _bind(server, listen, credentials)
        return
    at = f"unix:{path}"
    with socket_file(path, lambda: _bind(server, at, None), tokens=tokens is not None):
        yield at, 0


def _check_free(host: str, port: int, listen: str) -> None:
    """Ask the system first: it says what is wrong, which gRPC does not hand on."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {listen}", why=error.strerror, fix="choose a free port"
        ) from error


def _bind(server: aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise Unavailable(
            f"cannot listen on {listen}", why=str(error), fix="choose a free port"
        ) from error


def server_credentials(
    cert: Path | None, key: Path | None, client_ca: Path | None
) -> grpc.ServerCredentials | None:
    """Return TLS credentials that are read again when their files change; None without any."""
    if cert is None or key is None:
        return None
    try:
        certificates = _Certificates(cert, key, client_ca)
        first = certificates.read()
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}", why=error.strerror) from error
    return grpc.dynamic_ssl_server_credentials(
        first,
        certificates.newer,  # type: ignore[arg-type]  # None is allowed, and means "unchanged"
        require_client_authentication=client_ca is not None,
    )


class _Certificates:
    """A server's certificates for handshakes, as its files hold them.

    gRPC asks for them before each handshake, on threads of its own, and uses the answer without a
    lock: it replaces the old configuration and frees it, while another handshake that asked earlier
    may be about to use it. That corrupts memory and ends the process. So there is an answer only if
    a file has changed, and no handshake passes while it takes effect: those that asked earlier have
    `_SETTLE_S` to finish, and those that ask later wait as long for the new configuration.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._seen = self._stamps()
        self._settled_at = 0.0
        self._one_at_a_time = threading.Lock()

    def read(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(read_guarded(self._key), read_guarded(self._cert))],
            root_certificates=None if self._client_ca is None else read_guarded(self._client_ca),
        )

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration to use from now on; None to keep the current one."""
        with self._one_at_a_time:
            time.sleep(max(0.0, self._settled_at - time.monotonic()))
            try:
                if (now := self._stamps()) == self._seen:
                    return None
                changed = self.read()
            except (OSError, UserError) as error:
                log.error("certificates not reloaded", extra=fields(error=str(error)))  # noqa: TRY400
                return None
            self._seen = now
            time.sleep(_SETTLE_S)
            self._settled_at = time.monotonic() + _SETTLE_S
        log.info("certificates reloaded")
        return changed

    def _stamps(self) -> list[int]:
        files = (self._cert, self._key, self._client_ca)
        return [path.stat().st_mtime_ns for path in files if path is not None]
