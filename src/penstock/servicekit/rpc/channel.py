"""The client's end of a gRPC connection: TLS and the token, from the files that its URL names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.errors import UsageError, UserError
from penstock.servicekit.guarded import read_guarded
from penstock.servicekit.rpc.address import ServiceAddress, is_surely_local
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.secrets import conceal

COMMON_OPTIONS: Final[Mapping[str, int]] = {
    # No limit of gRPC's own on what a client sends or receives: a client that meets one retries
    # the same message, which is too large, for ever. Clients send parts, and the limit on an entry
    # is ours, and says so.
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    # Find out about a dead peer within 15 s, also between calls.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}
"""Options of both ends."""

_TOKEN = re.compile(rb"[ -~]+")


def open_channel(address: ServiceAddress, options: Mapping[str, int] | None = None) -> aio.Channel:
    """Return a channel of its own, so that closing it does not close another client's.

    It is bound to the running event loop.
    """
    merged = {**COMMON_OPTIONS, "grpc.use_local_subchannel_pool": 1, **(options or {})}
    given = tuple(merged.items())
    if not address.tls:
        return aio.insecure_channel(address.target, options=given)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_contents(address.ca),
        private_key=_contents(address.key),
        certificate_chain=_contents(address.cert),
    )
    return aio.secure_channel(address.target, credentials, options=given)


def authorization(address: ServiceAddress) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries the token.

    The file is read at every call, since tokens are rotated by replacing it.
    """
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


def check_clear(address: ServiceAddress) -> None:
    """Refuse to send a token where it could be read on the way.

    Without TLS it goes to this host only, and only to an address that certainly is this host: a
    name may resolve differently from one lookup to the next.
    """
    local = address.socket is not None or is_surely_local(address.host)
    if address.token_file is None or address.tls or local:
        return
    raise UsageError(
        f"refusing to send a token to {address.target} without TLS",
        why="anyone on the network path could read and use it",
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
