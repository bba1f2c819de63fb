"""Both ends of a gRPC connection: certificates and tokens, from the files that name them."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
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

_TOKEN = re.compile(rb"[ -~]+")

_SETTLE_S = 0.1
"""Many times what a thread takes from asking for certificates to using them."""

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
    if not _TOKEN.fullmatch(token.strip()):
        raise UserError(
            f"there is no token in {address.token_file}",
            why="a token is one line of printable ASCII",
            fix="write the token into it, and nothing else",
        )
    text = token.strip().decode("ascii")
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
    """What a server shows and demands in a handshake, as its files have it.

    gRPC asks before each handshake, on threads of its own, and has no lock around what it does
    with the answer: it puts a new configuration in the place of the old one and frees that, while
    another handshake that asked before may still be about to use it. Memory is then corrupt, and
    the process ends. So there is an answer only if something has changed, and around that one no
    handshake is let through: those that asked before have `_SETTLE_S` to get past, and those that
    ask after wait as long for the new configuration to be in its place.
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
        """What to use from now on; None: what is in use."""
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
