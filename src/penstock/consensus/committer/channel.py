"""Both ends of a gRPC connection: certificates and tokens, from the files that name them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.consensus.committer.address import (
    CommitterAddress,
    is_surely_local,
    parse_listen,
    socket_of,
)
from penstock.consensus.committer.auth import TokenFile
from penstock.consensus.committer.grpcio import aio, grpc
from penstock.consensus.committer.sockets import placed
from penstock.errors import Unavailable, UsageError, UserError
from penstock.servicekit.guarded import read_guarded
from penstock.servicekit.logs import fields
from penstock.servicekit.secrets import conceal

log = logging.getLogger("penstock.consensus.committer")

# ------------------------------------------------------------------------------------- the client


def open_channel(address: CommitterAddress, options: Sequence[tuple[str, int]]) -> aio.Channel:
    """A channel on the running loop: one made elsewhere would be bound elsewhere."""
    if not address.tls:
        return aio.insecure_channel(address.target, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_contents(address.ca),
        private_key=_contents(address.key),
        certificate_chain=_contents(address.cert),
    )
    return aio.secure_channel(address.target, credentials, options=options)


def authorization(address: CommitterAddress) -> tuple[tuple[str, str], ...]:
    """What to send with a call; read at every use, as tokens are rotated by replacing the file."""
    check_clear(address)
    token = _contents(address.token_file)
    if token is None:
        return ()
    try:
        text = token.decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        raise UserError(
            f"there is no token in {address.token_file}",
            fix="write the token into it, on one line and nothing else",
        )
    conceal(text)
    return (("authorization", f"Bearer {text}"),)


def check_clear(address: CommitterAddress) -> None:
    """Refuse to send a token where somebody on the way could read it, and use it.

    Without TLS it goes to this host alone, and only to an address that is known to be one: what a
    name stands for may differ from one question to the next.
    """
    local = address.socket is not None or is_surely_local(address.host)
    if address.token_file is None or address.tls or local:
        return
    raise UsageError(
        f"refusing to send a token to {address.target} without TLS",
        why="whoever is on the way could read it, and use it",
        fix="name the authority of its certificate: ?ca=FILE in the URL, or ?tls=on if a public "
        "authority signed it; on this host, write 127.0.0.1",
    )


def _contents(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return read_guarded(path)
    except OSError as error:
        raise UserError(
            f"cannot read {path}", why=error.strerror, fix="correct the options of the grpc:// URL"
        ) from error


# ------------------------------------------------------------------------------------- the server


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Half of what TLS needs is a mistake, and not a wish to do without."""
    if (cert is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key belong together")


def open_tokens(path: Path | None) -> TokenFile | None:
    """The tokens of a file; None without one."""
    try:
        return None if path is None else TokenFile(path)
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}", why=error.strerror) from error


@contextlib.contextmanager
def bound(
    server: aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None,
    *,
    tokens: TokenFile | None,
) -> Iterator[tuple[str, int]]:
    """Let `server` listen, with TLS if there are credentials: where, with the port if it was 0.

    A Unix socket is a host with the port 0; its file is there as long as the block runs.
    """
    if (socket := socket_of(listen)) is None:
        yield parse_listen(listen)[0], _bind(server, listen, credentials)
        return
    at = f"unix:{socket}"
    with placed(socket, lambda: _bind(server, at, None), tokens=tokens is not None):
        yield at, 0


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
    """TLS, with certificates that are read again when their files change; None without any."""
    if cert is None or key is None:
        return None
    files = [path for path in (cert, key, client_ca) if path is not None]

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(read_guarded(key), read_guarded(cert))],
            root_certificates=None if client_ca is None else read_guarded(client_ca),
        )

    def stamps() -> list[int]:
        return [path.stat().st_mtime_ns for path in files]

    try:
        seen = stamps()
        current = configuration()
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}", why=error.strerror) from error

    def newest() -> grpc.ServerCertificateConfiguration:
        """Asked before each handshake, on a thread of gRPC's."""
        nonlocal seen, current
        try:
            now = stamps()
            if now != seen:
                seen, current = now, configuration()
                log.info("certificates reloaded")
        except (OSError, UserError) as error:
            log.error("certificates not reloaded", extra=fields(error=str(error)))  # noqa: TRY400
        return current

    return grpc.dynamic_ssl_server_credentials(
        current, newest, require_client_authentication=client_ca is not None
    )
