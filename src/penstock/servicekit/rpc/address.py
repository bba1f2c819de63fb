"""Where a service listens and how to reach it.

    grpc://host:port[?tls=on&ca=FILE&cert=FILE&key=FILE&token_file=FILE]
    grpc+unix:///run/penstock/persistd.sock[?token_file=FILE]

Secrets are named by file and are never part of the URL, which ends up in process lists and logs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.errors import UsageError
from penstock.servicekit.secrets import mask_url

DEFAULT_PORT = 6882
"""The port of a URL that names none: the committer's."""

_EXAMPLE = "grpc://host:6882?tls=on&ca=ca.pem&token_file=token"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """A parsed `grpc://` or `grpc+unix://` URL."""

    host: str = ""
    port: int = 0
    socket: Path | None = None
    """A Unix socket, in place of host and port."""
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    @property
    def target(self) -> str:
        """The address in the form that gRPC dials."""
        return dial_target(f"unix:{self.socket}" if self.socket else self.host, self.port)

    @property
    def url(self) -> str:
        """The URL without its options."""
        return f"grpc://{self.target}" if self.socket is None else f"grpc+unix://{self.socket}"

    @classmethod
    def parse(cls, url: str, *, default_port: int = DEFAULT_PORT) -> ServiceAddress:
        def refuse(what: str, fix: str) -> UsageError:
            return UsageError(f"grpc:// URL refused: {what}", where=mask_url(url), fix=fix)

        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise refuse(str(error), f"write {_EXAMPLE}") from error
        local = parts.scheme == "grpc+unix"
        if local and (parts.netloc or not parts.path.strip("/")):
            raise refuse("it names no socket", "write grpc+unix:///run/penstock/persistd.sock")
        if not local and (parts.scheme != "grpc" or not parts.hostname or parts.path.strip("/")):
            raise refuse("it is not grpc://host:port", f"write {_EXAMPLE}")
        if parts.username is not None or parts.password is not None:
            raise refuse("it holds a password", "put the token into a file, and token_file=FILE")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if "token" in options:
            raise refuse("it holds a token", "put the token into a file, and token_file=FILE")
        known = {"token_file"} if local else {"tls", "ca", "cert", "key", "token_file"}
        if unknown := sorted(options.keys() - known):
            raise refuse(f"unknown option {unknown[0]!r}", f"known are {', '.join(sorted(known))}")
        tls = options.pop("tls", "on" if "ca" in options or "cert" in options else "off")
        if tls not in ("on", "off"):
            raise refuse(f"tls={tls!r}", "write tls=on or tls=off")
        if ("cert" in options) != ("key" in options):
            raise refuse("cert and key belong together", f"write {_EXAMPLE}")
        if local:
            tokens = options.get("token_file")
            return cls(
                socket=Path(unquote(parts.path)), token_file=Path(tokens) if tokens else None
            )
        return cls(
            host=parts.hostname or "",
            port=default_port if port is None else port,
            tls=tls == "on",
            **{name: Path(path) for name, path in options.items()},
        )


def socket_of(listen: str) -> Path | None:
    """Return the Unix socket that `unix:/path` names; None for a host and a port."""
    scheme, _, path = listen.partition(":")
    if scheme != "unix":
        return None
    if path.startswith("///"):
        path = path[2:]
    if not path.startswith("/"):
        raise UsageError(
            f"cannot listen on {listen!r}", fix="write unix:/run/penstock/persistd.sock"
        )
    return Path(path)


def dial_target(host: str, port: int) -> str:
    """Return the address in the form that gRPC dials; a Unix socket is a host without a port."""
    if host.startswith("unix:"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_listen(text: str) -> tuple[str, int]:
    """Parse the `HOST:PORT` of a listener; port 0 lets the system choose."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(
            f"cannot listen on {text!r}",
            fix="write HOST:PORT, for example 127.0.0.1:6882, or unix:/path",
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches `host`; a name must resolve to loopback addresses only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def is_surely_local(host: str) -> bool:
    """True if `host` always means this machine, without asking a name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_own_listeners: set[tuple[str, int]] = set()


@contextlib.contextmanager
def register_listener(host: str, port: int) -> Iterator[None]:
    """While the block runs, `host:port` is known as a committer of this process."""
    _own_listeners.add((host, port))
    try:
        yield
    finally:
        _own_listeners.discard((host, port))


def is_own_listener(address: ServiceAddress) -> bool:
    """True if this process serves that committer itself; it would deadlock calling it."""
    if address.socket is not None:
        return (address.target, 0) in _own_listeners
    candidates = {host for host, port in _own_listeners if port == address.port}
    if not candidates:
        return False
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address.host, None)}
    except OSError:
        found = {address.host}
    everywhere = candidates & {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound
    return bool(candidates & found or (everywhere and all(map(is_loopback, found))))
